package launcher

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gorun-dev/gorun/launcher/internal/files"
	"github.com/gorun-dev/gorun/rankenv"
)

// Values of Job.RM.
const (
	RMNone  = "none"
	RMSlurm = "slurm"
	RMPBS   = "pbs"
)

// Allocation is what a resource manager gave to the shell in which gorun runs. The zero value is none.
type Allocation struct {
	Hosts []Host
	From  string   // for people: where the hosts are from
	Own   []string // further names of this host
	Note  string   // for people, without hosts: why an allocation that is there is not used
}

// FindAllocation finds the hosts of an allocation in the environment. rm is RMNone, RMSlurm, RMPBS, or "" for the one that is there.
func FindAllocation(rm string, environ []string) (Allocation, error) {
	var find func(environ []string) (Allocation, error)
	what := ""
	switch {
	case rm != "" && rm != RMNone && rm != RMSlurm && rm != RMPBS:
		return Allocation{}, flagf("--rm", "%s: must be none, slurm or pbs", rm)
	case rm == RMNone:
		return Allocation{}, nil
	case rm != RMPBS && getenv(environ, "SLURM_JOB_NODELIST") != "":
		find, what = slurmAllocation, "SLURM_JOB_NODELIST"
	case rm != RMSlurm && getenv(environ, "PBS_NODEFILE") != "":
		find, what = pbsAllocation, "PBS_NODEFILE"
	case rm == RMSlurm:
		return Allocation{}, flagf("--rm", "slurm: SLURM_JOB_NODELIST is not set: this is no allocation of Slurm")
	case rm == RMPBS:
		return Allocation{}, flagf("--rm", "pbs: PBS_NODEFILE is not set: this is no allocation of PBS")
	default:
		return Allocation{}, nil
	}
	if rm == "" {
		// One of several processes that somebody else started all over the allocation: each would start a job on all of it.
		if e, err := rankenv.FromEnviron(environ); err != nil || e.Size > 1 {
			note := what + " is not used: gorun itself was started as one of several ranks"
			if err == nil {
				note = fmt.Sprintf("%s is not used: gorun itself was started as rank %d of %d by %s", what, e.Rank, e.Size, e.Launcher)
			}
			return Allocation{Note: note}, nil
		}
	}
	a, err := find(environ)
	if err != nil {
		return Allocation{}, &UsageError{Msg: err.Error(), Hint: "--rm none ignores it"}
	}
	return a, nil
}

func slurmAllocation(environ []string) (Allocation, error) {
	a := Allocation{From: "SLURM_JOB_NODELIST"}
	list := getenv(environ, "SLURM_JOB_NODELIST")
	names, err := parseNodelist(list)
	if err != nil {
		return a, fmt.Errorf("SLURM_JOB_NODELIST=%q: %w", list, err)
	}
	if own := getenv(environ, "SLURMD_NODENAME"); own != "" {
		a.Own = []string{own}
	}
	// In a step of one task (srun --pty) the tasks are the step's, and one.
	perNode := "SLURM_TASKS_PER_NODE"
	if _, step := lookup(environ, "SLURM_PROCID"); getenv(environ, perNode) == "" || step && getenv(environ, "SLURM_JOB_CPUS_PER_NODE") != "" && !batchStep(getenv(environ, "SLURM_STEP_ID")) {
		perNode = "SLURM_JOB_CPUS_PER_NODE"
	}
	var slots []int
	if list = getenv(environ, perNode); list != "" {
		if slots, err = parsePerNode(list, len(names)); err != nil {
			return a, fmt.Errorf("%s=%q: %w", perNode, list, err)
		}
		a.From += " and " + perNode
	}
	for i, name := range names {
		h := Host{Name: name, Addr: name, Slots: 1}
		if slots != nil {
			h.Slots = slots[i]
		}
		if err := h.check(); err != nil {
			return a, fmt.Errorf("SLURM_JOB_NODELIST: host %q: %w", name, err)
		}
		a.Hosts = append(a.Hosts, h)
	}
	return a, nil
}

// batchStep tells the steps in which a batch script or the shell of salloc runs from those of srun: they have numbers at the top of
// the range, or none.
func batchStep(id string) bool {
	n, err := strconv.ParseUint(id, 10, 32)
	return err != nil || n >= 0xfffffff0
}

// pbsAllocation reads PBS's file: a line for each slot.
func pbsAllocation(environ []string) (Allocation, error) {
	file := getenv(environ, "PBS_NODEFILE")
	a := Allocation{From: "PBS_NODEFILE"}
	data, err := files.Read(file, maxHostfile)
	if err != nil {
		return a, fmt.Errorf("PBS_NODEFILE %s: %s", file, files.Reason(err))
	}
	a.Hosts, err = DecodeHostfile(file, data)
	if err != nil {
		return a, fmt.Errorf("PBS_NODEFILE %w", err)
	}
	return a, nil
}

// parseNodelist expands Slurm's list of hosts: a[1-3,07],b05,c[1-2]-[8-9].
func parseNodelist(list string) ([]string, error) {
	var names []string
	rest := list
	for rest != "" {
		item := rest
		depth := 0
		for i := 0; i < len(rest); i++ {
			switch c := rest[i]; {
			case c == '[':
				depth++
			case c == ']':
				depth--
			case c == ',' && depth == 0:
				item = rest[:i]
			}
			if depth < 0 || depth > 1 {
				return nil, fmt.Errorf("brackets don't match at %q", rest[i:])
			}
			if len(item) < len(rest) {
				break
			}
		}
		if depth != 0 {
			return nil, fmt.Errorf("no ] in %q", item)
		}
		if item == "" {
			return nil, fmt.Errorf("a host's name is empty")
		}
		expanded, err := expandNodes(item, maxHosts-len(names))
		if err != nil {
			return nil, err
		}
		names = append(names, expanded...)
		more := strings.HasPrefix(rest[len(item):], ",")
		rest = strings.TrimPrefix(rest[len(item):], ",")
		if more && rest == "" {
			return nil, fmt.Errorf("a host's name is empty")
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("no host in it")
	}
	return names, nil
}

// expandNodes expands the brackets of one item, the last ones fastest, to at most limit names.
func expandNodes(item string, limit int) ([]string, error) {
	out := []string{""}
	for item != "" {
		plain, rest, bracket := strings.Cut(item, "[")
		parts := []string{""}
		if bracket {
			var inner string
			inner, item, _ = strings.Cut(rest, "]")
			var err error
			if parts, err = expandRanges(inner, limit); err != nil {
				return nil, err
			}
		} else {
			item = ""
		}
		if len(out)*len(parts) > limit {
			return nil, fmt.Errorf("more than %d hosts", maxHosts)
		}
		next := make([]string, 0, len(out)*len(parts))
		for _, o := range out {
			for _, p := range parts {
				next = append(next, o+plain+p)
			}
		}
		out = next
	}
	return out, nil
}

// expandRanges expands what is in brackets: numbers and ranges, as wide as their first number is written.
func expandRanges(s string, limit int) ([]string, error) {
	var out []string
	for item := range strings.SplitSeq(s, ",") {
		low, high, isRange := strings.Cut(item, "-")
		if !isRange {
			high = low
		}
		// 18 digits are more than any host has, and don't overflow.
		lo, err1 := strconv.ParseUint(low, 10, 64)
		hi, err2 := strconv.ParseUint(high, 10, 64)
		if err1 != nil || err2 != nil || len(low) > 18 || len(high) > 18 || hi < lo {
			return nil, fmt.Errorf("%q is no number and no range", item)
		}
		if hi-lo >= uint64(max(limit-len(out), 0)) {
			return nil, fmt.Errorf("more than %d hosts", maxHosts)
		}
		for n := lo; n <= hi; n++ {
			out = append(out, fmt.Sprintf("%0*d", len(low), n))
		}
	}
	return out, nil
}

// parsePerNode expands Slurm's counts for n hosts: 2(x3),1.
func parsePerNode(list string, n int) ([]int, error) {
	var out []int
	for item := range strings.SplitSeq(list, ",") {
		digits, rest, repeated := strings.Cut(item, "(x")
		c, err := parseSlots(digits)
		if err != nil {
			return nil, fmt.Errorf("%q is no number from 1 to %d", digits, maxSlots)
		}
		times := 1
		if repeated {
			t, ok := strings.CutSuffix(rest, ")")
			if times, err = strconv.Atoi(t); err != nil || !ok || times < 1 {
				return nil, fmt.Errorf("%q must be a number such as 4, or 4(x2)", item)
			}
		}
		if times > n-len(out) {
			return nil, fmt.Errorf("says more than the %s that there are", count(n, "host"))
		}
		for range times {
			out = append(out, c)
		}
	}
	if len(out) < n {
		return nil, fmt.Errorf("says the counts of %d hosts, and there are %d", len(out), n)
	}
	return out, nil
}
