package placement

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Set is some CPUs, by their numbers in ascending order.
type Set []int

// maxCPU bounds the number of a CPU: the kernel's own bound is 8192.
const maxCPU = 1 << 16

// ParseSet reads a list as the kernel writes it: "0-3,8". An empty list is no CPU.
func ParseSet(list string) (Set, error) {
	var s Set
	list = strings.TrimSpace(list)
	if list == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, err1 := strconv.ParseUint(first, 10, 32)
		b, err2 := strconv.ParseUint(last, 10, 32)
		if err1 != nil || err2 != nil || b < a || b >= maxCPU || len(s) > 0 && int(a) <= s[len(s)-1] {
			return nil, fmt.Errorf("%q is no list of CPUs such as 0-3,8", list)
		}
		for n := a; n <= b; n++ {
			s = append(s, int(n))
		}
	}
	return s, nil
}

// String is the list as the kernel writes it: "0-3,8".
func (s Set) String() string {
	var b strings.Builder
	for i := 0; i < len(s); {
		j := i
		for j+1 < len(s) && s[j+1] == s[j]+1 {
			j++
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(s[i]))
		if j > i {
			b.WriteString("-" + strconv.Itoa(s[j]))
		}
		i = j + 1
	}
	return b.String()
}

// Has reports whether a CPU is in the set.
func (s Set) Has(cpu int) bool {
	_, found := slices.BinarySearch(s, cpu)
	return found
}

// and is the CPUs in both sets.
func (s Set) and(o Set) Set {
	var out Set
	for _, c := range s {
		if o.Has(c) {
			out = append(out, c)
		}
	}
	return out
}

// Allowed is the CPUs that the calling thread may use: what the cpuset of its control group and its affinity leave.
func Allowed() (Set, error) {
	mask := unix.NewCPUSet(maxCPU)
	if err := unix.SchedGetaffinityDynamic(0, mask); err != nil {
		return nil, fmt.Errorf("sched_getaffinity: %w", err)
	}
	var s Set
	for cpu, left := 0, mask.Count(); left > 0 && cpu < maxCPU; cpu++ {
		if mask.IsSet(cpu) {
			s = append(s, cpu)
			left--
		}
	}
	return s, nil
}

// Use lets the calling thread, and what it forks, run on these CPUs only. The caller has locked the thread.
func Use(s Set) error {
	if len(s) == 0 {
		return unix.EINVAL
	}
	mask := unix.NewCPUSet(s[len(s)-1] + 1)
	for _, cpu := range s {
		mask.Set(cpu)
	}
	return unix.SchedSetaffinityDynamic(0, mask)
}
