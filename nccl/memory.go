package nccl

import "github.com/gorun-dev/gorun/cuda"

// Alloc makes a buffer for communication: memory that can be registered, so that collectives work straight in it. Use it for what is sent and
// received, not for everything (cuda.Malloc).
func Alloc[T cuda.Element](d *cuda.Device, n int) (*cuda.Buffer[T], error) { panic("stub") }

// Register registers memory for all collectives of the communicator until Close. It is local and reference counted: memory registered
// twice is deregistered by the second Close. All members must pass registered memory to a call, or none (row S3): a mix is an error that names ranks and buffers.
func (c *Comm) Register(m *cuda.Memory) (*Registration, error) { panic("stub") }

// Registration is one claim on registered memory.
type Registration struct{ todo int }

func (r *Registration) Memory() *cuda.Memory { panic("stub") }

// Close deregisters. An error, naming them, while enqueued operations still use the memory. Twice is fine.
func (r *Registration) Close() error { panic("stub") }

// Arena is one large block, allocated and registered once, from which slices are carved; the same sequence of
// carvings gives the same offsets on all ranks, as windows and NVLS demand.
type Arena struct{ todo int }

// NewArena allocates bytes (rounded up to the allocation granularity) and registers them with the communicators.
func NewArena(d *cuda.Device, bytes uint64, comms ...*Comm) (*Arena, error) { panic("stub") }

// Carve takes n elements, aligned to 256 bytes. *FullError when they do not fit.
func Carve[T cuda.Element](a *Arena, n int) (cuda.Slice[T], error) { panic("stub") }

func (a *Arena) Memory() *cuda.Memory { panic("stub") }
func (a *Arena) Used() uint64         { panic("stub") }

// Reset takes all carvings back; their slices must not be used any more.
func (a *Arena) Reset() { panic("stub") }

// Close deregisters and frees.
func (a *Arena) Close() error { panic("stub") }
