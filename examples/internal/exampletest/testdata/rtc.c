/* A run-time compiler that has g++ compile the source, for the driver library beside it. The code is the path of a shared library in FAKE_DIR.
 * An index that is outside a slice is caught and ends the launch, as a touch of unmapped memory does on a GPU. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
struct program { char *source, *log; char name[64], path[512]; };

static const char before[] =
	"#include <math.h>\n"
	"#include <string.h>\n"
	"#define __global__ __attribute__((visibility(\"default\")))\n"
	"#define __device__\n"
	"struct dim { unsigned x, y, z; };\n"
	"static thread_local dim blockIdx, threadIdx, blockDim, gridDim;\n";

/* Threads run last to first: what depends on their order comes out wrong. */
static const char after[] =
	"\n#define EXPORT extern \"C\" __attribute__((visibility(\"default\")))\n"
	"EXPORT size_t fake_size(void) { return sizeof(KERNEL(_args)); }\n"
	"EXPORT int fake_run(void *args, long long n, unsigned blocks, unsigned threads) {\n"
	"	KERNEL(_args) a;\n"
	"	memcpy((void *)&a, args, sizeof a);\n"
	"	gridDim = {blocks, 1, 1}, blockDim = {threads, 1, 1};\n"
	"	try {\n"
	"		for (unsigned b = blocks; b-- > 0;)\n"
	"			for (unsigned t = threads; t-- > 0;) {\n"
	"				blockIdx.x = b, threadIdx.x = t;\n"
	"				KERNEL()(a, n);\n"
	"			}\n"
	"	} catch (int) {\n"
	"		return 1;\n"
	"	}\n"
	"	return 0;\n"
	"}\n";

API int nvrtcVersion(int *major, int *minor) { *major = 12, *minor = 8; return 0; }
API int nvrtcCreateProgram(struct program **p, const char *source, const char *name, int n, void *h, void *i) {
	(void)h, (void)i;
	*p = calloc(1, sizeof **p);
	(*p)->source = strdup(source);
	(*p)->log = strdup("");
	snprintf((*p)->name, sizeof (*p)->name, "%.*s", (int)strcspn(name, "."), name);
	return n;
}
API int nvrtcCompileProgram(struct program *p, int n, const char **options) {
	static const char index[] = "{ return ptr[i]; }", checked[] = "{ if (i < 0 || i >= n) throw 700; return ptr[i]; }";
	(void)n, (void)options;
	char *at = strstr(p->source, index), made[600], file[700], command[3000];
	if (!at)
		return 6;
	unsigned long long hash = 14695981039346656037u; /* FNV-1a */
	for (char *c = p->source; *c; c++)
		hash = (hash ^ (unsigned char)*c) * 1099511628211u;
	/* One process compiles a kernel for all. */
	snprintf(p->path, sizeof p->path, "%s/%s-%llx.so", getenv("FAKE_DIR"), p->name, hash);
	if (!access(p->path, F_OK))
		return 0;
	snprintf(made, sizeof made, "%s.%d", p->path, getpid());
	snprintf(file, sizeof file, "%s.cpp", made);
	FILE *f = fopen(file, "w");
	if (!f)
		return 1;
	fprintf(f, "%s%.*s%s%s\n#define KERNEL(x) %s##x\n%s", before, (int)(at - p->source), p->source, checked, at + strlen(index), p->name, after);
	if (fclose(f))
		return 1;
	snprintf(command, sizeof command, "g++ -std=c++17 -O2 -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden -Wl,-Bsymbolic -o '%s' '%s' >'%s.log' 2>&1", made, file, made);
	int rc = system(command);
	if (!rc)
		return rename(made, p->path) ? 1 : 0;
	snprintf(file, sizeof file, "%s.log", made);
	if ((f = fopen(file, "r"))) {
		p->log = calloc(1, 10000);
		if (fread(p->log, 1, 9999, f) == 0)
			strcpy(p->log, "g++ did not run");
		fclose(f);
	}
	return 6;
}
API int nvrtcGetProgramLogSize(struct program *p, size_t *n) { *n = strlen(p->log) + 1; return 0; }
API int nvrtcGetProgramLog(struct program *p, char *b) { strcpy(b, p->log); return 0; }
API int nvrtcGetPTXSize(struct program *p, size_t *n) { *n = strlen(p->path) + 1; return 0; }
API int nvrtcGetPTX(struct program *p, char *b) { strcpy(b, p->path); return 0; }
API int nvrtcDestroyProgram(struct program **p) { free((*p)->source); free((*p)->log); free(*p); return 0; }
API const char *nvrtcGetErrorString(int rc) { return rc == 6 ? "compilation" : "error"; }
