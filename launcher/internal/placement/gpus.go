package placement

import (
	"cmp"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gorun-dev/gorun/launcher/internal/files"
	"github.com/gorun-dev/gorun/launcher/internal/hostfacts"
)

// GPUs are a host's, of one maker.
type GPUs struct {
	Count int    // by the kernel's traces
	Vars  []Mask // variables that say which of them a program sees

	nvidia  bool
	hostVar string  // the variable of the collective library that names the host
	known   []known // by the number that the maker's library gives them; nil: not known
}

// Mask is a kind of variable such as CUDA_VISIBLE_DEVICES: the first of the names that is set counts. Each further Mask numbers what the one before left.
type Mask []string

// known is what the kernel's driver tells of a GPU.
type known struct {
	model, uuid string
	node        int // NUMA node; -1: not known
}

// FindGPUs finds the GPUs of the first maker that has any.
func FindGPUs(root string) GPUs {
	for _, v := range []struct {
		count func(root string) int
		gpus  GPUs
	}{
		{devices("dev/nvidia[0-9]*"), GPUs{nvidia: true, hostVar: "NCCL_HOSTID", Vars: []Mask{{"CUDA_VISIBLE_DEVICES"}}}},
		{amdGPUs, GPUs{hostVar: "NCCL_HOSTID", Vars: []Mask{{"ROCR_VISIBLE_DEVICES"}, {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}}}},
		{devices("dev/mtgpu.[0-9]*"), GPUs{hostVar: "MCCL_HOSTID", Vars: []Mask{{"MUSA_VISIBLE_DEVICES"}}}},
	} {
		if v.gpus.Count = v.count(root); v.gpus.Count > 0 {
			return v.gpus
		}
	}
	return GPUs{}
}

func devices(pattern string) func(string) int {
	return func(root string) int {
		found, _ := filepath.Glob(filepath.Join(files.GlobQuote(root), pattern))
		return len(found)
	}
}

const kfdNodes = "sys/class/kfd/kfd/topology/nodes"

// amdNodes are the nodes of the kernel's topology that are no CPU, in the order in which AMD's library numbers them.
func amdNodes(root string) []string {
	found, _ := filepath.Glob(filepath.Join(files.GlobQuote(root), kfdNodes, "*/gpu_id"))
	var names []string
	for _, f := range found {
		if id := hostfacts.Text("/", f); id != "" && id != "0" {
			names = append(names, filepath.Base(filepath.Dir(f)))
		}
	}
	number := func(s string) int { n, _ := strconv.Atoi(s); return n } // the kernel's names
	slices.SortFunc(names, func(a, b string) int { return cmp.Compare(number(a), number(b)) })
	return names
}

func amdGPUs(root string) int { return len(amdNodes(root)) }

// locate finds out which NUMA node each GPU is near.
func (g *GPUs) locate(root string) {
	var all []known
	node := func(bus string) int {
		n, err := strconv.Atoi(hostfacts.Text(root, filepath.Join("sys/bus/pci/devices", strings.ToLower(bus), "numa_node")))
		if err != nil {
			return -1
		}
		return n // -1 where the firmware does not say
	}
	switch {
	case g.nvidia:
		for _, one := range hostfacts.NVIDIA(root) {
			if one.Device != "" {
				all = append(all, known{one.Model, one.UUID, node(one.Bus)})
			}
		}
	case g.Count > 0 && g.Vars[0][0] == "ROCR_VISIBLE_DEVICES":
		for _, name := range amdNodes(root) {
			all = append(all, known{node: node(amdBus(hostfacts.Text(root, filepath.Join(kfdNodes, name, "properties"))))})
		}
	}
	if len(all) == g.Count {
		g.known = all
	}
}

// amdBus is the place on the PCI bus that a node's properties tell: "domain 0", "location_id 49920".
func amdBus(properties string) string {
	var domain, location uint64
	for line := range strings.Lines(properties) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.ParseUint(value, 10, 32)
		switch {
		case err != nil:
		case name == "domain":
			domain = n
		case name == "location_id":
			location = n
		}
	}
	hex := func(n uint64, width int) string {
		s := strconv.FormatUint(n, 16)
		return strings.Repeat("0", max(0, width-len(s))) + s
	}
	return hex(domain, 4) + ":" + hex(location>>8&0xff, 2) + ":" + hex(location>>3&0x1f, 2) + "." + hex(location&7, 1)
}

// Visible is the GPUs that a program with an environment sees. Tokens are opaque: numbers, UUIDs, prefixes of those, instances.
type Visible struct {
	Tokens []string
	From   string // the variable that says so, "NAME=value"; "" if none does
	gpus   *GPUs
	index  []int // of each token in gpus.known; -1: not known
}

// Lookup is an environment: os.LookupEnv and the like.
type Lookup func(name string) (string, bool)

// LookupIn looks in an environment; of two settings of a variable the first counts, as for getenv.
func LookupIn(environ []string) Lookup {
	return func(name string) (string, bool) {
		for _, kv := range environ {
			if len(kv) > len(name) && kv[len(name)] == '=' && kv[:len(name)] == name {
				return kv[len(name)+1:], true
			}
		}
		return "", false
	}
}

// Visible finds the GPUs that a program sees.
func (g *GPUs) Visible(env Lookup) Visible {
	v := Visible{gpus: g}
	for i := range g.Count {
		v.Tokens = append(v.Tokens, strconv.Itoa(i))
		v.index = append(v.index, g.index(strconv.Itoa(i), env))
	}
	for k, mask := range g.Vars {
		for _, name := range mask {
			list, set := env(name)
			if !set {
				continue
			}
			before := v
			v.Tokens, v.index, v.From = nil, nil, name+"="+list
			for _, token := range split(list, len(before.Tokens)) {
				at := g.index(token, env)
				if n, err := strconv.Atoi(token); err == nil {
					at = before.index[n]
				}
				if k < len(g.Vars)-1 {
					token = strconv.Itoa(len(v.Tokens)) // what the next one numbers
				}
				v.Tokens, v.index = append(v.Tokens, token), append(v.index, at)
			}
			break
		}
	}
	return v
}

// split takes a list such as CUDA_VISIBLE_DEVICES apart, where n devices are numbered: it ends at the first that isn't there. UUIDs are opaque, and believed.
func split(list string, n int) []string {
	var tokens []string
	for item := range strings.SplitSeq(list, ",") {
		item = strings.TrimSpace(item)
		i, err := strconv.Atoi(item)
		if item == "" || err == nil && (i < 0 || i >= n) || item == "NoDevFiles" {
			break
		}
		tokens = append(tokens, item)
	}
	return tokens
}

// index finds a token among the GPUs that the kernel's driver tells of; -1 if it isn't certain.
func (g *GPUs) index(token string, env Lookup) int {
	if n, err := strconv.Atoi(token); err == nil {
		if n < 0 || n >= len(g.known) {
			return -1
		}
		// NVIDIA's library numbers the fastest first, so that only GPUs of one model have the order of the bus.
		order, _ := env("CUDA_DEVICE_ORDER")
		if g.nvidia && order != "PCI_BUS_ID" && slices.ContainsFunc(g.known, func(k known) bool { return k.model != g.known[0].model }) {
			return -1
		}
		return n
	}
	uuid := strings.ToLower(token)
	if of, ok := strings.CutPrefix(uuid, "mig-gpu-"); ok { // MIG-GPU-UUID/1/0 tells whose instance it is
		uuid, _, _ = strings.Cut("gpu-"+of, "/")
	}
	found := -1
	for i, k := range g.known {
		if k.uuid != "" && strings.HasPrefix(strings.ToLower(k.uuid), uuid) {
			if found >= 0 {
				return -1
			}
			found = i
		}
	}
	return found
}

// node is the NUMA node that a visible GPU is near; -1: not known.
func (v *Visible) node(i int) int {
	if at := v.index[i]; at >= 0 {
		return v.gpus.known[at].node
	}
	return -1
}

// only is the environment that shows a program one of the GPUs alone.
func (v *Visible) only(i int, env Lookup) []string {
	if len(v.gpus.Vars) == 0 {
		return nil
	}
	mask := v.gpus.Vars[len(v.gpus.Vars)-1]
	set := []string{mask[0] + "=" + v.Tokens[i]}
	for _, alias := range mask[1:] {
		if _, there := env(alias); there { // the two are not to contradict each other
			set = append(set, alias+"="+v.Tokens[i])
		}
	}
	return set
}
