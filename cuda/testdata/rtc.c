/* A run-time compiler that compiles nothing: the code is the source. */
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
struct program { char *source; const char *log; };

API int nvrtcVersion(int *major, int *minor) { *major = 12, *minor = 8; return 0; }
API int nvrtcCreateProgram(struct program **p, const char *source, const char *name, int n, void *h, void *i) {
	(void)name, (void)h, (void)i;
	*p = calloc(1, sizeof **p);
	(*p)->source = strdup(source);
	(*p)->log = "";
	return n;
}
API int nvrtcCompileProgram(struct program *p, int n, const char **options) {
#ifdef CUDA
	if (n < 1 || strcmp(options[0], "--gpu-architecture=compute_90"))
		return 5;
#else
	(void)options;
	if (n)
		return 5;
#endif
	if (strstr(p->source, "#error"))
		return p->log = "scale.cu(1): error: #error", 6;
	return 0;
}
API int nvrtcGetProgramLogSize(struct program *p, size_t *n) { *n = strlen(p->log) + 1; return 0; }
API int nvrtcGetProgramLog(struct program *p, char *b) { strcpy(b, p->log); return 0; }
API int nvrtcGetPTXSize(struct program *p, size_t *n) { *n = strlen(p->source) + 1; return 0; }
API int nvrtcGetPTX(struct program *p, char *b) { strcpy(b, p->source); return 0; }
API int nvrtcDestroyProgram(struct program **p) { free((*p)->source); free(*p); return 0; }
API const char *nvrtcGetErrorString(int rc) { return rc == 5 ? "invalid option" : "error"; }
