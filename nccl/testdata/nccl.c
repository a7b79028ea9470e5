/* A collective library that works, without a GPU, between processes of one machine: ranks meet in a shared file, and each operation is a host
 * function on its stream (of the driver in DRIVER, GORUN_CUDA_LIB). Like the real one it notices nothing: where a peer does not come or calls something
 * else the stream never gets ready, and after an abort it says success. FAKE_LOG names a file for the calls, FAKE_NCCL has words that change what it does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#ifndef DRIVER
#define DRIVER "GORUN_CUDA_LIB"
#endif
#define TEXT(name) #name
#define SYMBOL(h, name) dlsym(h, TEXT(name)) /* with the name that the compiler's arguments give it */
#ifndef VERSION
#define VERSION 22803
#endif
enum { MAXRANKS = 8, CHUNK = 256 << 10, INPROGRESS = 7 };
typedef void *stream_t;

static int (*launch_host_func)(stream_t, void (*)(void *), void *);
static int (*is_capturing)(stream_t, int *);
static int (*capture_info)(stream_t, int *, uint64_t *, void **, void **, size_t *);
static int (*object_create)(void **, void *, void (*)(void *), unsigned, unsigned), (*graph_retain)(void *, void *, unsigned, unsigned);
static int (*mem_alloc)(uint64_t *, size_t), (*mem_free)(uint64_t);
static int (*get_current)(uintptr_t *), (*set_current)(uintptr_t);
static int (*address_range)(uintptr_t *, size_t *, uintptr_t), (*pointer_attributes)(unsigned, const int *, void **, uintptr_t);
static pthread_once_t once = PTHREAD_ONCE_INIT;
#ifdef HIP /* has devices in place of contexts */
static int (*get_device)(int *), (*set_device)(int);
static int get_device_as_context(uintptr_t *c) { int d = -1, rc = get_device(&d); *c = d + 1; return rc == 201 ? 0 : rc; }
static int set_device_of_context(uintptr_t c) { return set_device((int)c - 1); }
#endif

static void bind_driver(void) {
	void *h = dlopen(getenv(DRIVER), RTLD_NOW);
	launch_host_func = (int (*)(stream_t, void (*)(void *), void *))SYMBOL(h, cuLaunchHostFunc);
	is_capturing = (int (*)(stream_t, int *))SYMBOL(h, cuStreamIsCapturing);
	capture_info = (int (*)(stream_t, int *, uint64_t *, void **, void **, size_t *))SYMBOL(h, cuStreamGetCaptureInfo_v2);
	object_create = (int (*)(void **, void *, void (*)(void *), unsigned, unsigned))SYMBOL(h, cuUserObjectCreate);
	graph_retain = (int (*)(void *, void *, unsigned, unsigned))SYMBOL(h, cuGraphRetainUserObject);
	mem_alloc = (int (*)(uint64_t *, size_t))SYMBOL(h, cuMemAlloc_v2);
	mem_free = (int (*)(uint64_t))SYMBOL(h, cuMemFree_v2);
#ifdef HIP
	get_device = (int (*)(int *))dlsym(h, "hipGetDevice");
	set_device = (int (*)(int))dlsym(h, "hipSetDevice");
	get_current = get_device_as_context;
	set_current = set_device_of_context;
#else
	get_current = (int (*)(uintptr_t *))SYMBOL(h, cuCtxGetCurrent);
	set_current = (int (*)(uintptr_t))SYMBOL(h, cuCtxSetCurrent);
#endif
	address_range = (int (*)(uintptr_t *, size_t *, uintptr_t))SYMBOL(h, cuMemGetAddressRange_v2);
	pointer_attributes = (int (*)(unsigned, const int *, void **, uintptr_t))SYMBOL(h, cuPointerGetAttributes);
}

static int word(const char *w) { const char *v = getenv("FAKE_NCCL"); return v && strstr(v, w); }

static void note(const char *format, ...) {
	const char *path = getenv("FAKE_LOG");
	if (!path)
		return;
	char line[512];
	va_list a;
	va_start(a, format);
	int n = vsnprintf(line, sizeof line - 1, format, a);
	va_end(a);
	line[n++] = '\n';
	char mine[600];
	snprintf(mine, sizeof mine, "%s.%d", path, getpid());
	int fd = open(mine, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (write(fd, line, n) < 0)
		abort();
	close(fd);
}

/* What the ranks share. */
struct mailbox { volatile uint64_t sent, taken; size_t n; char data[CHUNK]; };
struct shared {
	volatile int joined;
	volatile uint64_t phase[MAXRANKS], wphase[MAXRANKS], sphase[MAXRANKS];
	volatile int color[MAXRANKS], key[MAXRANKS]; /* of a split */
	char slot[MAXRANKS][CHUNK];
	struct mailbox box[MAXRANKS][MAXRANKS];
};
struct comm {
	int n, rank, blocking, splits;
	char path[128];
	struct shared *s;
	volatile int state, aborted, uses;
	volatile int graphs;   /* that have captured something of it, and are not gone: the end waits for them */
	void *volatile newest; /* of them */
	struct holder *holder; /* the newest one's */
	uint64_t phase, wphase, sphase;
	uintptr_t ctx; /* current when it was made: calls make it current again */
	pthread_mutex_t turn;
	struct range *ranges;
	struct window *windows;
	int launches; /* since it last looked at what graphs have left */
	struct { char scalar[8]; int type, used; } made[64]; /* reductions */
};
typedef struct { char path[128]; } unique_id;

/* What is registered, for the log (NCCL_DEBUG_FILE) only. FAKE_NCCL: reg-none registers nothing, reg-refused says so, reg-leak gives nothing back. */
struct range { uintptr_t base; size_t size; int local, graph, shared; volatile int left; struct range *next; };

static void tell(const char *format, ...) {
	const char *file = getenv("NCCL_DEBUG_FILE"), *what = getenv("NCCL_DEBUG_SUBSYS");
	if (!file || !what || !strstr(what, "REG"))
		return;
	char line[512], path[512];
	size_t k = 0;
	for (; *file && k < sizeof path - 1; file += file[0] == '%' && file[1] == '%' ? 2 : 1)
		path[k++] = *file;
	path[k] = 0;
	int n = snprintf(line, sizeof line, "node-a:%d:%d [0] NCCL INFO ", getpid(), getpid());
	va_list a;
	va_start(a, format);
	n += vsnprintf(line + n, sizeof line - n - 1, format, a);
	va_end(a);
	line[n++] = '\n';
	int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (write(fd, line, n) < 0)
		abort();
	close(fd);
}
#if VERSION >= 22900
#define SIZES "totalSize %zu numSegments 1"
#else
#define SIZES "size %zd"
#endif
static struct range *range_of(struct comm *c, uintptr_t p, size_t n) {
	tell("register comm %p buffer %p size %zi", (void *)c, (void *)p, n);
	struct range *r = c->ranges;
	while (r && !(r->base <= p && p + n <= r->base + r->size && (r->local || r->graph)))
		r = r->next;
	if (!r) {
		r = calloc(1, sizeof *r);
		*r = (struct range){.base = p, .size = n, .next = c->ranges};
		c->ranges = r;
	}
	return r;
}
static void share(struct comm *c, struct range *r, uintptr_t buf, size_t n) {
	int peer = (c->rank + 1) % c->n;
	if (word("reg-refused"))
		tell("rank %d failed to IPC register userbuff %p buffSize %zd nPeers 1 isLegacyIpc 0 type POSIX_FD", c->rank, (void *)buf, n);
	if (word("reg-none") || word("reg-refused"))
		return;
	tell("rank %d - IPC %s buffer %p size %zd (baseAddr %p " SIZES ") to peer %d regAddr 0x7f0000000000%s", c->rank, r->shared ? "reuse" : "register",
		(void *)buf, n, (void *)r->base, r->size, peer, r->shared ? "" : " offsetOut 0");
	r->shared = 1;
}
static void give_back(struct comm *c, struct range *r, int last) {
	if (r->local || r->graph || !r->shared || word("reg-leak") || (word("reg-late") && !last))
		return;
	tell("rank %d - IPC deregistered buffer %p peer %d ipc remote buffer 0x7f0000000000", c->rank, (void *)r->base, (c->rank + 1) % c->n);
	r->shared = 0;
}
/* reclaim looks at what graphs have left, at every 11th launch as the real one does. */
static void reclaim(struct comm *c, int last) {
	if (!last && ++c->launches < 11)
		return;
	c->launches = 0;
	for (struct range *r = c->ranges; r; r = r->next) {
		int left = __atomic_exchange_n(&r->left, 0, __ATOMIC_SEQ_CST);
		r->graph -= left;
		if (left || last)
			give_back(c, r, last);
	}
}
struct config { size_t size; unsigned magic, version; int blocking, cga, minCTAs, maxCTAs; const char *net; int split, traffic; const char *name;
	int collnet, policy, shrink, nvls, per_peer, centric, graph; };

API int ncclGetVersion(int *v) { *v = VERSION; return 0; }
#ifdef MUSA
API int mcclCommMuDevice(struct comm *c, int *device) { (void)c, (void)device; return 0; } /* tells it from other makers' libraries; not called */
#endif
API const char *ncclGetErrorString(int rc) { return rc == 5 ? "invalid usage" : rc == 4 ? "invalid argument" : "some error"; }
static char last[256];
API const char *ncclGetLastError(struct comm *c) { (void)c; return last; }
static int fail(int rc, const char *why) { snprintf(last, sizeof last, "%s", why); return rc; }

API int ncclGetUniqueId(unique_id *id) {
	memset(id, 0, sizeof *id);
	/* A rank that is killed leaves it there: what started the ranks removes their TMPDIR. */
	const char *dir = getenv("TMPDIR");
	snprintf(id->path, sizeof id->path, "%s/fake-nccl-XXXXXX", dir && strlen(dir) < 100 ? dir : "/dev/shm");
	int fd = mkstemp(id->path);
	if (fd < 0 || ftruncate(fd, sizeof(struct shared)))
		return 2;
	close(fd);
	note("GetUniqueId");
	if (word("tell-ids"))
		note("id %s", id->path);
	if (word("id-dies"))
		kill(getpid(), SIGKILL);
	return word("no-id") ? fail(2, "no address for the root") : 0;
}

static void *joins(void *arg) {
	struct comm *c = arg;
	while (c->s->joined < c->n && !c->aborted)
		usleep(200);
	c->state = 0;
	return 0;
}
static int join(struct comm **out, int n, const char *path, int rank, const struct config *k);
API int ncclCommInitRankConfig(struct comm **out, int n, unique_id id, int rank, const struct config *k) {
	if (getenv("NCCL_GRAPH_MIXING_SUPPORT"))
		note("GRAPH_MIXING_SUPPORT=%s", getenv("NCCL_GRAPH_MIXING_SUPPORT"));
#if VERSION >= 22902
	note("graphUsageMode=%d", k->graph);
#endif
	note("CommInitRankConfig n=%d rank=%d size=%zu magic=%x blocking=%d name=%s cga=%d", n, rank, k->size, k->magic, k->blocking, k->name ? k->name : "", k->cga == INT_MIN);
	return join(out, n, id.path, rank, k);
}
/* Of several roots the first one's file is used; the others' must be there. */
API int ncclCommInitRankScalable(struct comm **out, int n, int rank, int roots, unique_id *ids, const struct config *k) {
	note("CommInitRankScalable n=%d rank=%d roots=%d name=%s", n, rank, roots, k->name ? k->name : "");
	for (int i = 0; i < roots; i++) {
		note("root %s", ids[i].path);
		if (!*ids[i].path)
			return fail(4, "an empty unique id");
	}
	int rc = join(out, n, ids[0].path, rank, k);
	for (int i = 1; i < roots; i++)
		unlink(ids[i].path);
	return rc;
}
static int join(struct comm **out, int n, const char *path, int rank, const struct config *k) {
	pthread_once(&once, bind_driver);
	if (word("init-fails") && rank == n - 1)
		return fail(1, "Cuda failure 2 'out of memory'");
	struct comm *c = calloc(1, sizeof *c);
	*c = (struct comm){.n = n, .rank = rank, .state = INPROGRESS, .turn = PTHREAD_MUTEX_INITIALIZER};
	snprintf(c->path, sizeof c->path, "%s", path);
	if (get_current(&c->ctx) || !c->ctx)
		return fail(1, "no device is current");
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0 || n > MAXRANKS)
		return fail(2, "connect to the root: no such address");
	c->s = mmap(0, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (!word("lost") || rank != 1) {
		if (__atomic_add_fetch(&c->s->joined, 1, __ATOMIC_SEQ_CST) == n)
			unlink(path);
	}
	*out = c;
	const char *env = getenv("NCCL_COMM_BLOCKING");
	c->blocking = env ? atoi(env) : k->blocking;
	if (c->blocking) {
		joins(c);
		return c->aborted ? fail(3, "aborted") : 0;
	}
	pthread_t t;
	pthread_create(&t, 0, joins, c);
	pthread_detach(t);
	return INPROGRESS;
}
API int ncclCommInitRank(struct comm **out, int n, unique_id id, int rank) { return join(out, n, id.path, rank, &(struct config){.blocking = 1}); }
/* The file FAKE_TORN stands for the end of a peer's connections. */
API int ncclCommGetAsyncError(struct comm *c, int *state) {
	const char *torn = getenv("FAKE_TORN");
	*state = c->state ? c->state : torn && access(torn, F_OK) == 0 ? 6 : 0;
	return 0;
}

#ifndef NOSPLIT
/* part makes a communicator of some members: its first one makes the file, by a name that all of them know. */
static int part(struct comm *c, struct comm **out, const char *name, int n, int rank, const struct config *k) {
	unique_id id;
	if (rank == 0) {
		int rc = ncclGetUniqueId(&id);
		if (rc || rename(id.path, name))
			return rc ? rc : 2;
	}
	while (access(name, F_OK)) {
		if (c->aborted)
			return fail(3, "aborted");
		usleep(100);
	}
	return join(out, n, name, rank, k);
}
static int splits_meet(struct comm *c) {
	uint64_t phase = ++c->sphase;
	__atomic_store_n(&c->s->sphase[c->rank], phase, __ATOMIC_SEQ_CST);
	for (int r = 0; r < c->n; r++)
		while (__atomic_load_n(&c->s->sphase[r], __ATOMIC_SEQ_CST) < phase) {
			if (c->aborted)
				return 0;
			usleep(50);
		}
	return 1;
}
API int ncclCommSplit(struct comm *c, int color, int key, struct comm **out, const struct config *k) {
	note("CommSplit color=%d key=%d name=%s share=%d", color, key, k && k->name ? k->name : "", k ? k->split != INT_MIN : 0);
	*out = 0;
	if (word("split-fails") && c->rank == 1)
		return fail(1, "Cuda failure 2 'out of memory'");
	while (word("split-hangs") && c->rank == 1) {
		if (c->aborted)
			return fail(3, "aborted");
		usleep(100);
	}
	c->s->color[c->rank] = color, c->s->key[c->rank] = key;
	if (!splits_meet(c))
		return fail(3, "aborted");
	int n = 0, rank = 0;
	for (int r = 0; r < c->n; r++)
		if (c->s->color[r] == color) {
			n++;
			rank += c->s->key[r] < key || (c->s->key[r] == key && r < c->rank);
		}
	if (!splits_meet(c))
		return fail(3, "aborted");
	char name[200];
	snprintf(name, sizeof name, "%s-split%d-%d", c->path, ++c->splits, color);
	return color == -1 ? 0 : part(c, out, name, n, rank, k);
}
API int ncclCommShrink(struct comm *c, int *leave, int count, struct comm **out, const struct config *k, int flags) {
	int rank = c->rank;
	for (int i = 0; i < count; i++)
		rank -= leave[i] < c->rank;
	note("CommShrink count=%d first=%d flags=%d name=%s share=%d", count, leave[0], flags, k && k->name ? k->name : "", k ? k->shrink != INT_MIN : 0);
	char name[200];
	snprintf(name, sizeof name, "%s-shrink-%d", c->path, leave[0]);
	return part(c, out, name, c->n - count, rank, k);
}
#endif

static void wait_graphs(struct comm *c) {
	while (c->graphs)
		usleep(200);
}
static void *ends(void *arg) { usleep(3000); wait_graphs(arg); ((struct comm *)arg)->state = 0; return 0; }
API int ncclCommFinalize(struct comm *c) {
	note("CommFinalize");
	reclaim(c, 1);
	if (c->blocking) {
		wait_graphs(c);
		return 0;
	}
	c->state = INPROGRESS;
	pthread_t t;
	pthread_create(&t, 0, ends, c);
	pthread_detach(t);
	return INPROGRESS;
}
API int ncclCommDestroy(struct comm *c) { note("CommDestroy"); wait_graphs(c); c->aborted = 1; return 0; } /* its memory stays: a stream may still look at it */
API int ncclCommAbort(struct comm *c) {
	note("CommAbort");
	while (word("stuck"))
		pause();
	c->aborted = 1;
	for (int i = 0; i < 2000 && c->uses; i++)
		usleep(1000);
	wait_graphs(c);
	return 0;
}
API int ncclCommRegister(struct comm *c, void *p, size_t n, void **h) {
	note("CommRegister bytes=%zu", n);
	if (word("no-register"))
		return 0;
	struct range *r = range_of(c, (uintptr_t)p, n);
	r->local++;
	*h = r;
	return 0;
}
/* The number of a reduction depends on its communicator, as the real one's does. */
API int ncclRedOpCreatePreMulSum(int *op, const void *scalar, int t, int where, struct comm *c) {
	static const int size[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
	int i = 0;
	while (i < 64 && c->made[i].used)
		i++;
	if (i == 64)
		return fail(2, "no room");
	memcpy(c->made[i].scalar, scalar, size[t]);
	c->made[i].type = t, c->made[i].used = 1;
	note("RedOpCreatePreMulSum type=%d where=%d number=%d", t, where, i);
	*op = 5 + i + (int)((uintptr_t)c >> 4 & 0xffff);
	return 0;
}
API int ncclRedOpDestroy(int op, struct comm *c) {
	int i = op - 5 - (int)((uintptr_t)c >> 4 & 0xffff);
	note("RedOpDestroy number=%d", i);
	if (i < 0 || i >= 64 || !c->made[i].used)
		return fail(4, "no such reduction");
	c->made[i].used = 0;
	return 0;
}
API int ncclCommDeregister(struct comm *c, void *h) {
	struct range *r = c->ranges;
	while (r && r != h)
		r = r->next;
	note("CommDeregister h=%s", r && r->local ? "0x77" : "unknown");
	if (!r)
		return fail(5, "Deregister: Could not find handle");
	r->local--;
	give_back(c, r, 0);
	return 0;
}

/* Windows: all ranks meet. */
struct window { char *p; size_t n; struct window *next; };
/* A window comes and goes with allocations: not on a thread that captures. */
static int allocates(struct comm *c) {
	uint64_t p;
	set_current(c->ctx);
	return mem_alloc(&p, 1) || mem_free(p);
}
API int ncclCommWindowRegister(struct comm *c, void *p, size_t n, struct window **w, int flags) {
	note("CommWindowRegister bytes=%zu flags=%d", n, flags);
	if (word("no-window"))
		return 0;
	if ((uintptr_t)p % 4096)
		return fail(4, "Window address must be suitably aligned.");
	if (allocates(c))
		return fail(1, "operation not permitted when stream is capturing");
	if (word("window-refused") && c->rank == 1) /* before the others are met */
		return fail(1, "Cuda failure 2 'out of memory'");
	uint64_t phase = ++c->wphase;
	__atomic_store_n(&c->s->wphase[c->rank], phase, __ATOMIC_SEQ_CST);
	for (int r = 0; r < c->n; r++)
		while (__atomic_load_n(&c->s->wphase[r], __ATOMIC_SEQ_CST) < phase) {
			if (c->aborted)
				return fail(3, "aborted");
			usleep(50);
		}
	if (word("window-fails") && c->rank == 1)
		return fail(2, "no addresses are left");
	if (word("window-gate") && c->rank == 1) /* it comes back when there is a file */
		for (int i = 0; i < 2000 && access(getenv("FAKE_GATE"), F_OK); i++)
			usleep(10000);
	*w = malloc(sizeof **w);
	**w = (struct window){p, n, c->windows};
	c->windows = *w;
	return 0;
}
API int ncclCommWindowDeregister(struct comm *c, struct window *w) {
	w->n = 0;
	note("CommWindowDeregister");
	return allocates(c) ? fail(1, "operation not permitted when stream is capturing") : 0;
}
struct team { int n, rank, stride; };
API struct team ncclTeamLsa(struct comm *c) { return (struct team){c->n, c->rank, 1}; }
#if VERSION >= 22902
API int ncclWinGetUserPtr(struct comm *c, struct window *w, void **p) { (void)c; *p = w->p; return 0; }
/* A number that tells what was asked: peers' memory cannot be seen here. */
API int ncclGetLsaDevicePointer(struct window *w, size_t off, int rank, void **p) { *p = w->p + off + (1ull << 40) * (rank + 1); return 0; }
#endif

/* Operations. */
enum kind { ALLREDUCE, REDUCE, BROADCAST, ALLGATHER, REDUCESCATTER, P2P };
struct message { int send, peer; char *p; size_t n, moved; struct message *next; };
struct op { enum kind kind; struct comm *c; const char *send; char *recv; size_t n; int t, red, root; struct message *messages; char scalar[8]; int scaled; };
static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

static int meet(struct comm *c) { /* 0: aborted */
	uint64_t p = ++c->phase;
	__atomic_store_n(&c->s->phase[c->rank], p, __ATOMIC_SEQ_CST);
	for (int r = 0; r < c->n; r++)
		for (int spin = 0; __atomic_load_n(&c->s->phase[r], __ATOMIC_SEQ_CST) < p; spin++) {
			if (c->aborted)
				return 0;
			if (spin > 100)
				usleep(50);
		}
	return 1;
}

#define REDUCE_AS(type)                                                                       \
	for (size_t i = 0; i < n; i++) {                                                          \
		type v = ((type *)(s->slot[0] + off))[i];                                             \
		for (int r = 1; r < ranks; r++) {                                                     \
			type x = ((type *)(s->slot[r] + off))[i];                                         \
			v = red == 0 || red == 4 ? v + x : red == 1 ? v * x : red == 2 ? (x > v ? x : v) : (x < v ? x : v); \
		}                                                                                     \
		((type *)out)[i] = red == 4 ? v / (type)ranks : v;                                    \
	}
static void reduce(struct shared *s, int ranks, size_t off, char *out, size_t n, int t, int red) {
	switch (t) {
	case 0: REDUCE_AS(int8_t) break;
	case 1: REDUCE_AS(uint8_t) break;
	case 2: REDUCE_AS(int32_t) break;
	case 3: REDUCE_AS(uint32_t) break;
	case 4: REDUCE_AS(int64_t) break;
	case 5: REDUCE_AS(uint64_t) break;
	case 7: REDUCE_AS(float) break;
	case 8: REDUCE_AS(double) break;
	}
}

#define SCALE_AS(type) for (size_t i = 0; i < n; i++) ((type *)p)[i] *= *(type *)k;
static void scale(char *p, size_t n, int t, const char *k) {
	switch (t) {
	case 0: SCALE_AS(int8_t) break;
	case 1: SCALE_AS(uint8_t) break;
	case 2: SCALE_AS(int32_t) break;
	case 3: SCALE_AS(uint32_t) break;
	case 4: SCALE_AS(int64_t) break;
	case 5: SCALE_AS(uint64_t) break;
	case 7: SCALE_AS(float) break;
	case 8: SCALE_AS(double) break;
	}
}

/* chunk is one step of a collective: what all have put into their slots is there when all have met, and is read before all meet again. */
static int collective(struct op *o) {
	struct comm *c = o->c;
	struct shared *s = c->s;
	size_t size = sizes[o->t], per = CHUNK / size;
	if (o->kind == REDUCESCATTER)
		per /= c->n;
	for (size_t at = 0; at < o->n; at += per) {
		size_t n = o->n - at < per ? o->n - at : per;
		if (o->kind == REDUCESCATTER)
			for (int r = 0; r < c->n; r++)
				memcpy(s->slot[c->rank] + r * n * size, o->send + (r * o->n + at) * size, n * size);
		else if (o->kind != BROADCAST || c->rank == o->root)
			memcpy(s->slot[c->rank], o->send + at * size, n * size);
		if (o->scaled)
			scale(s->slot[c->rank], n * (o->kind == REDUCESCATTER ? c->n : 1), o->t, o->scalar);
		if (!meet(c))
			return 0;
		switch (o->kind) {
		case ALLREDUCE: reduce(s, c->n, 0, o->recv + at * size, n, o->t, o->red); break;
		case REDUCE: if (c->rank == o->root) reduce(s, c->n, 0, o->recv + at * size, n, o->t, o->red); break;
		case REDUCESCATTER: reduce(s, c->n, c->rank * n * size, o->recv + at * size, n, o->t, o->red); break;
		case BROADCAST: memcpy(o->recv + at * size, s->slot[o->root], n * size); break;
		case ALLGATHER:
			for (int r = 0; r < c->n; r++)
				memcpy(o->recv + (r * o->n + at) * size, s->slot[r], n * size);
			break;
		case P2P: break;
		}
		if (!meet(c))
			return 0;
	}
	return 1;
}

static void transfers(struct op *o) {
	struct comm *c = o->c;
	for (struct message *m = o->messages; m; m = m->next)
		m->moved = 0;
	if (word("self-late") && o->messages->peer == c->rank)
		usleep(300000); /* longer than a stream that is closed is waited for */
	/* to this rank itself */
	for (struct message *m = o->messages; m; m = m->next)
		if (m->send && m->peer == c->rank)
			for (struct message *r = o->messages; r; r = r->next)
				if (!r->send && r->peer == c->rank && r->moved < r->n) {
					memmove(r->p, m->p, m->n);
					m->moved = r->moved = m->n;
					break;
				}
	for (int left = 1; left;) {
		left = 0;
		int went = 0;
		for (struct message *m = o->messages; m; m = m->next) {
			if (m->moved == m->n)
				continue;
			left = 1;
			int first = 1;
			for (struct message *b = o->messages; b != m; b = b->next)
				first = first && !(b->send == m->send && b->peer == m->peer && b->moved < b->n);
			if (!first)
				continue;
			struct mailbox *x = m->send ? &c->s->box[c->rank][m->peer] : &c->s->box[m->peer][c->rank];
			uint64_t sent = __atomic_load_n(&x->sent, __ATOMIC_SEQ_CST), taken = __atomic_load_n(&x->taken, __ATOMIC_SEQ_CST);
			if (m->send && sent == taken) {
				x->n = m->n - m->moved < CHUNK ? m->n - m->moved : CHUNK;
				memcpy(x->data, m->p + m->moved, x->n);
				m->moved += x->n;
				__atomic_store_n(&x->sent, sent + 1, __ATOMIC_SEQ_CST);
				went = 1;
			} else if (!m->send && sent > taken) {
				size_t n = x->n < m->n - m->moved ? x->n : m->n - m->moved;
				memcpy(m->p + m->moved, x->data, n);
				m->moved += n;
				__atomic_store_n(&x->taken, taken + 1, __ATOMIC_SEQ_CST);
				went = 1;
			}
		}
		if (c->aborted)
			return;
		if (!went)
			usleep(50);
	}
}

static void run(void *arg) {
	struct op *o = arg;
	__atomic_add_fetch(&o->c->uses, 1, __ATOMIC_SEQ_CST);
	pthread_mutex_lock(&o->c->turn);
	if (!o->c->aborted) {
		if (o->kind == P2P)
			transfers(o);
		else
			collective(o);
	}
	pthread_mutex_unlock(&o->c->turn);
	__atomic_sub_fetch(&o->c->uses, 1, __ATOMIC_SEQ_CST);
}

static __thread int depth;
static __thread struct { struct op *o; stream_t s; } grouped[256];
static __thread int ngrouped;

struct holder { struct comm *c; void *g; struct range *ranges[64]; int n; };
static void graph_gone(void *arg) {
	struct holder *h = arg;
	for (int i = 0; i < h->n; i++)
		__atomic_add_fetch(&h->ranges[i]->left, 1, __ATOMIC_SEQ_CST);
	if (h->c->newest == h->g)
		h->c->newest = 0;
	__atomic_sub_fetch(&h->c->graphs, 1, __ATOMIC_SEQ_CST);
	free(h);
}
/* hold has the graph under capture keep the communicator, once. */
static int hold(struct comm *c, stream_t s) {
	int status;
	uint64_t id;
	void *g = 0, *object;
	if (!capture_info || capture_info(s, &status, &id, &g, 0, 0) || !g || c->newest == g)
		return 0;
	struct holder *h = c->holder = calloc(1, sizeof *h);
	h->c = c, h->g = g;
	c->newest = g;
	__atomic_add_fetch(&c->graphs, 1, __ATOMIC_SEQ_CST);
	return object_create(&object, h, graph_gone, 1, 1) || graph_retain(g, object, 1, 1);
}

/* registers tells of a call's buffers what the real library tells: of collectives the receive buffer is registered, of messages both ends. */
static void registers(struct op *o, int captured) {
	struct comm *c = o->c;
	if (!getenv("NCCL_DEBUG_FILE"))
		return;
	uintptr_t bufs[16] = {(uintptr_t)o->recv, (uintptr_t)o->send};
	size_t sizes_of[16] = {o->n * sizes[o->t] * (o->kind == ALLGATHER ? c->n : 1), o->n * sizes[o->t] * (o->kind == REDUCESCATTER ? c->n : 1)};
	int nbufs = 2;
	if (o->kind == P2P) {
		nbufs = 0;
		for (struct message *m = o->messages; m && nbufs < 16; m = m->next)
			if (m->peer != c->rank)
				bufs[nbufs] = (uintptr_t)m->p, sizes_of[nbufs++] = m->n;
	} else {
		int in = 0;
		for (int i = 0; i < 2; i++)
			for (struct window *w = c->windows; w; w = w->next)
				if ((uintptr_t)w->p <= bufs[i] && bufs[i] + sizes_of[i] <= (uintptr_t)w->p + w->n) {
					in++;
					break;
				}
		if (in == 2) {
			if (c->rank == 0 && !word("reg-none"))
				tell("%s [Symmetric]: %zd Bytes -> Kernel AllGather_LL nchannels 7 nthreads 512 nWorks 1", o->kind == ALLGATHER ? "AllGather" : "AllReduce", sizes_of[0]);
			return;
		}
		if (o->kind == REDUCESCATTER || o->kind == REDUCE || o->recv == o->send)
			return;
	}
	for (int i = 0; i < nbufs; i++) {
		uintptr_t base;
		size_t size;
		int handles = 0;
		if (captured && !address_range(&base, &size, bufs[i]) && !pointer_attributes(1, (int[]){14}, (void *[]){&handles}, bufs[i]) && handles && c->holder && c->holder->n < 64) {
			struct range *r = range_of(c, base, size);
			r->graph++;
			c->holder->ranges[c->holder->n++] = r;
			share(c, r, bufs[i], sizes_of[i]);
		} else if (!captured)
			for (struct range *r = c->ranges; r; r = r->next)
				if (r->local && r->base <= bufs[i] && bufs[i] + sizes_of[i] <= r->base + r->size) {
					share(c, r, bufs[i], sizes_of[i]);
					break;
				}
		if (o->kind != P2P)
			return; /* of a collective the receive buffer only */
	}
}

static int issue(struct op *o, stream_t s) {
	int status = 0;
	set_current(o->c->ctx);
	if (is_capturing(s, &status) || status == 2)
		return fail(1, "the stream's capture is invalid");
	if (status && hold(o->c, s))
		return fail(1, "hold the graph");
	registers(o, status);
	reclaim(o->c, 0);
	return launch_host_func(s, run, o) ? fail(1, "launch") : 0;
}
#ifdef NOWORK /* for measuring what the callers cost */
#ifdef COLD /* behind a call that has filled the first caches with its own code and data, as a real one does */
__asm__(".text\n.p2align 6\nlong_way:\n.rept 8192\n.quad 0x0000000000841f0f\n.endr\nret\n"); /* 64 KiB of nops */
void long_way(void);
static volatile char filler[64 << 10];
static void cool(void) {
	for (int i = 0; i < (int)sizeof filler; i += 64)
		filler[i]++;
	long_way();
}
#else
static void cool(void) {}
#endif
#endif
static int enqueue(struct op v, stream_t s) {
#ifdef NOWORK
	cool();
	free(v.messages);
	return v.c->aborted || !s;
#endif
	if (v.c->state == INPROGRESS)
		return fail(4, "the communicator is not ready");
	if (word("call-error") && v.kind == BROADCAST)
		return fail(5, "broadcast is refused here");
	struct op *o = malloc(sizeof *o);
	*o = v;
	if (o->red > 4) {
		int i = (int)((unsigned)o->red - 5u) - (int)((uintptr_t)o->c >> 4 & 0xffff);
		if (i < 0 || i >= 64 || !o->c->made[i].used || o->c->made[i].type != o->t)
			return fail(4, "the reduction is of another communicator or type");
		memcpy(o->scalar, o->c->made[i].scalar, 8);
		o->scaled = 1, o->red = 0;
	}
	if (!depth)
		return issue(o, s);
	if (o->kind == P2P)
		for (int i = 0; i < ngrouped; i++)
			if (grouped[i].o->kind == P2P && grouped[i].o->c == o->c) {
				struct message *m = grouped[i].o->messages;
				while (m->next)
					m = m->next;
				m->next = o->messages;
				return 0;
			}
	grouped[ngrouped].o = o, grouped[ngrouped++].s = s;
	return 0;
}
API int ncclGroupStart(void) { note("GroupStart"); depth++; return 0; }
API int ncclGroupEnd(void) {
	note("GroupEnd");
	if (--depth)
		return 0;
	int rc = 0;
	for (int i = 0; i < ngrouped && !rc; i++)
		rc = issue(grouped[i].o, grouped[i].s);
	ngrouped = 0;
	return rc;
}

#define COLL(name, kind, params, red, root)                                                                   \
	API int name params {                                                                                     \
		note("%s n=%zu type=%d red=%d root=%d", &#name[4], n, t, red, root);                                   \
		return enqueue((struct op){kind, c, send, recv, n, t, red, root, 0, "", 0}, s);                              \
	}
COLL(ncclAllReduce, ALLREDUCE, (const void *send, void *recv, size_t n, int t, int op, struct comm *c, stream_t s), op, 0)
COLL(ncclReduce, REDUCE, (const void *send, void *recv, size_t n, int t, int op, int root, struct comm *c, stream_t s), op, root)
COLL(ncclBroadcast, BROADCAST, (const void *send, void *recv, size_t n, int t, int root, struct comm *c, stream_t s), 0, root)
COLL(ncclAllGather, ALLGATHER, (const void *send, void *recv, size_t n, int t, struct comm *c, stream_t s), 0, 0)
COLL(ncclReduceScatter, REDUCESCATTER, (const void *send, void *recv, size_t n, int t, int op, struct comm *c, stream_t s), op, 0)

static int message(int send, void *p, size_t n, int t, int peer, struct comm *c, stream_t s) {
	note("%s n=%zu type=%d peer=%d", send ? "Send" : "Recv", n, t, peer);
	struct message *m = malloc(sizeof *m);
	*m = (struct message){send, peer, p, n * sizes[t], 0, 0};
	return enqueue((struct op){P2P, c, 0, 0, n, t, 0, 0, m, "", 0}, s);
}
API int ncclSend(void *p, size_t n, int t, int peer, struct comm *c, stream_t s) { return message(1, p, n, t, peer, c, s); }
API int ncclRecv(void *p, size_t n, int t, int peer, struct comm *c, stream_t s) { return message(0, p, n, t, peer, c, s); }
