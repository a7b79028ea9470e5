package ncclsys

import (
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// MemAlloc makes device memory that can be registered; where that cannot be, ordinary memory, without notice.
func (l *Library) MemAlloc(bytes uint64) (DevicePtr, error) {
	var p DevicePtr
	rc := l.f.MemAlloc.Result3(uintptr(unsafe.Pointer(&p)), uintptr(bytes), 0)
	return p, l.check(&l.f.MemAlloc, rc)
}

// MemFree frees MemAlloc's memory. It succeeds even if a graph still uses the memory: the next launch then loses the context.
func (l *Library) MemFree(p DevicePtr) error {
	return l.check(&l.f.MemFree, l.f.MemFree.Result3(uintptr(p), 0, 0))
}

// CommRegister notes a range for registration, which happens in the first collective that can use it. 0 without error says
// that the range was not taken: registration is off, or the memory is not a device's. Local; not beside a launch.
func (l *Library) CommRegister(comm Comm, p DevicePtr, bytes uint64) (Registration, error) {
	var r Registration // 0 before the call: the library may succeed without writing it
	rc := l.f.CommRegister.Result6(uintptr(comm), uintptr(p), uintptr(bytes), uintptr(unsafe.Pointer(&r)), 0, 0)
	return r, l.check(&l.f.CommRegister, rc)
}

// CommDeregister undoes one CommRegister; 0 is allowed. The thread's context may be another one afterwards.
func (l *Library) CommDeregister(comm Comm, r Registration) error {
	return l.check(&l.f.CommDeregister, l.f.CommDeregister.Result3(uintptr(comm), uintptr(r), 0))
}

// CommWindowRegister makes a window of a range, all ranks together; it waits for them for ever. 0 without error says that
// the communicator has no windows. Memory without handles makes it hang; a second call for a range makes a second window.
func (l *Library) CommWindowRegister(comm Comm, p DevicePtr, bytes uint64, flags int32) (*Pending[Window], error) {
	w := newPending[Window](l, nil)
	rc := l.f.CommWindowRegister.Result6(uintptr(comm), uintptr(p), uintptr(bytes), uintptr(unsafe.Pointer(&w.cell)), u32(flags), 0)
	return pendingResult(w, l.check(&l.f.CommWindowRegister, rc))
}

// CommWindowDeregister ends a window. It succeeds even if a graph still uses it: the next launch then loses the context.
func (l *Library) CommWindowDeregister(comm Comm, w Window) error {
	return l.check(&l.f.CommWindowDeregister, l.f.CommWindowDeregister.Result3(uintptr(comm), uintptr(w), 0))
}

// WindowUserPtr is the address that the window was made of; 0 without error says that windows are not supported here.
func (l *Library) WindowUserPtr(comm Comm, w Window) (DevicePtr, error) {
	var p DevicePtr
	rc := l.f.WinGetUserPtr.Result3(uintptr(comm), uintptr(w), uintptr(unsafe.Pointer(&p)))
	return p, l.check(&l.f.WinGetUserPtr, rc)
}

// LSAPtr is the address of an offset of the window as this device sees it in a rank of its load-store domain.
func (l *Library) LSAPtr(w Window, off uint64, lsaRank int) (DevicePtr, error) {
	var p DevicePtr
	rc := l.f.GetLsaDevicePointer.Result6(uintptr(w), uintptr(off), u32(int32(lsaRank)), uintptr(unsafe.Pointer(&p)), 0, 0)
	return p, l.check(&l.f.GetLsaDevicePointer, rc)
}

// TeamLSA is the ranks of the communicator that this device reaches by load and store.
func (l *Library) TeamLSA(comm Comm) (Team, error) {
	if l.teamLSA == nil {
		return Team{}, l.fail(&l.f.TeamLsa, dl.Absent)
	}
	return l.teamLSA(comm), nil
}
