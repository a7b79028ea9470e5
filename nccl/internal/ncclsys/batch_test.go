package ncclsys

import (
	"errors"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// A batch is a group, with each message's arguments in their places; its error is the message's that has one.
func TestBatch(t *testing.T) {
	for _, v := range Vendors {
		t.Run(v.Name, func(t *testing.T) {
			f := newFake(t, v, Newest)
			p := map[*Vendor]string{NCCL: "nccl", RCCL: "nccl", MCCL: "mccl"}[v]
			b := NewBatch(f.Library)
			group := func() error {
				b.Start()
				b.Send(base, 1<<32, Float32, 5, comm, stream)
				b.Recv(base+16, 9, Int8, 0, comm, stream)
				return b.End()
			}
			if err := group(); err != nil {
				t.Error(err)
			}
			want := strings.Join([]string{p + "GroupStart -", p + "Send buf=0x7000000000 n=4294967296 type=7 peer=5" + tail, p + "Recv buf=0x7000000010 n=9 type=0 peer=0" + tail, p + "GroupEnd -", ""}, "\n")
			if d := cmp.Diff(f.log(), want); d != "" {
				t.Errorf("C saw, got - want +:\n%s", d)
			}
			for _, name := range []string{"GroupStart", "Send", "Recv", "GroupEnd"} {
				line := dl.CString(p + name + " ")
				var pin runtime.Pinner
				pin.Pin(&line[0])
				f.lib.Lookup("fake_fail_only").Call(5, uintptr(unsafe.Pointer(&line[0])))
				err := group()
				if err == nil || !strings.HasPrefix(err.Error(), p+name+": ") || !errors.Is(err, ErrInvalidUsage) {
					t.Errorf("%s fails: %v", name, err)
				}
				f.lib.Lookup("fake_fail_only").Call(7, uintptr(unsafe.Pointer(&line[0])))
				if err := group(); (err == ErrInProgress) != (name == "GroupEnd" || name == "GroupStart") {
					t.Errorf("%s is in progress: %v", name, err)
				}
				f.lib.Lookup("fake_fail_only").Call(0, 0)
				pin.Unpin()
			}
			f.log()
			b.Start()
			for range MostMessages {
				b.Send(base, 1, Float32, 0, comm, stream)
			}
			if err := b.End(); err != nil {
				t.Error(err)
			}
			if got := strings.Count(f.log(), "\n"); got != MostMessages+2 {
				t.Errorf("C saw %d calls, want %d", got, MostMessages+2)
			}
			if n := testing.AllocsPerRun(100, func() { group() }); n != 0 {
				t.Errorf("%v allocations", n)
			}
		})
	}
}
