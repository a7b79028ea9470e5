/* What gorun uses of the collective libraries as their makers' headers declare them, for calls, by-value structs and layouts; MCCL and
 * RCCL select the maker, VERSION the version (major*10000 + minor*100 + patch). */
#include "record.h"
#include <limits.h>
#include <stdlib.h>

typedef struct fake_comm *comm_t;
typedef struct fake_window *window_t;
typedef struct fake_stream *stream_t;
typedef struct { char internal[128]; } unique_id;
typedef int type_t, op_t;

#ifndef VERSION
#define VERSION 23206
#endif
#ifdef MCCL
#define F(n) mccl##n
#else
#define F(n) nccl##n
#endif
#define D(name, params, set, ...)        \
	API int F(name) params {             \
		if (fake_rc == 0) { set; }       \
		return RECORD(__VA_ARGS__);      \
	}
#define COMM ((comm_t)0x1111222233334444)

API int F(GetVersion)(int *v) {
	*v = VERSION >= 20900 ? VERSION : VERSION / 10000 * 1000 + VERSION % 10000;
	return fake_rc;
}
API const char *F(GetErrorString)(int rc) { return rc == 5 ? "invalid usage (run with NCCL_DEBUG=WARN for details)" : rc == 99 ? "" : "some error"; }
#if VERSION >= 21304
API const char *F(GetLastError)(comm_t c) { return c ? "wrong argument" : fake_rc == 5 || fake_rc == 99 ? "Duplicate GPU detected" : ""; }
#endif
/* The configuration as the header of each version has it. */
struct config {
	size_t size;
	unsigned magic, version;
	int blocking;
#if VERSION >= 21700
	int cga, minCTAs, maxCTAs;
	const char *netName;
#endif
#if VERSION >= 21800
	int splitShare;
#endif
#if VERSION >= 22600
	int trafficClass;
#endif
#if VERSION >= 22700
	const char *commName;
	int collnet, ctaPolicy, shrinkShare, nvlsCTAs;
#endif
#if VERSION >= 22800
	int netChannels, nvlinkSched;
#endif
#if VERSION >= 22902
	int graphUsage, rmaCtx;
#endif
#if VERSION >= 23003
	int maxP2p;
#endif
#if VERSION >= 23005
	int graphOrder;
#endif
#if VERSION >= 23100
	int launchOrder, rmaSig, rmaEager, hostCft;
#endif
#if VERSION >= 23200
	int nvlsHost;
#endif
};
_Static_assert(sizeof(struct config) ==
	(VERSION >= 23200 ? 120 : VERSION >= 23100 ? 112 : VERSION >= 23003 ? 96 : VERSION >= 22902 ? 88 : VERSION >= 22800 ? 80 :
	 VERSION >= 22700 ? 72 : VERSION >= 21800 ? 48 : VERSION >= 21700 ? 40 : 24), "the header's size");

/* note_config reads a configuration as the library does: its own prefix. */
static void note_config(const struct config *in) {
	struct config c;
	if (!in) {
		note(" config=none");
		return;
	}
	memset(&c, 0, sizeof c);
	memcpy(&c, in, in->size < sizeof c ? in->size : sizeof c);
	note(" config size=%zu magic=%x version=%u", c.size, c.magic, c.version);
#define I(f) if (c.f != INT_MIN) note(" " #f "=%d", c.f)
#define S(f) if (c.f) note(" " #f "=%s", c.f)
	I(blocking);
#if VERSION >= 21700
	I(cga); I(minCTAs); I(maxCTAs); S(netName);
#endif
#if VERSION >= 21800
	I(splitShare);
#endif
#if VERSION >= 22600
	I(trafficClass);
#endif
#if VERSION >= 22700
	S(commName); I(collnet); I(ctaPolicy); I(shrinkShare); I(nvlsCTAs);
#endif
#if VERSION >= 22800
	I(netChannels); I(nvlinkSched);
#endif
#if VERSION >= 22902
	I(graphUsage); I(rmaCtx);
#endif
#if VERSION >= 23003
	I(maxP2p);
#endif
#if VERSION >= 23005
	I(graphOrder);
#endif
#if VERSION >= 23100
	I(launchOrder); I(rmaSig); I(rmaEager); I(hostCft);
#endif
#if VERSION >= 23200
	I(nvlsHost);
#endif
}

/* A non-blocking call writes its handle later, when the test lets it. */
static comm_t *late;
static const struct config *late_config;
static void made(comm_t *out, const struct config *c) {
	if (c && c->blocking == 0)
		late = out, late_config = c;
	else if (fake_rc == 0)
		*out = COMM;
}
API void fake_finish(void) {
	note("finish");
	note_config(late_config);
	note("\n");
	*late = COMM;
}

D(GetUniqueId, (unique_id *id), for (int i = 0; i < 128; i++) id->internal[i] = (char)i, "out=%d", id != 0)
D(CommInitRank, (comm_t *out, int n, unique_id id, int rank), made(out, 0), "n=%d id=%s rank=%d", n, hex(&id, 128), rank)
#define MADE(name, params, cfg, ...)                          \
	API int F(name) params {                                  \
		note("%s ", __func__), note(__VA_ARGS__);             \
		note_config(cfg);                                     \
		note("\n");                                           \
		made(out, cfg);                                       \
		return fake_rc;                                       \
	}
#if VERSION >= 21403
MADE(CommInitRankConfig, (comm_t *out, int n, unique_id id, int rank, struct config *c), c, "n=%d id=%s rank=%d", n, hex(&id, 128), rank)
D(CommFinalize, (comm_t c), , "comm=%p", (void *)c)
#endif
#if VERSION >= 22304
MADE(CommInitRankScalable, (comm_t *out, int n, int rank, int nid, unique_id *ids, struct config *c), c, "n=%d rank=%d nid=%d last=%s", n, rank, nid, hex(&ids[nid - 1], 128))
#endif
#if VERSION >= 21801
MADE(CommSplit, (comm_t comm, int color, int key, comm_t *out, struct config *c), c, "comm=%p color=%d key=%d", (void *)comm, color, key)
#endif
#if VERSION >= 22703
MADE(CommShrink, (comm_t comm, int *ex, int n, comm_t *out, struct config *c, int flags), c, "comm=%p n=%d first=%d last=%d flags=%d", (void *)comm, n, ex[0], ex[n - 1], flags)
#endif
D(CommDestroy, (comm_t c), , "comm=%p", (void *)c)
D(CommAbort, (comm_t c), , "comm=%p", (void *)c)
D(CommGetAsyncError, (comm_t c, int *rc), *rc = 7, "comm=%p", (void *)c)
D(CommCount, (comm_t c, int *n), *n = 8, "comm=%p", (void *)c)
#ifdef MCCL
D(CommMuDevice, (comm_t c, int *n), *n = 2, "comm=%p", (void *)c)
#endif

#if VERSION >= 21901
D(MemAlloc, (void **p, size_t n), *p = (void *)0x7000000000, "bytes=%zu", n)
D(MemFree, (void *p), , "p=%p", p)
D(CommRegister, (comm_t c, void *p, size_t n, void **h), if (n != 1) *h = (void *)0x77, "comm=%p p=%p bytes=%zu", (void *)c, p, n)
D(CommDeregister, (comm_t c, void *h), , "comm=%p h=%p", (void *)c, h)
#endif
#if VERSION >= 22703
D(CommWindowRegister, (comm_t c, void *p, size_t n, window_t *w, int flags), if (n != 1) *w = (window_t)0x5555666677778888, "comm=%p p=%p bytes=%zu flags=%d", (void *)c, p, n, flags)
D(CommWindowDeregister, (comm_t c, window_t w), , "comm=%p w=%p", (void *)c, (void *)w)
#endif
#if VERSION >= 22902
D(WinGetUserPtr, (comm_t c, window_t w, void **p), *p = (void *)0x7000000000, "comm=%p w=%p", (void *)c, (void *)w)
D(GetLsaDevicePointer, (window_t w, size_t off, int rank, void **p), *p = (void *)0x7000000000, "w=%p off=%zu rank=%d", (void *)w, off, rank)
#endif
#if VERSION >= 22803
typedef struct { int nRanks, rank, stride; } team;
API team F(TeamLsa)(comm_t c) { RECORD("comm=%p", (void *)c); return (team){4, -3, 2}; }
#endif

#define BUFS "send=%p recv=%p n=%zu type=%d", send, recv, n, t
#define TAIL " comm=%p stream=%p", (void *)c, (void *)s
#define COLL(name, params, extra, ...)           \
	API int F(name) params {                     \
		note("%s ", __func__), note(BUFS);       \
		note(extra, __VA_ARGS__);                \
		note(TAIL), note("\n");                  \
		return fake_rc;                          \
	}
COLL(AllReduce, (const void *send, void *recv, size_t n, type_t t, op_t op, comm_t c, stream_t s), " op=%d", op)
COLL(Reduce, (const void *send, void *recv, size_t n, type_t t, op_t op, int root, comm_t c, stream_t s), " op=%d root=%d", op, root)
COLL(Broadcast, (const void *send, void *recv, size_t n, type_t t, int root, comm_t c, stream_t s), " root=%d", root)
COLL(AllGather, (const void *send, void *recv, size_t n, type_t t, comm_t c, stream_t s), "%s", "")
COLL(ReduceScatter, (const void *send, void *recv, size_t n, type_t t, op_t op, comm_t c, stream_t s), " op=%d", op)
#undef TAIL
#define TAIL " comm=%p stream=%p", b, n, t, peer, (void *)c, (void *)s
D(Send, (const void *b, size_t n, type_t t, int peer, comm_t c, stream_t s), , "buf=%p n=%zu type=%d peer=%d" TAIL)
D(Recv, (void *b, size_t n, type_t t, int peer, comm_t c, stream_t s), , "buf=%p n=%zu type=%d peer=%d" TAIL)
D(GroupStart, (void), , "-")
D(GroupEnd, (void), , "-")
#if VERSION >= 21104
D(RedOpCreatePreMulSum, (op_t *op, void *scalar, type_t t, int where, comm_t c), *op = 77, "scalar=%g type=%d where=%d comm=%p", *(double *)scalar, t, where, (void *)c)
D(RedOpDestroy, (op_t op, comm_t c), , "op=%d comm=%p", op, (void *)c)
#endif
