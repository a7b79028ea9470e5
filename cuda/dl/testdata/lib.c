/* A library for the loader's tests. */
#include <stdint.h>
#define API __attribute__((visibility("default")))

API const char *probe_name(void) { return NAME; }
API void put64(uint64_t *p, uint64_t v) { *p = v; }
API int negative(void) { return -7; }
API uint64_t weigh(int a, uint64_t b, int c, uint64_t d, int e, uint64_t f, int g, uint64_t h, int i, uint64_t j, int k) {
	return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j + 11 * k;
}
#ifdef FOREIGN
API void foreign_mark(void) {}
#endif
#ifdef NEEDS
void no_such_function_anywhere(void);
API void needs(void) { no_such_function_anywhere(); }
#endif
