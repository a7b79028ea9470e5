package pmix

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/procman"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// openMPI is a program of Open MPI, testdata/openmpi.c.
var openMPI = sync.OnceValues(func() (string, error) {
	if _, err := exec.LookPath("mpicc.openmpi"); err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "pmix-test-")
	if err != nil {
		return "", err
	}
	program := filepath.Join(dir, "openmpi")
	if out, err := exec.Command("mpicc.openmpi", "-Wall", "-o", program, "testdata/openmpi.c").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return program, nil
})

func needOpenMPI(t *testing.T) string {
	t.Helper()
	program, err := openMPI()
	if err != nil {
		citest.Lacking(t, "a program of Open MPI: %v", err)
	}
	return program
}

// run runs a program of Open MPI as all ranks of a job, and returns what each has printed, and how each has left.
func (j *job) run(t *testing.T, program, what string) (out []string, left []procman.Departure) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	out, left = make([]string, len(j.hostOf)), make([]procman.Departure, len(j.hostOf))
	var wg sync.WaitGroup
	for r := range j.hostOf {
		wg.Go(func() {
			cmd := exec.CommandContext(ctx, program, what)
			cmd.WaitDelay = bound / 10
			for _, kv := range os.Environ() {
				if !strings.HasPrefix(kv, "OMPI_") && !strings.HasPrefix(kv, "PMIX_") {
					cmd.Env = append(cmd.Env, kv)
				}
			}
			cmd.Env = append(cmd.Env, j.server(r).Environ(r)...)
			b, err := cmd.CombinedOutput()
			out[r], left[r] = string(b), j.server(r).Ended(r)
			if err != nil {
				out[r] += err.Error()
			}
		})
	}
	wg.Wait()
	return out, left
}

// clean fails the test if something of the job is left.
func (j *job) clean(t *testing.T) {
	t.Helper()
	for _, s := range j.servers {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	if len(j.dirs) != 2*len(j.servers) {
		t.Errorf("%d servers have made %q", len(j.servers), j.dirs)
	}
	for _, dir := range j.dirs {
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", dir, err)
		}
	}
}

func TestOpenMPI(t *testing.T) {
	program := needOpenMPI(t)
	for _, hostOf := range [][]int{{0}, {0, 0}, {0, 0, 0, 0}, make([]int, 8), {0, 1}, {0, 0, 1, 2, 1}} {
		t.Run(fmt.Sprint(hostOf), func(t *testing.T) {
			j := start(t, hostOf...)
			out, left := j.run(t, program, "hello")
			here := map[int]int{}
			for _, h := range hostOf {
				here[h]++
			}
			for r, h := range hostOf {
				want := fmt.Sprintf("rank %d of %d, program 0, %d on its host, universe %d: good\n", r, len(hostOf), here[h], len(hostOf)+5)
				if diff := cmp.Diff(want, out[r]); diff != "" {
					t.Errorf("rank %d has printed (-want +got):\n%s", r, diff)
				}
				if left[r] != (procman.Departure{}) {
					t.Errorf("rank %d has left: %+v", r, left[r])
				}
			}
			j.clean(t)
		})
	}
}

func TestOpenMPIEnds(t *testing.T) {
	program := needOpenMPI(t)
	t.Run("abort", func(t *testing.T) {
		j := start(t, 0)
		out, left := j.run(t, program, "abort")
		want := procman.Departure{Aborted: true, Code: 7}
		if got := j.ended(t); got != (departure{0, want}) {
			t.Errorf("told: %+v", got)
		}
		want.Unfinished = true
		if left[0] != want || !strings.Contains(out[0], "exit status 7") {
			t.Errorf("left: %+v, want %+v; printed:\n%s", left[0], want, out[0])
		}
	})
	for what, want := range map[string]procman.Departure{"silent": {Silent: true}, "exit": {Unfinished: true}, "die": {Unfinished: true}} {
		t.Run(what, func(t *testing.T) {
			j := start(t, 0)
			out, left := j.run(t, program, what)
			if left[0] != want {
				t.Errorf("left: %+v, want %+v; printed:\n%s", left[0], want, out[0])
			}
			j.clean(t)
		})
	}
}
