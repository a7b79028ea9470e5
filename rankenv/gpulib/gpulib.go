// Package gpulib says which libraries of GPU makers ranks open, where they look for them, and which of their settings gorun refuses. It opens
// none: the launcher, which links no loader, tells and checks by it what ranks will do.
//
// A [Search] says where a library may be, [Search.Places] the places in their order; [CheckFile] says why a file cannot be loaded. The variables
// ([NCCL], [CUDA], ...) are the libraries that are known. [CollectiveSettings] are variables that work against gorun. It is for gorun's own
// packages launcher, cuda and nccl.
package gpulib

// The makers' libraries for collectives.
var (
	NCCL = Search{
		Env:     "GORUN_NCCL_LIB",
		Sonames: []string{"libnccl.so.2"},
		HomeEnv: []string{"NCCL_HOME", "CUDA_HOME", "CUDA_PATH"}, Homes: []string{"/usr/local/cuda", "/usr/local/nccl"}, HomeLib: []string{"lib64", "lib"},
		Wheels: []string{"nvidia/nccl/lib"},
		Last:   []string{"libnccl.so"},
	}
	MCCL = Search{
		Env:     "GORUN_MCCL_LIB",
		Sonames: []string{"libmccl.so.2", "libmccl.so"},
		HomeEnv: []string{"MUSA_HOME", "MUSA_PATH"}, Homes: []string{"/usr/local/musa"}, HomeLib: []string{"lib"},
	}
	RCCL = Search{
		Env:     "GORUN_RCCL_LIB",
		Sonames: []string{"librccl.so.1"},
		HomeEnv: []string{"ROCM_PATH"}, Homes: []string{"/opt/rocm"}, HomeLib: []string{"lib"},
		Wheels: []string{"_rocm_sdk_libraries/lib"},
		Last:   []string{"librccl.so"},
	}
)

// Their drivers' libraries.
var (
	CUDA = Search{
		Env:     "GORUN_CUDA_LIB",
		Sonames: []string{"libcuda.so.1"}, // never libcuda.so, which may be the toolkit's stub
		Dirs:    []string{"/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/run/opengl-driver/lib"},
	}
	MUSA = Search{
		Env:     "GORUN_MUSA_LIB",
		Sonames: []string{"libmusa.so.1", "libmusa.so"},
		HomeEnv: []string{"MUSA_HOME", "MUSA_PATH"}, Homes: []string{"/usr/local/musa"}, HomeLib: []string{"lib"},
	}
	HIP = Search{
		Env:     "GORUN_HIP_LIB",
		Sonames: []string{"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"},
		HomeEnv: []string{"ROCM_PATH", "HIP_PATH"}, Homes: []string{"/opt/rocm"}, HomeLib: []string{"lib"},
		Wheels: []string{"_rocm_sdk_core/lib"},
	}
)

// NVML is NVIDIA's management library, which comes with the driver. Only ranks open it.
var NVML = Search{
	Env:     "GORUN_NVML_LIB",
	Sonames: []string{"libnvidia-ml.so.1"},
	Dirs:    CUDA.Dirs,
}

// The compilers for their devices, which only ranks open.
var (
	NVRTC = Search{
		Env:     "GORUN_NVRTC_LIB",
		Sonames: []string{"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"},
		HomeEnv: []string{"CUDA_HOME", "CUDA_PATH"}, Homes: []string{"/usr/local/cuda"}, HomeLib: []string{"lib64", "lib"},
		Wheels: []string{"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"},
	}
	MTRTC = Search{
		Env:     "GORUN_MTRTC_LIB",
		Sonames: []string{"libmtrtc.so.1", "libmtrtc.so"},
		HomeEnv: []string{"MUSA_HOME", "MUSA_PATH"}, Homes: []string{"/usr/local/musa"}, HomeLib: []string{"lib"},
	}
	HIPRTC = Search{
		Env:     "GORUN_HIPRTC_LIB",
		Sonames: []string{"libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5"},
		HomeEnv: []string{"ROCM_PATH", "HIP_PATH"}, Homes: []string{"/opt/rocm"}, HomeLib: []string{"lib"},
		Wheels: []string{"_rocm_sdk_core/lib"},
	}
)

// CollectiveSettings are the environment variables (and lines of the library's configuration files) that work against gorun, of the library whose
// variables begin with prefix: "NCCL_" (also RCCL's) or "MCCL_".
func CollectiveSettings(prefix string) []Setting {
	legacy := "LEGACY_CUDA_REGISTER"
	if prefix == "MCCL_" {
		legacy = "LEGACY_MUSA_REGISTER"
	}
	on, off := []string{"1"}, []string{"0"}
	list := []Setting{
		{Name: legacy, Not: off, Effect: BreaksProgram,
			Why: "it registers memory that cannot be shared safely: hangs, faults on abort, and graphs never give it back"},
		{Name: "COMM_ID", Effect: BreaksProgram,
			Why: "every unique id becomes the same one, but an id makes only one communicator; gorun passes the ids itself"},
		{Name: "LAUNCH_MODE", Values: []string{"GROUP"}, Effect: BreaksGraphs,
			Why: "launches wait for the other devices of the process, which a capture does not allow"},
		{Name: "GRAPH_REGISTER", Values: off, Effect: Warns,
			Why: "captured collectives do not register buffers; it must be the same on all ranks, else they hang"},
		{Name: "LOCAL_REGISTER", Values: off, Effect: Warns,
			Why: "registrations have no effect; it must be the same on all ranks, else they hang"},
		{Name: "CUMEM_ENABLE", Values: off, Effect: Warns,
			Why: "memory cannot be shared by handle, so nothing can be registered"},
		{Name: "WIN_ENABLE", Values: off, Effect: Warns,
			Why: "there are no windows"},
		{Name: "P2P_USE_CUDA_MEMCPY", Values: on, Effect: Warns,
			Why: "registrations have no effect within a host"},
		{Name: "LAUNCH_RACE_FATAL", Values: off, Effect: Warns,
			Why: "threads that race to launch are not told"},
		{Name: "COMM_BLOCKING", Values: on, Effect: Warns,
			Why: "making a communicator cannot be given up when a rank does not come"},
		{Name: "COMM_SPLIT_SHARE_RESOURCES", Values: on, Effect: Warns,
			Why: "a communicator cannot be closed before the graphs of those split from it"},
		{Name: "ALGO", Effect: Warns, Why: "a fixed algorithm may be one that cannot use registered buffers"},
		{Name: "PROTO", Values: []string{"LL", "LL128", "LL,LL128", "LL128,LL"}, Effect: Warns,
			Why: "only protocol Simple uses registered buffers"},
	}
	for i := range list {
		list[i].Name = prefix + list[i].Name
	}
	return list
}
