package nccl

import (
	"crypto/sha256"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda"
)

// What a block is given of any call must fit, all ranks must come to the same shape, and no block may be left without a line: it would fall behind the others' counts.
func TestPeerShape(t *testing.T) {
	for ranks := 2; ranks <= peerRanks; ranks++ {
		limit := peerLimit(ranks)
		if limit*uint64(ranks-1) > peerMost || 4*limit*uint64(ranks-1) <= peerMost {
			t.Errorf("%d ranks: limit %d", ranks, limit)
		}
		room, _, _ := peerShape(limit)
		for bytes := uint64(1); bytes <= limit; bytes++ {
			per, blocks, threads := peerShape(bytes)
			lines := int((bytes + 7) / 8)
			if per > room || blocks > peerBlocks || per*blocks < lines || per*(blocks-1) >= lines || threads < 1 || threads > 512 || threads%32 != 0 {
				t.Fatalf("%d bytes of at most %d: %d lines a block (room for %d), %d blocks, %d threads", bytes, limit, per, room, blocks, threads)
			}
		}
	}
}

// peer.cu has the numbers of this package and of cuda, and peer.ptx was made of it.
func TestPeerSource(t *testing.T) {
	b, err := os.ReadFile("peer.cu")
	if err != nil {
		t.Fatal(err)
	}
	source := string(b)
	if made := fmt.Sprintf("sha256 %x\n", sha256.Sum256(b)); !strings.Contains(peerPTX, made) {
		t.Error("peer.ptx is not of this peer.cu: run .ci/ptx where there is nvcc")
	}
	if size := fmt.Sprintf("gorun_peer_param_0[%d]", unsafe.Sizeof(peerArgs{})); !strings.Contains(peerPTX, size) {
		t.Errorf("peer.ptx has no %s", size)
	}
	numbers := map[string]int{}
	for _, m := range regexp.MustCompile(`enum \{ (.*) \};`).FindAllStringSubmatch(source, -1) {
		next := 0
		for name := range strings.SplitSeq(m[1], ", ") {
			fmt.Sscanf(name, name[:max(0, strings.Index(name, "=")+1)]+" %d", &next)
			name, _, _ = strings.Cut(name, " ")
			numbers[name] = next
			next++
		}
	}
	for name, want := range map[string]int{
		"ALL_REDUCE": int(OpAllReduce), "REDUCE": int(OpReduce), "BROADCAST": int(OpBroadcast), "ALL_GATHER": int(OpAllGather), "REDUCE_SCATTER": int(OpReduceScatter),
		"SUM": int(Sum), "PROD": int(Prod), "MIN": int(Min), "MAX": int(Max),
		"INT8": int(cuda.Int8DType), "UINT8": int(cuda.Uint8DType), "INT32": int(cuda.Int32DType), "UINT32": int(cuda.Uint32DType), "INT64": int(cuda.Int64DType),
		"UINT64": int(cuda.Uint64DType), "FLOAT16": int(cuda.Float16DType), "BFLOAT16": int(cuda.BFloat16DType), "FLOAT32": int(cuda.Float32DType), "FLOAT64": int(cuda.Float64DType),
	} {
		if got, ok := numbers[name]; !ok || got != want {
			t.Errorf("peer.cu: %s is %d (%t), want %d", name, got, ok, want)
		}
	}
	for _, m := range []struct {
		text string
		want int
	}{{`bufs\[(\d+)\]; // by rank`, peerRanks}, {`const u64 blocks = (\d+);`, peerBlocks}} {
		if f := regexp.MustCompile(m.text).FindStringSubmatch(source); f == nil || f[1] != fmt.Sprint(m.want) {
			t.Errorf("peer.cu: %s: %v, want %d", m.text, f, m.want)
		}
	}
}
