package ncclsys

import (
	"bufio"
	"os"
	"path/filepath"
	"strings"

	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// Vendor is a maker of a collective library: where it is and what it does otherwise than NCCL.
type Vendor struct {
	Name string // "NCCL"
	Spec dl.Spec

	prefix   string           // of its functions
	env      string           // of its settings: "NCCL_"
	cudaName string           // its name for CUDA in result names
	lacks    map[Feature]bool // what its hardware or library has in no version
}

// NCCL is NVIDIA's.
var NCCL = &Vendor{
	Name: "NCCL", prefix: "nccl", env: "NCCL_", cudaName: "Cuda",
	Spec: dl.Spec{
		Name: "NCCL", Search: gpulib.NCCL,
		Symbol: "ncclCommInitRank", Sole: "libnccl.so",
		Foreign: map[string]string{"mscclLoadAlgo": "RCCL", "ncclAllReduceWithBias": "RCCL"},
	},
}

// MCCL is Moore Threads'. Other libraries have the same file name.
var MCCL = &Vendor{
	Name: "MCCL", prefix: "mccl", env: "MCCL_", cudaName: "Musa",
	Spec: dl.Spec{
		Name: "MCCL", Search: gpulib.MCCL,
		Symbol: "mcclCommMuDevice", Sole: "libmccl.so",
		Foreign: map[string]string{"mcclCommMcDevice": "MetaX's MCCL"},
	},
}

// RCCL is AMD's. Its functions have NCCL's names.
var RCCL = &Vendor{
	Name: "RCCL", prefix: "nccl", env: "NCCL_", cudaName: "Cuda",
	Spec: dl.Spec{
		Name: "RCCL", Search: gpulib.RCCL,
		Symbol: "ncclCommInitRank", Sole: "librccl.so",
	},
	// Its 8-bit floats count from NCCL's version on, too: those that it had before are in AMD's own encoding.
	lacks: map[Feature]bool{Sharp: true},
}

// Vendors are all of them.
var Vendors = []*Vendor{NCCL, MCCL, RCCL}

// Settings are the environment variables (and lines of the library's configuration files) that work against gorun.
func (v *Vendor) Settings() []gpulib.Setting { return gpulib.CollectiveSettings(v.env) }

// Lookup finds settings as the library does: the environment, then the user's and the system's configuration file.
func (v *Vendor) Lookup() gpulib.Lookup {
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
