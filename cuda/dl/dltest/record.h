/* The recorder of the C libraries that tests build: every function notes its name and arguments as it sees them, and
 * returns 0 or what fake_fail asked for. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define API __attribute__((visibility("default")))

static char fake_text[1 << 16];
static size_t fake_len;
static int fake_rc;

API const char *fake_log(void) { return fake_text; }
API void fake_reset(void) { fake_len = 0, fake_text[0] = 0, fake_rc = 0; }
API void fake_fail(int rc) { fake_rc = rc; }
/* fake_fail_only is fake_fail for the calls whose line begins so; 0: for none. The text stays the caller's. */
static const char *fake_only;
static int fake_only_rc;
API void fake_fail_only(int rc, const char *line) { fake_only_rc = rc, fake_only = line; }

__attribute__((unused, format(printf, 1, 2))) static void note(const char *fmt, ...) {
	va_list ap;
	va_start(ap, fmt);
	int n = vsnprintf(fake_text + fake_len, sizeof fake_text - fake_len, fmt, ap);
	va_end(ap);
	if (n > 0 && fake_len + n < sizeof fake_text)
		fake_len += n;
}

/* The bytes of a struct, as hexadecimal. */
__attribute__((unused)) static const char *hex(const void *p, size_t n) {
	static char buf[4][1024];
	static int turn;
	char *b = buf[turn++ % 4];
	b[0] = 0;
	for (size_t i = 0; i < n && i < 500; i++)
		sprintf(b + 2 * i, "%02x", ((const unsigned char *)p)[i]);
	return b;
}

static int recorded(void) {
	note("\n");
	if (fake_only) {
		const char *line = fake_text + fake_len - 1;
		while (line > fake_text && line[-1] != '\n')
			line--;
		if (!strncmp(line, fake_only, strlen(fake_only)))
			return fake_only_rc;
	}
	return fake_rc;
}

#define RECORD(...) (note("%s ", __func__), note(__VA_ARGS__), recorded())
