package nccl

import (
	"testing"

	"github.com/gorun-dev/gorun/cuda"
)

func TestOtherEnd(t *testing.T) {
	for _, tc := range []struct {
		busy string
		rank int
		op   Op
		ok   bool
	}{
		{Call{Op: OpSend, Count: 8, Type: cuda.Float32DType, Root: 1}.String(), 1, OpSend, true},
		{Call{Op: OpRecv, Count: 8, Type: cuda.Float32DType, Root: 12}.String(), 12, OpRecv, true},
		{"message #3, send of 8 float32, to rank 2", 2, OpSend, true},
		{"message #3, a send with rank 2", 0, 0, false},
		{"capture at train.go:41: send of 8 float32, to rank 1", 0, 0, false},
		{"send of 8 float32, to rank 1 (train.go:41)", 0, 0, false}, // a meeting, which ends by itself
		{"reduce of 8 float32, sum, to rank 1", 0, 0, false},
		{"send of 8 float32, to rank -1", 0, 0, false},
		{"", 0, 0, false},
	} {
		rank, op, ok := otherEnd(tc.busy)
		if ok != tc.ok || ok && (rank != tc.rank || op != tc.op) {
			t.Errorf("%q: rank %d, %v, %t; want rank %d, %v, %t", tc.busy, rank, op, ok, tc.rank, tc.op, tc.ok)
		}
	}
}
