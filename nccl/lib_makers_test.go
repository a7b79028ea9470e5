package nccl_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/nccl"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// makerVar says whose names the libraries have that tests build: MUSA or HIP, else CUDA.
const makerVar = "GORUN_TEST_MAKER"

type maker struct {
	name            string
	driver, library gpulib.Search
}

func makerOf(t testing.TB) maker {
	t.Helper()
	switch name := os.Getenv(makerVar); name {
	case "":
		return maker{"CUDA", gpulib.CUDA, gpulib.NCCL}
	case "MUSA":
		return maker{name, gpulib.MUSA, gpulib.MCCL}
	case "HIP":
		return maker{name, gpulib.HIP, gpulib.RCCL}
	default:
		t.Fatalf("%s=%s", makerVar, name)
		return maker{}
	}
}

// libraries builds the driver and the collective library, and tells ranks where they are. args are for the compiler of the second.
func (m maker) libraries(t testing.TB, args ...string) []string {
	t.Helper()
	const driver, library = "../cuda/testdata/driver.c", "testdata/nccl.c"
	args = append(args, "-lpthread", "-ldl", fmt.Sprintf("-DDRIVER=%q", m.driver.Env))
	return []string{
		m.driver.Env + "=" + dltest.Build(t, driver, m.driver.Sonames[0], append(dltest.Maker(t, m.name, driver), "-lpthread")...),
		m.library.Env + "=" + dltest.Build(t, library, m.library.Sonames[0], append(dltest.Maker(t, m.name, library), args...)...),
	}
}

// TestLibraryMakers runs tests beside it with Moore Threads' and AMD's names of all functions of driver and library.
func TestLibraryMakers(t *testing.T) {
	if os.Getenv(makerVar) != "" {
		t.Skip("runs with another maker's names already")
	}
	if testing.Short() {
		t.Skip("-short: the same code with libraries of other names")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Run("fake", func(t *testing.T) {
		fakeLibraries(t) // or says what is missing
		for _, m := range []string{"MUSA", "HIP"} {
			t.Run(m, func(t *testing.T) {
				dltest.Parallel(t)
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // against hanging only
				defer cancel()
				cmd := exec.CommandContext(ctx, self, "-test.v", "-test.timeout=4m",
					"-test.run=^TestLibrary(Explain|Collectives|Captured|PointToPoint|Window)$/^(fake|with_addresses)$")
				cmd.Env = append(os.Environ(), makerVar+"="+m)
				out, err := cmd.CombinedOutput()
				if err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				if n := strings.Count(string(out), "\n--- PASS: Test"); n != 5 {
					t.Errorf("%d tests ran, want 5:\n%s", n, out)
				}
			})
		}
	})
}

// A library of a maker whose hardware nobody has run this on is not told to be able, and none is told to lack what its manual has.
func TestLibraryExplain(t *testing.T) {
	able := "yes: "
	if os.Getenv(makerVar) != "" {
		able = "unproven: "
	}
	t.Run("fake", func(t *testing.T) {
		allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
			return withDevice(ctx, job, nil, func(w *world) error {
				text := nccl.Explain(w.comm)
				for _, what := range []string{"registration, local", "registration, graph", "within a host (P2P)", "between hosts (network)", "windows"} {
					if !strings.Contains(text, fmt.Sprintf("\n%-28s %s", what+":", able)) {
						return fmt.Errorf("%s is not %q:\n%s", what, able, text)
					}
				}
				return nil
			})
		}, fakeLibraries(t)...))
	})
}
