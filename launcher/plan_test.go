package launcher

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write golden files")

// golden compares text with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(got, string(want)); d != "" {
		t.Errorf("%s (-got +want):\n%s", name, d)
	}
}

var testFacts = Facts{
	Programs: []Program{{Name: "./prog", Path: "/srv/prog"}},
	Host:     "a",
	Dir:      "/srv",
	Environ:  []string{"PATH=/bin", "HOME=/h", "HOME=/second", "SLURM_PROCID=3", "OMPI_COMM_WORLD_RANK=1", "RANK=9", "GORUN_JOB_ID=outer", "MASTER_PORT=1"},
}

func TestPlanGolden(t *testing.T) {
	on := true
	job := Job{NP: 2, Program: "./prog", Args: []string{"a b", "it's", "", "\n\xff"}, Dir: "sub", Device: "host", Timeout: time.Minute,
		TagOutput: &on, Stdin: StdinNone, Env: []Setting{{Name: "NCCL_DEBUG", Value: "INFO"}, {Name: "MASTER_PORT", Value: "29500"}, {Name: "SLURM_PROCID", Inherit: true}}}
	p, err := job.Plan(testFacts)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := p.Write(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "plan.txt", b.String())
	js, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "plan.json", string(js)+"\n")
}

func TestPlanStdin(t *testing.T) {
	for stdin, want := range map[string]string{"": "stdin      to rank 0\n", "1": "stdin      to rank 1\n", StdinAll: "stdin      to all ranks\n", StdinNone: "stdin      to no rank\n"} {
		p, err := Job{NP: 2, Program: "./prog", Stdin: stdin}.Plan(testFacts)
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		if err := p.Write(&b); err != nil || !strings.Contains(b.String(), want) {
			t.Errorf("--stdin %q: %v, %q, want %q in it", stdin, err, b.String(), want)
		}
	}
}

func TestPlanEnvironment(t *testing.T) {
	job := Job{NP: 3, Program: "./prog", Env: []Setting{{Name: "HOME", Value: "/mine"}, {Name: "X", Value: "1"}, {Name: "X", Value: "2"}}}
	p, err := job.Plan(testFacts)
	if err != nil {
		t.Fatal(err)
	}
	env := p.environ(&p.Ranks[2], launchVars("id", "sock", "127.0.0.1", 4711))
	got := map[string]string{}
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		if old, twice := got[name]; twice {
			t.Errorf("%s is set twice: %q and %q", name, old, value)
		}
		got[name] = value
	}
	for name, want := range map[string]string{"PATH": "/bin", "HOME": "/mine", "X": "2", "RANK": "2", "WORLD_SIZE": "3", "GORUN_RANK": "2", "GORUN_JOB_ID": "id",
		"GORUN_CONTROL": "sock", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711", "JAX_COORDINATOR_ADDRESS": "127.0.0.1:4711"} {
		if got[name] != want {
			t.Errorf("%s = %q, want %q", name, got[name], want)
		}
	}
	for _, name := range []string{"SLURM_PROCID", "OMPI_COMM_WORLD_RANK"} {
		if v, ok := got[name]; ok {
			t.Errorf("%s = %q, want it removed", name, v)
		}
	}
	if want := []string{"GORUN_JOB_ID", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "RANK", "SLURM_PROCID"}; !slices.Equal(p.Removed, want) {
		t.Errorf("removed %q, want %q", p.Removed, want)
	}
	on := true
	job.KeepLauncherEnv = &on
	if p, err = job.Plan(testFacts); err != nil {
		t.Fatal(err)
	}
	if env := p.environ(&p.Ranks[0], nil); !slices.Contains(env, "SLURM_PROCID=3") {
		t.Errorf("KeepLauncherEnv: SLURM_PROCID is not there: %q", env)
	} else if slices.Contains(env, "RANK=9") {
		t.Errorf("KeepLauncherEnv: the outer RANK is still there: %q", env)
	}
}

func TestPlanErrors(t *testing.T) {
	for _, c := range []struct {
		name string
		job  Job
		want string
	}{
		{"too many", Job{NP: MaxNP + 1}, "number of ranks 16385: must be from 1 to 16384"},
		{"negative", Job{NP: -1}, "number of ranks -1: must be from 1 to 16384"},
		{"place", Job{Env: []Setting{{Name: "RANK", Value: "1"}}}, "variable RANK: it tells a rank its place in the job, gorun sets it"},
		{"place of here", Job{Env: []Setting{{Name: "RANK", Inherit: true}}}, "variable RANK: it tells a rank its place in the job, gorun sets it"},
		{"device", Job{Env: []Setting{{Name: "GORUN_DEVICE", Value: "host"}}}, "variable GORUN_DEVICE: use --device, or device in the job file"},
		{"no name", Job{Env: []Setting{{Value: "1"}}}, `variable "": not a name`},
		{"zero byte", Job{Env: []Setting{{Name: "A", Value: "\x00"}}}, "variable A: its value holds a zero byte"},
		{"stdin", Job{Stdin: "some"}, "--stdin some: must be a rank's number, all or none"},
		{"stdin of no rank", Job{NP: 3, Stdin: "3"}, "--stdin 3: there is no such rank, the job has 3 ranks (from 0)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := c.job.Plan(testFacts)
			if err == nil || err.Error() != c.want {
				t.Fatalf("got %v, want %q", err, c.want)
			}
			if _, ok := errors.AsType[*UsageError](err); !ok {
				t.Errorf("got a %T, want a *UsageError", err)
			}
		})
	}
}

func TestMerge(t *testing.T) {
	on, off := true, false
	flags := Job{NP: 2, TagOutput: &off, Env: []Setting{{Name: "A", Value: "flag"}}}
	file := Job{NP: 4, Program: "p", Args: []string{"x"}, KillGrace: NoGrace, TagOutput: &on, Env: []Setting{{Name: "A", Value: "file"}, {Name: "B", Value: "file"}}}
	got := Merge(flags, Job{Timeout: time.Second}, file)
	want := Job{NP: 2, Program: "p", Args: []string{"x"}, KillGrace: NoGrace, Timeout: time.Second, TagOutput: &off,
		Env: []Setting{{Name: "A", Value: "file"}, {Name: "B", Value: "file"}, {Name: "A", Value: "flag"}}}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
}

func TestNearest(t *testing.T) {
	list := []string{"--timeout", "--kill-grace", "--tag-output", "-np", "--wdir"}
	for word, want := range map[string]string{"--timout": "--timeout", "--tmieout": "--timeout", "--killgrace": "--kill-grace", "-pn": "-np", "--workdir": "--wdir", "--zzz": "", "--tag_output": "--tag-output"} {
		if got := Nearest(word, list); got != want {
			t.Errorf("Nearest(%q) = %q, want %q", word, got, want)
		}
	}
}

func TestParseDuration(t *testing.T) {
	for in, want := range map[string]time.Duration{"5": 5 * time.Second, "0.5": 500 * time.Millisecond, "2m": 2 * time.Minute, "1h30m": 90 * time.Minute, "0": 0} {
		if got, err := parseDuration(in); err != nil || got != want {
			t.Errorf("parseDuration(%q) = %v, %v, want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "x", "-1", "-1s", "5 s"} {
		if got, err := parseDuration(in); err == nil {
			t.Errorf("parseDuration(%q) = %v, want an error", in, got)
		}
	}
	if got, err := parseGrace("0s"); err != nil || got != NoGrace {
		t.Errorf("parseGrace(0s) = %v, %v, want NoGrace", got, err)
	}
}

func TestPlanHosts(t *testing.T) {
	facts := testFacts
	facts.Environ = append([]string{"NCCL_DEBUG=WARN", "NCCL_ALGO=Ring", "GORUN_NCCL_LIB=/l.so", "GORUN_DEVICE=0", "GORUN_TIMEOUT=3", "LD_LIBRARY_PATH=/x", "MINE=1", "NCCL_DEBUG=twice"}, facts.Environ...)
	hosts, err := ParseHosts("a:1,me@b:3,ssh://c:2222:2,unused:4")
	if err != nil {
		t.Fatal(err)
	}
	job := Job{NP: 6, Program: "./prog", Args: []string{"x"}, Hosts: hosts, Stage: []string{"data.bin", "/abs"}, Ports: PortRange{40000, 40100},
		Env: []Setting{{Name: "NCCL_ALGO", Value: "Tree"}, {Name: "MINE", Inherit: true}, {Name: "SLURM_PROCID", Inherit: true}}}
	p, err := job.Plan(facts)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := p.Write(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "hosts.txt", b.String())
	js, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "hosts.json", string(js)+"\n")

	env := remoteEnviron([]string{"HOME=/there", "PATH=/usr/bin", "PATH=/second", "RANK=8", "NCCL_DEBUG=TRACE", "NCCL_ALGO=there", "OMPI_X=1"}, p.Remote.Forward, p.Ranks[5].Env, []string{"MASTER_ADDR=10.0.0.1"})
	got := map[string]string{}
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		if old, twice := got[name]; twice {
			t.Errorf("%s is set twice: %q and %q", name, old, value)
		}
		got[name] = value
	}
	for name, want := range map[string]string{"HOME": "/there", "PATH": "/usr/bin", "RANK": "5", "NCCL_DEBUG": "WARN", "NCCL_ALGO": "Tree", "MINE": "1", "SLURM_PROCID": "3",
		"GORUN_NCCL_LIB": "/l.so", "MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3", "CROSS_SIZE": "3", "WORLD_SIZE": "6"} {
		if got[name] != want {
			t.Errorf("%s = %q, want %q", name, got[name], want)
		}
	}
	for _, name := range []string{"LD_LIBRARY_PATH", "GORUN_TIMEOUT", "OMPI_X", "GORUN_DEVICE"} {
		if v, ok := got[name]; ok {
			t.Errorf("%s = %q, want it not set", name, v)
		}
	}
}

// Settings of Open MPI reach the ranks of other hosts, unless its mpirun has made them.
func TestOpenMPISettingsAreForwarded(t *testing.T) {
	for _, mpirun := range []bool{false, true} {
		f := Facts{Programs: []Program{{Name: "prog", Path: "/prog"}}, Host: "here", Dir: "/", Environ: []string{"OMPI_MCA_btl=^tcp"}}
		var want []string
		if mpirun {
			f.Environ = append(f.Environ, "OMPI_COMM_WORLD_RANK=0")
		} else {
			want = f.Environ
		}
		p, err := Job{Apps: []App{{NP: 2, Program: "prog"}}, Hosts: []Host{{Name: "a", Addr: "a"}, {Name: "b", Addr: "b"}}}.Plan(f)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(p.Remote.Forward, want) {
			t.Errorf("under mpirun %v: %q, want %q", mpirun, p.Remote.Forward, want)
		}
	}
}

// Which hosts a plan has, how many ranks run on each, and which one is local.
func TestPlanPlacement(t *testing.T) {
	hosts := func(list string) []Host {
		h, err := ParseHosts(list)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	allocation := func(list string, own ...string) Allocation {
		return Allocation{Hosts: hosts(list), From: "X", Own: own}
	}
	for _, c := range []struct {
		name  string
		job   Job
		facts Facts
		want  string
	}{
		{"nothing said", Job{}, Facts{Host: "a"}, "a* 1"},
		{"one rank a GPU", Job{}, Facts{Host: "a", GPUs: 8}, "a* 8"},
		{"a number of ranks wins", Job{NP: 2}, Facts{Host: "a", GPUs: 8}, "a* 2"},
		{"one device", Job{Device: "host"}, Facts{Host: "a", GPUs: 8}, "a* 1"},
		{"every slot", Job{Hosts: hosts("b:2,c")}, Facts{Host: "a", GPUs: 8}, "b 2, c 1"},
		{"own name", Job{Hosts: hosts("A:2,b")}, Facts{Host: "a"}, "A* 2, b 1"},
		{"own name without the domain", Job{Hosts: hosts("a,a.x.y,a.z")}, Facts{Host: "a.x.y"}, "a* 2, a.z 1"},
		{"two names of this host", Job{Hosts: hosts("localhost:2,b,a:3")}, Facts{Host: "a"}, "localhost* 5, b 1"},
		{"the way is asked for by a user", Job{Hosts: hosts("me@a,me@localhost")}, Facts{Host: "a"}, "a 1, localhost 1"},
		{"by a port", Job{Hosts: hosts("ssh://a:22")}, Facts{Host: "a"}, "a 1"},
		{"by a command", Job{Hosts: hosts("localhost"), RSH: "x"}, Facts{Host: "a"}, "localhost 1"},
		{"a command without hosts", Job{NP: 3, RSH: "x"}, Facts{Host: "a"}, "a* 3"},
		{"this host takes any number", Job{NP: 9, Hosts: hosts("localhost")}, Facts{Host: "a"}, "localhost* 9"},
		{"hostfile", Job{Hostfile: "f"}, Facts{Host: "a", Hostfile: hosts("b:2,b")}, "b 3"},
		{"hostfile before an allocation", Job{Hostfile: "f"}, Facts{Host: "a", Hostfile: hosts("b"), Allocation: allocation("c")}, "b 1"},
		{"allocation", Job{}, Facts{Host: "a.x", Allocation: allocation("n1:2,n2:2", "n2")}, "n1 2, n2* 2"},
		{"allocation of this host", Job{}, Facts{Host: "a", GPUs: 4, Allocation: allocation("a:1")}, "a* 4"},
		{"allocation of some slots here", Job{}, Facts{Host: "a", GPUs: 4, Allocation: allocation("a:3")}, "a* 3"},
		{"more ranks than slots here", Job{NP: 5}, Facts{Host: "a", Allocation: allocation("a:3")}, "a* 5"},
		{"ppr here", Job{MapBy: &MapBy{PPR: 3}}, Facts{Host: "a"}, "a* 3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := c.job.Plan(c.facts)
			if err != nil {
				t.Fatal(err)
			}
			n := make([]int, len(p.Hosts))
			for _, r := range p.Ranks {
				if r.LocalRank != n[r.Host] {
					t.Errorf("rank %d has local rank %d, want %d", r.Rank, r.LocalRank, n[r.Host])
				}
				n[r.Host]++
			}
			var got []string
			for i, h := range p.Hosts {
				local := ""
				if h.Local {
					local = "*"
				}
				got = append(got, h.Name+local+" "+strconv.Itoa(n[i]))
				if h.Local != (h.Addr == "") {
					t.Errorf("host %+v", h)
				}
			}
			if g := strings.Join(got, ", "); g != c.want {
				t.Errorf("got %s, want %s", g, c.want)
			}
		})
	}
	for _, c := range []struct {
		name string
		job  Job
		want string
	}{
		{"few slots here, said", Job{NP: 3, Hosts: hosts("localhost:2")}, "3 ranks, but host localhost has 2 slots; give their slots (-H localhost:3), or --oversubscribe"},
		{"few slots there", Job{NP: 3, Hosts: hosts("b")}, "3 ranks, but host b has 1 slot; give their slots (-H b:3), or --oversubscribe"},
		{"hosts twice", Job{Hosts: hosts("b"), Hostfile: "f"}, "hosts are given twice, by -H (or [[host]]) and by the hostfile f: give one of them"},
		{"stage", Job{Stage: []string{"none", "f"}}, "--stage none and files to send contradict each other"},
		{"two ways", Job{Hosts: hosts("b"), RSH: "ssh", SSHConfig: "c d"}, "--ssh-config is for the built-in ssh client, and --rsh replaces it: give it to the command (ssh -F 'c d')"},
		{"keys for another way", Job{Hosts: hosts("b"), RSH: "ssh", AcceptNewHostKeys: new(true)}, "--accept-new-host-keys is for the built-in ssh client, and --rsh replaces it: give it to the command (ssh -o StrictHostKeyChecking=accept-new)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := c.job.Plan(testFacts); err == nil || err.Error() != c.want {
				t.Errorf("got\n  %v, want\n  %s", err, c.want)
			}
		})
	}
}
