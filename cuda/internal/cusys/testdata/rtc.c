/* The run-time compilers as their makers' headers declare them. A source with "error" in it does not compile. */
#include "record.h"

#if defined MUSA
#define F(n) mtrtc##n
#elif defined HIP
#define F(n) hiprtc##n
#else
#define F(n) nvrtc##n
#endif

struct program { int bad; };
typedef struct program *program_t;
static struct program one;

API const char *F(GetErrorString)(int rc) { return rc == 6 ? "COMPILATION" : "OTHER"; }
API int F(Version)(int *major, int *minor) { return *major = 13, *minor = 2, fake_rc; }
API int F(CreateProgram)(program_t *p, const char *src, const char *name, int n, const char *const *headers, const char *const *includes) {
	one.bad = strstr(src, "error") != 0;
	*p = &one;
	return RECORD("src=%s name=%s headers=%d,%d,%d", src, name, n, headers != 0, includes != 0);
}
API int F(DestroyProgram)(program_t *p) { return RECORD("same=%d", *p == &one), *p = 0, 0; }
API int F(CompileProgram)(program_t p, int n, const char *const *options) {
	RECORD("same=%d n=%d first=%s last=%s", p == &one, n, n ? options[0] : "", n ? options[n - 1] : "");
	return fake_rc ? fake_rc : p->bad ? 6 : 0;
}
API int F(GetProgramLogSize)(program_t p, size_t *n) { return *n = p->bad ? 24 : 1, 0; }
API int F(GetProgramLog)(program_t p, char *b) { return strcpy(b, p->bad ? "x.cu(1): wrong\n" : ""), 0; }
#ifdef HIP
API int F(GetCodeSize)(program_t p, size_t *n) { return *n = 5, p != &one; }
API int F(GetCode)(program_t p, char *b) { return memcpy(b, "code\0", 5), p != &one; }
#else
API int F(GetPTXSize)(program_t p, size_t *n) { return *n = 5, p != &one; }
API int F(GetPTX)(program_t p, char *b) { return memcpy(b, "code\0", 5), p != &one; }
#endif
