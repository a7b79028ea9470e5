package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// ownCPUs are the CPUs that this process may use; at least n.
func ownCPUs(t *testing.T, n int) []int {
	t.Helper()
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	var cpus []int
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	if len(cpus) < n {
		citest.Lacking(t, "%d CPUs, of which %d are here", n, len(cpus))
	}
	return cpus
}

// startOn starts gorun as taskset does.
func (j *job) startOn(cpus ...int) *job {
	j.t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, set unix.CPUSet
	for _, cpu := range cpus {
		set.Set(cpu)
	}
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		j.t.Fatal(err)
	}
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		j.t.Fatal(err)
	}
	defer unix.SchedSetaffinity(0, &before)
	return j.start()
}

// crowdedSaid has a job say that its ranks share CPUs.
func crowdedSaid(j *job) *job {
	j.cmd.Env = append(slices.DeleteFunc(j.cmd.Env, func(kv string) bool { return strings.HasPrefix(kv, "GORUN_OVERSUBSCRIBE=") }), "GORUN_OVERSUBSCRIBE=")
	return j
}

// sorted are the lines of text, in order.
func sorted(text string) []string {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	slices.Sort(lines)
	return lines
}

// Where ranks run, here and as ranks of agents.
func TestPlacement(t *testing.T) {
	unraced(t)
	home := remoteHome(t)
	t.Run("within the allowed CPUs", func(t *testing.T) { placedWithin(t, home) })
	t.Run("cores", func(t *testing.T) { placedOnCores(t, home) })
	t.Run("more ranks than CPUs", func(t *testing.T) { placedCrowded(t, home) })
	t.Run("quota", placedInQuota)
	t.Run("inherited", placedInherited)
}

// Ranks use no CPU that gorun may not use, bound or not.
func placedWithin(t *testing.T, home string) {
	cpus := ownCPUs(t, 2)
	one := cpus[len(cpus)-1]
	for _, bind := range []string{"", "none", "core", "core:1", "numa"} {
		for _, remote := range []bool{false, true} {
			if remote && bind != "" && bind != "core" {
				continue // the same code
			}
			args := []string{"-np", "1", "rank", "cpus"}
			if bind != "" {
				args = append([]string{"--bind-to", bind}, args...)
			}
			j := newJob(t, args...)
			if remote {
				j = remoteJob(t, home, "a", args...)
			}
			code := j.startOn(one).wait()
			share := ""
			if strings.HasPrefix(bind, "core") {
				share = "1"
			}
			if want := fmt.Sprintf("0 %d 1 %s\n", one, share); code != 0 || j.out.String() != want || j.err.Len() > 0 {
				t.Errorf("--bind-to %q, remote %v: exit code %d, got %q, want %q; stderr %s", bind, remote, code, j.out.String(), want, j.err.String())
			}
		}
	}
}

func placedOnCores(t *testing.T, home string) {
	cpus := ownCPUs(t, 2)[:2]
	for _, remote := range []bool{false, true} {
		args := []string{"-v", "--report", filepath.Join(t.TempDir(), "report"), "-np", "2", "rank", "cpus"}
		j := newJob(t, append([]string{"--bind-to", "core:1"}, args...)...)
		if remote {
			j = remoteJob(t, home, "a:2", append([]string{"-x", "TOLD=1"}, args...)...)
			j.cmd.Env = append(j.cmd.Env, "GORUN_BIND_TO=core")
		}
		code := j.startOn(cpus...).wait()
		got := sorted(j.out.String())
		data, err := os.ReadFile(args[2])
		var report launcher.Account
		if err == nil {
			err = json.Unmarshal(data, &report)
		}
		if code != 0 || err != nil || len(report.Ranks) != 2 {
			t.Fatalf("remote %v: exit code %d, stderr %s, report %v, %s", remote, code, j.err.String(), err, data)
		}
		if got[0] == "0 "+strconv.Itoa(cpus[0])+"-"+strconv.Itoa(cpus[1])+" 2 " {
			t.Skipf("CPUs %v are the threads of one core", cpus) // no core for each rank: refused
		}
		for i, cpu := range cpus {
			if want := fmt.Sprintf("%d %d 1 1", i, cpu); got[i] != want {
				t.Errorf("remote %v: got %q, want %q", remote, got[i], want)
			}
			if p := report.Ranks[i].Place; p == nil || p.CPUs != strconv.Itoa(cpu) || !p.Bound || p.Why != "1 core" {
				t.Errorf("remote %v: report of rank %d: %+v", remote, i, p)
			}
			if want := fmt.Sprintf(", CPUs %d (1 core)\n", cpu); !strings.Contains(j.err.String(), fmt.Sprintf("gorun: rank %d: host ", i)) || !strings.Contains(j.err.String(), want) {
				t.Errorf("remote %v: -v does not say that rank %d has%s%s", remote, i, want, j.err.String())
			}
		}
	}
}

// More ranks than CPUs are allowed, said once, and bound to nothing.
func placedCrowded(t *testing.T, home string) {
	cpus := ownCPUs(t, 1)
	all := strconv.Itoa(cpus[0])
	if n := len(cpus); n > 1 {
		cpus = cpus[:2]
		all = fmt.Sprintf("%d-%d", cpus[0], cpus[1])
		if cpus[1] != cpus[0]+1 {
			all = fmt.Sprintf("%d,%d", cpus[0], cpus[1])
		}
	}
	share := fmt.Sprintf("64 ranks share %d CPUs", len(cpus))
	if len(cpus) == 1 {
		share = "64 ranks share 1 CPU"
	}
	for _, c := range []struct {
		name   string
		args   []string
		stderr string
	}{
		{"default", nil, "gorun: " + share + "\n"},
		{"asked for", []string{"--oversubscribe"}, ""},
		{"cores", []string{"--bind-to", "core"}, "gorun: " + share + "; not bound: --bind-to core needs a core for each rank\n"},
		{"cores, asked for", []string{"--oversubscribe", "--bind-to", "core"}, "gorun: not bound: --bind-to core needs a core for each rank\n"},
		{"elsewhere", nil, "gorun: host a: " + share + "\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := append(c.args, "-np", "64", "rank", "cpus")
			j := newJob(t, args...)
			if c.name == "elsewhere" {
				j = remoteJob(t, home, "a:64", args...)
			}
			code := crowdedSaid(j).startOn(cpus...).wait()
			if code != 0 || j.err.String() != c.stderr {
				t.Errorf("exit code %d, stderr %q, want %q", code, j.err.String(), c.stderr)
			}
			lines := sorted(j.out.String())
			for _, l := range lines {
				if _, rest, _ := strings.Cut(l, " "); rest != fmt.Sprintf("%s %d ", all, len(cpus)) {
					t.Errorf("%q, want CPUs %s", l, all)
				}
			}
			if len(lines) != 64 {
				t.Errorf("%d ranks have run", len(lines))
			}
		})
	}
}

// Ranks that share the time of one CPU and a half are bound to none.
func placedInQuota(t *testing.T) {
	ownCPUs(t, 2)
	group, limit := controlGroup(t, "cpu", "cpu.cfs_quota_us", "cpu.max")
	if err := os.WriteFile(filepath.Join(group, limit), []byte("150000"), 0o600); err != nil { // of 100000, which is the default
		t.Fatal(err)
	}
	j := crowdedSaid(newJob(t, "-np", "2", "--bind-to", "core", "rank", "cpus"))
	args := append([]string{"-c", `echo 0 >"$0/cgroup.procs" && exec "$@"`, group, j.cmd.Path}, j.cmd.Args[1:]...)
	j.cmd.Path, j.cmd.Args = "/bin/sh", append([]string{"sh"}, args...)
	code := j.run()
	j.gone()
	if want := "gorun: 2 ranks share 1.5 CPUs (quota of the control group); not bound: --bind-to core needs a core for each rank\n"; code != 0 || j.err.String() != want {
		t.Errorf("exit code %d, stderr %q, want %q", code, j.err.String(), want)
	}
	if strings.Contains(j.out.String(), " 1\n") { // GORUN_CPU_SHARE of a bound rank
		t.Errorf("a rank is bound: %s", j.out.String())
	}
}

// What a bound rank starts, and a job in it, is bound with it.
func placedInherited(t *testing.T) {
	cpus := ownCPUs(t, 2)[:2]
	j := crowdedSaid(newJob(t, "--bind-to", "core:1", "-np", "2", "gorun", "--bind-to", "core", "-np", "1", "rank", "cpus"))
	code := j.startOn(cpus...).wait()
	got := sorted(j.out.String())
	want := []string{fmt.Sprintf("0 %d 1 1", cpus[0]), fmt.Sprintf("0 %d 1 1", cpus[1])}
	if strings.Contains(j.err.String(), "not bound") {
		t.Skip(j.err.String())
	}
	if code != 0 || !slices.Equal(got, want) {
		t.Errorf("exit code %d, got %q, want %q; stderr %s", code, got, want, j.err.String())
	}
}
