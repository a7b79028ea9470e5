package launcher

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseNodelist(t *testing.T) {
	for list, want := range map[string]string{
		"a":                      "a",
		"a,b":                    "a b",
		"a[1-3,7],b05":           "a1 a2 a3 a7 b05",
		"a[08-11]":               "a08 a09 a10 a11",
		"a[1-2]-[8-9].x":         "a1-8.x a1-9.x a2-8.x a2-9.x",
		"a[3],b[1,1]":            "a3 b1 b1",
		"n[998-1001]":            "n998 n999 n1000 n1001",
		"a-b-c[1-2]d,e[001-002]": "a-b-c1d a-b-c2d e001 e002",
	} {
		got, err := parseNodelist(list)
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%q: got %q, %v, want %s", list, got, err, want)
		}
	}
	for list, want := range map[string]string{
		"":                "no host in it",
		",a":              "a host's name is empty",
		"a,":              "a host's name is empty",
		"a[1-3":           `no ] in "a[1-3"`,
		"a1-3]":           `brackets don't match at "]"`,
		"a[[1]]":          `brackets don't match at "[1]]"`,
		"a[]":             `"" is no number and no range`,
		"a[3-1]":          `"3-1" is no number and no range`,
		"a[x]":            `"x" is no number and no range`,
		"a[1-99999999]":   "more than 16384 hosts",
		"a[1-200][1-200]": "more than 16384 hosts",
		"a[-1]":           `"-1" is no number and no range`,
	} {
		if got, err := parseNodelist(list); err == nil || err.Error() != want {
			t.Errorf("%q: got %q, %v, want %s", list, got, err, want)
		}
	}
}

func TestParsePerNode(t *testing.T) {
	got, err := parsePerNode("2(x3),1", 4)
	if d := cmp.Diff(got, []int{2, 2, 2, 1}); d != "" || err != nil {
		t.Errorf("%v; -got +want:\n%s", err, d)
	}
	for list, want := range map[string]string{
		"":                         `"" is no number from 1 to 16384`,
		"0":                        `"0" is no number from 1 to 16384`,
		"2(x":                      `"2(x" must be a number such as 4, or 4(x2)`,
		"2(x2":                     `"2(x2" must be a number such as 4, or 4(x2)`,
		"2(x0)":                    `"2(x0)" must be a number such as 4, or 4(x2)`,
		"2(x3)":                    "says the counts of 3 hosts, and there are 4",
		"2(x5)":                    "says more than the 4 hosts that there are",
		"2(x999999999999)":         "says more than the 4 hosts that there are",
		"1,1,1,1,1":                "says more than the 4 hosts that there are",
		"2(x3),1 ":                 `"1 " is no number from 1 to 16384`,
		"2(x99999999999999999999)": `"2(x99999999999999999999)" must be a number such as 4, or 4(x2)`,
	} {
		if got, err := parsePerNode(list, 4); err == nil || err.Error() != want {
			t.Errorf("%q: got %v, %v, want %s", list, got, err, want)
		}
	}
}

func TestFindAllocation(t *testing.T) {
	nodefile := filepath.Join(t.TempDir(), "nodes")
	if err := os.WriteFile(nodefile, []byte("a\na\nb.x\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	h := func(name string, slots int) Host { return Host{Name: name, Addr: name, Slots: slots} }
	slurm := []string{"SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=a[1-2],b", "SLURM_TASKS_PER_NODE=2(x2),1", "SLURM_JOB_CPUS_PER_NODE=8(x3)", "SLURMD_NODENAME=a1"}
	pbs := []string{"PBS_NODEFILE=" + nodefile}
	for _, c := range []struct {
		name string
		rm   string
		env  []string
		want Allocation
	}{
		{"none", "", []string{"PATH=/bin", "SLURM_JOB_NODELIST="}, Allocation{}},
		{"off", RMNone, slurm, Allocation{}},
		{"slurm", "", slurm, Allocation{Hosts: []Host{h("a1", 2), h("a2", 2), h("b", 1)}, From: "SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE", Own: []string{"a1"}}},
		{"slurm without tasks", "", []string{"SLURM_JOB_NODELIST=a", "SLURM_JOB_CPUS_PER_NODE=8"}, Allocation{Hosts: []Host{h("a", 8)}, From: "SLURM_JOB_NODELIST and SLURM_JOB_CPUS_PER_NODE"}},
		{"slurm without counts", "", []string{"SLURM_JOB_NODELIST=a"}, Allocation{Hosts: []Host{h("a", 1)}, From: "SLURM_JOB_NODELIST"}},
		{"batch script", "", append([]string{"SLURM_PROCID=0", "SLURM_STEP_ID=4294967291", "SLURM_NTASKS=5"}, slurm...),
			Allocation{Hosts: []Host{h("a1", 2), h("a2", 2), h("b", 1)}, From: "SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE", Own: []string{"a1"}}},
		{"step of one task", "", append([]string{"SLURM_PROCID=0", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=1", "SLURM_TASKS_PER_NODE=1"}, slurm...),
			Allocation{Hosts: []Host{h("a1", 8), h("a2", 8), h("b", 8)}, From: "SLURM_JOB_NODELIST and SLURM_JOB_CPUS_PER_NODE", Own: []string{"a1"}}},
		{"rank of a step", "", append([]string{"SLURM_PROCID=1", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=5", "SLURM_STEP_NUM_NODES=3", "SLURM_NODEID=0", "SLURM_LOCALID=1", "SLURM_STEP_TASKS_PER_NODE=2(x2),1"}, slurm...),
			Allocation{Note: "SLURM_JOB_NODELIST is not used: gorun itself was started as rank 1 of 5 by slurm"}},
		{"rank of gorun", "", append([]string{"GORUN_RANK=1", "GORUN_SIZE=2", "GORUN_LOCAL_RANK=1", "GORUN_LOCAL_SIZE=2", "GORUN_NODE=0", "GORUN_NODES=1"}, pbs...),
			Allocation{Note: "PBS_NODEFILE is not used: gorun itself was started as rank 1 of 2 by gorun"}},
		{"rank of a step, asked for", RMSlurm, append([]string{"SLURM_PROCID=1", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=5"}, slurm[:2]...),
			Allocation{Hosts: []Host{h("a1", 1), h("a2", 1), h("b", 1)}, From: "SLURM_JOB_NODELIST"}},
		{"pbs", "", pbs, Allocation{Hosts: []Host{h("a", 0), h("a", 0), h("b.x", 0)}, From: "PBS_NODEFILE"}},
		{"pbs instead of slurm", RMPBS, append(pbs, slurm...), Allocation{Hosts: []Host{h("a", 0), h("a", 0), h("b.x", 0)}, From: "PBS_NODEFILE"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := FindAllocation(c.rm, c.env)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(got, c.want); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
		})
	}
	for _, c := range []struct {
		rm   string
		env  string
		want string
	}{
		{"lsf", "A=1", "--rm lsf: must be none, slurm or pbs"},
		{RMSlurm, "A=1", "--rm slurm: SLURM_JOB_NODELIST is not set: this is no allocation of Slurm"},
		{RMPBS, "A=1", "--rm pbs: PBS_NODEFILE is not set: this is no allocation of PBS"},
		{"", "SLURM_JOB_NODELIST=a[", `SLURM_JOB_NODELIST="a[": no ] in "a["; --rm none ignores it`},
		{"", "SLURM_JOB_NODELIST=a;b", `SLURM_JOB_NODELIST: host "a;b": ';' is in no host's name; --rm none ignores it`},
		{"", "SLURM_JOB_NODELIST=a SLURM_TASKS_PER_NODE=1(x2)", `SLURM_TASKS_PER_NODE="1(x2)": says more than the 1 host that there are; --rm none ignores it`},
		{"", "PBS_NODEFILE=/nonexistent/f", "PBS_NODEFILE /nonexistent/f: no such file or directory; --rm none ignores it"},
	} {
		_, err := FindAllocation(c.rm, strings.Fields(c.env))
		if _, ok := errors.AsType[*UsageError](err); !ok || err.Error() != c.want {
			t.Errorf("%s, %s: got %v (%T), want %s", c.rm, c.env, err, err, c.want)
		}
	}
}

func FuzzSlurm(f *testing.F) {
	f.Add("a[1-3,7],b05", "2(x4),1")
	f.Add("a[1-2]-[08-9],", "8(x")
	f.Fuzz(func(t *testing.T, nodes, counts string) {
		names, err := parseNodelist(nodes)
		if err != nil {
			return
		}
		if len(names) == 0 || len(names) > maxHosts {
			t.Fatalf("%q: %d names", nodes, len(names))
		}
		slots, err := parsePerNode(counts, len(names))
		if err == nil && len(slots) != len(names) {
			t.Fatalf("%q, %q: %d counts for %d hosts", nodes, counts, len(slots), len(names))
		}
		for _, n := range slots {
			if n < 1 || n > maxSlots {
				t.Fatalf("%q: %d slots", counts, n)
			}
		}
	})
}
