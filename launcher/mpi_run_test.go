package launcher

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// mpiProgram is testdata/mpi/mpi.c, built by an MPI's compiler; the test is skipped where that is missing.
func mpiProgram(t *testing.T, compiler string) Program {
	t.Helper()
	cc := citest.Program(t, compiler)
	file := filepath.Join(t.TempDir(), "mpi")
	if out, err := exec.Command(cc, "-O1", "-o", file, "testdata/mpi/mpi.c").CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", compiler, err, out)
	}
	p, err := FindProgram(file, "")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// mpiJob runs a program with MPI, each element of args as one of the job's programs: a number of ranks, and arguments. Scripts (sh ...) find the
// process manager of the job, PMI where it names none.
func mpiJob(t *testing.T, prog Program, job Job, o Options, args ...string) (acct *Account, out, errs string) {
	t.Helper()
	var facts []Program
	for _, a := range args {
		words := strings.Fields(a)
		np, err := strconv.Atoi(words[0])
		if err != nil {
			t.Fatal(err)
		}
		app := App{NP: np, Program: prog.Name, Args: words[1:]}
		p := prog
		if words[1] == "sh" {
			if p, err = FindProgram("sh", os.Getenv("PATH")); err != nil {
				t.Fatal(err)
			}
			app = App{NP: np, Program: "sh", Args: []string{"-c", strings.TrimSpace(strings.SplitN(a, "sh", 2)[1])}, MPI: job.MPI}
			if app.MPI == "" {
				app.MPI = MPIPMI
			}
		}
		job.Apps = append(job.Apps, app)
		facts = append(facts, p)
	}
	p, err := job.Plan(Facts{Programs: facts, Host: "here", Dir: t.TempDir(), Environ: append(os.Environ(), "MPICH_CC_IS=here", "PROG="+prog.Path)})
	if err != nil {
		t.Fatal(err)
	}
	stdout, stderr := &sink{}, &sink{}
	o.Stdout, o.Stderr = stdout, stderr
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute) // a hang
	defer cancel()
	acct = Run(ctx, p, o)
	nothingLeft(t, acct.Job)
	return acct, stdout.text(), stderr.text()
}

// mpiSays runs a job of mpiJob that has to end well, its ranks having written the lines of want.
func mpiSays(t *testing.T, prog Program, want []string, args ...string) *Account {
	t.Helper()
	acct, out, errs := mpiJob(t, prog, Job{}, Options{}, args...)
	if acct.Code != 0 {
		t.Fatalf("code %d: %s%s", acct.Code, acct.Summary(), errs)
	}
	if diff := cmp.Diff(sortedLines(out), want); diff != "" {
		t.Errorf("-got +want:\n%s", diff)
	}
	return acct
}

// mpiEnded fails the test if a job has not ended so: its exit code, the rank that is the cause, and the summary's first line without host and times.
func mpiEnded(t *testing.T, acct *Account, errs string, code, cause int, summary string) {
	t.Helper()
	first, _, _ := strings.Cut(acct.Summary(), "\n")
	first = regexp.MustCompile(` \(.*?host .*?, pid \d+\)| after [0-9.]+[a-zµ]+$`).ReplaceAllString(first, "")
	if acct.Code != code || acct.Cause != cause || first != summary {
		t.Errorf("got code %d, cause %d, %q, want code %d, cause %d, %q; stderr %s", acct.Code, acct.Cause, first, code, cause, summary, errs)
	}
}

// mpiRestarts runs a job whose first attempt is ended by MPI_Abort and whose second one ends well.
func mpiRestarts(t *testing.T, prog Program, job Job) {
	t.Helper()
	twice := 2
	job.Restarts = &twice
	acct, out, errs := mpiJob(t, prog, job, Options{}, "2 sh [ $GORUN_RESTART = 1 ] && exec $PROG check; exec $PROG abort 0 5")
	if acct.Code != 0 || acct.Restarts != 1 {
		t.Fatalf("code %d after %d restarts, want 0 after 1: %s", acct.Code, acct.Restarts, errs)
	}
	if diff := cmp.Diff(sortedLines(out), right(2, func(int) int { return 0 })); diff != "" {
		t.Errorf("-got +want:\n%s", diff)
	}
	if !strings.Contains(errs, "called MPI_Abort with code 5") {
		t.Errorf("stderr %s", errs)
	}
}

// sortedLines are the sorted lines of a text.
func sortedLines(text string) []string {
	l := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	slices.Sort(l)
	return l
}

// right are the lines of size ranks that check each other, given what each rank's program is.
func right(size int, app func(rank int) int) []string {
	host, _ := os.Hostname()
	var want []string
	for r := range size {
		want = append(want, fmt.Sprintf("%d/%d app %d sum %d right host %s near %d universe %d", r, size, app(r), size*(size-1)/2, host, size, size))
	}
	slices.Sort(want)
	return want
}

// Programs with MPICH find each other, whatever their number.
func TestMPICH(t *testing.T) {
	prog := mpiProgram(t, "mpicc.mpich")
	one := func(int) int { return 0 }
	for _, c := range []struct {
		name string
		args []string
		want []string
	}{
		{"1", []string{"1 check"}, right(1, one)},
		{"2", []string{"2 check"}, right(2, one)},
		{"4", []string{"4 check"}, right(4, one)},
		{"8", []string{"8 check"}, right(8, one)},
		{"64", []string{"64 short"}, right(64, one)},
		{"several programs", []string{"2 check", "1 check a", "1 sh exec $PROG check"}, right(4, func(r int) int { return max(r-1, 0) })},
		{"children that keep the socket", []string{"2 fork"}, right(2, one)},
		{"MPI_Comm_spawn", []string{"2 spawn"}, append(right(2, one), "spawn: error 1", "spawn: error 1")},
		{"MPI_Publish_name", []string{"1 publish"}, append(right(1, one), "publish: error 1")},
	} {
		t.Run(c.name, func(t *testing.T) {
			mpiSays(t, prog, c.want, c.args...)
		})
	}
}

// How ranks that do not come to the end of MPI end the job.
func TestMPIEnds(t *testing.T) {
	prog := mpiProgram(t, "mpicc.mpich")
	rubbish := "3 sh echo hello >&3; sleep 1000"
	for _, c := range []struct {
		name    string
		args    []string
		job     Job
		code    int
		cause   int
		summary string // without host and times
		ends    []string
	}{
		{name: "abort", args: []string{"3 abort 1 7"}, code: 7, cause: 1, summary: "gorun: rank 1 called MPI_Abort with code 7"},
		{name: "abort with code 0", args: []string{"2 abort 1 0"}, code: 0, cause: 1, summary: "gorun: rank 1 called MPI_Abort with code 0"},
		{name: "abort with a large code", args: []string{"2 abort 0 256"}, code: 1, cause: 0, summary: "gorun: rank 0 called MPI_Abort with code 256"},
		{name: "abort, others go on after failures", args: []string{"2 abort 1 7"}, job: Job{OnFail: OnFailWait}, code: 7, cause: 1, summary: "gorun: rank 1 called MPI_Abort with code 7"},
		{name: "abort behind a script that goes on", args: []string{"2 sh $PROG abort 1 7; sleep 1000"}, code: 7, cause: 1, summary: "gorun: rank 1 called MPI_Abort with code 7"},
		{name: "killed", args: []string{"3 kill 2"}, code: 137, cause: 2, summary: "gorun: rank 2 was killed by SIGKILL"},
		{name: "exit with a code", args: []string{"2 exit 0 3"}, code: 3, cause: 0, summary: "gorun: rank 0 exited with code 3"},
		{name: "exit with a code behind MPI_Finalize", args: []string{"2 after 0 3"}, code: 3, cause: 0, summary: "gorun: rank 0 exited with code 3"},
		{name: "exit with code 0", args: []string{"2 exit 1 0"}, code: 1, cause: 1, summary: "gorun: rank 1 exited with code 0 before MPI_Finalize"},
		{name: "all leave out MPI_Finalize", args: []string{"2 exit-all"}, code: 0, cause: -1},
		{name: "some leave out MPI", args: []string{"2 never"}, code: 0, cause: -1},
		{name: "some never come", args: []string{"1 check", "2 never"}, code: 15, cause: 0, summary: "gorun: rank 0 exited with code 15"},
		{name: "killed before MPI_Init", args: []string{"1 check", "1 sh kill -9 $$"}, code: 137, cause: 1, summary: "gorun: rank 1 was killed by SIGKILL"},
		{name: "rubbish", args: []string{rubbish}, job: Job{KillGrace: 200 * time.Millisecond}, code: 1, cause: 0,
			summary: `gorun: rank 0 does not speak PMI 1.1 on the descriptor in PMI_FD: no command: "hello"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			acct, _, errs := mpiJob(t, prog, c.job, Options{}, c.args...)
			if c.args[0] == rubbish && acct.Cause > 0 { // whose came first is chance
				c.cause, c.summary = acct.Cause, strings.Replace(c.summary, "rank 0", fmt.Sprintf("rank %d", acct.Cause), 1)
			}
			if told := strings.Contains(errs, "no rank asked for its place by pmi: if it called MPI_Init, each rank was alone"); told != strings.HasSuffix(c.args[len(c.args)-1], "never") {
				t.Errorf("that no rank asked is told: %v; stderr %s", told, errs)
			}
			mpiEnded(t, acct, errs, c.code, c.cause, c.summary)
		})
	}
}

// A job that is started again begins anew.
func TestMPIRestarts(t *testing.T) { mpiRestarts(t, mpiProgram(t, "mpicc.mpich"), Job{}) }

// Who keeps the others waiting in MPI_Init is told, on a signal, and when the job's time is over.
func TestMPIWaitIsTold(t *testing.T) {
	prog := mpiProgram(t, "mpicc.mpich")
	come := filepath.Join(t.TempDir(), "come")
	signals := make(chan os.Signal)
	stop := make(chan struct{})
	defer close(stop)
	asked := &sink{wrote: make(chan struct{}, 1)}
	go func() {
		for {
			select {
			case signals <- syscall.SIGIO:
			case <-stop:
				return
			}
			select {
			case <-asked.wrote:
			case <-time.After(100 * time.Millisecond):
			case <-stop:
				return
			}
			if strings.Contains(asked.text(), waitText) {
				os.WriteFile(come, nil, 0o644)
				return
			}
		}
	}()
	job := Job{Apps: []App{{NP: 3, Program: prog.Name, Args: []string{"late", "1", come}}}}
	p, err := job.Plan(Facts{Programs: []Program{prog}, Host: "here", Dir: t.TempDir(), Environ: os.Environ()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	acct := Run(ctx, p, Options{Stderr: asked, Signals: signals})
	if acct.Code != 0 {
		t.Fatalf("code %d: %s\n%s", acct.Code, acct.Summary(), asked.text())
	}
	if acct.Hang == nil || !strings.Contains(strings.Join(acct.Hang.Lines, "\n"), waitText) {
		t.Errorf("the report has %+v", acct.Hang)
	}
}

const waitText = "rank 1 of 3 has not entered PMI barrier #1 (MPI_Init, MPI_Finalize): it has not called MPI_Init; ranks 0,2 wait for it since "
