/* The driver library of package cuda's tests, with kernels: a module is a shared library that rtc.c has compiled. */
#define cuModuleLoadDataEx other_load
#define cuModuleUnload other_unload
#define cuModuleGetFunction other_function
#define cuLaunchKernel other_launch
#include "../../../../cuda/testdata/driver.c"
#undef cuModuleLoadDataEx
#undef cuModuleUnload
#undef cuModuleGetFunction
#undef cuLaunchKernel
#include <dlfcn.h>

struct kernel { size_t size; int (*run)(void *args, long long n, u32 blocks, u32 threads); };
struct launch { struct kernel k; long long n; u32 blocks, threads; int once; char args[]; };

API int cuModuleLoadDataEx(void **m, const char *image, u32 n, int *options, void **values) {
	(void)options;
	SAFE;
	*m = dlopen(image, RTLD_NOW | RTLD_LOCAL);
	if (!*m) {
		snprintf(values[0], n ? (size_t)(uintptr_t)values[1] : 0, "%s", dlerror());
		return unlock(218);
	}
	live++;
	return unlock(0);
}
API int cuModuleUnload(void *m) { NEED; dlclose(m); live--; return unlock(0); }
API int cuModuleGetFunction(void **f, void *m, const char *name) {
	NEED;
	if (!dlsym(m, name))
		return unlock(500);
	*f = m;
	return unlock(0);
}
static void run(void *arg) {
	struct launch *l = arg;
	if (l->k.run(l->args, l->n, l->blocks, l->threads)) {
		lock();
		sticky = 700;
		unlock(0);
	}
	if (l->once)
		free(l);
}
API int cuLaunchKernel(void *f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 smem, struct stream *s, void **params, void **extra) {
	NEED;
	if (gy != 1 || gz != 1 || by != 1 || bz != 1 || bx > 1024 || smem || extra)
		return unlock(1);
	struct kernel k = {((size_t (*)(void))dlsym(f, "fake_size"))(), (int (*)(void *, long long, u32, u32))dlsym(f, "fake_run")};
	struct launch *l = malloc(sizeof *l + k.size);
	*l = (struct launch){.k = k, .n = *(long long *)params[1], .blocks = gx, .threads = bx, .once = !s->cap};
	memcpy(l->args, params[0], k.size);
	return unlock(emit(s, (struct op){.kind = CALL, .fn = run, .arg = l}));
}
