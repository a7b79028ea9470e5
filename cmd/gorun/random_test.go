package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
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

// Ranks end one after the other, each in its way. The first that does not end well decides the exit code and is named.
// GORUN_TEST_JOBS=1000 runs more of them.
func TestRandomEnds(t *testing.T) {
	jobs := 25
	if s := os.Getenv("GORUN_TEST_JOBS"); s != "" {
		var err error
		if jobs, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	for seed := range jobs {
		rnd := rand.New(rand.NewPCG(11, uint64(seed)))
		np := 1 + rnd.IntN(6)
		order := rnd.Perm(np)
		var script strings.Builder
		script.WriteString("GORUN=$PPID\necho $$ >tmp$RANK; mv tmp$RANK pid$RANK\n")
		for _, deaf := range []int{rnd.IntN(2 * np), rnd.IntN(2 * np)} {
			fmt.Fprintf(&script, "[ $RANK = %d ] && trap '' TERM INT\n", deaf)
		}
		fmt.Fprintf(&script, "[ $RANK = %d ] && trap 'exit 77' TERM INT\n", rnd.IntN(2*np))
		script.WriteString("after() { until [ -e pid$1 ]; do sleep 0.01; done; until grep -q '^State:.[ZX]' /proc/$(cat pid$1)/status; do sleep 0.01; done; }\ncase $RANK in\n")
		code, reason, cause := 0, "done", -1
		for i, rank := range order {
			e := randomEnds(rnd)
			before := ""
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

		j := newJob(t, "-np", strconv.Itoa(np), "--kill-grace", "50ms", "--wdir", "", "--report", "r.json", "sh", "script")
		for i, a := range j.cmd.Args {
			if a == "--wdir" {
				j.cmd.Args[i+1] = j.dir
			}
		}
		j.cmd.Dir = j.dir
		if err := os.WriteFile(filepath.Join(j.dir, "script"), []byte(script.String()), 0o600); err != nil {
			t.Fatal(err)
		}
		got := j.run()
		j.gone()
		var acct struct {
			Code, Cause int
			Reason      string
		}
		text, err := os.ReadFile(filepath.Join(j.dir, "r.json"))
		if err == nil {
			err = json.Unmarshal(text, &acct)
		}
		if err != nil {
			t.Errorf("seed %d: report: %v", seed, err)
		}
		if got != code || acct.Code != code || acct.Reason != reason || acct.Cause != cause {
			t.Errorf("seed %d: exit code %d, report %+v; want code %d, reason %s, cause %d\nscript:\n%s\nstderr:\n%s", seed, got, acct, code, reason, cause, script.String(), j.err.String())
		}
		if want := fmt.Sprintf("gorun: rank %d ", cause); cause >= 0 && !strings.Contains(j.err.String(), want) {
			t.Errorf("seed %d: stderr %q does not say %q", seed, j.err.String(), want)
		}
	}
}
