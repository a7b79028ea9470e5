package ncclsys

import (
	"bufio"
	"os"
	"path/filepath"
	"strings"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// Vendor is a maker of a collective library: where it is and what it does otherwise than NCCL.
type Vendor struct {
	Name string // "NCCL"
	Spec dl.Spec

	id       vendorID
	prefix   string           // of its functions
	env      string           // of its settings: "NCCL_"
	cudaName string           // its name for CUDA in result names
	lacks    map[Feature]bool // what its hardware or library has in no version
}

type vendorID uint8

const (
	ncclID vendorID = iota
	mcclID
	rcclID
)

// NCCL is NVIDIA's.
var NCCL = &Vendor{
	Name: "NCCL", id: ncclID, prefix: "nccl", env: "NCCL_", cudaName: "Cuda",
	Spec: dl.Spec{
		Name: "NCCL", Env: "GORUN_NCCL_LIB",
		Sonames: []string{"libnccl.so.2"},
		HomeEnv: []string{"NCCL_HOME", "CUDA_HOME", "CUDA_PATH"}, Homes: []string{"/usr/local/cuda", "/usr/local/nccl"}, HomeLib: []string{"lib64", "lib"},
		Wheels: []string{"nvidia/nccl/lib"},
		Last:   []string{"libnccl.so"},
		Symbol: "ncclCommInitRank", Sole: "libnccl.so",
		Foreign: map[string]string{"mscclLoadAlgo": "RCCL", "ncclAllReduceWithBias": "RCCL"},
	},
}

// MCCL is Moore Threads'. Other libraries have the same file name.
var MCCL = &Vendor{
	Name: "MCCL", id: mcclID, prefix: "mccl", env: "MCCL_", cudaName: "Musa",
	Spec: dl.Spec{
		Name: "MCCL", Env: "GORUN_MCCL_LIB",
		Sonames: []string{"libmccl.so.2", "libmccl.so"},
		HomeEnv: []string{"MUSA_HOME", "MUSA_PATH"}, Homes: []string{"/usr/local/musa"}, HomeLib: []string{"lib"},
		Symbol: "mcclCommMuDevice", Sole: "libmccl.so",
		Foreign: map[string]string{"mcclCommMcDevice": "MetaX's MCCL"},
	},
	// Nothing is published about registration by capture: it must not be counted on.
	lacks: map[Feature]bool{GraphRegister: true, Sharp: true, RAS: true, NVLSMode: true},
}

// RCCL is AMD's. Its functions have NCCL's names.
var RCCL = &Vendor{
	Name: "RCCL", id: rcclID, prefix: "nccl", env: "NCCL_", cudaName: "Cuda",
	Spec: dl.Spec{
		Name: "RCCL", Env: "GORUN_RCCL_LIB",
		Sonames: []string{"librccl.so.1"},
		HomeEnv: []string{"ROCM_PATH"}, Homes: []string{"/opt/rocm"}, HomeLib: []string{"lib"},
		Wheels: []string{"_rocm_sdk_libraries/lib"},
		Last:   []string{"librccl.so"},
		Symbol: "ncclCommInitRank", Sole: "librccl.so",
	},
	// Its 8-bit floats count from NCCL's version on, too: those that it had before are in AMD's own encoding.
	lacks: map[Feature]bool{Sharp: true, NVLSMode: true},
}

// Vendors are all of them.
var Vendors = []*Vendor{NCCL, MCCL, RCCL}

// Settings are the environment variables (and lines of the library's configuration files) that work against gorun.
func (v *Vendor) Settings() []dl.Setting {
	legacy := "LEGACY_CUDA_REGISTER"
	if v.id == mcclID {
		legacy = "LEGACY_MUSA_REGISTER"
	}
	on, off := []string{"1"}, []string{"0"}
	list := []dl.Setting{
		{Name: legacy, Not: off, Effect: dl.BreaksProgram,
			Why: "it registers memory that cannot be shared safely: hangs, faults on abort, and graphs never give it back"},
		{Name: "COMM_ID", Effect: dl.BreaksProgram,
			Why: "every unique id becomes the same one, but an id makes only one communicator; gorun passes the ids itself"},
		{Name: "LAUNCH_MODE", Values: []string{"GROUP"}, Effect: dl.BreaksGraphs,
			Why: "launches wait for the other devices of the process, which a capture does not allow"},
		{Name: "GRAPH_REGISTER", Values: off, Effect: dl.Warns,
			Why: "captured collectives do not register buffers; it must be the same on all ranks, else they hang"},
		{Name: "LOCAL_REGISTER", Values: off, Effect: dl.Warns,
			Why: "registrations have no effect; it must be the same on all ranks, else they hang"},
		{Name: "CUMEM_ENABLE", Values: off, Effect: dl.Warns,
			Why: "memory cannot be shared by handle, so nothing can be registered"},
		{Name: "WIN_ENABLE", Values: off, Effect: dl.Warns,
			Why: "there are no windows"},
		{Name: "P2P_USE_CUDA_MEMCPY", Values: on, Effect: dl.Warns,
			Why: "registrations have no effect within a host"},
		{Name: "LAUNCH_RACE_FATAL", Values: off, Effect: dl.Warns,
			Why: "threads that race to launch are not told"},
		{Name: "COMM_BLOCKING", Values: on, Effect: dl.Warns,
			Why: "making a communicator cannot be given up when a rank does not come"},
		{Name: "COMM_SPLIT_SHARE_RESOURCES", Values: on, Effect: dl.Warns,
			Why: "a communicator cannot be closed before the graphs of those split from it"},
		{Name: "ALGO", Effect: dl.Warns, Why: "a fixed algorithm may be one that cannot use registered buffers"},
		{Name: "PROTO", Values: []string{"LL", "LL128", "LL,LL128", "LL128,LL"}, Effect: dl.Warns,
			Why: "only protocol Simple uses registered buffers"},
	}
	for i := range list {
		list[i].Name = v.env + list[i].Name
	}
	return list
}

// Lookup finds settings as the library does: the environment, then the user's and the system's configuration file.
func (v *Vendor) Lookup() dl.Lookup {
	base := strings.ToLower(strings.TrimSuffix(v.env, "_"))
	var files []string
	if f := os.Getenv(v.env + "CONF_FILE"); f != "" {
		files = append(files, f)
	} else if home, err := os.UserHomeDir(); err == nil {
		files = append(files, filepath.Join(home, "."+base+".conf"))
	}
	files = append(files, "/etc/"+base+".conf")
	type found struct{ value, from string }
	set := map[string]found{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // most machines have none
		}
		for k, val := range parseConf(string(b)) {
			if _, ok := set[k]; !ok {
				set[k] = found{val, f}
			}
		}
	}
	return func(name string) (string, string) {
		if val, ok := os.LookupEnv(name); ok {
			return val, "environment"
		}
		f := set[name]
		return f.value, f.from
	}
}

// parseConf reads NAME=VALUE lines; # starts a comment. The first line of a name counts.
func parseConf(text string) map[string]string {
	out := map[string]string{}
	sc := bufio.NewScanner(strings.NewReader(text))
	sc.Buffer(nil, len(text)+1)
	for sc.Scan() {
		line, _, _ := strings.Cut(sc.Text(), "#")
		name, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if name = strings.TrimSpace(name); !ok || name == "" {
			continue
		}
		if _, dup := out[name]; !dup {
			out[name] = strings.TrimSpace(value)
		}
	}
	return out
}

// Prefix is what the names of the maker's settings begin with: "NCCL_".
func (v *Vendor) Prefix() string { return v.env }
