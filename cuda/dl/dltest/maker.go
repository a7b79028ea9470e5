package dltest

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// Maker are the compiler's arguments that give a C library, which is written with CUDA's and NCCL's names, those of a maker of GPUs: "CUDA", "MUSA" or "HIP".
func Maker(t testing.TB, maker, source string) []string {
	t.Helper()
	text, err := os.ReadFile(source)
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"-D" + maker}
	for _, m := range regexp.MustCompile(`\b(cu|nvrtc|nccl)([A-Z]\w+)`).FindAllStringSubmatch(string(text), -1) {
		library, name := m[1], m[2]
		switch maker + " " + library {
		case "MUSA cu":
			library = "mu"
		case "MUSA nvrtc":
			library = "mtrtc"
		case "MUSA nccl":
			library = "mccl"
		case "HIP cu":
			library, name = "hip", strings.TrimSuffix(name, "_v2")
			if other, ok := hipNames[name]; ok {
				name = other
			}
		case "HIP nvrtc":
			library, name = "hiprtc", strings.Replace(name, "PTX", "Code", 1)
		default:
			continue
		}
		args = append(args, "-D"+m[0]+"="+library+name)
	}
	return args
}

// hipNames are AMD's names that are not CUDA's with another prefix.
var hipNames = map[string]string{
	"DeviceGetCount": "GetDeviceCount", "CtxSynchronize": "DeviceSynchronize", "MemAlloc": "Malloc", "MemFree": "Free", "MemAllocHost": "HostMalloc",
	"MemFreeHost": "HostFree", "PointerGetAttributes": "DrvPointerGetAttributes", "StreamCreate": "StreamCreateWithFlags",
	"EventCreate": "EventCreateWithFlags", "LaunchKernel": "ModuleLaunchKernel",
}
