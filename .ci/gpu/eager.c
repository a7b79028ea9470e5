/* eager.c: collectives called from C in the loop of nccl-tests, by the libraries' functions alone: what gorun-bench has to be compared with. It needs no headers, prints
 * what gorun-bench -json prints, and starts its ranks itself, one a device.
 *
 *   cc -O2 -o eager eager.c -ldl && ./eager [-np N] [-op all-reduce|broadcast|sendrecv] [-n CALLS] [-w WARMUP] [-r ROUNDS] [-memory driver|nccl] SIZE...
 *
 * GORUN_CUDA_LIB and GORUN_NCCL_LIB name the libraries, as for gorun. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAXRANKS 16
#define MAXROUNDS 64

typedef struct { char b[128]; } id_t128;

static int (*cu_init)(unsigned), (*cu_device)(int *, int), (*cu_retain)(void **, int), (*cu_current)(void *), (*cu_alloc)(uintptr_t *, size_t), (*cu_zero)(uintptr_t, unsigned char, size_t, void *),
	(*cu_stream)(void **, unsigned), (*cu_query)(void *), (*cu_name)(char *, int, int);
static int (*n_version)(int *), (*n_id)(id_t128 *), (*n_init)(void **, int, id_t128, int), (*n_destroy)(void *), (*n_alloc)(void **, size_t), (*n_start)(void), (*n_end)(void),
	(*n_allreduce)(const void *, void *, size_t, int, int, void *, void *), (*n_broadcast)(const void *, void *, size_t, int, int, void *, void *),
	(*n_send)(const void *, size_t, int, int, void *, void *), (*n_recv)(void *, size_t, int, int, void *, void *), (*n_async)(void *, int *);

/* What the ranks share. */
static struct shared {
	volatile int at, turn, failed, have;
	id_t128 id;
	double us[MAXRANKS][MAXROUNDS], enqueued[MAXRANKS][MAXROUNDS];
} *all;

static int np = 2, n = 100, warm = 20, rounds = 5, rank;
static const char *op = "all-reduce", *memory = "driver";

static void die(const char *what, int code) {
	fprintf(stderr, "eager: rank %d: %s: %d\n", rank, what, code);
	all->failed = 1;
	exit(1);
}
#define OK(call) do { int rc_ = (call); if (rc_) die(#call, rc_); } while (0)

static void load(void *lib, void *to, const char *name, const char *older) {
	void *f = dlsym(lib, name);
	if (!f && older)
		f = dlsym(lib, older);
	if (!f)
		die(name, -1);
	*(void **)to = f;
}

static void *open_lib(const char *setting, const char *name) {
	const char *path = getenv(setting);
	void *lib = dlopen(path && *path ? path : name, RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		fprintf(stderr, "eager: %s\n", dlerror());
		all->failed = 1;
		exit(1);
	}
	return lib;
}

static void barrier(void) {
	int turn = all->turn;
	if (__atomic_add_fetch(&all->at, 1, __ATOMIC_SEQ_CST) == np) {
		all->at = 0;
		__atomic_store_n(&all->turn, turn + 1, __ATOMIC_SEQ_CST);
	}
	while (all->turn == turn) {
		if (all->failed)
			exit(1);
		sched_yield();
	}
}

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void *comm, *stream;
static char *send, *recv;
static size_t most;

/* enqueue is call i, on the next part of the buffers, as nccl-tests do it. */
static void enqueue(int i, size_t bytes) {
	size_t at = bytes * (i % (most / bytes)), count = bytes / 4;
	char *s = send + at, *r = recv + at;
	if (!strcmp(op, "all-reduce"))
		OK(n_allreduce(s, r, count, 7, 0, comm, stream));
	else if (!strcmp(op, "broadcast"))
		OK(n_broadcast(s, r, count, 7, 0, comm, stream));
	else {
		OK(n_start());
		OK(n_send(s, count, 7, (rank + 1) % np, comm, stream));
		OK(n_recv(r, count, 7, (rank + np - 1) % np, comm, stream));
		OK(n_end());
	}
}

static void settle(void) {
	for (;;) {
		int rc = cu_query(stream), state = 0;
		if (!rc)
			return;
		if (rc != 600)
			die("stream query", rc);
		OK(n_async(comm, &state));
		if (state)
			die("asynchronous error", state);
	}
}

/* timed is nccl-tests' loop: calls, then one wait. */
static double timed(int calls, size_t bytes, double *enqueued) {
	double start = now(), between;
	for (int i = 0; i < calls; i++)
		enqueue(i, bytes);
	between = now();
	settle();
	if (enqueued)
		*enqueued = (between - start) / calls;
	return (now() - start) / calls;
}

static int by_value(const void *a, const void *b) {
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}
static double median(double *v, int k) {
	qsort(v, k, sizeof *v, by_value);
	return (v[(k - 1) / 2] + v[k / 2]) / 2;
}

static void report(size_t bytes, const char *device, int version) {
	double us[MAXROUNDS], enqueued[MAXROUNDS];
	for (int k = 0; k < rounds; k++) {
		us[k] = enqueued[k] = 0;
		for (int r = 0; r < np; r++) {
			us[k] += all->us[r][k] / np;
			if (all->enqueued[r][k] > enqueued[k])
				enqueued[k] = all->enqueued[r][k];
		}
	}
	printf("{\"op\":\"%s\",\"mode\":\"c\",\"calls\":\"eager\",\"ranks\":%d,\"bytes\":%zu,\"us\":%.3f,\"enqueue_us\":%.3f,\"n\":%d,\"rounds\":%d,\"device\":\"%s\",\"library\":\"NCCL %d\"}\n",
		op, np, bytes, median(us, rounds), median(enqueued, rounds), n, rounds, device, version);
	fflush(stdout);
}

static void run(char **sizes) {
	void *cu = open_lib("GORUN_CUDA_LIB", "libcuda.so.1"), *nc = open_lib("GORUN_NCCL_LIB", "libnccl.so.2"), *ctx;
	int dev, version = 0;
	char device[128] = "";
	load(cu, &cu_init, "cuInit", 0), load(cu, &cu_device, "cuDeviceGet", 0), load(cu, &cu_retain, "cuDevicePrimaryCtxRetain", 0), load(cu, &cu_current, "cuCtxSetCurrent", 0);
	load(cu, &cu_alloc, "cuMemAlloc_v2", 0), load(cu, &cu_zero, "cuMemsetD8Async", 0), load(cu, &cu_stream, "cuStreamCreate", 0), load(cu, &cu_query, "cuStreamQuery", 0);
	load(cu, &cu_name, "cuDeviceGetName", 0);
	load(nc, &n_version, "ncclGetVersion", 0), load(nc, &n_id, "ncclGetUniqueId", 0), load(nc, &n_init, "ncclCommInitRank", 0), load(nc, &n_destroy, "ncclCommDestroy", 0);
	load(nc, &n_start, "ncclGroupStart", 0), load(nc, &n_end, "ncclGroupEnd", 0), load(nc, &n_allreduce, "ncclAllReduce", 0), load(nc, &n_broadcast, "ncclBroadcast", 0);
	load(nc, &n_send, "ncclSend", 0), load(nc, &n_recv, "ncclRecv", 0), load(nc, &n_async, "ncclCommGetAsyncError", 0);
	OK(cu_init(0));
	OK(cu_device(&dev, rank));
	OK(cu_name(device, sizeof device, dev));
	OK(cu_retain(&ctx, dev));
	OK(cu_current(ctx));
	OK(cu_stream(&stream, 1)); /* CU_STREAM_NON_BLOCKING */
	for (char **s = sizes; *s; s++)
		if (strtoull(*s, 0, 10) > most)
			most = strtoull(*s, 0, 10);
	if (!strcmp(memory, "nccl")) {
		load(nc, &n_alloc, "ncclMemAlloc", 0);
		OK(n_alloc((void **)&send, most));
		OK(n_alloc((void **)&recv, most));
	} else {
		uintptr_t p;
		OK(cu_alloc(&p, most));
		send = (char *)p;
		OK(cu_alloc(&p, most));
		recv = (char *)p;
	}
	OK(cu_zero((uintptr_t)send, 0, most, stream));
	OK(n_version(&version));
	if (!rank)
		OK(n_id(&all->id));
	barrier();
	OK(n_init(&comm, np, all->id, rank));
	timed(warm + 1, most, 0);
	timed(warm + 1, 8, 0);
	for (char **s = sizes; *s; s++) {
		size_t bytes = strtoull(*s, 0, 10);
		timed(1, bytes, 0);
		for (int k = 0; k < rounds; k++) {
			barrier();
			timed(1, bytes, 0);
			all->us[rank][k] = timed(n, bytes, &all->enqueued[rank][k]);
		}
		barrier();
		if (!rank)
			report(bytes, device, version);
		barrier();
	}
	OK(n_destroy(comm));
}

int main(int argc, char **argv) {
	int i = 1;
	for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
		const char *f = argv[i], *v = argv[i + 1];
		if (!strcmp(f, "-np"))
			np = atoi(v);
		else if (!strcmp(f, "-n"))
			n = atoi(v);
		else if (!strcmp(f, "-w"))
			warm = atoi(v);
		else if (!strcmp(f, "-r"))
			rounds = atoi(v);
		else if (!strcmp(f, "-op"))
			op = v;
		else if (!strcmp(f, "-memory"))
			memory = v;
		else
			break;
	}
	int sized = i < argc;
	for (char **s = argv + i; *s; s++)
		sized &= strtoull(*s, 0, 10) >= 8;
	if (!sized || np < 1 || np > MAXRANKS || n < 1 || warm < 0 || rounds < 1 || rounds > MAXROUNDS || (strcmp(op, "all-reduce") && strcmp(op, "broadcast") && strcmp(op, "sendrecv")) ||
		(strcmp(memory, "driver") && strcmp(memory, "nccl"))) {
		fprintf(stderr, "usage: eager [-np N] [-op all-reduce|broadcast|sendrecv] [-n CALLS] [-w WARMUP] [-r ROUNDS] [-memory driver|nccl] SIZE...  (in bytes, from 8 on)\n");
		return 2;
	}
	all = mmap(0, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (all == MAP_FAILED)
		return 1;
	for (rank = 0; rank < np; rank++) {
		pid_t pid = fork();
		if (pid < 0)
			die("fork", errno);
		if (!pid) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			run(argv + i);
			return 0;
		}
	}
	int bad = 0, status;
	while (wait(&status) > 0)
		if (status)
			bad = all->failed = 1;
	return bad;
}
