package ncclsys

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// Library is an open collective library.
type Library struct {
	vendor  *Vendor
	lib     *dl.Library
	f       functions
	version Version

	// The calls with structs by value, through reflection.
	initRank       func(out *uintptr, size int32, id idByValue, rank int32) int32
	initRankConfig func(out *uintptr, size int32, id idByValue, rank int32, config unsafe.Pointer) int32
	teamLSA        func(Comm) Team

	mu      sync.Mutex       // guards pending
	pending map[any]struct{} // the handles that the library may still write
}

type idByValue struct{ B [128]byte }

// Open opens the maker's library. It calls nothing but the version.
func Open(v *Vendor) (*Library, error) {
	lib, err := dl.Open(v.Spec)
	if err != nil {
		return nil, err
	}
	l := &Library{vendor: v, lib: lib, pending: map[any]struct{}{}}
	if err := l.bind(); err != nil {
		lib.Close()
		return nil, err
	}
	return l, nil
}

func (l *Library) bind() error {
	f := &l.f
	if err := l.lib.Bind(f.symbols(l.vendor)); err != nil {
		return err
	}
	var code int32
	if err := l.check(&f.GetVersion, f.GetVersion.Result3(uintptr(unsafe.Pointer(&code)), 0, 0)); err != nil {
		return err
	}
	if code <= 0 {
		return fmt.Errorf("load %s: %s tells version %d", l.vendor.Name, l.lib.Path(), code)
	}
	l.version = DecodeVersion(code)
	f.CommInitRank.Bind(&l.initRank)
	if f.CommInitRankConfig.Func != 0 {
		f.CommInitRankConfig.Bind(&l.initRankConfig)
	}
	if f.TeamLsa.Func != 0 {
		f.TeamLsa.Bind(&l.teamLSA)
	}
	return nil
}

func (l *Library) Vendor() *Vendor      { return l.vendor }
func (l *Library) Library() *dl.Library { return l.lib }
func (l *Library) Version() Version     { return l.version }
func (l *Library) String() string       { return fmt.Sprintf("%s (%s)", l.found(), l.lib.Path()) }

// Setenv sets a variable for the library (setenv of its C library), not for Go and what Go starts. Before the library has threads: they read the environment at any time.
func (l *Library) Setenv(name, value string) error {
	set := l.lib.Lookup("setenv")
	if set == 0 {
		return fmt.Errorf("set %s: the C library has no setenv", name)
	}
	n, v := dl.CString(name), dl.CString(value) // C copies them
	if rc := int32(set.Call3(uintptr(unsafe.Pointer(&n[0])), uintptr(unsafe.Pointer(&v[0])), 1)); rc != 0 {
		return fmt.Errorf("set %s=%s: no memory", name, value)
	}
	return nil
}

// Close unloads the library; for tests.
func (l *Library) Close() { l.lib.Close() }

// newPending makes a handle's place, and keeps it and what the library reads until Done.
func newPending[T ~uintptr](l *Library, c *configLayout, more ...any) *Pending[T] {
	p := &Pending[T]{lib: l}
	p.pin.Pin(p)
	if c != nil {
		p.pin.Pin(c)
		if c.commName != nil {
			p.pin.Pin(c.commName)
		}
	}
	for _, m := range more {
		p.pin.Pin(m)
	}
	l.mu.Lock()
	l.pending[p] = struct{}{}
	l.mu.Unlock()
	return p
}

// pendingResult settles what is complete: without a group, success is the end of it.
func pendingResult[T ~uintptr](p *Pending[T], err error) (*Pending[T], error) {
	if err != nil && err != ErrInProgress {
		p.Done()
		return nil, err
	}
	return p, err
}

// cells are out arguments of hot calls.
var cells = sync.Pool{New: func() any { return new([2]uint64) }}

func u32[T ~int32](v T) uintptr { return uintptr(uint32(v)) }
