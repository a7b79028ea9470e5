// Small collectives by peer memory: see lib_peer.go. Built to peer.ptx by .ci/ptx.
//
// Each rank has one buffer that all ranks of the communicator map. A message is written straight into the reader's buffer, as lines of 16 bytes: twice 4 bytes
// of data and a flag, each pair of them one store of 8 bytes, so that who sees the flag has the data (the LL protocol of NCCL). Nothing is fenced, nobody is told.
//
// Where a block's lines are: [parity of its count][sender][block][cap lines]. Every call has each block of a rank exchange at least one line with the same
// block of each other rank. So who has ended its call k has seen the others begin k, thus end k-1: the lines of k-1 have been read, and two parities are enough.

struct gorun_peer_args {
	unsigned long long send, recv;
	unsigned long long bytes; // of one rank's part: of the whole in all-reduce, broadcast and reduce
	unsigned long long counts; // unsigned[65]: how many calls each block has done, and not 0: a call was given up
	unsigned long long stop; // unsigned in host memory: not 0 when the communicator has failed
	unsigned long long bufs[8]; // by rank
	int rank, ranks, root;
	int op, red, type; // as packages nccl and cuda number them
	int per, cap; // lines of a block, and how many there is room for
};

// The numbers of package nccl's Op and RedOp and of package cuda's DType; a test holds them.
enum { ALL_REDUCE = 1, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER };
enum { SUM = 0, PROD, MIN, MAX };
enum { INT8 = 1, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };

typedef unsigned long long u64;

struct line { unsigned a, b; };

static __device__ __forceinline__ void put(u64 p, line v, unsigned flag) {
	asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.a), "r"(flag), "r"(v.b), "r"(flag) : "memory");
}

// get waits for a line; false if the communicator has failed meanwhile.
static __device__ __forceinline__ bool get(u64 p, line &v, unsigned flag, u64 stop, unsigned *broken) {
	for (unsigned spins = 0;;) {
		unsigned fa, fb;
		asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.a), "=r"(fa), "=r"(v.b), "=r"(fb) : "l"(p) : "memory");
		if (fa == flag && fb == flag)
			return true;
		if (++spins == 4096) {
			spins = 0;
			if (*(volatile unsigned *)stop) {
				*broken = 1;
				return false;
			}
		}
	}
}

// load reads 8 bytes from i*8 on, or as many as there are.
static __device__ __forceinline__ line load(u64 from, u64 i, u64 bytes) {
	u64 at = from + i * 8, left = bytes - i * 8;
	line v = {0, 0};
	if (left >= 8 && (at & 7) == 0) {
		uint2 x = *(const uint2 *)at;
		v.a = x.x, v.b = x.y;
		return v;
	}
	u64 x = 0;
#pragma unroll 1
	for (int k = 0; k < 8 && k < left; k++)
		x |= (u64) * (const unsigned char *)(at + k) << (8 * k);
	v.a = (unsigned)x, v.b = (unsigned)(x >> 32);
	return v;
}

static __device__ __forceinline__ void store(u64 to, u64 i, u64 bytes, line v) {
	u64 at = to + i * 8, left = bytes - i * 8;
	if (left >= 8 && (at & 7) == 0) {
		*(uint2 *)at = make_uint2(v.a, v.b);
		return;
	}
	u64 x = (u64)v.b << 32 | v.a;
#pragma unroll 1
	for (int k = 0; k < 8 && k < left; k++)
		*(unsigned char *)(at + k) = (unsigned char)(x >> (8 * k));
}

// 16-bit floats are added as float and rounded once, to the nearest even.
static __device__ __forceinline__ float f16(unsigned x) {
	float f;
	asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((unsigned short)x));
	return f;
}
static __device__ __forceinline__ unsigned to16(float f) {
	unsigned short h;
	asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
	return h;
}
static __device__ __forceinline__ unsigned tobf16(float f) {
	unsigned x = __float_as_uint(f);
	if ((x & 0x7fffffff) > 0x7f800000)
		return x >> 16 | 0x40; // a NaN stays one
	return (x + 0x7fff + (x >> 16 & 1)) >> 16;
}

// sum is what a reduction has so far: floats of up to 32 bits in f, others as they are in v.
struct sum {
	line v;
	float f[4];
};

static __device__ __forceinline__ bool floats(int type) { return type >= FLOAT16 && type <= FLOAT32; }

static __device__ __forceinline__ void unpack(int type, line v, float (&f)[4]) {
	if (type == FLOAT32) {
		f[0] = __uint_as_float(v.a), f[1] = __uint_as_float(v.b), f[2] = f[3] = 0;
	} else if (type == FLOAT16) {
		f[0] = f16(v.a), f[1] = f16(v.a >> 16), f[2] = f16(v.b), f[3] = f16(v.b >> 16);
	} else {
		f[0] = __uint_as_float(v.a << 16), f[1] = __uint_as_float(v.a & 0xffff0000), f[2] = __uint_as_float(v.b << 16), f[3] = __uint_as_float(v.b & 0xffff0000);
	}
}

static __device__ __forceinline__ line pack(int type, const float (&f)[4]) {
	line v;
	if (type == FLOAT32)
		v.a = __float_as_uint(f[0]), v.b = __float_as_uint(f[1]);
	else if (type == FLOAT16)
		v.a = to16(f[0]) | to16(f[1]) << 16, v.b = to16(f[2]) | to16(f[3]) << 16;
	else
		v.a = tobf16(f[0]) | tobf16(f[1]) << 16, v.b = tobf16(f[2]) | tobf16(f[3]) << 16;
	return v;
}

// whole reduces integers of any length, which fill x and y from the top; flip is the top bit where they have a sign.
static __device__ __forceinline__ u64 whole(int red, u64 x, u64 y, u64 flip) {
	return red == SUM ? x + y : ((x ^ flip) < (y ^ flip)) == (red == MIN) ? x : y;
}

static __device__ __forceinline__ u64 both(line v) { return (u64)v.b << 32 | v.a; }
static __device__ __forceinline__ line apart(u64 x) {
	line v = {(unsigned)x, (unsigned)(x >> 32)};
	return v;
}

// add reduces one rank's line into what there is.
static __device__ __forceinline__ void add(int red, int type, sum &to, line v) {
	if (floats(type)) {
		float f[4];
		unpack(type, v, f);
#pragma unroll
		for (int k = 0; k < 4; k++)
			to.f[k] = red == SUM ? to.f[k] + f[k] : red == PROD ? to.f[k] * f[k] : red == MIN ? fminf(to.f[k], f[k]) : fmaxf(to.f[k], f[k]);
		return;
	}
	if (type == FLOAT64) {
		double x = __longlong_as_double(both(to.v)), y = __longlong_as_double(both(v));
		to.v = apart(__double_as_longlong(red == SUM ? x + y : red == PROD ? x * y : red == MIN ? fmin(x, y) : fmax(x, y)));
		return;
	}
	// Integers, each moved to the top of 64 bits: so one way serves all lengths.
	int bits = type <= UINT8 ? 8 : type <= UINT32 ? 32 : 64;
	u64 x = both(to.v), y = both(v), out = 0, flip = type & 1 ? 1ull << 63 : 0;
#pragma unroll 1
	for (int at = 0; at < 64; at += bits) {
		int up = 64 - bits - at, down = 64 - bits;
		u64 p = x << up >> down << down, q = y << up >> down << down;
		u64 z = red == PROD ? (p >> down) * (q >> down) << down : whole(red, p, q, flip);
		out |= z >> down << at;
	}
	to.v = apart(out);
}

extern "C" __global__ void gorun_peer(gorun_peer_args a, long long) {
	unsigned block = blockIdx.x, t = threadIdx.x;
	const u64 blocks = 64;
	unsigned *count = (unsigned *)a.counts + block, *broken = (unsigned *)a.counts + blocks;
	if (*broken)
		return; // the program has been told that the communicator has failed, and may have freed what the calls behind it use
	unsigned flag = *count + 1;
	u64 lines = (a.bytes + 7) / 8, from = (u64)block * a.per;
	unsigned mine = (unsigned)min((u64)a.per, lines - from);
	// slot is where rank `sender` writes this block's lines into a buffer.
	u64 stride = (u64)a.cap * 16, parity = (u64)(flag & 1) * a.ranks;
#define SLOT(buf, sender) ((buf) + ((parity + (sender)) * blocks + block) * stride)
	bool scatter = a.op == REDUCE_SCATTER, rooted = a.op == REDUCE || a.op == BROADCAST, root = a.rank == a.root;
	// Whom this rank has data for: everybody, or in a reduce the root only, or in a broadcast everybody from the root. Whoever gets none gets an empty line.
	for (unsigned i = t; i < mine; i += blockDim.x) {
		line own;
		if (!scatter)
			own = load(a.send, from + i, a.bytes);
#pragma unroll 1
		for (int k = 1; k < a.ranks; k++) {
			int p = a.rank + k;
			if (p >= a.ranks)
				p -= a.ranks;
			if (rooted && !(a.op == BROADCAST ? root : p == a.root)) {
				if (i == 0)
					put(SLOT(a.bufs[p], a.rank), line{0, 0}, flag);
				continue;
			}
			put(SLOT(a.bufs[p], a.rank) + (u64)i * 16, scatter ? load(a.send + (u64)p * a.bytes, from + i, a.bytes) : own, flag);
		}
	}
	u64 me = a.bufs[a.rank];
	for (unsigned i = t; i < mine; i += blockDim.x) {
		sum to;
		line own = load(a.send + (scatter ? (u64)a.rank * a.bytes : 0), from + i, a.bytes); // before anything is waited for
#pragma unroll 1
		for (int r = 0; r < a.ranks; r++) { // in their order, so that the result is the same everywhere
			line v;
			bool data = !rooted || (a.op == BROADCAST ? r == a.root : root);
			if (r == a.rank)
				v = own;
			else if (!data && i > 0)
				continue; // of whom there is no data, the first line is awaited all the same
			else if (!get(SLOT(me, r) + (u64)i * 16, v, flag, a.stop, broken))
				return;
			if (a.op == ALL_GATHER)
				store(a.recv + (u64)r * a.bytes, from + i, a.bytes, v);
			else if (a.op == BROADCAST) {
				if (data)
					store(a.recv, from + i, a.bytes, v);
			} else if (r > 0)
				add(a.red, a.type, to, v);
			else {
				to.v = v;
				unpack(a.type, v, to.f);
			}
		}
		if (a.op != ALL_GATHER && a.op != BROADCAST && (a.op != REDUCE || root))
			store(a.recv, from + i, a.bytes, floats(a.type) ? pack(a.type, to.f) : to.v);
	}
	__syncthreads();
	if (t == 0)
		*count = flag;
}
