package launcher

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
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

func TestMPINotes(t *testing.T) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		if os.Getenv("GORUN_CI") == "1" {
			t.Fatal("gcc is missing, and GORUN_CI=1 demands it")
		}
		t.Skip("gcc is missing: it builds the programs that this test looks at")
	}
	dir := t.TempDir()
	open := Program{Name: "./open", Path: needing(t, gcc, dir, "open", "libmpi.so.40")}
	mpich := Program{Name: "./mpi ch", Path: needing(t, gcc, dir, "mpich", "libmpich.so.12")}
	integers := Program{Name: "./integers", Path: needing(t, gcc, dir, "integers", "libmpir.so.23")}
	write(t, dir+"/script", "#!/bin/sh\n: libmpi.so.40\n", 0o755)
	script := Program{Name: "./script", Path: dir + "/script"}
	pipe := Program{Name: "./pipe", Path: dir + "/pipe"}
	if err := syscall.Mkfifo(pipe.Path, 0o755); err != nil {
		t.Fatal(err)
	}
	const does = ": gorun does not speak PMI, each rank would be alone, rank 0 of 1; start it with mpirun"
	app := func(np int, p Program, env ...Setting) App { return App{NP: np, Program: p.Name, Env: env} }
	for _, c := range []struct {
		name     string
		apps     []App
		programs []Program
		job      Job
		environ  []string
		want     []string
	}{
		{name: "linked", apps: []App{app(2, open)}, programs: []Program{open}, want: []string{"./open is linked with MPI (libmpi.so.40)" + does}},
		{name: "on hosts", apps: []App{app(2, open)}, programs: []Program{open}, job: Job{Hosts: []Host{{Name: "a", Addr: "a"}, {Name: "b", Addr: "b"}}},
			want: []string{"./open is linked with MPI (libmpi.so.40)" + does}},
		{name: "of several each", apps: []App{app(1, open), app(1, script), app(1, mpich)}, programs: []Program{open, script, mpich},
			want: []string{"./open is linked with MPI (libmpi.so.40)" + does, "'./mpi ch' is linked with MPI (libmpich.so.12)" + does}},
		{name: "one rank is alone", apps: []App{app(1, open)}, programs: []Program{open}},
		{name: "another library", apps: []App{app(2, integers)}, programs: []Program{integers}},
		{name: "a script", apps: []App{app(2, script)}, programs: []Program{script}},
		{name: "a pipe", apps: []App{app(2, pipe)}, programs: []Program{pipe}},
		{name: "a Go package", apps: []App{app(2, Program{Name: "./go"})}, programs: []Program{{Name: "./go", GoDir: dir}}},
		{name: "a process manager's variables are kept", apps: []App{app(2, open, Setting{Name: "PMI_RANK", Inherit: true})}, programs: []Program{open}, environ: []string{"PMI_RANK=0", "PMI_SIZE=2"}},
		{name: "or set", apps: []App{app(2, open, Setting{Name: "PMIX_RANK", Value: "0"})}, programs: []Program{open}},
		{name: "but taken away", apps: []App{app(2, open)}, programs: []Program{open}, environ: []string{"PMI_RANK=0", "PMI_SIZE=2"},
			want: []string{"./open is linked with MPI (libmpi.so.40)" + does}},
	} {
		t.Run(c.name, func(t *testing.T) {
			job := c.job
			job.Apps = c.apps
			p, err := job.Plan(Facts{Programs: c.programs, Host: "here", Dir: dir, Environ: c.environ})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, p.MPINotes()); diff != "" {
				t.Errorf("notes (-want +got):\n%s", diff)
			}
		})
	}
}
