package cuda

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// hostDevice is the host platform. See host_drive.go for how work gets done.
type hostDevice struct {
	dev   *Device
	cores int // that this rank may compute on
	spin  int // passes over the tasks before a wait gives the core away

	space addressSpace

	bmu    sync.Mutex           // guards changes of bell
	gone   bool                 // closed: no other bell is taken any more; guarded by bmu
	bell   atomic.Pointer[Bell] // what the driver sleeps on
	own    Bell
	parker *parker

	streams sharedList[*hostStream]

	driver   driver
	captures captures
	pool     workers
	copies   taskPool[copyTask]
	fills    taskPool[fillTask]
	helpers  sync.WaitGroup // host functions and release callbacks under way
}

// hostDevices counts those open in this process, givenBells those of them that have been given a bell: a rank's.
var hostDevices, givenBells atomic.Int32

// crowded reports whether several ranks live in this process: they wait differently. A rank's second device, which has its own bell, is no rank; without any bell
// that was given each device counts.
func crowded() bool {
	if n := givenBells.Load(); n > 0 {
		return n > 1
	}
	return hostDevices.Load() > 1
}

func newHostDevice(d *Device) *hostDevice {
	h := &hostDevice{dev: d, parker: newParker()}
	cores, localSize := machineCores(), 1
	// A rank that is bound to cores has them with others, or alone: it does not share the host's.
	for _, name := range []string{"GORUN_CPU_SHARE", "GORUN_LOCAL_SIZE"} {
		if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
			localSize = n
			break
		}
	}
	h.cores = max(1, cores/localSize)
	// A peer that has a core of its own answers within a microsecond; one that waits for ours does not.
	h.spin = 4
	if localSize <= cores {
		h.spin = 300
	}
	h.driver.init(h)
	h.pool.init(h)
	h.bell.Store(&h.own)
	parkers.Store(&h.own, h.parker)
	hostDevices.Add(1)
	return h
}

// machineCores is what the scheduler grants this process.
func machineCores() int {
	n := runtime.GOMAXPROCS(0)
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err == nil && set.Count() > 0 {
		n = min(n, set.Count())
	}
	return n
}

func (d *hostDevice) kind() Platform { return Host }

func (d *hostDevice) String() string {
	if d.cores == 1 {
		return "host (1 core)"
	}
	return fmt.Sprintf("host (%d cores)", d.cores)
}

func (d *hostDevice) quiesce() { d.helpers.Wait() }

// close ends the device's goroutines and gives up its addresses. Streams are gone by now.
func (d *hostDevice) close() error {
	d.driver.stop()
	d.pool.stop()
	d.quiesce()
	// Who still rings rings nothing: the other bell's memory may go now.
	d.bmu.Lock()
	d.gone = true
	if old := d.bell.Swap(&d.own); old != &d.own {
		parkers.CompareAndDelete(old, d.parker)
		givenBells.Add(-1)
	}
	parkers.Delete(&d.own)
	d.bmu.Unlock()
	hostDevices.Add(-1)
	return d.space.close()
}

func (d *hostDevice) setBell(b *Bell) error {
	d.bmu.Lock()
	defer d.bmu.Unlock()
	old := d.bell.Load()
	switch {
	case d.gone:
		if b == nil {
			return nil // it has its own
		}
		return &Error{Op: "set bell", Detail: "device " + d.dev.String(), Err: ErrClosed}
	case b == nil:
		d.driver.acquire() // nobody sleeps on the old one
		defer d.driver.release()
		b = &d.own
	case old == b:
		return nil
	case old != &d.own:
		return &Error{Op: "set bell", Err: errors.New("the device has another bell already")}
	}
	if p, taken := parkers.LoadOrStore(b, d.parker); taken && p != d.parker {
		return &Error{Op: "set bell", Err: errors.New("it is the bell of another device of this process")}
	}
	d.bell.Store(b)
	switch {
	case old == &d.own && b != old:
		givenBells.Add(1)
	case old != &d.own:
		parkers.CompareAndDelete(old, d.parker)
		givenBells.Add(-1)
	}
	old.Ring() // the driver may sleep on it
	return nil
}

func (d *hostDevice) ring() {
	d.driver.rung.Store(true)
	d.bell.Load().Ring()
}

// failed lets the driver cancel what is enqueued.
func (d *hostDevice) failed() {
	d.ring()
	d.driver.background.wake()
}

func (d *hostDevice) alloc(bytes uint64, kind AllocKind, name string) (platformMemory, error) {
	m, err := d.space.alloc(bytes, kind, name)
	if err != nil {
		return nil, err
	}
	return m, nil
}

func (d *hostDevice) mapShared(s SharedMemory) (platformPeer, error) {
	p, err := mapPeer(s)
	if err != nil {
		return nil, err
	}
	return p, nil
}

// loadKernel has nothing to load: kernels run their Host function.
func (d *hostDevice) loadKernel(string, kernelSource, reflect.Type) (platformKernel, error) {
	return nil, nil
}

func (d *hostDevice) info() Info {
	_, total, _ := d.memoryInfo()
	return Info{Platform: Host, Name: "host", Index: -1, Memory: total, Multiprocessors: d.cores}
}

func (d *hostDevice) memoryInfo() (free, total uint64, err error) {
	var i unix.Sysinfo_t
	if err := unix.Sysinfo(&i); err != nil {
		return 0, 0, err
	}
	return i.Freeram * uint64(i.Unit), i.Totalram * uint64(i.Unit), nil
}

func (d *hostDevice) qualifies(addr uintptr, n uint64) error { return d.space.qualifies(addr, n) }

// pending reports whether any stream has work left.
func (d *hostDevice) pending() bool {
	for _, s := range d.streams.all() {
		if s.pending() {
			return true
		}
	}
	return false
}
