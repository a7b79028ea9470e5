package cuda

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/internal/cusys"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// driverDevice is a GPU by the vendor's driver library.
//
// The driver keeps the current device for each OS thread, and a goroutine moves between threads. So every call that needs the
// device is made between bind and unbind: the goroutine is locked to its thread and the context is made current (0.2 µs). What the threads had
// current before is not restored: nothing else in a rank uses a context of its own.
//
// No call here waits for the stream's work: see driver_wait.go. The one call that the driver itself may make wait is freeing memory.
type driverDevice struct {
	dev *Device
	// What each call of a communication library reads is together.
	thread   atomic.Uintptr // by its number, the one that has the context current: see driver_bind.go
	closed   atomic.Bool
	gone     atomic.Bool // the context is lost, with all that is in it
	hung     atomic.Bool // and the driver is not asked any more
	captures captures

	platform Platform
	drv      *cusys.Driver
	id       cusys.Device
	ctx      cusys.Context
	about    Info
	settings []gpulib.Finding // that break graphs

	aux    cusys.Stream // for zeroing memory
	auxMu  sync.Mutex   // guards the order of zeroing and its wait
	vmm    vmm
	pinned pinnedPool

	helpers  sync.WaitGroup // host functions and release callbacks under way
	releases releaseQueue

	smu     sync.Mutex // guards streams
	streams map[*driverStream]struct{}

	kmu     sync.Mutex // guards kernels
	kernels map[kernelKey]*driverModule
}

func vendorOf(p Platform) *cusys.Vendor {
	switch p {
	case MUSA:
		return cusys.MUSA
	case HIP:
		return cusys.HIP
	}
	return cusys.CUDA
}

// namedDriver is the platform whose library the environment names, nil without one: for machines with hardware of several vendors, or that does not show itself. If
// that of the hardware is named, that is it.
func namedDriver(hw *hardware) *hardware {
	if hw != nil && os.Getenv(vendorOf(hw.platform).Driver.Env) != "" {
		return hw
	}
	for _, p := range []Platform{CUDA, MUSA, HIP} {
		if env := vendorOf(p).Driver.Env; os.Getenv(env) != "" {
			return &hardware{platform: p, what: "a library", where: env}
		}
	}
	return nil
}

// drivers are the open libraries. A library stays open for the life of the process, so one that was opened is used again.
var drivers struct {
	sync.Mutex
	open map[Platform]*cusys.Driver
}

func openDriver(p Platform, token string) (*cusys.Driver, error) {
	drivers.Lock()
	defer drivers.Unlock()
	if d := drivers.open[p]; d != nil {
		return d, nil
	}
	if strings.HasPrefix(token, "MIG-") && p == CUDA {
		// The driver shows an instance only to a process that asks for it before the driver starts.
		if _, set := os.LookupEnv("CUDA_VISIBLE_DEVICES"); !set {
			os.Setenv("CUDA_VISIBLE_DEVICES", token)
		}
	}
	d, err := cusys.Open(vendorOf(p))
	if err != nil {
		return nil, err
	}
	if err := d.Init(); err != nil {
		return nil, fmt.Errorf("%s: %w", d, err)
	}
	if drivers.open == nil {
		drivers.open = make(map[Platform]*cusys.Driver)
	}
	drivers.open[p] = d
	return d, nil
}

func newDriverDevice(dev *Device, p Platform, token string) (*driverDevice, error) {
	drv, err := openDriver(p, token)
	if err != nil {
		return nil, err
	}
	_, err = gpulib.CheckSettings(drv.Vendor().Settings(), environment, false)
	if err != nil {
		return nil, err
	}
	index, err := chooseDevice(drv, p, token)
	if err != nil {
		return nil, err
	}
	g := &driverDevice{dev: dev, platform: p, drv: drv, streams: make(map[*driverStream]struct{}), kernels: make(map[kernelKey]*driverModule)}
	dev.plat = g // which fails at once where the context was lost earlier in this process
	g.settings, _ = graphSettings(drv)
	g.pinned.g, g.pinned.limit = g, pinnedLimit
	if g.id, err = drv.Device(index); err != nil {
		return nil, err
	}
	if g.about, err = g.describe(index); err != nil {
		return nil, err
	}
	if g.ctx, err = drv.PrimaryCtxRetain(g.id); err != nil {
		return nil, fmt.Errorf("%s: %w", g, g.cause(err))
	}
	if err = g.start(); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", g, g.cause(err)), drv.PrimaryCtxRelease(g.id))
	}
	openDevices.add(g)
	return g, nil
}

// start makes what the device needs in its context.
func (g *driverDevice) start() error {
	in, err := g.enter(true)
	if err != nil {
		return err
	}
	defer in.leave()
	if g.aux, err = g.drv.StreamCreate(cusys.StreamNonBlocking); err != nil {
		return err
	}
	if err = g.vmm.init(g); err != nil {
		return errors.Join(err, g.drv.StreamDestroy(g.aux))
	}
	return nil
}

func environment(name string) (value, from string) {
	if v, ok := os.LookupEnv(name); ok {
		return v, "environment"
	}
	return "", ""
}

// graphSettings are the settings under which captured graphs hang.
func graphSettings(drv *cusys.Driver) ([]gpulib.Finding, error) {
	_, err := gpulib.CheckSettings(drv.Vendor().Settings(), environment, true)
	var se *gpulib.SettingError
	if errors.As(err, &se) {
		return se.Findings, err
	}
	return nil, nil
}

// describe asks the driver about the device.
func (g *driverDevice) describe(index int) (Info, error) {
	d := g.drv
	i := Info{Platform: g.platform, Index: index, Driver: d.Version().String(), Library: d.Library().Path()}
	var errs [3]error
	i.Name, errs[0] = d.DeviceName(g.id)
	i.PCIBusID, errs[1] = d.DevicePCIBusID(g.id)
	i.Memory, errs[2] = d.DeviceMemory(g.id)
	if err := errors.Join(errs[:]...); err != nil {
		return i, err
	}
	if id, err := d.DeviceUUID(g.id); err == nil {
		i.UUID = uuidText(g.platform, id, i.Name)
	} else if !cusys.IsMissing(err) {
		return i, err
	}
	for _, a := range []struct {
		attribute cusys.Attribute
		to        *int
	}{{cusys.AttrMultiprocessors, &i.Multiprocessors}, {cusys.AttrCCMajor, &i.Major}, {cusys.AttrCCMinor, &i.Minor}} {
		var err error
		if *a.to, err = d.DeviceAttribute(g.id, a.attribute); err != nil {
			return i, err
		}
	}
	return i, nil
}

func (g *driverDevice) kind() Platform { return g.platform }

func (g *driverDevice) String() string {
	return fmt.Sprintf("%s device %d (%s)", g.platform, g.about.Index, g.about.Name)
}

func (g *driverDevice) info() Info { return g.about }

func (g *driverDevice) memoryInfo() (free, total uint64, err error) {
	in, err := g.enter(true)
	if err != nil {
		return 0, 0, err
	}
	defer in.leave()
	free, total, err = g.drv.MemInfo()
	return free, total, g.cause(err)
}

// entered is a thread with the device current on it for calls of this package.
type entered struct {
	g     *driverDevice
	quiet bool
	mode  int32 // the thread's, while quiet
}

// enter is bind for calls of this package. While this thread captures, the driver forbids it most calls (even a query of another stream), and spoils
// the capture. What is to be forbidden this package has asked unsafeCall for; so quiet, which is for all calls but those on a stream that
// captures, tells the driver to let the thread do what it likes.
func (g *driverDevice) enter(quiet bool) (entered, error) {
	if err := g.bind(); err != nil {
		return entered{}, err
	}
	e := entered{g: g}
	if quiet {
		e.mode, e.quiet = g.relax()
	}
	return e, nil
}

func (e entered) leave() {
	if e.quiet {
		e.g.restore(e.mode)
	}
	e.g.unbind()
}

// setBell: the device sleeps on no bell, it asks the driver.
func (g *driverDevice) setBell(*Bell) error { return nil }
func (g *driverDevice) ring()               {}
func (g *driverDevice) failed()             {}

func (g *driverDevice) mapShared(SharedMemory) (platformPeer, error) {
	return nil, fmt.Errorf("memory of a %s device is mapped by its communication library", g.platform)
}

// close gives all back. Streams, memory and graphs are gone by now. After a sticky error the context is lost and the driver takes it back with the process.
func (g *driverDevice) close() error {
	g.quiesce()
	hostCalls.forget(func(c *hostCall) bool { return c.g == g }) // of streams that failed before them
	var errs []error
	if in, err := g.enter(true); err == nil {
		errs = append(errs, g.pinned.close(), g.vmm.close(), g.unload(), g.drv.StreamDestroy(g.aux))
		in.leave()
	}
	g.closed.Store(true)
	openDevices.remove(g)
	if !g.hung.Load() {
		errs = append(errs, g.drv.PrimaryCtxRelease(g.id))
	}
	return g.lost(errors.Join(errs...))
}

// abandon has no more calls made to a driver that does not come back from them.
func (g *driverDevice) abandon() {
	g.gone.Store(true)
	g.hung.Store(true)
}

// quiesce waits for host functions and release callbacks. A callback whose graph is gone comes within a millisecond; one whose launch hangs never
// comes, so that wait is bounded.
func (g *driverDevice) quiesce() {
	if g.hung.Load() {
		return
	}
	const bound = 2 * time.Second
	for start := time.Now(); g.releases.due() && time.Since(start) < bound; {
		time.Sleep(50 * time.Microsecond)
	}
	g.helpers.Wait()
}

// driverError is a driver's error and which of this package's errors it is.
type driverError struct {
	err *cusys.Error
	is  error
}

func (e *driverError) Error() string   { return e.err.Error() }
func (e *driverError) Unwrap() []error { return []error{e.is, e.err} }

// meaning finds the package's error for a result, nil without one.
func meaning(r cusys.Result) error {
	switch {
	case r == cusys.ErrOutOfMemory:
		return ErrOutOfMemory
	case r == cusys.ErrIllegalAddress:
		return ErrIllegalAddress
	case r == cusys.ErrCaptureInvalidated:
		return ErrCaptureInvalidated
	case r == cusys.ErrCaptureUnjoined:
		return ErrCaptureUnjoined
	case r >= cusys.ErrCaptureUnsupported && r <= cusys.ErrCaptureWrongThread:
		return ErrCaptureUnsafe
	}
	return nil
}

// cause makes a driver's error one of this package. One with which the context is lost becomes the device's.
func (g *driverDevice) cause(err error) error {
	if err == nil {
		return nil
	}
	return g.translate(err) // apart, so that success allocates nothing
}

func (g *driverDevice) translate(err error) error {
	var e *cusys.Error
	if !errors.As(err, &e) {
		return err
	}
	if is := meaning(e.Code); is != nil {
		err = &driverError{e, is}
	}
	if e.Code.Sticky() {
		g.gone.Store(true)
		g.dev.Fail(&Error{Op: "device failed", Detail: g.String(), Err: err})
	}
	return err
}

// lost is for what gives something back: with the context lost there is nothing to give back.
func (g *driverDevice) lost(err error) error {
	if g.gone.Load() {
		return nil
	}
	return err
}

// address is a device address as the exported types hold it. It never points into Go's heap.
func address(p cusys.DevicePtr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) }

func devicePtr(p unsafe.Pointer) cusys.DevicePtr { return cusys.DevicePtr(uintptr(p)) }

// uuidText is the UUID as the vendors' tools print it. AMD's is text already.
func uuidText(p Platform, id cusys.UUID, model string) string {
	if p == HIP {
		return "GPU-" + strings.TrimRight(string(id[:]), "\x00")
	}
	kind := "GPU"
	if strings.Contains(model, " MIG ") {
		kind = "MIG"
	}
	return fmt.Sprintf("%s-%x-%x-%x-%x-%x", kind, id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// isDeviceToken reports whether a token can name a GPU.
func isDeviceToken(token string) bool {
	if n, err := strconv.Atoi(token); err == nil {
		return n >= 0
	}
	return strings.HasPrefix(token, "GPU-") || strings.HasPrefix(token, "MIG-")
}

// chooseDevice finds the number of a token's device among those that the driver shows.
func chooseDevice(drv *cusys.Driver, p Platform, token string) (int, error) {
	n, err := drv.DeviceCount()
	if err != nil {
		return 0, err
	}
	shown := fmt.Sprintf("the driver shows %d", n)
	for _, name := range []string{"CUDA_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"} {
		if v, ok := os.LookupEnv(name); ok {
			shown += fmt.Sprintf(" (%s=%s)", name, v)
		}
	}
	if n == 0 {
		return 0, errors.New("no device: " + shown)
	}
	if i, err := strconv.Atoi(token); err == nil {
		if i >= n {
			return 0, fmt.Errorf("no device %d: %s", i, shown)
		}
		return i, nil
	}
	if token == "" {
		return chooseByRank(n, shown)
	}
	var found []int
	var all []string
	for i := range n {
		dev, err := drv.Device(i)
		if err != nil {
			return 0, err
		}
		name, err := drv.DeviceName(dev)
		if err != nil {
			return 0, err
		}
		id, err := drv.DeviceUUID(dev)
		if err != nil {
			return 0, err
		}
		text := uuidText(p, id, name)
		all = append(all, text)
		if strings.HasPrefix(strings.ToLower(text), strings.ToLower(token)) {
			found = append(found, i)
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return 0, fmt.Errorf("several devices begin with %s: %s", token, strings.Join(all, ", "))
	case strings.HasPrefix(token, "MIG-") && n == 1 && os.Getenv("CUDA_VISIBLE_DEVICES") == token:
		return 0, nil // an older form of the token, which the driver understood
	}
	return 0, fmt.Errorf("no device %s: %s: %s", token, shown, strings.Join(all, ", "))
}

// chooseByRank gives each rank of a host its own of n devices.
func chooseByRank(n int, shown string) (int, error) {
	for _, name := range []string{"GORUN_LOCAL_RANK", "LOCAL_RANK"} {
		v := os.Getenv(name)
		if v == "" {
			continue
		}
		rank, err := strconv.Atoi(v)
		switch {
		case err != nil || rank < 0:
			return 0, fmt.Errorf("%s=%s is no rank", name, v)
		case rank < n:
			return rank, nil
		case n == 1 && strings.Contains(shown, "VISIBLE_DEVICES="):
			return 0, nil // the launcher showed each rank its own
		}
		return 0, fmt.Errorf("local rank %d has none left: %s; start at most %d ranks on this host, or let them share GPUs with --gpu-bind share", rank, shown, n)
	}
	return 0, nil
}
