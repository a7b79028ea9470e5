package dl

// MostCalls is how many calls a Calls takes.
const MostCalls = 8

// Calls are calls of functions of integers and device addresses, made one after the other in one way to C and back, which costs as much as the shortest of them. All
// are made, whatever they return. Their results are written by C: so it is allocated once and used again, never on a stack (NewCalls). Pointers to Go variables are
// no arguments for it.
type Calls struct {
	n     uint64
	calls [MostCalls]struct {
		frame
		result int64 // an int in its low half
	}
}

// NewCalls makes one on the heap.
//
//go:noinline
func NewCalls() *Calls { return new(Calls) }

// Reset empties it.
func (c *Calls) Reset() { c.n = 0 }

// Add adds a call; false without the function, or room.
func (c *Calls) Add(e *Entry, a [6]uintptr) bool {
	if e.Func == 0 || c.n == MostCalls {
		return false
	}
	f := &c.calls[c.n].frame
	f.fn = uintptr(e.Func)
	copy(f.args[:], a[:])
	c.n++
	return true
}

// Run makes the calls.
func (c *Calls) Run() { callAll(c) }

// Result is what call i returned.
func (c *Calls) Result(i int) int32 { return int32(c.calls[i].result) }
