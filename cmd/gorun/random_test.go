package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gorun-dev/gorun/launcher"
)

// randomEnd is a rank's part in a random job. It acts when the rank before it has ended.
type randomEnd struct {
	do     string // shell code
	code   int    // of the job, if it ends by this; 0: it goes on
	reason string // of the job, if it ends by this
}

func randomEnds(rnd *rand.Rand) randomEnd {
	fatal := []syscall.Signal{syscall.SIGKILL, syscall.SIGSEGV, syscall.SIGABRT, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGPIPE, 40}
	switch n := rnd.IntN(10); {
	case n < 5:
		return randomEnd{"exit 0", 0, ""}
	case n < 7:
		code := 1 + rnd.IntN(255)
		return randomEnd{fmt.Sprintf("echo rank $RANK is unhappy >&2; exit %d", code), code, "failed"}
	case n < 9:
		sig := fatal[rnd.IntN(len(fatal))]
		return randomEnd{fmt.Sprintf("kill -%d $$; sleep 1000", sig), 128 + int(sig), "failed"}
	default:
		sig := []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP}[rnd.IntN(3)]
		return randomEnd{fmt.Sprintf("kill -%d $GORUN; sleep 1000", sig), 128 + int(sig), "signal"}
	}
}

// long is for what is done before a release.
var long = flag.Bool("long", false, "run more of the random jobs")

// Ranks end one after the other, each in its way. The first that does not end well decides the exit code and is named, whatever the others do, and
// whether they are ended or waited for.
func TestRandomEnds(t *testing.T) {
	t.Parallel()
	jobs := often(200)
	if *long {
		jobs = 1000
	}
	home := remoteHome(t)
	const lanes = 4
	for lane := range lanes {
		t.Run(strconv.Itoa(lane), func(t *testing.T) {
			t.Parallel()
			for seed := lane; seed < jobs; seed += lanes {
				randomEndsJob(t, home, seed)
			}
		})
	}
}

// randomEndsJob runs one of the jobs.
func randomEndsJob(t *testing.T, home string, seed int) {
	rnd := rand.New(rand.NewPCG(11, uint64(seed)))
	np := 1 + rnd.IntN(6)
	order := rnd.Perm(np)
	hosts, wait := rnd.IntN(5) == 0, rnd.IntN(3) == 0
	var script strings.Builder
	script.WriteString("echo $$ >tmp$RANK; mv tmp$RANK pid$RANK\n")
	for _, deaf := range []int{rnd.IntN(2 * np), rnd.IntN(2 * np)} {
		fmt.Fprintf(&script, "[ $RANK = %d ] && trap '' TERM INT\n", deaf)
	}
	fmt.Fprintf(&script, "[ $RANK = %d ] && trap 'exit 77' TERM INT\n", rnd.IntN(2*np))
	pause := "[ $n -ge 30 ] || sleep 0.1" // as in newRandomJob
	if hosts {
		pause = "sleep 0.3" // agents see the ends of their ranks when they get to run
	}
	script.WriteString(ended)
	fmt.Fprintf(&script, "after() { n=0; until [ -e pid$1 ]; do sleep 0.01; n=$((n+1)); done; read -r pid <pid$1; until ended $pid; do sleep 0.01; n=$((n+1)); done; %s; }\ncase $RANK in\n", pause)
	code, reason, cause := 0, "done", -1
	for i, rank := range order {
		e := randomEnds(rnd)
		before := "" // the first ends while others are still being started
		if i > 0 {
			before = fmt.Sprintf("after %d; ", order[i-1])
		}
		// Traps are for the waiting only: the end is as it was drawn.
		fmt.Fprintf(&script, "%d) %strap - TERM INT; %s;;\n", rank, before, e.do)
		if reason == "done" && e.reason != "" {
			code, reason = e.code, e.reason
			if reason == "failed" {
				cause = rank
			}
		}
	}
	script.WriteString("esac\n")

	args := []string{"-np", strconv.Itoa(np), "--kill-grace", "50ms", "-x", "GORUN"}
	if wait {
		args = append(args, "--on-fail", "wait")
	}
	var j *job
	if hosts {
		j = remoteJob(t, home, "a:3,b:3", args...)
	} else {
		j = newJob(t, args...)
	}
	j.cmd.Args = append(j.cmd.Args, "--wdir", j.dir, "sh", "script")
	report := j.reporting()
	j.through(`GORUN=$$; export GORUN; exec "$@"`)
	j.cmd.Dir = j.dir
	if err := os.WriteFile(filepath.Join(j.dir, "script"), []byte(script.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	got := j.run()
	j.gone()
	acct := report()
	if got != code || acct.Code != code || string(acct.Reason) != reason || acct.Cause != cause {
		t.Errorf("seed %d: exit code %d, report %+v; want code %d, reason %s, cause %d\nhosts %v, wait %v, script:\n%s\nstderr:\n%s", seed, got, acct, code, reason, cause, hosts, wait, script.String(), j.err.String())
	}
	if want := fmt.Sprintf("gorun: rank %d (host ", cause); cause >= 0 && !strings.Contains(j.err.String(), want) {
		t.Errorf("seed %d: stderr %q does not say %q", seed, j.err.String(), want)
	}
}

// A rank fails, and then somebody sends gorun a signal that it may see first: the failure is the cause.
func TestSignalAfterFailure(t *testing.T) {
	const end = `[ $RANK = 0 ] && { until [ -e $RANKDIR/go ]; do sleep 0.01; done; exit 3; }
kill -STOP $PPID; touch $RANKDIR/go; after 0; kill -TERM $PPID; kill -CONT $PPID; exec sleep 1000`
	for range often(10) {
		j := newJob(t, "-np", "2", "sh", "-c", after+end)
		report := j.reporting()
		if got := j.run(); got != 3 {
			t.Errorf("exit code %d, want 3: %s", got, j.err.String())
		}
		if r := report(); r.Cause != 0 || r.Reason != launcher.ReasonFailed {
			t.Errorf("cause %d, reason %s, want 0, failed", r.Cause, r.Reason)
		}
	}
}
