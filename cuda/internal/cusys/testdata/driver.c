/* What gorun uses of the driver libraries as their makers' headers declare them, for calls and layouts; MUSA and HIP select the maker, OLD
 * leaves out what old versions lack. Out arguments get fixed values. */
#include "record.h"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef void *ptr;

#if defined MUSA
#define FN(c, m, h) m
#elif defined HIP
#define FN(c, m, h) h
#else
#define FN(c, m, h) c
#endif
#define D(c, m, h, params, set, ...)     \
	API int FN(c, m, h) params {         \
		if (fake_rc == 0) { set; }       \
		return RECORD(__VA_ARGS__);      \
	}

#ifndef VERSION
#define VERSION 13000
#endif

D(cuInit, muInit, hipInit, (u32 flags), , "flags=%u", flags)
API int FN(cuDriverGetVersion, muDriverGetVersion, hipDriverGetVersion)(int *v) { *v = VERSION; return 0; }

D(cuDeviceGetCount, muDeviceGetCount, hipGetDeviceCount, (int *n), *n = 3, "n=%d", n != 0)
D(cuDeviceGet, muDeviceGet, hipDeviceGet, (int *d, int ordinal), *d = 2, "ordinal=%d", ordinal)
D(cuDeviceGetAttribute, muDeviceGetAttribute, hipDeviceGetAttribute, (int *v, int attr, int dev), *v = 9, "attr=%d dev=%d", attr, dev)
#ifdef OLD
D(cuDeviceGetUuid, muDeviceGetUuid, hipDeviceGetUuid, (unsigned char *id, int dev), memset(id, 0xab, 16), "dev=%d", dev)
#else
D(cuDeviceGetUuid_v2, muDeviceGetUuid_v2, hipDeviceGetUuid, (unsigned char *id, int dev), memset(id, 0xab, 16), "dev=%d", dev)
#endif
D(cuDeviceGetName, muDeviceGetName, hipDeviceGetName, (char *b, int len, int dev), snprintf(b, len, "H200"), "len=%d dev=%d", len, dev)
D(cuDeviceTotalMem_v2, muDeviceTotalMem_v2, hipDeviceTotalMem, (size_t *n, int dev), *n = 1ull << 40, "dev=%d", dev)
D(cuDeviceGetPCIBusId, muDeviceGetPCIBusId, hipDeviceGetPCIBusId, (char *b, int len, int dev), snprintf(b, len, "0000:1b:00.0"), "len=%d dev=%d", len, dev)
D(cuDeviceCanAccessPeer, muDeviceCanAccessPeer, hipDeviceCanAccessPeer, (int *v, int dev, int peer), *v = 1, "dev=%d peer=%d", dev, peer)

#ifdef HIP
D(, , hipSetDevice, (int dev), , "dev=%d", dev)
D(, , hipGetDevice, (int *dev), *dev = 4, "dev=%d", dev != 0)
#else
D(cuDeviceGetP2PAttribute, muDeviceGetP2PAttribute, , (int *v, int what, int dev, int peer), *v = 1, "what=%d dev=%d peer=%d", what, dev, peer)
D(cuDevicePrimaryCtxRetain, muDevicePrimaryCtxRetain, , (ptr *c, int dev), *c = (ptr)0x1111222233334444, "dev=%d", dev)
D(cuDevicePrimaryCtxRelease_v2, muDevicePrimaryCtxRelease_v2, , (int dev), , "dev=%d", dev)
D(cuCtxSetCurrent, muCtxSetCurrent, , (ptr c), , "ctx=%p", c)
D(cuCtxGetCurrent, muCtxGetCurrent, , (ptr *c), *c = (ptr)0x1111222233334444, "out=%d", c != 0)
#endif

D(cuMemAlloc_v2, muMemAlloc_v2, hipMalloc, (u64 *p, size_t n), *p = 0x7000000001, "bytes=%zu", n)
D(cuMemFree_v2, muMemFree_v2, hipFree, (u64 p), , "p=%llx", p)
D(cuMemGetInfo_v2, muMemGetInfo_v2, hipMemGetInfo, (size_t *f, size_t *t), (*f = 5, *t = 6), "out=%d", f && t)
#ifdef HIP
D(, , hipHostMalloc, (ptr *p, size_t n, u32 flags), *p = fake_text, "bytes=%zu flags=%u", n, flags)
#else
D(cuMemAllocHost_v2, muMemAllocHost_v2, , (ptr *p, size_t n), *p = fake_text, "bytes=%zu flags=0", n)
#endif
D(cuMemFreeHost, muMemFreeHost, hipHostFree, (ptr p), , "log=%d", p == fake_text)
D(cuMemcpyHtoDAsync_v2, muMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync, (u64 d, const char *s, size_t n, ptr st), , "dst=%llx src=%.*s stream=%p", d, (int)n, s, st)
D(cuMemcpyDtoHAsync_v2, muMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync, (char *d, u64 s, size_t n, ptr st), memset(d, 'z', n), "src=%llx bytes=%zu stream=%p", s, n, st)
D(cuMemcpyDtoDAsync_v2, muMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync, (u64 d, u64 s, size_t n, ptr st), , "dst=%llx src=%llx bytes=%zu stream=%p", d, s, n, st)
D(cuMemsetD8Async, muMemsetD8Async, hipMemsetD8Async, (u64 d, unsigned char v, size_t n, ptr st), , "dst=%llx v=%u n=%zu stream=%p", d, v, n, st)
D(cuMemsetD32Async, muMemsetD32Async, hipMemsetD32Async, (u64 d, u32 v, size_t n, ptr st), , "dst=%llx v=%u n=%zu stream=%p", d, v, n, st)
API int FN(cuPointerGetAttributes, muPointerGetAttributes, hipDrvPointerGetAttributes)(u32 n, const int *attrs, void **data, u64 p) {
	note("%s n=%u p=%llx attrs=", __func__, n, p);
	for (u32 i = 0; i < n; i++) {
		note("%d,", attrs[i]);
		switch (fake_rc ? -1 : attrs[i]) {
		case 2: *(u32 *)data[i] = 2; break;
		case 9: *(int *)data[i] = 3; break;
		case 10: *(_Bool *)data[i] = 1; break;
		case 11: *(u64 *)data[i] = 0x7000000000; break;
		case 12: *(size_t *)data[i] = 1ull << 33; break;
		case 14: *(u32 *)data[i] = 9; break;
		}
	}
	note("\n");
	return fake_rc;
}

#ifndef OLD
struct prop {
	int type, handles;
	struct { int type, id; } location;
	void *win32;
	struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
};
struct access { struct { int type, id; } location; int flags; };
_Static_assert(sizeof(struct prop) == 32 && sizeof(struct access) == 12, "the header's sizes");
#define PROP(p) (p)->type, (p)->handles, (p)->location.type, (p)->location.id, (p)->win32, (p)->flags.compression, (p)->flags.rdma, (p)->flags.usage
#define PROPF "type=%d handles=%d loc=%d,%d win32=%p comp=%d rdma=%d usage=%d"

D(cuMemGetAllocationGranularity, muMemGetAllocationGranularity, hipMemGetAllocationGranularity, (size_t *n, const struct prop *p, int opt), *n = 2 << 20, PROPF " opt=%d", PROP(p), opt)
D(cuMemCreate, muMemCreate, hipMemCreate, (u64 *h, size_t n, const struct prop *p, u64 flags), *h = 0xaaaabbbbccccdddd, "bytes=%zu " PROPF " flags=%llu", n, PROP(p), flags)
D(cuMemRelease, muMemRelease, hipMemRelease, (u64 h), , "h=%llx", h)
D(cuMemAddressReserve, muMemAddressReserve, hipMemAddressReserve, (u64 *p, size_t n, size_t align, u64 addr, u64 flags), *p = 0x7000000000, "bytes=%zu align=%zu addr=%llx flags=%llu", n, align, addr, flags)
D(cuMemAddressFree, muMemAddressFree, hipMemAddressFree, (u64 p, size_t n), , "p=%llx bytes=%zu", p, n)
D(cuMemMap, muMemMap, hipMemMap, (u64 p, size_t n, size_t off, u64 h, u64 flags), , "p=%llx bytes=%zu off=%zu h=%llx flags=%llu", p, n, off, h, flags)
D(cuMemUnmap, muMemUnmap, hipMemUnmap, (u64 p, size_t n), , "p=%llx bytes=%zu", p, n)
D(cuMemSetAccess, muMemSetAccess, hipMemSetAccess, (u64 p, size_t n, const struct access *a, size_t count), , "p=%llx bytes=%zu count=%zu first=%d,%d,%d last=%d,%d,%d", p, n, count, a[0].location.type, a[0].location.id, a[0].flags, a[count - 1].location.type, a[count - 1].location.id, a[count - 1].flags)
D(cuMemRetainAllocationHandle, muMemRetainAllocationHandle, hipMemRetainAllocationHandle, (u64 *h, u64 p), *h = 0xaaaabbbbccccdddd, "p=%llx", p)
D(cuMemExportToShareableHandle, muMemExportToShareableHandle, hipMemExportToShareableHandle, (void *out, u64 h, int type, u64 flags), *(int *)out = 77, "h=%llx type=%d flags=%llu", h, type, flags)
#if defined HIP && VERSION < 70100000 /* takes the descriptor's address */
D(, , hipMemImportFromShareableHandle, (u64 *h, void *os, int type), *h = 0xaaaabbbbccccdddd, "fd=%d type=%d", *(int *)os, type)
#else
D(cuMemImportFromShareableHandle, muMemImportFromShareableHandle, hipMemImportFromShareableHandle, (u64 *h, void *os, int type), *h = 0xaaaabbbbccccdddd, "fd=%d type=%d", (int)(intptr_t)os, type)
#endif
#endif

D(cuStreamCreate, muStreamCreate, hipStreamCreateWithFlags, (ptr *s, u32 flags), *s = (ptr)0x5555666677778888, "flags=%u", flags)
D(cuStreamDestroy_v2, muStreamDestroy_v2, hipStreamDestroy, (ptr s), , "s=%p", s)
D(cuStreamQuery, muStreamQuery, hipStreamQuery, (ptr s), , "s=%p", s)
D(cuStreamWaitEvent, muStreamWaitEvent, hipStreamWaitEvent, (ptr s, ptr e, u32 flags), , "s=%p e=%p flags=%u", s, e, flags)
D(cuEventCreate, muEventCreate, hipEventCreateWithFlags, (ptr *e, u32 flags), *e = (ptr)0x5555666677778888, "flags=%u", flags)
D(cuEventDestroy_v2, muEventDestroy_v2, hipEventDestroy, (ptr e), , "e=%p", e)
D(cuEventRecord, muEventRecord, hipEventRecord, (ptr e, ptr s), , "e=%p s=%p", e, s)
D(cuEventQuery, muEventQuery, hipEventQuery, (ptr e), , "e=%p", e)

#if defined MUSA && defined OLD
D(, muStreamBeginCapture, , (ptr s, int mode), , "s=%p mode=%d", s, mode)
#else
D(cuStreamBeginCapture_v2, muStreamBeginCapture_v2, hipStreamBeginCapture, (ptr s, int mode), , "s=%p mode=%d", s, mode)
#endif
D(cuStreamEndCapture, muStreamEndCapture, hipStreamEndCapture, (ptr s, ptr *g), *g = (ptr)0x5555666677778888, "s=%p", s)
D(cuStreamIsCapturing, muStreamIsCapturing, hipStreamIsCapturing, (ptr s, int *status), *status = 1, "s=%p", s)
D(cuThreadExchangeStreamCaptureMode, muThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode, (int *mode), int was = *mode; *mode = 0; note("was=%d ", was), "out=%d", mode != 0)
#ifdef OLD
API int FN(cuGraphInstantiate_v2, muGraphInstantiate, hipGraphInstantiateWithFlags)(ptr *x, ptr g, ptr *node, char *log, size_t n) {
	*x = (ptr)0x5555666677778888;
	if (fake_rc)
		snprintf(log, n, "a node is wrong");
	return RECORD("g=%p node=%d log=%zu", g, node != 0, n);
}
#else
D(cuGraphInstantiateWithFlags, muGraphInstantiateWithFlags, hipGraphInstantiateWithFlags, (ptr *x, ptr g, u64 flags), *x = (ptr)0x5555666677778888, "g=%p flags=%llu", g, flags)
D(cuUserObjectCreate, muUserObjectCreate, hipUserObjectCreate, (ptr *o, ptr arg, void (*destroy)(void *), u32 count, u32 flags), (*o = (ptr)0x5555666677778888, destroy(arg)), "arg=%p count=%u flags=%u", arg, count, flags)
D(cuUserObjectRelease, muUserObjectRelease, hipUserObjectRelease, (ptr o, u32 n), , "o=%p n=%u", o, n)
D(cuGraphRetainUserObject, muGraphRetainUserObject, hipGraphRetainUserObject, (ptr g, ptr o, u32 n, u32 flags), , "g=%p o=%p n=%u flags=%u", g, o, n, flags)
D(cuLaunchHostFunc, muLaunchHostFunc, hipLaunchHostFunc, (ptr s, void (*fn)(void *), ptr arg), fn(arg), "s=%p arg=%p", s, arg)
#endif
D(cuGraphLaunch, muGraphLaunch, hipGraphLaunch, (ptr x, ptr s), , "x=%p s=%p", x, s)
D(cuGraphExecDestroy, muGraphExecDestroy, hipGraphExecDestroy, (ptr x), , "x=%p", x)
D(cuGraphDestroy, muGraphDestroy, hipGraphDestroy, (ptr g), , "g=%p", g)
D(cuGraphGetNodes, muGraphGetNodes, hipGraphGetNodes, (ptr g, ptr *nodes, size_t *n), *n = 2, "g=%p nodes=%d n=%d", g, nodes != 0, n != 0)

API int FN(cuModuleLoadDataEx, muModuleLoadDataEx, hipModuleLoadDataEx)(ptr *m, const void *image, u32 n, int *options, void **values) {
	*m = (ptr)0x5555666677778888;
	if (fake_rc)
		snprintf(values[0], (size_t)values[1], "ptxas: line 3\n");
	return RECORD("image=%s n=%u options=%d,%d size=%zu", (const char *)image, n, options[0], options[1], (size_t)values[1]);
}
D(cuModuleUnload, muModuleUnload, hipModuleUnload, (ptr m), , "m=%p", m)
D(cuModuleGetFunction, muModuleGetFunction, hipModuleGetFunction, (ptr *f, ptr m, const char *name), *f = (ptr)0x5555666677778888, "m=%p name=%s", m, name)
D(cuLaunchKernel, muLaunchKernel, hipModuleLaunchKernel, (ptr f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 smem, ptr s, void **params, void **extra), , "f=%p grid=%u,%u,%u block=%u,%u,%u smem=%u s=%p params=%d,%g extra=%d", f, gx, gy, gz, bx, by, bz, smem, s, *(int *)params[0], *(double *)params[1], extra != 0)

#ifdef HIP
API const char *hipGetErrorName(int rc) { return rc == 2 ? "hipErrorOutOfMemory" : "hipErrorUnknown"; }
API const char *hipGetErrorString(int rc) { return rc == 2 ? "out of memory" : "unknown error"; }
#else
API int FN(cuGetErrorName, muGetErrorName, )(int rc, const char **s) { return *s = rc == 2 ? FN("CUDA", "MUSA", ) "_ERROR_OUT_OF_MEMORY" : NULL, rc == 2 ? 0 : 1; }
API int FN(cuGetErrorString, muGetErrorString, )(int rc, const char **s) { return *s = rc == 2 ? "out of memory" : NULL, rc == 2 ? 0 : 1; }
#endif
