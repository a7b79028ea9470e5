package hostfacts

import (
	"path"
	"strconv"
	"strings"
)

// groups are the control groups of this process, by controller: "" is the unified one.
func (h host) groups() map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(h.text("proc/self/cgroup")) {
		_, rest, ok := strings.Cut(strings.TrimSpace(line), ":")
		controllers, group, ok2 := strings.Cut(rest, ":")
		if !ok || !ok2 || !strings.HasPrefix(group, "/") {
			continue
		}
		for c := range strings.SplitSeq(controllers, ",") {
			out[c] = path.Clean(group)
		}
	}
	return out
}

// files are a control file of a group and of all above it; in a container the group's own may be the root.
func (h host) files(mount, group, name string) []string {
	var out []string
	for {
		if t := h.text(path.Join("sys/fs/cgroup", mount, group, name)); t != "" {
			out = append(out, t)
		}
		if group == "/" || group == "." || group == "" {
			return out
		}
		group = path.Dir(group)
	}
}

// CoreLimit is how many CPUs' time the control groups of this process grant; 0: no quota. root is "/".
func CoreLimit(root string) float64 { return host{Options{Root: root}}.coreLimit() }

// coreLimit is the least quota of the groups, in cores; 0: none.
func (h host) coreLimit() float64 {
	least := 0.0
	take := func(quota, period string) {
		q, errQ := strconv.ParseFloat(quota, 64)
		p, errP := strconv.ParseFloat(period, 64)
		if errQ == nil && errP == nil && q > 0 && p > 0 && (least == 0 || q/p < least) {
			least = q / p
		}
	}
	g := h.groups()
	if group, ok := g[""]; ok {
		for _, t := range h.files("", group, "cpu.max") {
			if quota, period, ok := strings.Cut(t, " "); ok {
				take(quota, period)
			}
		}
	}
	if group, ok := g["cpu"]; ok {
		quotas, periods := h.files("cpu", group, "cpu.cfs_quota_us"), h.files("cpu", group, "cpu.cfs_period_us")
		for i := range min(len(quotas), len(periods)) {
			take(quotas[i], periods[i])
		}
	}
	return least
}

// OOMKills counts the processes of this process's control group that the kernel has killed for lack of memory; of the whole machine where no group
// counts them. Only differences mean something.
func OOMKills() (n int, ok bool) { return host{Options{Root: "/"}}.oomKills() }

func (h host) oomKills() (n int, ok bool) {
	g := h.groups()
	if group, there := g[""]; there {
		if all := h.files("", group, "memory.events"); len(all) > 0 {
			return oomKill(all[0])
		}
	}
	if group, there := g["memory"]; there {
		if all := h.files("memory", group, "memory.oom_control"); len(all) > 0 {
			return oomKill(all[0])
		}
	}
	return oomKill(h.text("proc/vmstat"))
}

// oomKill is the number behind oom_kill in a file of counts.
func oomKill(text string) (n int, ok bool) {
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == "oom_kill" {
			n, err := strconv.Atoi(f[1])
			return n, err == nil
		}
	}
	return 0, false
}

// memoryLimit is the least limit of the groups, and what is used of it; -1: none.
func (h host) memoryLimit() (limit, used int64) {
	limit = -1
	take := func(limits, useds []string) {
		for i := range min(len(limits), len(useds)) {
			l, err := strconv.ParseInt(limits[i], 10, 64)
			if err != nil || l <= 0 || limit >= 0 && l >= limit {
				continue // "max"
			}
			limit = l
			used, _ = strconv.ParseInt(useds[i], 10, 64) // the kernel's number
		}
	}
	g := h.groups()
	if group, ok := g[""]; ok {
		take(h.files("", group, "memory.max"), h.files("", group, "memory.current"))
	}
	if group, ok := g["memory"]; ok {
		take(h.files("memory", group, "memory.limit_in_bytes"), h.files("memory", group, "memory.usage_in_bytes"))
	}
	return limit, used
}
