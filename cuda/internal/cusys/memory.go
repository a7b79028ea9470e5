package cusys

import (
	"sync"
	"unsafe"
)

// MemAlloc makes device memory that other processes cannot map by handle (only by legacy IPC).
func (d *Driver) MemAlloc(bytes uint64) (DevicePtr, error) {
	var p DevicePtr
	rc := d.f.MemAlloc.Result3(uintptr(unsafe.Pointer(&p)), uintptr(bytes), 0)
	return p, d.check(&d.f.MemAlloc, rc)
}

// MemFree frees MemAlloc's memory. It succeeds even if a graph still uses the memory: the next launch then loses the context.
func (d *Driver) MemFree(p DevicePtr) error {
	return d.check(&d.f.MemFree, d.f.MemFree.Result3(uintptr(p), 0, 0))
}

// MemInfo is the free and the whole memory of the current device in bytes.
func (d *Driver) MemInfo() (free, total uint64, err error) {
	rc := d.f.MemGetInfo.Result3(uintptr(unsafe.Pointer(&free)), uintptr(unsafe.Pointer(&total)), 0)
	return free, total, d.check(&d.f.MemGetInfo, rc)
}

// MemAllocHost makes pinned host memory: copies to and from it are asynchronous.
func (d *Driver) MemAllocHost(bytes uint64) (unsafe.Pointer, error) {
	var p unsafe.Pointer
	rc := d.f.MemAllocHost.Result3(uintptr(unsafe.Pointer(&p)), uintptr(bytes), 0)
	return p, d.check(&d.f.MemAllocHost, rc)
}

// MemFreeHost frees MemAllocHost's memory.
func (d *Driver) MemFreeHost(p unsafe.Pointer) error {
	return d.check(&d.f.MemFreeHost, d.f.MemFreeHost.Result3(uintptr(p), 0, 0))
}

// CopyToDevice enqueues a copy. src may be Go memory only if it is kept alive until the stream has made the copy: with
// pageable memory the driver stages it before it returns, with pinned memory (MemAllocHost) it does not.
func (d *Driver) CopyToDevice(dst DevicePtr, src unsafe.Pointer, bytes uint64, s Stream) error {
	return d.check(&d.f.MemcpyHtoDAsync, d.f.MemcpyHtoDAsync.Result6(uintptr(dst), uintptr(src), uintptr(bytes), uintptr(s), 0, 0))
}

// CopyToHost enqueues a copy; dst as src of CopyToDevice.
func (d *Driver) CopyToHost(dst unsafe.Pointer, src DevicePtr, bytes uint64, s Stream) error {
	return d.check(&d.f.MemcpyDtoHAsync, d.f.MemcpyDtoHAsync.Result6(uintptr(dst), uintptr(src), uintptr(bytes), uintptr(s), 0, 0))
}

// Copy enqueues a copy within or between devices.
func (d *Driver) Copy(dst, src DevicePtr, bytes uint64, s Stream) error {
	return d.check(&d.f.MemcpyDtoDAsync, d.f.MemcpyDtoDAsync.Result6(uintptr(dst), uintptr(src), uintptr(bytes), uintptr(s), 0, 0))
}

// Set8 enqueues filling n bytes with v.
func (d *Driver) Set8(dst DevicePtr, v uint8, n uint64, s Stream) error {
	return d.check(&d.f.MemsetD8Async, d.f.MemsetD8Async.Result6(uintptr(dst), uintptr(v), uintptr(n), uintptr(s), 0, 0))
}

// Set32 enqueues filling n 32-bit words with v.
func (d *Driver) Set32(dst DevicePtr, v uint32, n uint64, s Stream) error {
	return d.check(&d.f.MemsetD32Async, d.f.MemsetD32Async.Result6(uintptr(dst), uintptr(v), uintptr(n), uintptr(s), 0, 0))
}

// pointerQuery holds the arguments of one PointerInfo call; its pointers point to itself.
type pointerQuery struct {
	attributes [6]pointerAttribute
	values     [6]uint64 // wider than any answer, so that narrow ones leave zeros above
	data       [6]unsafe.Pointer
}

var pointerQueries = sync.Pool{New: func() any {
	q := &pointerQuery{attributes: [6]pointerAttribute{ptrMemoryType, ptrDevice, ptrLegacyIPC, ptrRangeStart, ptrRangeSize, ptrAllowedHandle}}
	for i := range q.data {
		q.data[i] = unsafe.Pointer(&q.values[i])
	}
	return q
}}

// PointerInfo asks what an address is, in one call.
func (d *Driver) PointerInfo(p DevicePtr) (PointerInfo, error) {
	q := pointerQueries.Get().(*pointerQuery)
	defer pointerQueries.Put(q)
	q.values = [6]uint64{}
	rc := d.f.PointerGetAttributes.Result6(uintptr(len(q.attributes)), uintptr(unsafe.Pointer(&q.attributes)),
		uintptr(unsafe.Pointer(&q.data)), uintptr(p), 0, 0)
	if err := d.check(&d.f.PointerGetAttributes, rc); err != nil {
		return PointerInfo{}, err
	}
	v := &q.values
	info := PointerInfo{Base: DevicePtr(v[3]), Size: v[4], Handles: HandleType(v[5]), LegacyIPC: v[2] != 0}
	switch uint32(v[0]) {
	case 1:
		info.Type = MemoryHost
	case 2:
		info.Type, info.Device = MemoryDevice, Device(v[1])
	}
	return info, nil
}

// MemGranularity is what the size and address of memory with these properties must be a multiple of, in bytes.
func (d *Driver) MemGranularity(prop *MemProp, g Granularity) (uint64, error) {
	var n uint64
	rc := d.f.MemGetAllocationGranularity.Result3(uintptr(unsafe.Pointer(&n)), uintptr(unsafe.Pointer(prop)), u32(g))
	return n, d.check(&d.f.MemGetAllocationGranularity, rc)
}

// MemCreate makes physical memory without an address. With HandleFabric it is ErrNotPermitted or ErrNotSupported on most
// machines, also where the device's attribute says that it can: try again without.
func (d *Driver) MemCreate(bytes uint64, prop *MemProp) (AllocHandle, error) {
	if prop.Handles&^d.vendor.Handles != 0 {
		return 0, &Error{Op: d.f.MemCreate.Name, Code: ErrNotSupported, Text: d.vendor.Name + " has no fabric handles"}
	}
	var h AllocHandle
	rc := d.f.MemCreate.Result6(uintptr(unsafe.Pointer(&h)), uintptr(bytes), uintptr(unsafe.Pointer(prop)), 0, 0, 0)
	return h, d.check(&d.f.MemCreate, rc)
}

// MemRelease gives a handle back; the memory lives until its last mapping goes.
func (d *Driver) MemRelease(h AllocHandle) error {
	return d.check(&d.f.MemRelease, d.f.MemRelease.Result3(uintptr(h), 0, 0))
}

// MemReserve reserves addresses; align is a power of two or 0.
func (d *Driver) MemReserve(bytes, align uint64) (DevicePtr, error) {
	var p DevicePtr
	rc := d.f.MemAddressReserve.Result6(uintptr(unsafe.Pointer(&p)), uintptr(bytes), uintptr(align), 0, 0, 0)
	return p, d.check(&d.f.MemAddressReserve, rc)
}

// MemUnreserve gives reserved addresses back.
func (d *Driver) MemUnreserve(p DevicePtr, bytes uint64) error {
	return d.check(&d.f.MemAddressFree, d.f.MemAddressFree.Result3(uintptr(p), uintptr(bytes), 0))
}

// MemMap puts a handle's memory at reserved addresses. It cannot be used before MemSetAccess.
func (d *Driver) MemMap(p DevicePtr, bytes uint64, h AllocHandle) error {
	return d.check(&d.f.MemMap, d.f.MemMap.Result6(uintptr(p), uintptr(bytes), 0, uintptr(h), 0, 0))
}

// MemUnmap undoes MemMap. It succeeds even if a graph still uses the memory.
func (d *Driver) MemUnmap(p DevicePtr, bytes uint64) error {
	return d.check(&d.f.MemUnmap, d.f.MemUnmap.Result3(uintptr(p), uintptr(bytes), 0))
}

// MemSetAccess lets devices use mapped memory.
func (d *Driver) MemSetAccess(p DevicePtr, bytes uint64, access []MemAccess) error {
	rc := d.f.MemSetAccess.Result6(uintptr(p), uintptr(bytes), uintptr(unsafe.Pointer(unsafe.SliceData(access))), uintptr(len(access)), 0, 0)
	return d.check(&d.f.MemSetAccess, rc)
}

// MemRetain is a new reference to the memory mapped at p; MemRelease it. ErrInvalidValue if p is not mapped by MemMap.
func (d *Driver) MemRetain(p DevicePtr) (AllocHandle, error) {
	var h AllocHandle
	rc := d.f.MemRetainAllocationHandle.Result3(uintptr(unsafe.Pointer(&h)), uintptr(p), 0)
	return h, d.check(&d.f.MemRetainAllocationHandle, rc)
}

// MemExportFD makes a file descriptor of the memory, to be closed by the caller.
func (d *Driver) MemExportFD(h AllocHandle) (int, error) {
	var fd int32
	rc := d.f.MemExportToShareableHandle.Result6(uintptr(unsafe.Pointer(&fd)), uintptr(h), u32(HandleFD), 0, 0, 0)
	if err := d.check(&d.f.MemExportToShareableHandle, rc); err != nil {
		return -1, err
	}
	return int(fd), nil
}

// MemImportFD takes another process's memory by a descriptor, which stays the caller's.
func (d *Driver) MemImportFD(fd int) (AllocHandle, error) {
	var h AllocHandle
	e := &d.f.MemImportFromShareableHandle
	if d.vendor.fdByPointer(d.version) {
		n := int32(fd)
		rc := e.Result3(uintptr(unsafe.Pointer(&h)), uintptr(unsafe.Pointer(&n)), u32(HandleFD))
		return h, d.check(e, rc)
	}
	rc := e.Result3(uintptr(unsafe.Pointer(&h)), uintptr(fd), u32(HandleFD))
	return h, d.check(e, rc)
}
