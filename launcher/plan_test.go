package launcher

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
	Program: Program{Name: "./prog", Path: "/srv/prog"},
	Host:    "a",
	Dir:     "/srv",
	Environ: []string{"PATH=/bin", "HOME=/h", "HOME=/second", "SLURM_PROCID=3", "OMPI_COMM_WORLD_RANK=1", "RANK=9", "GORUN_JOB_ID=outer", "MASTER_PORT=1"},
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

func TestPlanEnvironment(t *testing.T) {
	job := Job{NP: 3, Program: "./prog", Env: []Setting{{Name: "HOME", Value: "/mine"}, {Name: "X", Value: "1"}, {Name: "X", Value: "2"}}}
	p, err := job.Plan(testFacts)
	if err != nil {
		t.Fatal(err)
	}
	env := p.environ(&p.Ranks[2], p.atLaunch("id", "sock", "127.0.0.1", 4711))
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
	job.KeepLauncherEnv = true
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
		{"device", Job{Env: []Setting{{Name: "GORUN_DEVICE", Value: "host"}}}, "variable GORUN_DEVICE: use --device, or device in the job file"},
		{"no name", Job{Env: []Setting{{Value: "1"}}}, `variable "": not a name`},
		{"zero byte", Job{Env: []Setting{{Name: "A", Value: "\x00"}}}, "variable A: its value holds a zero byte"},
		{"stdin", Job{Stdin: "3"}, "stdin 3: must be 0 or none"},
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

// A shell reads what shellQuote writes.
func TestShellQuote(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		if os.Getenv("GORUN_CI") == "1" {
			t.Fatal("bash is not installed, and GORUN_CI=1 demands it")
		}
		t.Skip("bash is not installed")
	}
	all := make([]byte, 255)
	for i := range all {
		all[i] = byte(i + 1)
	}
	for _, s := range []string{"", "a", "a b", "it's", `back\slash`, `"q"`, "$HOME", "`x`", "tab\t", "\n", "ü", "\xff'", "*", "~", "-x", string(all)} {
		out, err := exec.Command(bash, "-c", "printf %s "+shellQuote(s)).Output()
		if err != nil || string(out) != s {
			t.Errorf("shellQuote(%q) = %s: the shell reads %q (%v)", s, shellQuote(s), out, err)
		}
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
		if got, err := ParseDuration(in); err != nil || got != want {
			t.Errorf("ParseDuration(%q) = %v, %v, want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "x", "-1", "-1s", "5 s"} {
		if got, err := ParseDuration(in); err == nil {
			t.Errorf("ParseDuration(%q) = %v, want an error", in, got)
		}
	}
	if got, err := ParseGrace("0s"); err != nil || got != NoGrace {
		t.Errorf("ParseGrace(0s) = %v, %v, want NoGrace", got, err)
	}
}
