package dl_test

import (
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// The calls are made in their order, with their arguments, and each result is its call's.
func TestCalls(t *testing.T) {
	l := open(t)
	sixth, negative := dl.Entry{Func: l.Lookup("sixth")}, dl.Entry{Func: l.Lookup("negative")}
	const a = 0x1234567800000000
	c := dl.NewCalls()
	if got := c.Run(); got != 0 {
		t.Errorf("%d for no call", got)
	}
	before := sixth.Result6(a, a+1, a+2, a+3, a+4, a+5)
	for round := range 3 {
		c.Keep(0)
		want, all := []int32{}, int32(0)
		for i := range dl.MostCalls {
			e, result := &sixth, before+1
			if i%3 == 2 {
				e, result = &negative, -7
			} else {
				before++
			}
			if !c.Add(e.Func, a, a+1, a+2, a+3, a+4, a+5) {
				t.Fatalf("call %d was not taken", i)
			}
			want = append(want, result)
			all |= result
		}
		if c.Add(sixth.Func, 0, 0, 0, 0, 0, 0) {
			t.Error("it took more calls than it has room for")
		}
		if got := c.Run(); got != all {
			t.Errorf("round %d: %#x for all, want %#x", round, got, all)
		}
		got := []int32{}
		for i := range dl.MostCalls {
			got = append(got, c.Result(i))
		}
		if d := cmp.Diff(got, want); d != "" {
			t.Errorf("round %d: got - want +:\n%s", round, d)
		}
	}
	c.Keep(0)
	if c.Add(0, 0, 0, 0, 0, 0, 0) {
		t.Error("it took a function that there is not")
	}
	if n := testing.AllocsPerRun(100, func() {
		c.Keep(0)
		c.Add(negative.Func, 0, 0, 0, 0, 0, 0)
		c.Run()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// The goroutine's stack moves while C calls back into Go between two of the calls.
func TestCallsCallback(t *testing.T) {
	l := open(t)
	back, negative := dl.Entry{Func: l.Lookup("call_back")}, dl.Entry{Func: l.Lookup("negative")}
	var deep func(n int) int
	deep = func(n int) int {
		var page [1024]byte
		if n == 0 {
			runtime.GC()
			return int(page[0])
		}
		page[n] = byte(n)
		return deep(n-1) + int(page[n])
	}
	var came atomic.Uint64
	f := dl.NewCallback(func(arg uintptr) {
		came.Add(uint64(arg))
		deep(int(arg))
	})
	for _, n := range []uintptr{1, 50, 150} {
		came.Store(0)
		got := make(chan []int32)
		go func() {
			c := dl.NewCalls()
			c.Add(back.Func, uintptr(f), n, 0, 0, 0, 0)
			c.Add(negative.Func, 0, 0, 0, 0, 0, 0)
			c.Add(back.Func, uintptr(f), n+1, 0, 0, 0, 0)
			c.Run()
			got <- []int32{c.Result(0), c.Result(1), c.Result(2)}
		}()
		if d := cmp.Diff(<-got, []int32{int32(n) + 1, -7, int32(n) + 2}); d != "" || came.Load() != uint64(2*n+1) {
			t.Errorf("%d came; got - want +:\n%s", came.Load(), d)
		}
	}
}

func BenchmarkCalls(b *testing.B) {
	e := dl.Entry{Func: open(b).Lookup("negative")}
	c := dl.NewCalls()
	b.ReportAllocs()
	for b.Loop() {
		c.Keep(0)
		for range 4 {
			c.Add(e.Func, 1, 2, 3, 4, 5, 6)
		}
		c.Run()
	}
}
