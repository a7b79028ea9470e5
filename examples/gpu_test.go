//go:build !race

package examples

import (
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/examples/internal/exampletest"
)

// onGPUs is the start of a command line that gives each rank the GPU of its local rank's number.
var onGPUs = []string{"sh", "-c", `GORUN_DEVICE=$GORUN_LOCAL_RANK exec "$@"`, "sh"}

// TestGPUExamples runs each example, the same binary, on libraries that stand in for a GPU's.
func TestGPUExamples(t *testing.T) {
	env := exampletest.FakeGPUs(t, ".")
	for _, name := range []string{"allreduce", "graphreg", "localreg", "arena", "lsapointer", "winuserptr"} {
		for _, n := range []string{"1", "2", "3"} {
			t.Run(name+"/"+n, func(t *testing.T) {
				args := append([]string{"-np", n}, onGPUs...)
				out, stderr, err := gorunOn(t, env, append(args, filepath.Join(bin, name))...)
				if err != nil {
					t.Fatalf("%v\nstdout:\n%s\nstderr:\n%s", err, out, stderr)
				}
				if strings.TrimSpace(out) == "" {
					t.Error("it printed nothing")
				}
				t.Log(out)
			})
		}
	}
}

// TestGPUTrain wants the losses of the host platform from GPUs.
func TestGPUTrain(t *testing.T) {
	env := exampletest.FakeGPUs(t, ".")
	data := filepath.Join(t.TempDir(), "data.csv")
	mustGorun(t, "-np", "1", filepath.Join(bin, "train"), "-write", data, "-rows", "1501")
	train := []string{filepath.Join(bin, "train"), "-data", data, "-epochs", "4"}
	want := losses(t, mustGorun(t, append([]string{"-np", "2"}, train...)...))
	for _, n := range []string{"1", "2", "3"} {
		args := append([]string{"-np", n}, onGPUs...)
		out, stderr, err := gorunOn(t, env, append(args, train...)...)
		if err != nil {
			t.Fatalf("%s ranks: %v\nstdout:\n%s\nstderr:\n%s", n, err, out, stderr)
		}
		exampletest.Contains(t, out, "(CUDA device 0", "released: yes (0 live, 0 pending)")
		got := losses(t, out)
		if len(got) != len(want) {
			t.Fatalf("%s ranks: %d epochs, %d on the host platform", n, len(got), len(want))
		}
		for i := range got {
			if math.Abs(got[i]-want[i]) > 1e-5*want[i] {
				t.Errorf("%s ranks, epoch %d: loss %v, %v on the host platform", n, i+1, got[i], want[i])
			}
		}
		t.Log(out)
	}
}
