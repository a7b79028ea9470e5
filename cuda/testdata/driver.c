/* A driver library that works, without a GPU: memory is the machine's, each stream is a thread, graphs are lists of what was captured.
 * It is as strict as the real one where package cuda depends on it: calls need a current context on their thread, captures forbid and are
 * invalidated, a touch of freed memory loses the context for good (700). FAKE_DEVICES and FAKE_FABRIC say what the machine has, FAKE_VISIBLE what of it
 * the process sees.
 * The test compiles it for each vendor, with the names changed; HIP says what AMD does otherwise. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
typedef unsigned u32;
typedef unsigned long long u64;
typedef void (*hostfn)(void *);

enum { GRAIN = 2 << 20, MAXDEPS = 64, MAXNODES = 4096, MAXOBJECTS = 256 };

static pthread_mutex_t L = PTHREAD_MUTEX_INITIALIZER; /* guards all that follows */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int started, sticky, contexts, live, graphs_live;
static u64 used;
static __thread int current; /* device + 1 */
static __thread int thread_mode;

static void lock(void) { pthread_mutex_lock(&L); }
static int unlock(int rc) { pthread_mutex_unlock(&L); return rc; }

/* fake_refuse has one call of a function not be done, after so many that are; it says whether the last one that was asked for has come. With ! before
 * the name the process dies of it. The kernel gorun_peer has "lines" and "right lines": then this rank's are lost, or wrong;
 * and "context", which it loses. */
static struct { char name[48]; int after; } refused;
static int refuse(const char *call) {
	int dies = refused.name[0] == '!';
	if (strcmp(refused.name + dies, call) || refused.after-- != 0)
		return 0;
	if (dies)
		kill(getpid(), SIGKILL);
	return 1;
}
API int fake_refuse(const char *name, int after) {
	lock();
	int came = refused.after < 0;
	snprintf(refused.name, sizeof refused.name, "%s", name);
	refused.after = after;
	return unlock(came);
}

/* Memory. */
enum kind { PLAIN, VMM, HOST, RESERVED };
struct mem { u64 base; size_t n; enum kind kind; int device, fd, handles, access; struct mem *next; };
struct handle { size_t n; int fd, device, handles; };
static struct mem *mems;

static struct mem *find(u64 p) {
	for (struct mem *m = mems; m; m = m->next)
		if (p - m->base < m->n)
			return m;
	return 0;
}
static struct mem *add(u64 base, size_t n, enum kind kind) {
	struct mem *m = calloc(1, sizeof *m);
	*m = (struct mem){.base = base, .n = n, .kind = kind, .device = current - 1, .fd = -1, .next = mems};
	mems = m;
	live++;
	return m;
}
static void drop(struct mem *m) {
	for (struct mem **p = &mems; *p; p = &(*p)->next)
		if (*p == m) {
			*p = m->next;
			break;
		}
	free(m);
	live--;
}
/* usable says whether the device may touch a range, and loses the context if not. */
static int usable(u64 p, size_t n) {
	struct mem *m = find(p);
	int ok = n == 0 || (m && n <= m->n - (p - m->base) && (m->kind == PLAIN || m->kind == HOST || (m->kind == VMM && m->access)));
	if (!ok)
		sticky = 700;
	return ok;
}

/* The kernel of package nccl's small collectives, gorun_peer (nccl/peer.cu), which says what the lines are: the same bytes in the same places. */
enum { PEER_RANKS = 8, PEER_BLOCKS = 64 };
enum { ALL_REDUCE = 1, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER };
enum { SUM, PROD, MIN, MAX };
enum { INT8 = 1, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };
struct gorun_peer_args { u64 send, recv, bytes, counts, stop, bufs[PEER_RANKS]; int rank, ranks, root, op, red, type, per, cap; };

/* Work. */
enum opkind { COPY, SET8, SET32, CALL, RECORD, WAIT, RUN, SCALE, PEER };
/* An event is its last record; who waits for an earlier one goes on doing so. */
struct record { int done; };
struct event { struct record *last; struct capture *cap; int deps[MAXDEPS], ndeps; };
struct object { hostfn fn; void *arg; int refs; };
struct graph { int refs, n, nobj; struct op *nodes[MAXNODES]; struct object *objects[MAXOBJECTS]; };
struct exec { int refs; struct graph *g; int nobj; struct object *objects[MAXOBJECTS]; };
struct op {
	enum opkind kind;
	u64 dst, src, count;
	u32 v;
	float factor;
	struct gorun_peer_args peer; /* and v blocks */
	hostfn fn;
	void *arg;
	struct record *mark;
	struct exec *x;
	int deps[MAXDEPS], ndeps;
	struct op *next;
};
struct stream {
	struct op *first, *last;
	u64 queued, done;
	int closed;
	struct capture *cap;
	int deps[MAXDEPS], ndeps;
	pthread_t thread;
};
struct capture { struct graph *g; struct stream *origin, *streams[16]; int nstreams, mode, invalid, ended; pid_t tid; struct capture *next; };
static struct capture *captures;

/* L is held, and given up for the destructor. */
static void unref_object(struct object *o) {
	if (--o->refs)
		return;
	unlock(0);
	o->fn(o->arg);
	lock();
	free(o);
}
static void unref_graph(struct graph *g) {
	if (--g->refs)
		return;
	for (int i = 0; i < g->n; i++)
		free(g->nodes[i]);
	free(g);
}
static void unref_exec(struct exec *x) {
	if (--x->refs)
		return;
	for (int i = 0; i < x->nobj; i++)
		unref_object(x->objects[i]);
	unref_graph(x->g);
	free(x);
}

static float float_of(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static u32 bits_of(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static double double_of(u64 x) { double f; memcpy(&f, &x, 8); return f; }
static u64 bits_of_double(double f) { u64 x; memcpy(&x, &f, 8); return x; }

static float from_f16(u32 x) {
	u32 sign = (x & 0x8000) << 16, e = x >> 10 & 31, m = x & 1023;
	if (e == 31)
		return float_of(sign | 0x7f800000 | m << 13);
	float f = e ? float_of((e + 112) << 23 | m << 13) : (float)m / (1 << 24);
	return sign ? -f : f;
}
static u32 to_f16(float f) {
	u32 x = bits_of(f), sign = x >> 16 & 0x8000, a = x & 0x7fffffff;
	if (a > 0x7f800000)
		return 0x7fff; /* as GPUs have it */
	if (a >= 0x477ff000)
		return sign | 0x7c00;
	if (a < 0x38800000) /* below the normal numbers: what is left of the sum is a multiple of 2^-24, rounded by the addition */
		return sign | (bits_of(float_of(a) + 0.5f) - bits_of(0.5f));
	return sign | ((a + 0xfff + (a >> 13 & 1)) - (112u << 23)) >> 13;
}
static u32 to_bf16(float f) {
	u32 x = bits_of(f);
	return (x & 0x7fffffff) > 0x7f800000 ? x >> 16 | 0x40 : (x + 0x7fff + (x >> 16 & 1)) >> 16;
}

static int width_of(int type) { return (const int[]){0, 1, 1, 4, 4, 8, 8, 2, 2, 4, 8}[type]; }
static u64 extend(int type, u64 x) {
	switch (type) {
	case INT8: return (u64)(int8_t)x;
	case UINT8: return (uint8_t)x;
	case INT32: return (u64)(int32_t)x;
	case UINT32: return (u32)x;
	}
	return x;
}
static u64 reduce_int(int red, int type, u64 x, u64 y) {
	int less = type == INT8 || type == INT32 || type == INT64 ? (long long)y < (long long)x : y < x;
	switch (red) {
	case SUM: return extend(type, x + y);
	case PROD: return extend(type, x * y);
	case MIN: return less ? y : x;
	default: return less ? x : y;
	}
}
/* Floats are reduced as doubles: one sum or product of two floats, rounded to double and then to float, is the float's own. */
static double reduce_float(int red, double x, double y) {
	switch (red) {
	case SUM: return x + y;
	case PROD: return x * y;
	}
	if (x != x || y != y)
		return x != x ? y : x;
	if (x == y)
		return (red == MIN) == !!__builtin_signbit(x) ? x : y;
	return (red == MIN) == (x < y) ? x : y;
}
static double number_of(int type, u64 x) {
	switch (type) {
	case FLOAT16: return from_f16(x & 0xffff);
	case BFLOAT16: return float_of((u32)x << 16);
	case FLOAT32: return float_of((u32)x);
	}
	return double_of(x);
}
static u64 bits_of_number(int type, double f) {
	switch (type) {
	case FLOAT16: return to_f16((float)f);
	case BFLOAT16: return to_bf16((float)f);
	case FLOAT32: return bits_of((float)f);
	}
	return bits_of_double(f);
}
/* reduce_lines makes one line of those of all ranks, in the order of the ranks. */
static u64 reduce_lines(const u64 *v, int ranks, int red, int type) {
	u64 out = 0;
	int bits = 8 * width_of(type);
	for (int at = 0; at < 64; at += bits) {
		u64 x = extend(type, v[0] >> at);
		if (type >= FLOAT16) {
			double f = number_of(type, x);
			for (int r = 1; r < ranks; r++) {
				f = reduce_float(red, f, number_of(type, v[r] >> at));
				if (type != FLOAT64)
					f = (float)f;
			}
			x = bits_of_number(type, f);
		} else
			for (int r = 1; r < ranks; r++)
				x = reduce_int(red, type, x, extend(type, v[r] >> at));
		out |= (bits == 64 ? x : x & ((1ull << bits) - 1)) << at;
	}
	return out;
}

static u64 load_line(u64 from, u64 i, u64 bytes) {
	u64 x = 0, left = bytes - i * 8;
	memcpy(&x, (void *)(from + i * 8), left < 8 ? left : 8);
	return x;
}
static void store_line(u64 to, u64 i, u64 bytes, u64 x) {
	u64 left = bytes - i * 8;
	memcpy((void *)(to + i * 8), &x, left < 8 ? left : 8);
}
static void put_line(u64 p, u64 x, u32 flag) {
	__atomic_store_n((u64 *)p, (u32)x | (u64)flag << 32, __ATOMIC_RELEASE);
	__atomic_store_n((u64 *)p + 1, x >> 32 | (u64)flag << 32, __ATOMIC_RELEASE);
}
/* peer_usable says whether the memory of this rank is all there; that of the others see peer_slot. */
static int peer_usable(const struct gorun_peer_args *a) {
	u64 all = a->bytes * a->ranks;
	return usable(a->stop, 4) && usable(a->counts, 4 * (PEER_BLOCKS + 1)) && usable(a->send, a->op == REDUCE_SCATTER ? all : a->bytes) &&
	       ((a->op == REDUCE && a->rank != a->root) || usable(a->recv, a->op == ALL_GATHER ? all : a->bytes));
}
/* get_line waits for a line, without L; 0 if the communicator or the context has failed meanwhile. */
static int get_line(const struct gorun_peer_args *a, u64 p, u64 *x, u32 flag) {
	for (int spins = 0;; spins++) {
		u64 lo = __atomic_load_n((u64 *)p, __ATOMIC_ACQUIRE), hi = __atomic_load_n((u64 *)p + 1, __ATOMIC_ACQUIRE);
		if (lo >> 32 == flag && hi >> 32 == flag) {
			*x = (u32)lo | hi << 32;
			return peer_usable(a);
		}
		if (*(volatile u32 *)a->stop) {
			((u32 *)a->counts)[PEER_BLOCKS] = 1;
			return 0;
		}
		unlock(0);
		if (spins < 64)
			sched_yield();
		else
			usleep(50);
		lock();
		if (sticky || !usable(p, 16) || !usable(a->counts, 4 * (PEER_BLOCKS + 1)) || !usable(a->stop, 4))
			return 0;
	}
}

static u64 peer_lines(const struct gorun_peer_args *a) { return (a->bytes + 7) / 8; }
static u64 peer_mine(const struct gorun_peer_args *a, u32 block) {
	u64 left = peer_lines(a) - (u64)block * a->per;
	return left < (u64)a->per ? left : (u64)a->per;
}
/* peer_valid wants arguments with which the ranks do not lose each other: each block has a line. */
static int peer_valid(const struct gorun_peer_args *a, u32 blocks) {
	return a->ranks >= 2 && a->ranks <= PEER_RANKS && a->rank >= 0 && a->rank < a->ranks && a->root >= 0 && a->root < a->ranks &&
	       a->op >= ALL_REDUCE && a->op <= REDUCE_SCATTER &&
	       (a->op == BROADCAST || a->op == ALL_GATHER || (a->red >= SUM && a->red <= MAX && a->type >= INT8 && a->type <= FLOAT64)) &&
	       blocks <= PEER_BLOCKS && a->per > 0 && a->per <= a->cap && peer_lines(a) > (u64)(blocks - 1) * a->per && peer_lines(a) <= (u64)blocks * a->per;
}
/* peer_slot is where a rank's lines for a block of a rank are, for the calls with this flag; 0 if they are not memory. */
static u64 peer_slot(const struct gorun_peer_args *a, int to, int sender, u32 block, u32 flag) {
	u64 p = a->bufs[to] + (((u64)(flag & 1) * a->ranks + sender) * PEER_BLOCKS + block) * a->cap * 16;
	return usable(p, peer_mine(a, block) * 16) ? p : 0;
}

/* peer does the whole kernel: first all blocks' sending, then their waiting. L is held, and given up while it waits. */
static void peer(const struct gorun_peer_args *a, u32 blocks) {
	int scatter = a->op == REDUCE_SCATTER, rooted = a->op == REDUCE || a->op == BROADCAST, root = a->rank == a->root;
	int writes = a->op != REDUCE || root;
	int wrong = refuse("right lines"), lost = refuse("lines");
	if (refuse("context")) {
		sticky = 700;
		return;
	}
	u32 *counts = (u32 *)a->counts;
	if (!usable(a->counts, 4 * (PEER_BLOCKS + 1)) || counts[PEER_BLOCKS] || !peer_usable(a))
		return;
	for (u32 block = 0; block < blocks; block++) {
		u64 from = (u64)block * a->per, mine = peer_mine(a, block);
		u32 flag = counts[block] + 1;
		for (int p = 0; p < a->ranks; p++) {
			if (p == a->rank)
				continue;
			u64 to = peer_slot(a, p, a->rank, block, flag);
			if (!to)
				return;
			if (rooted && !(a->op == BROADCAST ? root : p == a->root)) {
				put_line(to, 0, flag);
				continue;
			}
			for (u64 i = 0; i < mine && !lost; i++)
				put_line(to + i * 16, load_line(a->send + (scatter ? (u64)p * a->bytes : 0), from + i, a->bytes) ^ wrong << 8, flag);
		}
	}
	for (u32 block = 0; block < blocks; block++) {
		u64 from = (u64)block * a->per, mine = peer_mine(a, block);
		u32 flag = counts[block] + 1;
		for (u64 i = 0; i < mine; i++) {
			u64 v[PEER_RANKS] = {0};
			for (int r = 0; r < a->ranks; r++) {
				if (r == a->rank)
					v[r] = load_line(a->send + (scatter ? (u64)r * a->bytes : 0), from + i, a->bytes);
				else if (!rooted || (a->op == BROADCAST ? r == a->root : root) || i == 0) {
					u64 slot = peer_slot(a, a->rank, r, block, flag);
					if (!slot || !get_line(a, slot + i * 16, &v[r], flag))
						return;
				}
			}
			if (a->op == ALL_GATHER)
				for (int r = 0; r < a->ranks; r++)
					store_line(a->recv + (u64)r * a->bytes, from + i, a->bytes, v[r]);
			else if (a->op == BROADCAST)
				store_line(a->recv, from + i, a->bytes, v[a->root]);
			else if (writes)
				store_line(a->recv, from + i, a->bytes, reduce_lines(v, a->ranks, a->red, a->type));
		}
		counts[block] = flag;
	}
}

static void execute(struct op *o);
/* waits says whether a node waits for other ranks, of whichever communicator: one after the other these keep their order. */
static int waits(const struct op *o) { return o->kind == CALL || o->kind == PEER; }
static int together(const struct op *a, const struct op *b) { return a->kind == PEER && b->kind == PEER && a->peer.stop == b->peer.stop; }
/* run does a graph's nodes one after the other, with FAKE_SHUFFLE in any order that their dependencies allow, also those of gorun_peer of one communicator. */
static void run_graph(const struct graph *g) {
	int shuffle = getenv("FAKE_SHUFFLE") != 0;
	char done[MAXNODES] = {0};
	for (int left = g->n; left; left--) {
		int i = shuffle ? random() % g->n : g->n - left;
		for (;; i = (i + 1) % g->n) {
			int ready = !done[i];
			for (int k = 0; ready && k < g->nodes[i]->ndeps; k++)
				ready = done[g->nodes[i]->deps[k]];
			for (int k = 0; ready && waits(g->nodes[i]) && k < i; k++)
				ready = done[k] || !waits(g->nodes[k]) || together(g->nodes[i], g->nodes[k]);
			if (ready)
				break;
		}
		done[i] = 1;
		execute(g->nodes[i]);
	}
}

/* execute does an operation; L is held, and given up while Go runs, and while a kernel waits for a peer. */
static void execute(struct op *o) {
	if (sticky)
		return;
	switch (o->kind) {
	case COPY:
		if (usable(o->dst, o->count) && usable(o->src, o->count))
			memmove((void *)o->dst, (void *)o->src, o->count);
		break;
	case SET8:
		if (usable(o->dst, o->count))
			memset((void *)o->dst, o->v, o->count);
		break;
	case SET32:
		if (usable(o->dst, 4 * o->count))
			for (u64 i = 0; i < o->count; i++)
				((u32 *)o->dst)[i] = o->v;
		break;
	case SCALE:
		if (usable(o->dst, 4 * o->count))
			for (u64 i = 0; i < o->count; i++)
				((float *)o->dst)[i] *= o->factor;
		break;
	case PEER:
		peer(&o->peer, o->v);
		break;
	case CALL:
		unlock(0);
		o->fn(o->arg);
		lock();
		break;
	case RECORD:
		o->mark->done = 1;
		break;
	case WAIT:
		while (!o->mark->done && !sticky)
			pthread_cond_wait(&changed, &L);
		break;
	case RUN:
		run_graph(o->x->g);
		unref_exec(o->x);
		break;
	}
}

static void *work(void *arg) {
	struct stream *s = arg;
	lock();
	for (;;) {
		struct op *o = s->first;
		if (!o) {
			if (s->closed)
				break;
			pthread_cond_wait(&changed, &L);
			continue;
		}
		s->first = o->next;
		execute(o);
		free(o);
		s->done++;
		pthread_cond_broadcast(&changed);
	}
	free(s);
	live--;
	unlock(0);
	return 0;
}

static int invalidate(struct capture *c, int rc) {
	c->invalid = 1;
	return rc;
}
/* forbidden is for calls that captures forbid: those that are neither recorded nor enqueued, as strict as can be. */
static int forbidden(void) {
	if (thread_mode == 2)
		return 0;
	for (struct capture *c = captures; c; c = c->next)
		if (!c->ended && (c->mode == 0 || (c->mode == 1 && c->tid == gettid())))
			return invalidate(c, 900);
	return 0;
}

#define NEED                          \
	lock();                           \
	if (refuse(__func__))             \
		return unlock(801);           \
	if (sticky)                       \
		return unlock(sticky);        \
	if (!current)                     \
		return unlock(201);
#define SAFE                          \
	NEED;                             \
	{                                 \
		int rc = forbidden();         \
		if (rc)                       \
			return unlock(rc);        \
	}

/* emit enqueues an operation or records it. L is held. */
static int emit(struct stream *s, struct op op) {
	if (s->cap) {
		struct capture *c = s->cap;
		if (c->invalid)
			return 901;
		struct op *o = malloc(sizeof *o);
		*o = op;
		memcpy(o->deps, s->deps, sizeof s->deps);
		o->ndeps = s->ndeps;
		s->deps[0] = c->g->n;
		s->ndeps = 1;
		c->g->nodes[c->g->n++] = o;
		return 0;
	}
	struct op *o = malloc(sizeof *o);
	*o = op;
	o->next = 0;
	if (s->first)
		s->last->next = o;
	else
		s->first = o;
	s->last = o;
	s->queued++;
	pthread_cond_broadcast(&changed);
	return 0;
}

/* With FAKE_VISIBLE the process sees one device alone, the machine's with that number. */
static int shift(void) { const char *v = getenv("FAKE_VISIBLE"); return v ? atoi(v) : 0; }
static int devices(void) { const char *v = getenv("FAKE_DEVICES"); return getenv("FAKE_VISIBLE") ? 1 : v ? atoi(v) : 2; }

API int cuInit(u32 flags) { started = 1; srandom(getpid()); return flags != 0; }
#ifdef HIP
enum { VERSION = 70200000, CC_MAJOR = 23, CC_MINOR = 61, PROCESSORS = 63, VIRTUAL = 89 };
#else
enum { VERSION = 12080, CC_MAJOR = 75, CC_MINOR = 76, PROCESSORS = 16, VIRTUAL = 102 };
#endif
API int cuDriverGetVersion(int *v) { *v = VERSION; return 0; }
API int cuDeviceGetCount(int *n) { *n = devices(); return started ? 0 : 3; }
API int cuDeviceGet(int *d, int i) { *d = i; return i < devices() ? 0 : 101; }
API int cuDeviceGetAttribute(int *v, int a, int dev) {
	(void)dev;
	switch (a) {
	case PROCESSORS: *v = 7; break;
	case CC_MAJOR: *v = 9; break;
	case CC_MINOR: *v = 0; break;
	case VIRTUAL: case 103: case 110: *v = 1; break;
	case 128: *v = getenv("FAKE_FABRIC") != 0; break;
	default: *v = 0;
	}
	return 0;
}
API int cuDeviceGetUuid_v2(unsigned char *id, int dev) {
	dev += shift();
#ifdef HIP
	char text[17];
	snprintf(text, sizeof text, "8a5e%012x", dev);
	memcpy(id, text, 16);
#else
	for (int i = 0; i < 16; i++)
		id[i] = 0x10 * (dev + 1) + i;
#endif
	return 0;
}
API int cuDeviceGetName(char *b, int n, int dev) { snprintf(b, n, "Fake %d", dev + shift()); return 0; }
API int cuDeviceTotalMem_v2(size_t *n, int dev) { (void)dev; *n = 1ull << 35; return 0; } /* half of it cannot be had */
API int cuDeviceGetPCIBusId(char *b, int n, int dev) { snprintf(b, n, "0000:%02x:00.0", dev + shift() + 1); return 0; }
API int cuDeviceGetP2PAttribute(int *v, int what, int a, int b) { *v = what == 3 && a != b; return 0; }
API int cuDeviceCanAccessPeer(int *v, int a, int b) { *v = a != b; return 0; }
#ifdef HIP
API int hipSetDevice(int dev) { current = dev + 1; return sticky; }
API int hipGetDevice(int *d) { *d = current - 1; return current ? 0 : 201; }
#else
API int cuDevicePrimaryCtxRetain(uintptr_t *c, int dev) { lock(); contexts++; *c = dev + 1; return unlock(0); }
API int cuDevicePrimaryCtxRelease_v2(int dev) { (void)dev; lock(); contexts--; return unlock(0); }
API int cuCtxSetCurrent(uintptr_t c) { current = (int)c; return sticky; }
API int cuCtxGetCurrent(uintptr_t *c) { *c = current; return 0; }
#endif

API int cuMemAlloc_v2(u64 *p, size_t n) {
	SAFE;
	if (n == 0)
		return unlock(1);
	if (n > (1ull << 34) - used)
		return unlock(2);
	*p = (u64)(uintptr_t)mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	memset((void *)*p, 0xa5, n < 4096 ? n : 4096);
	add(*p, n, PLAIN);
	used += n;
	return unlock(0);
}
API int cuMemFree_v2(u64 p) {
	SAFE;
	struct mem *m = find(p);
	if (!m || m->base != p || m->kind != PLAIN)
		return unlock(1);
	used -= m->n;
	munmap((void *)p, m->n);
	drop(m);
	return unlock(0);
}
API int cuMemGetInfo_v2(size_t *f, size_t *t) { SAFE; *t = 1ull << 34; *f = *t - used; return unlock(0); }
#ifdef HIP
#define HOST_FLAGS , u32 flags
#define NO_FLAGS if (flags) return 1
#else
#define HOST_FLAGS
#define NO_FLAGS
#endif
API int cuMemAllocHost_v2(void **p, size_t n HOST_FLAGS) { NO_FLAGS; SAFE; *p = calloc(1, n); add((u64)(uintptr_t)*p, n, HOST); return unlock(0); }
API int cuMemFreeHost(void *p) {
	SAFE;
	struct mem *m = find((u64)(uintptr_t)p);
	if (!m || m->kind != HOST)
		return unlock(1);
	drop(m);
	free(p);
	return unlock(0);
}
API int cuMemGetAddressRange_v2(u64 *b, size_t *n, u64 p) {
	NEED;
	struct mem *m = find(p);
	if (!m)
		return unlock(500);
	*b = m->base, *n = m->n;
	return unlock(0);
}
API int cuPointerGetAttributes(u32 n, const int *attrs, void **data, u64 p) {
	NEED;
	struct mem *m = find(p);
	if (m && m->kind == RESERVED)
		m = 0;
	for (u32 i = 0; i < n && m; i++)
		switch (attrs[i]) {
		case 2: *(u32 *)data[i] = m->kind == HOST ? 1 : 2; break;
		case 9: *(int *)data[i] = m->device; break;
		case 10: *(_Bool *)data[i] = m->kind == PLAIN; break;
		case 11: *(u64 *)data[i] = m->base; break;
		case 12: *(size_t *)data[i] = m->n; break;
		case 14: *(u32 *)data[i] = m->handles; break;
		}
	return unlock(0);
}

struct prop { int type, handles, loctype, locid; void *win32; uint8_t comp, rdma; uint16_t usage; uint8_t reserved[4]; };
API int cuMemGetAllocationGranularity(size_t *n, const struct prop *p, int opt) { (void)p; *n = opt ? GRAIN : 4096; return 0; }
static u64 add_handle(struct handle of) {
	struct handle *v = malloc(sizeof *v);
	*v = of;
	live++;
	return (u64)(uintptr_t)v;
}
API int cuMemCreate(u64 *h, size_t n, const struct prop *p, u64 flags) {
	SAFE;
	if (p->handles & 8)
		return unlock(800);
	if (flags || p->type != 1 || p->loctype != 1 || n % GRAIN)
		return unlock(1);
	if (n > (1ull << 34) - used)
		return unlock(2);
	char about[32]; /* for who imports it */
	snprintf(about, sizeof about, "fake %d %d", p->locid, p->handles);
	int fd = memfd_create(about, MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, n))
		return unlock(2);
	*h = add_handle((struct handle){n, fd, p->locid, p->handles});
	return unlock(0);
}
API int cuMemRelease(u64 h) {
	SAFE;
	struct handle *v = (void *)h;
	close(v->fd);
	free(v);
	live--;
	return unlock(0);
}
static int dup_fd(int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, 0); }
API int cuMemRetainAllocationHandle(u64 *h, u64 p) {
	SAFE;
	struct mem *m = find(p);
	if (!m || m->kind != VMM)
		return unlock(1);
	*h = add_handle((struct handle){m->n, dup_fd(m->fd), m->device, m->handles});
	return unlock(0);
}
API int cuMemExportToShareableHandle(int *fd, u64 h, int type, u64 flags) {
	SAFE;
	struct handle *v = (void *)h;
	if (type != 1 || !(v->handles & type) || flags)
		return unlock(1);
	*fd = dup(v->fd); /* not close-on-exec, as other libraries' may be */
	return unlock(*fd < 0 ? 999 : 0);
}
API int cuMemImportFromShareableHandle(u64 *h, void *os, int type) {
	SAFE;
	int fd = (int)(intptr_t)os, device, handles;
	char link[40], about[64] = "";
	struct stat st;
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	if (type != 1 || fstat(fd, &st) || readlink(link, about, sizeof about - 1) < 0 || sscanf(about, "/memfd:fake %d %d", &device, &handles) != 2)
		return unlock(1);
	*h = add_handle((struct handle){st.st_size, dup_fd(fd), device, handles});
	return unlock(0);
}
API int cuMemAddressReserve(u64 *p, size_t n, size_t align, u64 hint, u64 flags) {
	SAFE;
	if (hint || flags || n % GRAIN)
		return unlock(1);
	char *a = mmap(0, n + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	char *b = (char *)(((uintptr_t)a + align - 1) / align * align);
	if (b > a)
		munmap(a, b - a);
	if (b + n < a + n + align)
		munmap(b + n, a + align - b);
	*p = (u64)(uintptr_t)b;
	add(*p, n, RESERVED);
	return unlock(0);
}
API int cuMemAddressFree(u64 p, size_t n) {
	SAFE;
	struct mem *m = find(p);
	if (!m || m->kind != RESERVED || m->n != n)
		return unlock(1);
	munmap((void *)p, n);
	drop(m);
	return unlock(0);
}
API int cuMemMap(u64 p, size_t n, size_t off, u64 h, u64 flags) {
	SAFE;
	struct mem *m = find(p);
	struct handle *v = (void *)h;
	if (!m || m->kind != RESERVED || m->n != n || v->n != n || off || flags)
		return unlock(1);
	mmap((void *)p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, v->fd, 0);
	m->kind = VMM, m->fd = dup_fd(v->fd), m->handles = v->handles, m->device = v->device, m->access = 0;
	used += n;
	return unlock(0);
}
API int cuMemUnmap(u64 p, size_t n) {
	SAFE;
	struct mem *m = find(p);
	if (!m || m->kind != VMM || m->n != n)
		return unlock(1);
	mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	close(m->fd);
	m->kind = RESERVED;
	used -= n;
	return unlock(0);
}
struct access { int loctype, locid, flags; };
API int cuMemSetAccess(u64 p, size_t n, const struct access *a, size_t count) {
	SAFE;
	struct mem *m = find(p);
	if (!m || m->kind != VMM || m->n != n)
		return unlock(1);
	for (size_t i = 0; i < count; i++)
		if (a[i].loctype != 1 || a[i].flags != 3 || a[i].locid >= devices())
			return unlock(1);
	mprotect((void *)p, n, PROT_READ | PROT_WRITE);
	m->access = (int)count;
	return unlock(0);
}

static struct op copy_op(u64 d, u64 s, size_t n) { return (struct op){.kind = COPY, .dst = d, .src = s, .count = n}; }
API int cuMemcpyHtoDAsync_v2(u64 d, void *s, size_t n, struct stream *st) { NEED; return unlock(emit(st, copy_op(d, (u64)(uintptr_t)s, n))); }
API int cuMemcpyDtoHAsync_v2(void *d, u64 s, size_t n, struct stream *st) { NEED; return unlock(emit(st, copy_op((u64)(uintptr_t)d, s, n))); }
API int cuMemcpyDtoDAsync_v2(u64 d, u64 s, size_t n, struct stream *st) { NEED; return unlock(emit(st, copy_op(d, s, n))); }
API int cuMemsetD8Async(u64 d, unsigned char v, size_t n, struct stream *st) { NEED; return unlock(emit(st, (struct op){.kind = SET8, .dst = d, .v = v, .count = n})); }
API int cuMemsetD32Async(u64 d, u32 v, size_t n, struct stream *st) {
	NEED;
	return unlock(d % 4 ? 1 : emit(st, (struct op){.kind = SET32, .dst = d, .v = v, .count = n}));
}
API int cuLaunchHostFunc(struct stream *s, hostfn fn, void *arg) { NEED; return unlock(emit(s, (struct op){.kind = CALL, .fn = fn, .arg = arg})); }

API int cuStreamCreate(struct stream **out, u32 flags) {
	SAFE;
	if (flags != 1)
		return unlock(1);
	struct stream *s = calloc(1, sizeof *s);
	live++;
	pthread_create(&s->thread, 0, work, s);
	pthread_detach(s->thread);
	*out = s;
	return unlock(0);
}
API int cuStreamDestroy_v2(struct stream *s) { SAFE; s->closed = 1; pthread_cond_broadcast(&changed); return unlock(0); }
API int cuStreamQuery(struct stream *s) {
	NEED;
	if (s->cap)
		return unlock(invalidate(s->cap, 900));
	int rc = forbidden();
	return unlock(rc ? rc : s->done == s->queued ? 0 : 600);
}
API int cuEventCreate(struct event **e, u32 flags) { SAFE; if (flags != 2) return unlock(1); *e = calloc(1, sizeof **e); live++; return unlock(0); }
API int cuEventDestroy_v2(struct event *e) { SAFE; (void)e; live--; return unlock(0); } /* streams may still wait for it: the memory stays */
API int cuEventRecord(struct event *e, struct stream *s) {
	NEED;
	if (s->cap) {
		if (s->cap->invalid)
			return unlock(901);
		e->cap = s->cap;
		memcpy(e->deps, s->deps, sizeof s->deps);
		e->ndeps = s->ndeps;
		return unlock(0);
	}
	e->cap = 0;
	e->last = calloc(1, sizeof *e->last); /* never given back: streams may wait for it */
	return unlock(emit(s, (struct op){.kind = RECORD, .mark = e->last}));
}
API int cuEventQuery(struct event *e) {
	SAFE;
	if (e->cap)
		return unlock(e->cap->ended ? 907 : invalidate(e->cap, 907));
	return unlock(!e->last || e->last->done ? 0 : 600);
}
API int cuStreamWaitEvent(struct stream *s, struct event *e, u32 flags) {
	NEED;
	if (flags)
		return unlock(1);
	if (e->cap) {
		struct capture *c = e->cap;
		if (c->ended || (s->cap && s->cap != c))
			return unlock(902);
		if (!s->cap)
			s->cap = c, s->ndeps = 0, c->streams[c->nstreams++] = s;
		for (int i = 0; i < e->ndeps && s->ndeps < MAXDEPS; i++)
			s->deps[s->ndeps++] = e->deps[i];
		return unlock(0);
	}
	if (s->cap)
		return unlock(e->last ? invalidate(s->cap, 905) : 0);
	if (!e->last)
		return unlock(0);
	return unlock(emit(s, (struct op){.kind = WAIT, .mark = e->last}));
}

API int cuStreamBeginCapture_v2(struct stream *s, int mode) {
	NEED;
	if (s->cap)
		return unlock(invalidate(s->cap, 901));
	struct capture *c = calloc(1, sizeof *c);
	c->g = calloc(1, sizeof *c->g);
	c->g->refs = 1;
	c->origin = c->streams[0] = s, c->nstreams = 1, c->mode = mode, c->tid = gettid(), c->next = captures;
	captures = c;
	s->cap = c, s->ndeps = 0;
	return unlock(0);
}
API int cuStreamEndCapture(struct stream *s, struct graph **out) {
	NEED;
	struct capture *c = s->cap;
	*out = 0;
	if (!c)
		return unlock(1);
	if (c->origin != s)
		return unlock(invalidate(c, 903));
	if (c->mode != 2 && c->tid != gettid())
		return unlock(invalidate(c, 908));
	c->ended = 1;
	char before[MAXNODES] = {0};
	for (int i = 0; i < s->ndeps; i++)
		before[s->deps[i]] = 1;
	int unjoined = 0;
	for (int n = c->g->n - 1; n >= 0; n--) {
		if (!before[n])
			unjoined = 1;
		for (int i = 0; i < c->g->nodes[n]->ndeps; i++)
			before[c->g->nodes[n]->deps[i]] = 1;
	}
	for (int i = 0; i < c->nstreams; i++)
		c->streams[i]->cap = 0;
	if (c->invalid || unjoined) {
		for (int i = 0; i < c->g->nobj; i++)
			unref_object(c->g->objects[i]);
		unref_graph(c->g);
		return unlock(c->invalid ? 901 : 904);
	}
	*out = c->g;
	graphs_live++;
	return unlock(0);
}
API int cuStreamIsCapturing(struct stream *s, int *status) { NEED; *status = s->cap ? 1 + s->cap->invalid : 0; return unlock(0); }
API int cuStreamGetCaptureInfo_v2(struct stream *s, int *status, u64 *id, struct graph **g, void **deps, size_t *n) {
	NEED;
	(void)id, (void)deps, (void)n;
	*status = s->cap ? 1 + s->cap->invalid : 0;
	*g = s->cap ? s->cap->g : 0;
	return unlock(0);
}
API int cuThreadExchangeStreamCaptureMode(int *m) { int old = thread_mode; thread_mode = *m; *m = old; return 0; }

API int cuGraphInstantiateWithFlags(struct exec **out, struct graph *g, u64 flags) {
	SAFE;
	if (flags)
		return unlock(1);
	struct exec *x = calloc(1, sizeof *x);
	x->refs = 1, x->g = g, x->nobj = g->nobj;
	g->refs++;
	for (int i = 0; i < g->nobj; i++)
		(x->objects[i] = g->objects[i])->refs++;
	*out = x;
	graphs_live++;
	return unlock(0);
}
API int cuGraphLaunch(struct exec *x, struct stream *s) {
	NEED;
	int rc = s->cap ? 0 : forbidden();
	if (rc)
		return unlock(rc);
	x->refs++;
	return unlock(emit(s, (struct op){.kind = RUN, .x = x}));
}
API int cuGraphExecDestroy(struct exec *x) { SAFE; graphs_live--; unref_exec(x); return unlock(0); }
API int cuGraphDestroy(struct graph *g) {
	SAFE;
	graphs_live--;
	for (int i = 0; i < g->nobj; i++)
		unref_object(g->objects[i]);
	unref_graph(g);
	return unlock(0);
}
API int cuGraphGetNodes(struct graph *g, void **nodes, size_t *n) { NEED; (void)nodes; *n = g->n; return unlock(0); }
API int cuUserObjectCreate(struct object **out, void *arg, hostfn fn, u32 refs, u32 flags) {
	if (flags != 1)
		return 1;
	struct object *o = malloc(sizeof *o);
	*o = (struct object){fn, arg, (int)refs};
	*out = o;
	return 0;
}
API int cuUserObjectRelease(struct object *o, u32 n) { lock(); o->refs -= n - 1; unref_object(o); return unlock(0); }
API int cuGraphRetainUserObject(struct graph *g, struct object *o, u32 n, u32 flags) {
	if (n != 1 || flags != 1)
		return 1;
	lock();
	g->objects[g->nobj++] = o;
	return unlock(0);
}

/* Modules: an image is its source. The kernels are scale: x[i] *= a for its n items, and gorun_peer. */
API int cuModuleLoadDataEx(char **m, const char *image, u32 n, int *options, void **values) {
	SAFE;
	if (n != 2 || options[0] != 5 || options[1] != 6)
		return unlock(1);
	if (strstr(image, "broken")) {
		snprintf(values[0], (size_t)(uintptr_t)values[1], "ptxas: broken");
		return unlock(218);
	}
	*m = strdup(image);
	live++;
	return unlock(0);
}
API int cuModuleUnload(char *m) { SAFE; free(m); live--; return unlock(0); }
API int cuModuleGetFunction(const char **f, char *m, const char *name) {
	SAFE;
	if (!strcmp(name, "scale") && strstr(m, "void scale(scale_args a, long long n)"))
		*f = "scale";
	else if (!strcmp(name, "gorun_peer") && strstr(m, name))
		*f = "gorun_peer";
	else
		return unlock(500);
	return unlock(0);
}
struct scale_args { short pad; float *x; long long n; float a; };
API int cuLaunchKernel(const char *f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 smem, struct stream *s, void **params, void **extra) {
	NEED;
	long long n = *(long long *)params[1];
	if (gy != 1 || gz != 1 || bx > 1024 || by != 1 || bz != 1 || smem || extra || gx != (n + bx - 1) / bx)
		return unlock(1);
	if (!strcmp(f, "gorun_peer")) {
		struct gorun_peer_args *p = params[0];
		return unlock(peer_valid(p, gx) ? emit(s, (struct op){.kind = PEER, .peer = *p, .v = gx}) : 1);
	}
	struct scale_args *a = params[0];
	if (a->n < n)
		return unlock(1);
	return unlock(emit(s, (struct op){.kind = SCALE, .dst = (u64)(uintptr_t)a->x, .count = n, .factor = a->a}));
}

#if defined HIP
#define NAME(a, b) b
#elif defined MUSA
#define NAME(a, b) "MUSA_" a
#else
#define NAME(a, b) "CUDA_" a
#endif
static const char *error_name(int rc) {
	switch (rc) {
	case 2: return NAME("ERROR_OUT_OF_MEMORY", "hipErrorOutOfMemory");
	case 700: return NAME("ERROR_ILLEGAL_ADDRESS", "hipErrorIllegalAddress");
	case 900: return NAME("ERROR_STREAM_CAPTURE_UNSUPPORTED", "hipErrorStreamCaptureUnsupported");
	}
	return 0;
}
static const char *error_text(int rc) {
	return rc == 2 ? "out of memory" : rc == 700 ? "an illegal memory access was encountered" : rc == 900 ? "operation not permitted when stream is capturing" : 0;
}
#ifdef HIP
API const char *hipGetErrorName(int rc) { return error_name(rc); }
API const char *hipGetErrorString(int rc) { return error_text(rc); }
#else
API int cuGetErrorName(int rc, const char **s) { *s = error_name(rc); return *s ? 0 : 1; }
API int cuGetErrorString(int rc, const char **s) { *s = error_text(rc); return *s ? 0 : 1; }
#endif

/* For the tests: what was not given back. A stream goes with its thread. */
API int fake_live(void) { lock(); return unlock(live + graphs_live + contexts); }
