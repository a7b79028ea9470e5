/* A library for the loader's tests. */
#include <stdint.h>
#define API __attribute__((visibility("default")))

API const char *probe_name(void) { return NAME; }
API void put64(uint64_t *p, uint64_t v) { *p = v; }
API int negative(void) { return -7; }
API uint64_t weigh(int a, uint64_t b, int c, uint64_t d, int e, uint64_t f, int g, uint64_t h, int i, uint64_t j, int k) {
	return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j + 11 * k;
}
/* 12 arguments, each in its place, on a stack that is aligned as the ABI says. */
API int spread(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h, uint64_t i, uint64_t j, uint64_t k, uint64_t l) {
	uint64_t v[] = {a, b, c, d, e, f, g, h, i, j, k, l};
	for (int n = 0; n < 12; n++)
		if (v[n] != 0x1234567800000000u + (uint64_t)n)
			return n + 1;
	return (uintptr_t)__builtin_frame_address(0) % 16 ? -1 : 0;
}
API int call_back(void (*f)(uintptr_t), uintptr_t arg) { f(arg); return arg + 1; }
#ifdef FOREIGN
API void foreign_mark(void) {}
#endif
#ifdef NEEDS
void no_such_function_anywhere(void);
API void needs(void) { no_such_function_anywhere(); }
#endif
/* Six arguments, each in its place, which are then overwritten, as a callee may. The result says how many calls came before. */
API int sixth(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f) {
	static int before;
	uint64_t v[] = {a, b, c, d, e, f};
	for (int n = 0; n < 6; n++)
		if (v[n] != 0x1234567800000000u + (uint64_t)n)
			return -n - 1;
	if ((uintptr_t)__builtin_frame_address(0) % 16)
		return -7;
#ifdef __x86_64__
	__asm__ volatile("xor %%edi, %%edi; xor %%esi, %%esi; xor %%edx, %%edx; xor %%ecx, %%ecx; xor %%r8d, %%r8d; xor %%r9d, %%r9d; xor %%r10d, %%r10d; xor %%r11d, %%r11d"
		::: "rdi", "rsi", "rdx", "rcx", "r8", "r9", "r10", "r11");
#endif
	return before++;
}
