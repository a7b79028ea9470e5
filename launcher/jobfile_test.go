package launcher

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestDecodeJob(t *testing.T) {
	on := true
	got, err := DecodeJob("job.toml", []byte(`
[job]
np = 4
program = "./train"
args = ["-epochs", "3"]
wdir = "/tmp"
device = "host"

[env]
NCCL_DEBUG = "INFO"
OMP_NUM_THREADS = 4
CHECK = true
LIMIT = 1000000.0
RATE = 0.001

[launch]
timeout = "10m"
kill_grace = 0
tag_output = true
stdin = "none"
keep_launcher_env = true
report = "r.json"
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Job{NP: 4, Program: "./train", Args: []string{"-epochs", "3"}, Dir: "/tmp", Device: "host",
		Env:     []Setting{{Name: "CHECK", Value: "true"}, {Name: "LIMIT", Value: "1000000.0"}, {Name: "NCCL_DEBUG", Value: "INFO"}, {Name: "OMP_NUM_THREADS", Value: "4"}, {Name: "RATE", Value: "0.001"}},
		Timeout: 10 * time.Minute, KillGrace: NoGrace, TagOutput: &on, Stdin: StdinNone, KeepLauncherEnv: true, Report: "r.json"}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
	line := "gorun -np 4 -x CHECK=true -x LIMIT=1000000.0 -x NCCL_DEBUG=INFO -x OMP_NUM_THREADS=4 -x RATE=0.001 --wdir /tmp --device host --stdin none " +
		"--tag-output=true --timeout 10m0s --kill-grace 0 --keep-launcher-env --report r.json ./train -epochs 3"
	if got := got.CommandLine(); got != line {
		t.Errorf("command line:\n got %s\nwant %s", got, line)
	}
}

func TestDecodeJobErrors(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"unknown key", "[job]\nnp = 4\nprogamm = \"x\"\n", "job.toml:3: unknown key job.progamm; did you mean program?"},
		{"far key", "[launch]\nxyzzy = 1\n", "job.toml:2: unknown key launch.xyzzy; known there: timeout, kill_grace, tag_output, stdin, keep_launcher_env, report"},
		{"unknown table", "\n[jobs]\n", "job.toml:2: unknown key jobs; did you mean job?"},
		{"top level", "np = 4\n", "job.toml:1: unknown key np; known there: job, env, launch"},
		{"dotted", "job.npp = 4\n", "job.toml:1: unknown key job.npp; did you mean np?"},
		{"syntax", "[job]\nnp = \n", "job.toml:2: expected value but found '\\n' instead"},
		{"type", "[job]\nnp = \"four\"\n", "job.toml:2: job.np is of type string, must be of type integer"},
		{"np", "[job]\nnp = 0\n", "job.toml:2: np = 0: must be from 1 to 16384"},
		{"timeout", "[launch]\ntimeout = \"soon\"\n", "job.toml:2: timeout = soon: must be a duration such as \"10m\", or a number of seconds"},
		{"grace", "[launch]\n\nkill_grace = -1\n", "job.toml:3: kill_grace = -1: must be a duration such as \"30s\", or a number of seconds"},
		{"stdin", "[launch]\nstdin = 3\n", "job.toml:2: stdin = 3: must be 0 or \"none\""},
		{"env", "[env]\nA = [1]\n", "job.toml:2: variable A: must be a string, a number, true or false"},
		{"env place", "[env]\nRANK = 1\n", "job.toml:2: variable RANK: it tells a rank its place in the job, gorun sets it"},
		{"table as a value", "job = 3\n", "job.toml:1: job must be a table: [job]"},
		{"array for a string", "[job]\nprogram = [\"x\"]\n", "job.toml:2: job.program is of type array, must be of type string"},
		{"fraction", "[job]\nnp = 1.5\n", "job.toml:2: job.np is of type float, must be of type integer"},
		{"other case", "[job]\nprogram = \"x\"\nNP = 4\n", "job.toml:3: unknown key job.NP; did you mean np?"},
		{"other case of a table", "[Job]\nprogram = \"x\"\n", "job.toml:1: unknown key Job; did you mean job?"},
		{"table in env", "[env.A]\nb = 1\n", "job.toml:1: variable A: must be a string, a number, true or false"},
		{"empty report", "[launch]\nreport = \"\"\n", "job.toml:2: report is empty"},
		{"empty program", "[job]\nprogram = \"\"\n", "job.toml:2: program is empty"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := DecodeJob("job.toml", []byte(c.text))
			if err == nil {
				t.Fatal("no error")
			}
			if _, ok := errors.AsType[*UsageError](err); !ok {
				t.Errorf("got a %T, want a *UsageError", err)
			}
			if d := cmp.Diff(err.Error(), c.want); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
		})
	}
}

func TestReadJobFileMissing(t *testing.T) {
	_, err := ReadJobFile("/nonexistent/job.toml")
	if want := "job file /nonexistent/job.toml: no such file or directory"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// Every example in configs is a job file.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../configs/*.toml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples in configs: %v", err)
	}
	for _, f := range files {
		job, err := ReadJobFile(f)
		if err != nil {
			t.Error(err)
			continue
		}
		if job.Program == "" {
			t.Errorf("%s names no program", f)
		}
	}
}

func FuzzDecodeJob(f *testing.F) {
	f.Add([]byte("[job]\nnp = 4\nprogram = \"x\"\n[env]\nA = 1\n[launch]\ntimeout = \"1s\"\n"))
	f.Add([]byte("job.np = 1\nenv = {A = \"b\"}\n[[launch]]\n"))
	files, _ := filepath.Glob("../configs/*.toml")
	for _, name := range files {
		if data, err := os.ReadFile(name); err == nil {
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		job, err := DecodeJob("job.toml", data)
		if err != nil {
			if _, ok := errors.AsType[*UsageError](err); !ok || !strings.HasPrefix(err.Error(), "job.toml") {
				t.Fatalf("error %v (%T) does not name the file", err, err)
			}
			return
		}
		// What was accepted can be planned.
		if _, err := job.Plan(testFacts); err != nil {
			t.Fatalf("accepted, but no plan: %v", err)
		}
	})
}
