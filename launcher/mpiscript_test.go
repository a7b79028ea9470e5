package launcher

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// python makes an interpreter with an mpi4py that is linked with a library, or none, and says the interpreter's path.
func python(t *testing.T, dir string, libraries ...string) string {
	t.Helper()
	write(t, filepath.Join(dir, "bin/python3.11"), "#!/bin/sh\n", 0o755)
	if err := os.Symlink("python3.11", filepath.Join(dir, "bin/python3")); err != nil {
		t.Fatal(err)
	}
	for _, lib := range libraries {
		made := needing(t, citest.Program(t, "gcc"), t.TempDir(), "x", lib)
		packages := filepath.Join(dir, "lib/python3.11/site-packages/mpi4py")
		if err := os.MkdirAll(packages, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := copyProgram(made, filepath.Join(packages, "MPI."+lib+".so")); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, "bin/python3")
}

func TestScriptMPI(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	t.Setenv("PYTHONPATH", "")
	dir := t.TempDir()
	mpich := python(t, dir+"/mpich", "libmpich.so.12")
	twice := python(t, dir+"/twice", "libmpi.so.12", "libmpich.so.12")
	both := python(t, dir+"/both", "libmpi.so.12", "libmpi.so.40")
	without := python(t, dir+"/without")
	write(t, dir+"/uses.py", "import os\nfrom mpi4py import MPI\n", 0o644)
	write(t, dir+"/later.py", "def f():\n    import mpi4py\n", 0o644)
	write(t, dir+"/speaks.py", "# import mpi4py\nprint('import mpi4py')\nimport mpi4pyx\n", 0o644)
	write(t, dir+"/runs", "#!"+mpich+" -u\nimport mpi4py.MPI\n", 0o755)
	write(t, dir+"/env", "#!/usr/bin/env -S "+mpich+"\nimport mpi4py.MPI\n", 0o755)
	write(t, dir+"/shell", "#!/bin/sh\nimport mpi4py\n", 0o755)
	write(t, dir+"/long.py", strings.Repeat("#\n", maxScript)+"import mpi4py\n", 0o644)
	needing(t, citest.Program(t, "gcc"), dir, "linked", "libmpich.so.12")
	tool := dir + "/bin/tool"
	write(t, tool, "#!/bin/sh\n", 0o755)
	write(t, dir+"/wrap", "#!/usr/bin/env bash\n# mpirun ./linked\nexport A=1; [ -e ./runs ] &&\n\texec './linked' \"$@\"\n", 0o755)
	write(t, dir+"/launches", "#!/bin/sh\nn=2; ./linked; /usr/bin/mpirun -n $n ./linked\n", 0o755)
	write(t, dir+"/comment", "#!/bin/sh\n  # ./linked\n", 0o755)
	named := ScriptMPI{Script: "./linked", Library: "libmpich.so.12", Named: true}
	write(t, dir+"/bin/mpiexec.hydra", "#!/bin/sh\n", 0o755)
	for _, c := range []struct {
		name    string
		program string
		args    []string
		want    ScriptMPI
	}{
		{"a script", mpich, []string{"uses.py", "x"}, ScriptMPI{Script: "uses.py", Library: "libmpich.so.12"}},
		{"its whole path", mpich, []string{dir + "/uses.py"}, ScriptMPI{Script: dir + "/uses.py", Library: "libmpich.so.12"}},
		{"behind options", mpich, []string{"-u", "-X", "dev", "-W", "error", "later.py"}, ScriptMPI{Script: "later.py", Library: "libmpich.so.12"}},
		{"a script itself", dir + "/runs", nil, ScriptMPI{Script: dir + "/runs", Library: "libmpich.so.12"}},
		{"by env", dir + "/env", nil, ScriptMPI{Script: dir + "/env", Library: "libmpich.so.12"}},
		{"of one kind twice", twice, []string{"uses.py"}, ScriptMPI{Script: "uses.py", Library: "libmpich.so.12"}},
		{"of two kinds", both, []string{"uses.py"}, ScriptMPI{Script: "uses.py"}},
		{"not installed", without, []string{"uses.py"}, ScriptMPI{Script: "uses.py"}},
		{"not imported", mpich, []string{"speaks.py"}, ScriptMPI{}},
		{"too far behind", mpich, []string{"long.py"}, ScriptMPI{}},
		{"a module", mpich, []string{"-m", "mpi4py.futures", "uses.py"}, ScriptMPI{}},
		{"code", mpich, []string{"-c", "import mpi4py", "uses.py"}, ScriptMPI{}},
		{"nothing", mpich, nil, ScriptMPI{}},
		{"not there", mpich, []string{"gone.py"}, ScriptMPI{}},
		{"a directory", mpich, []string{"."}, ScriptMPI{}},
		{"another interpreter", dir + "/shell", []string{"uses.py"}, ScriptMPI{}},
		{"a tool", tool, []string{"-n", "1", "./linked", "x"}, ScriptMPI{Script: "./linked", Library: "libmpich.so.12", Given: true}},
		{"a tool and a program without MPI", tool, []string{"./runs", "x"}, ScriptMPI{}},
		{"a tool and a name", tool, []string{"linked"}, ScriptMPI{}},
		{"another launcher", dir + "/bin/mpiexec.hydra", []string{"-n", "1", "./linked"}, ScriptMPI{}},
		{"a shell script", dir + "/wrap", []string{"x"}, named},
		{"a shell and a script", "/bin/sh", []string{"-e", "wrap", "x"}, named},
		{"a shell and text", "/bin/sh", []string{"-ec", "cd /;(./linked)>out", "./runs"}, named},
		{"a shell, its options and text", "/bin/sh", []string{"--posix", "-euo", "pipefail", "-c", "exec ./linked"}, named},
		{"a shell, more of its options and text", "/bin/sh", []string{"-ceu", "exec ./linked"}, named},
		{"a shell, its options and a script", "/bin/sh", []string{"-o", "pipefail", "wrap"}, named},
		{"a shell script and a program", dir + "/wrap", []string{"./linked"}, ScriptMPI{Script: "./linked", Library: "libmpich.so.12", Given: true}},
		{"a shell script that launches", dir + "/launches", nil, ScriptMPI{}},
		{"a shell script's comment", dir + "/comment", nil, ScriptMPI{}},
		{"a shell and no text", "/bin/sh", []string{"-c"}, ScriptMPI{}},
		{"a shell and nothing", "/bin/sh", nil, ScriptMPI{}},
		{"Python and a program", mpich, []string{"speaks.py", "./linked"}, ScriptMPI{}},
	} {
		p, err := FindProgram(c.program, "")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(findScriptMPI(p, c.args, dir), c.want); diff != "" {
			t.Errorf("%s (-got +want):\n%s", c.name, diff)
		}
	}
	if got := findScriptMPI(Program{Name: "python3"}, []string{"uses.py"}, dir); got != (ScriptMPI{}) {
		t.Errorf("a program of other hosts: got %+v", got)
	}
}

// A script's name is one of the directory that its program runs in.
func TestFindScripts(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	t.Setenv("PYTHONPATH", "")
	dir := t.TempDir()
	prog := Program{Name: "python3", Path: python(t, dir)}
	write(t, dir+"/a/uses.py", "import mpi4py\n", 0o644)
	app := func(dir string) App { return App{NP: 1, Program: "python3", Args: []string{"uses.py"}, Dir: dir} }
	for _, c := range []struct {
		name string
		job  Job
		dir  string
		want []bool
	}{
		{"the current one", Job{Program: "python3", Args: []string{"uses.py"}}, dir + "/a", []bool{true}},
		{"another", Job{Program: "python3", Args: []string{"uses.py"}}, dir, []bool{false}},
		{"the job's", Job{Program: "python3", Args: []string{"uses.py"}, Dir: "a"}, dir, []bool{true}},
		{"a program's", Job{Dir: "/", Apps: []App{app("a"), app(dir + "/a"), app("")}}, dir, []bool{true, true, false}},
		{"a job that is none", Job{NP: 3, Apps: []App{app("a")}}, dir, nil},
	} {
		f := Facts{Dir: c.dir}
		for range c.job.Programs() {
			f.Programs = append(f.Programs, prog)
		}
		var got []bool
		for _, s := range c.job.FindScripts(f) {
			got = append(got, s.Script != "")
		}
		if diff := cmp.Diff(got, c.want); diff != "" {
			t.Errorf("%s (-got +want):\n%s", c.name, diff)
		}
	}
}

// What a script says decides what its ranks find, or is told.
func TestPlanOfScripts(t *testing.T) {
	prog := Program{Name: "python3", Path: "/usr/bin/python3"}
	plan := func(np int, mpi string, s ScriptMPI) *Plan {
		t.Helper()
		p, err := Job{NP: np, Program: "python3", MPI: mpi}.Plan(Facts{Programs: []Program{prog}, Scripts: []ScriptMPI{s}, Host: "here", Dir: "/"})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	p := plan(2, "", ScriptMPI{Script: "a.py", Library: "libmpich.so.12"})
	if diff := cmp.Diff(p.mpiWorlds(), []agentwire.World{{Dialect: "pmi", Runs: []agentwire.Run{{First: 0, Ranks: 2, App: 0}}}}); diff != "" || p.MPINotes() != nil {
		t.Errorf("notes %q, worlds (-got +want):\n%s", p.MPINotes(), diff)
	}
	var b strings.Builder
	p.writeMPI(&b)
	if got, want := b.String(), "mpi        pmi for ranks 0,1: a.py imports mpi4py (libmpich.so.12)\n"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	alone := ScriptMPI{Script: "./x", Library: "libmpi.so.40", Named: true}
	p = plan(2, "", alone)
	want := []string{"python3 runs ./x, which is linked with MPI (libmpi.so.40): each rank would be alone, rank 0 of 1; --mpi pmix joins them, --mpi off says that it is meant so"}
	if diff := cmp.Diff(p.MPINotes(), want); diff != "" || p.mpiWorlds() != nil {
		t.Errorf("worlds %v, notes (-got +want):\n%s", p.mpiWorlds(), diff)
	}
	if got := append(plan(2, MPIOff, alone).MPINotes(), plan(2, MPIPMIx, alone).MPINotes()...); got != nil {
		t.Errorf("notes %q", got)
	}
	for _, c := range []struct {
		np   int
		mpi  string
		lib  string
		want int
	}{{2, "", "", 1}, {2, "", "libmpi.so.1", 1}, {1, "", "", 0}, {2, MPIOff, "", 0}, {2, MPIPMI, "", 0}} {
		notes := plan(c.np, c.mpi, ScriptMPI{Script: "a.py", Library: c.lib}).MPINotes()
		if len(notes) != c.want || c.want > 0 && !strings.HasPrefix(notes[0], "a.py imports mpi4py") {
			t.Errorf("%d ranks, --mpi %s, %s: got notes %q, want %d", c.np, c.mpi, c.lib, notes, c.want)
		}
	}
}
