package launcher

import (
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// needing makes an executable that needs a library of the given name, and says its path.
func needing(t *testing.T, gcc, dir, name, lib string) string {
	t.Helper()
	write(t, filepath.Join(dir, "lib.c"), "int far(void) { return 0; }\n", 0o644)
	write(t, filepath.Join(dir, "main.c"), "int far(void); int main(void) { return far(); }\n", 0o644)
	for _, args := range [][]string{{"-shared", "-fPIC", "-Wl,-soname," + lib, "-o", lib, "lib.c"}, {"-o", name, "main.c", "./" + lib}} {
		cmd := exec.Command(gcc, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("gcc: %v\n%s", err, out)
		}
	}
	return filepath.Join(dir, name)
}

// The process manager that ranks find, and what is said where they find none.
func TestMPIChoice(t *testing.T) {
	gcc := citest.Program(t, "gcc")
	dir := t.TempDir()
	made := map[string]Program{}
	for _, lib := range []string{"libmpi.so.1", "libmpich.so.10", "libmpi.so.12", "libmpifort.so.12", "libmpir.so.23", "libmpi.so.20", "libmpi.so.40", "libmpi_abi.so.0"} {
		file := needing(t, gcc, dir, "with "+lib, lib)
		prog, err := FindProgram(file, "")
		if err != nil {
			t.Fatal(err)
		}
		made[lib] = prog
	}
	write(t, dir+"/script", "#!/bin/sh\n: libmpi.so.12\n", 0o755)
	script, err := FindProgram(dir+"/script", "")
	if err != nil {
		t.Fatal(err)
	}
	pipe := Program{Name: "./pipe", Path: dir + "/pipe"}
	if err := syscall.Mkfifo(pipe.Path, 0o755); err != nil {
		t.Fatal(err)
	}
	pipe.MPI = mpiLibrary(pipe.Path)
	all := append(slices.Collect(maps.Values(made)), script, pipe)
	alone := func(lib string) string {
		return fmt.Sprintf("'%s/with %s' is linked with MPI (%s): gorun does not know which process manager it asks for (--mpi), each rank would be alone, rank 0 of 1; start it with its own mpirun", dir, lib, lib)
	}
	app := func(np int, p Program, mpi string, env ...Setting) App {
		return App{NP: np, Program: p.Name, Env: env, MPI: mpi}
	}
	keep := true
	outer := []string{"PMI_RANK=0", "PMI_SIZE=2"}
	for _, c := range []struct {
		name    string
		apps    []App
		job     Job
		environ []string
		want    []string // of the apps
		worlds  []agentwire.World
		notes   []string
	}{
		{name: "MPICH", apps: []App{app(2, made["libmpich.so.10"], "")}, want: []string{"pmi"}, worlds: []agentwire.World{{Dialect: "pmi", Runs: []agentwire.Run{{First: 0, Ranks: 2, App: 0}}}}},
		{name: "its common name", apps: []App{app(2, made["libmpi.so.12"], "auto")}, want: []string{"pmi"}, worlds: []agentwire.World{{Dialect: "pmi", Runs: []agentwire.Run{{First: 0, Ranks: 2, App: 0}}}}},
		{name: "Open MPI", apps: []App{app(2, made["libmpi.so.40"], "")}, want: []string{"pmix"}, worlds: []agentwire.World{{Dialect: "pmix", Runs: []agentwire.Run{{First: 0, Ranks: 2, App: 0}}}}},
		{name: "two kinds", apps: []App{app(2, made["libmpi.so.40"], ""), app(1, made["libmpi.so.12"], ""), app(1, script, "pmix")}, want: []string{"pmix", "pmi", "pmix"}, worlds: []agentwire.World{
			{Dialect: "pmix", Runs: []agentwire.Run{{First: 0, Ranks: 2, App: 0}, {First: 3, Ranks: 1, App: 2}}}, {Dialect: "pmi", Runs: []agentwire.Run{{First: 2, Ranks: 1, App: 1}}}}},
		{name: "Open MPI 2", apps: []App{app(2, made["libmpi.so.20"], "")}, want: []string{""}, notes: []string{alone("libmpi.so.20")}},
		{name: "Fortran", apps: []App{app(1, made["libmpifort.so.12"], "")}, want: []string{"pmi"}, worlds: []agentwire.World{{Dialect: "pmi", Runs: []agentwire.Run{{First: 0, Ranks: 1, App: 0}}}}},
		{name: "off", apps: []App{app(2, made["libmpi.so.12"], "off")}, want: []string{""}},
		{name: "off for the job", apps: []App{app(2, made["libmpi.so.12"], "")}, job: Job{MPI: "off"}, want: []string{""}},
		{name: "too old", apps: []App{app(2, made["libmpi.so.1"], "")}, want: []string{""}, notes: []string{alone("libmpi.so.1")}},
		{name: "of no name", apps: []App{app(2, made["libmpi_abi.so.0"], "")}, want: []string{""}, notes: []string{alone("libmpi_abi.so.0")}},
		{name: "one rank is alone", apps: []App{app(1, made["libmpi.so.1"], "")}, want: []string{""}},
		{name: "too old, and off", apps: []App{app(2, made["libmpi.so.1"], "off")}, want: []string{""}},
		{name: "long integers", apps: []App{app(2, made["libmpir.so.23"], "")}, want: []string{""}},
		{name: "a script", apps: []App{app(2, script, "")}, want: []string{""}},
		{name: "a pipe", apps: []App{app(2, pipe, "")}, want: []string{""}},
		{name: "a script with", apps: []App{app(2, script, "pmi")}, want: []string{"pmi"}, worlds: []agentwire.World{{Dialect: "pmi", Runs: []agentwire.Run{{First: 0, Ranks: 2, App: 0}}}}},
		{name: "on hosts", apps: []App{app(2, made["libmpi.so.1"], "")}, job: Job{Hosts: []Host{{Name: "a", Addr: "a"}, {Name: "b", Addr: "b"}}}, want: []string{""}, notes: []string{alone("libmpi.so.1")}},
		{name: "several", apps: []App{app(1, made["libmpi.so.12"], ""), app(2, script, ""), app(3, script, "pmi"), app(1, made["libmpi.so.1"], ""), app(1, made["libmpi.so.1"], "")},
			want:   []string{"pmi", "", "pmi", "", ""},
			worlds: []agentwire.World{{Dialect: "pmi", Runs: []agentwire.Run{{First: 0, Ranks: 1, App: 0}, {First: 3, Ranks: 3, App: 2}}}}, notes: []string{alone("libmpi.so.1")}},
		{name: "variables are kept", apps: []App{app(2, made["libmpi.so.12"], "", Setting{Name: "PMI_RANK", Inherit: true})}, environ: outer, want: []string{""}},
		{name: "all are", apps: []App{app(2, made["libmpi.so.12"], "")}, job: Job{KeepLauncherEnv: &keep}, environ: outer, want: []string{""}},
		{name: "or set", apps: []App{app(2, made["libmpi.so.12"], "", Setting{Name: "PMIX_RANK", Value: "0"})}, want: []string{""}},
		{name: "are kept by one", apps: []App{app(1, made["libmpi.so.12"], "", Setting{Name: "PMI_RANK", Inherit: true}), app(1, made["libmpi.so.12"], "")}, environ: outer,
			want: []string{"", "pmi"}, worlds: []agentwire.World{{Dialect: "pmi", Runs: []agentwire.Run{{First: 1, Ranks: 1, App: 1}}}}},
		{name: "but pmi is wanted", apps: []App{app(2, made["libmpi.so.12"], "pmi")}, job: Job{KeepLauncherEnv: &keep}, environ: outer, want: []string{"pmi"},
			worlds: []agentwire.World{{Dialect: "pmi", Runs: []agentwire.Run{{First: 0, Ranks: 2, App: 0}}}}},
		{name: "are taken away", apps: []App{app(2, made["libmpi.so.12"], "")}, environ: outer, want: []string{"pmi"}, worlds: []agentwire.World{{Dialect: "pmi", Runs: []agentwire.Run{{First: 0, Ranks: 2, App: 0}}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			job := c.job
			job.Apps = c.apps
			var programs []Program
			for _, a := range c.apps {
				i := slices.IndexFunc(all, func(p Program) bool { return p.Name == a.Program })
				programs = append(programs, all[i])
			}
			p, err := job.Plan(Facts{Programs: programs, Host: "here", Dir: dir, Environ: c.environ})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, a := range p.Apps {
				got = append(got, a.MPI)
			}
			if diff := cmp.Diff(got, c.want); diff != "" {
				t.Errorf("process managers (-got +want):\n%s", diff)
			}
			if diff := cmp.Diff(p.mpiWorlds(), c.worlds); diff != "" {
				t.Errorf("worlds (-got +want):\n%s", diff)
			}
			if diff := cmp.Diff(p.MPINotes(), c.notes); diff != "" {
				t.Errorf("notes (-got +want):\n%s", diff)
			}
		})
	}
}

func TestWithoutManagers(t *testing.T) {
	env := []string{"PMI_RANK=1", "PATH=/bin", "PMI2_X=", "PMIX_NAMESPACE=n", "PMIX_MCA_gds=hash", "PMI_DEBUG=1", "MPI_LOCALNRANKS=2", "OMPI_COMM_WORLD_RANK=1", "OMPI_MCA_btl=tcp", "PMIRANK=1", "I_MPI_PMI_LIBRARY=/slurm/libpmi.so", "I_MPI_FABRICS=shm"}
	if diff := cmp.Diff(withoutManagers(env), []string{"PATH=/bin", "PMIX_MCA_gds=hash", "PMI_DEBUG=1", "OMPI_MCA_btl=tcp", "PMIRANK=1", "I_MPI_FABRICS=shm"}); diff != "" {
		t.Errorf("-got +want:\n%s", diff)
	}
}
