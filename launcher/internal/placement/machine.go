// Package placement decides which CPUs and which GPU each rank of a host gets. It has two halves: Read looks at the host, as /sys and /proc show it, and
// opens no library; Place is a function from what was found and what is asked for to the ranks' masks.
package placement

import (
	"slices"
	"strconv"

	"github.com/gorun-dev/gorun/launcher/internal/hostfacts"
)

// Machine is what a host has for its ranks.
type Machine struct {
	Allowed Set     // CPUs that ranks may use
	Quota   float64 // how many CPUs' time the control groups grant; 0: no quota
	Nodes   []Node  // NUMA nodes that have allowed CPUs, in order; at least one
	Cores   []Core  // with allowed CPUs; nil if they were not asked for
	GPUs    GPUs
}

// Node is a NUMA node.
type Node struct {
	ID   int
	CPUs Set // the allowed ones
}

// Core is a core: what its hardware threads share.
type Core struct {
	CPUs  Set // the allowed ones
	Node  int // index in Machine.Nodes
	Speed int // a core with more is faster; all 0 where nothing is known
}

// Read looks at a host for a wish. root is "/".
func Read(root string, allowed Set, b Bind) *Machine {
	m := &Machine{Allowed: allowed, Quota: hostfacts.CoreLimit(root), GPUs: FindGPUs(root), Nodes: []Node{{CPUs: allowed}}}
	if b.To == None || b.To == "" && m.GPUs.Count == 0 {
		return m // nothing will be bound
	}
	m.readNodes(root)
	if b.To == "" && len(m.Nodes) < 2 {
		return m
	}
	m.GPUs.locate(root)
	if b.To == ToCore {
		m.readCores(root)
	}
	return m
}

func (m *Machine) readNodes(root string) {
	const dir = "sys/devices/system/node"
	online, err := ParseSet(hostfacts.Text(root, dir+"/online"))
	if err != nil {
		return
	}
	var nodes []Node
	n := 0
	for _, id := range online {
		cpus, err := ParseSet(hostfacts.Text(root, dir+"/node"+strconv.Itoa(id)+"/cpulist"))
		if err != nil {
			return
		}
		if cpus = cpus.and(m.Allowed); len(cpus) > 0 {
			nodes = append(nodes, Node{id, cpus})
			n += len(cpus)
		}
	}
	// What does not add up (a sandbox with files of its own) is not believed.
	if n == len(m.Allowed) {
		m.Nodes = nodes
	}
}

func (m *Machine) readCores(root string) {
	var slow, fast Set // Intel's two kinds, where there are two
	slow, _ = ParseSet(hostfacts.Text(root, "sys/devices/cpu_atom/cpus"))
	fast, _ = ParseSet(hostfacts.Text(root, "sys/devices/cpu_core/cpus"))
	for i, node := range m.Nodes {
		seen := map[int]bool{}
		for _, cpu := range node.CPUs {
			if seen[cpu] {
				continue
			}
			dir := "sys/devices/system/cpu/cpu" + strconv.Itoa(cpu)
			text := hostfacts.Text(root, dir+"/topology/core_cpus_list")
			if text == "" {
				text = hostfacts.Text(root, dir+"/topology/thread_siblings_list") // before Linux 5.3
			}
			threads, err := ParseSet(text)
			if threads = threads.and(node.CPUs); err != nil || !threads.Has(cpu) {
				threads = Set{cpu}
			}
			c := Core{CPUs: threads, Node: i}
			if n, err := strconv.Atoi(hostfacts.Text(root, dir+"/cpu_capacity")); err == nil {
				c.Speed = n
			} else if fast.Has(cpu) {
				c.Speed = 2
			} else if slow.Has(cpu) {
				c.Speed = 1
			}
			for _, t := range threads {
				seen[t] = true
			}
			m.Cores = append(m.Cores, c)
		}
	}
}

// differ reports whether some cores are faster than others.
func differ(cores []Core) bool {
	return slices.ContainsFunc(cores, func(c Core) bool { return c.Speed != cores[0].Speed })
}

// usable is how many ranks can run at once.
func (m *Machine) usable() float64 {
	n := float64(len(m.Allowed))
	if m.Quota > 0 {
		n = min(n, m.Quota)
	}
	return n
}
