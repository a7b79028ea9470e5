/* NVIDIA's management library, with the GPUs of driver.c: 8 that are joined to each other, but those that FAKE_UNLINKED names by their numbers. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

static int open;
API int fake_open(void) { return open; }

API int nvmlInit_v2(void) {
	if (getenv("FAKE_NVML"))
		return 9;
	open++;
	return 0;
}
API int nvmlShutdown(void) { return open-- > 0 ? 0 : 1; }
API int nvmlDeviceGetHandleByUUID(const char *uuid, uintptr_t *d) {
	unsigned first;
	if (sscanf(uuid, "GPU-%2x", &first) != 1 || first < 0x10 || first > 0x80 || first % 16)
		return 6;
	*d = first / 16;
	return 0;
}
API int nvmlDeviceGetP2PStatus(uintptr_t a, uintptr_t b, int what, int *status) {
	const char *not = getenv("FAKE_UNLINKED");
	if (!a || !b || a == b || what < 0 || what > 4)
		return 2;
	*status = what == 2 && not && (strchr(not, '0' + (int)a - 1) || strchr(not, '0' + (int)b - 1)) ? 5 : 0;
	return 0;
}
API const char *nvmlErrorString(int rc) { return rc == 2 ? "Invalid Argument" : rc == 6 ? "Not Found" : rc == 9 ? "Driver Not Loaded" : "Unknown Error"; }
