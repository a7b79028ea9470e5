package launcher

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// Programs with Open MPI find each other, too.
func TestOpenMPI(t *testing.T) {
	prog := mpiProgram(t, "mpicc.openmpi")
	one := func(int) int { return 0 }
	for _, c := range []struct {
		name string
		args []string
		want []string
	}{
		{"1", []string{"1 check"}, right(1, one)},
		{"4", []string{"4 check"}, right(4, one)},
		{"64", []string{"64 short"}, right(64, one)},
		{"several programs", []string{"2 check", "1 check a"}, right(3, func(r int) int { return r / 2 })},
		{"children that keep the socket", []string{"2 fork"}, right(2, one)},
	} {
		t.Run(c.name, func(t *testing.T) {
			nothingOfPMIx(t, mpiSays(t, prog, c.want, c.args...).Job)
		})
	}
}

// nothingOfPMIx fails the test if directories of a job's ranks are left.
func nothingOfPMIx(t *testing.T, job string) {
	t.Helper()
	for _, dir := range []string{"/dev/shm", os.TempDir()} {
		if left, err := filepath.Glob(filepath.Join(dir, "gorun-"+job+"*")); err != nil || len(left) > 0 {
			t.Errorf("left behind: %q, %v", left, err)
		}
	}
}

func TestOpenMPIEnds(t *testing.T) {
	prog := mpiProgram(t, "mpicc.openmpi")
	for _, c := range []struct {
		name    string
		args    []string
		job     Job
		code    int
		cause   int
		summary string // without host and times
	}{
		{name: "abort", args: []string{"3 abort 1 7"}, code: 7, cause: 1, summary: "gorun: rank 1 called MPI_Abort with code 7"},
		{name: "abort, others go on after failures", args: []string{"2 abort 1 7"}, job: Job{OnFail: OnFailWait}, code: 7, cause: 1, summary: "gorun: rank 1 called MPI_Abort with code 7"},
		{name: "killed", args: []string{"3 kill 2"}, code: 137, cause: 2, summary: "gorun: rank 2 was killed by SIGKILL"},
		{name: "exit with a code", args: []string{"2 exit 0 3"}, code: 3, cause: 0, summary: "gorun: rank 0 exited with code 3"},
		{name: "some leave out MPI", args: []string{"2 never"}, code: 0, cause: -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			acct, _, errs := mpiJob(t, prog, c.job, Options{}, c.args...)
			if told := strings.Contains(errs, "no rank asked for its place by pmix: if it called MPI_Init, each rank was alone"); told != strings.HasSuffix(c.args[0], "never") {
				t.Errorf("that no rank asked is told: %v; stderr %s", told, errs)
			}
			mpiEnded(t, acct, errs, c.code, c.cause, c.summary)
			nothingOfPMIx(t, acct.Job)
		})
	}
}

func TestOpenMPIRestarts(t *testing.T) {
	mpiRestarts(t, mpiProgram(t, "mpicc.openmpi"), Job{MPI: MPIPMIx})
}

// A rank's library may be too old, or no PMIx at all; and what it has to say for the user comes with the rank's stderr.
func TestPMIxClients(t *testing.T) {
	bash := citest.Program(t, "bash") // it opens TCP connections
	// A client's first message: a header with how long the rest is, and who it is.
	script := `exec 4<>/dev/tcp/127.0.0.1/${PMIX_SERVER_URI3##*:}
body="native\000\000\000\000\000\000${PMIX_NAMESPACE}\000\000\000\000\001VERSION\000v3\000\001hash\000"
printf '\377\377\377\377\377\377\377\377'"\\x$(printf %02x $(printf "$body" | wc -c))"'\000\000\000\000\000\000\000'"$body" >&4
`
	for _, c := range []struct{ name, script, want string }{
		{"old", strings.Replace(script, "VERSION", "2.1.4", 1), `gorun: rank 1 has a PMIx library that is too old: 3.0 or later is needed (Open MPI 4.0), found "2.1.4"`},
		{"rubbish", strings.Replace(script, "VERSION", "4.2.2", 1) + `printf '\000\000\000\000\000\000\000d\000\000\000\005\000\000\000\000gorun' >&4
`, `gorun: rank 1 does not speak PMIx: a request has 1735357045 values where one is expected`},
	} {
		t.Run(c.name, func(t *testing.T) {
			prog, err := FindProgram(bash, "")
			if err != nil {
				t.Fatal(err)
			}
			job := Job{MPI: MPIPMIx, Apps: []App{{NP: 2, Program: prog.Name, Args: []string{"-c", "[ $PMIX_RANK = 0 ] && exec sleep 1000\n" + c.script + "exec sleep 1000"}}}}
			p, err := job.Plan(Facts{Programs: []Program{prog}, Host: "here", Dir: t.TempDir(), Environ: os.Environ()})
			if err != nil {
				t.Fatal(err)
			}
			stderr := &sink{}
			acct := Run(t.Context(), p, Options{Stderr: stderr})
			mpiEnded(t, acct, stderr.text(), 1, 1, c.want)
		})
	}
}
