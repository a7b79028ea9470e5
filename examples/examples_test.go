//go:build !race

// Package examples tests the programs below it as a user runs them: built, and started by gorun.
package examples

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// bin is the folder of the built gorun and examples.
var bin string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "gorun-examples-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		build := exec.Command("go", "build", "-o", dir+"/", "../cmd/...", "./...")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
			return 1
		}
		bin = dir
		return m.Run()
	}())
}

// gorun runs it on the host platform with a bound and returns what it printed.
func gorun(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	return gorunOn(t, []string{"GORUN_DEVICE=host"}, args...)
}

// gorunOn runs it with more environment.
func gorunOn(t *testing.T, env []string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "gorun"), args...)
	cmd.Env = append(os.Environ(), env...)
	var o, e bytes.Buffer
	cmd.Stdout, cmd.Stderr = &o, &e
	err = cmd.Run()
	return o.String(), e.String(), err
}

func mustGorun(t *testing.T, args ...string) string {
	t.Helper()
	stdout, stderr, err := gorun(t, args...)
	if err != nil {
		t.Fatalf("gorun %s: %v\nstdout:\n%s\nstderr:\n%s", strings.Join(args, " "), err, stdout, stderr)
	}
	return stdout
}

func TestExamplesRun(t *testing.T) {
	for _, name := range []string{"allreduce", "graphreg", "localreg", "arena", "lsapointer", "winuserptr"} {
		for _, n := range []string{"1", "2", "4"} {
			t.Run(name+"/"+n, func(t *testing.T) {
				if out := mustGorun(t, "-np", n, filepath.Join(bin, name)); strings.TrimSpace(out) == "" {
					t.Error("it printed nothing")
				}
			})
		}
	}
}

// TestReadmeProgram runs the program in README.md.
func TestReadmeProgram(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```go\n(package main.*?)```").FindSubmatch(readme)
	if m == nil {
		t.Fatal("README.md has no Go program")
	}
	src := filepath.Join(t.TempDir(), "main.go")
	if err := os.WriteFile(src, m[1], 0o644); err != nil {
		t.Fatal(err)
	}
	prog := filepath.Join(t.TempDir(), "readme")
	build := exec.Command("go", "build", "-o", prog, src)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	out := mustGorun(t, "-np", "3", prog)
	for r := range 3 {
		if want := fmt.Sprintf("rank %d of 3: 1, 0 bytes staged\n", r); !strings.Contains(out, want) {
			t.Errorf("output lacks %q:\n%s", want, out)
		}
	}
}

// TestReadmeCommands tries the command lines of README.md: gorun's as a dry run, the benchmark on small sizes, and wants each make
// target to exist.
func TestReadmeCommands(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	tried := 0
	for _, block := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllSubmatch(readme, -1) {
		for line := range strings.Lines(string(block[1])) {
			line, _, _ = strings.Cut(line, "#")
			word := strings.Fields(line)
			switch {
			case len(word) < 2 || word[0] != "gorun" && word[0] != "make":
				continue
			case word[0] == "make":
				if !bytes.Contains(makefile, []byte("\n"+word[1]+":")) {
					t.Errorf("%s: the Makefile has no such target", line)
				}
				continue
			case word[1] == "bench":
				line = strings.Replace(line, "-e 64M", "-e 64", 1)
			case word[1] == "check" && !slices.Contains(word, "-H"):
				line = strings.Replace(line, "train.toml", "configs/train.toml", 1)
			case word[1] == "check":
				line = "gorun check --help"
			default:
				word[0] = "--dry-run"
				line = strings.Join(word, " ")
			}
			tried++
			line = strings.NewReplacer("./prog", filepath.Join(bin, "barrier"), "./mpi_program", filepath.Join(bin, "barrier"), "python train.py", filepath.Join(bin, "barrier"), "python train_jax.py", filepath.Join(bin, "barrier")).Replace(line)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			cmd := exec.CommandContext(ctx, filepath.Join(bin, "gorun"), strings.Fields(strings.TrimPrefix(strings.TrimSpace(line), "gorun "))...)
			cmd.Dir = ".."
			cmd.Env = append(os.Environ(), "GORUN_DEVICE=host")
			out, err := cmd.CombinedOutput()
			cancel()
			if word[1] == "check" && cmd.ProcessState.ExitCode() == 1 && bytes.Contains(out, []byte("fault: ")) {
				err = nil // this machine has one
			}
			if err != nil {
				t.Errorf("gorun %s: %v\n%s", line, err, out)
			}
		}
	}
	if tried < 5 {
		t.Errorf("only %d command lines found", tried)
	}
}

// TestReadmeJobFile checks the job file in README.md.
func TestReadmeJobFile(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```toml\n(.*?)```").FindSubmatch(readme)
	if m == nil {
		t.Fatal("README.md has no job file")
	}
	file := filepath.Join(t.TempDir(), "job.toml")
	if err := os.WriteFile(file, m[1], 0o644); err != nil {
		t.Fatal(err)
	}
	mustGorun(t, "config", "validate", file)
}

var lossLine = regexp.MustCompile(`(?m)^epoch +(\d+).*\bloss +([0-9.eE+-]+)`)

// losses are the losses by epoch that train printed.
func losses(t *testing.T, out string) []float64 {
	t.Helper()
	var l []float64
	for _, m := range lossLine.FindAllStringSubmatch(out, -1) {
		v, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			t.Fatal(err)
		}
		l = append(l, v)
	}
	if len(l) == 0 {
		t.Fatalf("no losses in\n%s", out)
	}
	return l
}

// TestTrainSameLoss trains on 1, 2, 4 and 7 ranks and wants the losses of one rank from all.
func TestTrainSameLoss(t *testing.T) {
	data := filepath.Join(t.TempDir(), "data.csv")
	mustGorun(t, "-np", "1", filepath.Join(bin, "train"), "-write", data, "-rows", "1501")
	var want []float64
	for _, n := range []string{"1", "2", "4", "7"} {
		out := mustGorun(t, "-np", n, filepath.Join(bin, "train"), "-data", data, "-epochs", "4")
		got := losses(t, out)
		if want == nil {
			want = got
			continue
		}
		if len(got) != len(want) {
			t.Fatalf("%s ranks: %d epochs, 1 rank: %d", n, len(got), len(want))
		}
		for i := range got {
			if math.Abs(got[i]-want[i]) > 1e-5*math.Abs(want[i]) {
				t.Errorf("%s ranks, epoch %d: loss %v, one rank: %v", n, i+1, got[i], want[i])
			}
		}
		if !strings.Contains(out, "released") {
			t.Errorf("%s ranks: the output does not tell that the registrations were released:\n%s", n, out)
		}
	}
}

// TestTrainBadField wants file and line of an empty field.
func TestTrainBadField(t *testing.T) {
	data := filepath.Join(t.TempDir(), "bad.csv")
	if err := os.WriteFile(data, []byte("a,b,label\n1,2,x\n3,,y\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, stderr, err := gorun(t, "-np", "2", filepath.Join(bin, "train"), "-data", data)
	if err == nil {
		t.Fatal("it succeeded")
	}
	if want := data + ":3: "; strings.Count(stderr, want) != 1 {
		t.Errorf("stderr has %q not just once:\n%s", want, stderr)
	}
}
