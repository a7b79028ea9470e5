package dl

// MostCalls is how many calls a Calls takes.
const MostCalls = 8

// Calls are calls of functions of six integers and device addresses at most, made one after the other in one way to C and back, which costs as much as the shortest of
// them. All are made, whatever they return. Their results are written by C: so it is allocated once and used again, never on a stack (NewCalls). Pointers to Go
// variables are no arguments for it. call_*.s know how it lies in memory.
type Calls struct {
	calls [MostCalls]struct { // each a line of the cache
		fn     uintptr
		args   [6]uintptr
		result int64 // an int in its low half
	}
	n uint64
}

// NewCalls makes one on the heap.
//
//go:noinline
func NewCalls() *Calls { return new(Calls) }

// Keep leaves the first n of the calls.
func (c *Calls) Keep(n int) { c.n = min(c.n, uint64(n)) }

// Add adds a call; false without the function, or room.
func (c *Calls) Add(f Func, a1, a2, a3, a4, a5, a6 uintptr) bool {
	if f == 0 || c.n >= MostCalls {
		return false
	}
	p := &c.calls[c.n]
	p.fn = uintptr(f)
	p.args = [6]uintptr{a1, a2, a3, a4, a5, a6}
	c.n++
	return true
}

// Run makes the calls, and returns 0 where each of them did.
func (c *Calls) Run() int32 { return callAll(c) }

// Len is the number of calls, Func the function of call i, and Result what it returned.
func (c *Calls) Len() int           { return int(c.n) }
func (c *Calls) Func(i int) Func    { return Func(c.calls[i].fn) }
func (c *Calls) Result(i int) int32 { return int32(c.calls[i].result) }
