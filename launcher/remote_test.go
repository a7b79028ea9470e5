package launcher

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/way"
)

func agentMain(args []string) {
	var err error
	if len(args) == 2 && args[0] == "verify" {
		err = VerifyAgent(args[1])
	} else {
		err = ServeAgent()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gorun agent:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// planOn is the plan of a job that runs a shell script on some hosts with some ranks each; a host called here is local.
func planOn(t *testing.T, job Job, script string, hosts ...string) *Plan {
	t.Helper()
	prog, err := FindProgram("sh", os.Getenv("PATH"))
	if err != nil {
		t.Fatal(err)
	}
	job.Args = []string{"-c", script}
	for _, h := range hosts {
		name, slots, _ := strings.Cut(h, ":")
		n := 1
		fmt.Sscan(slots, &n)
		job.Hosts = append(job.Hosts, Host{Name: name, Addr: name, Slots: n})
	}
	p, err := job.Plan(Facts{Program: prog, Host: "here", Dir: t.TempDir(), Environ: os.Environ()})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// remoteOptions are those of a run whose hosts are all this machine, each with an agent of its own.
func remoteOptions(t *testing.T, o Options) Options {
	t.Helper()
	t.Setenv("HOME", t.TempDir())
	t.Setenv("XDG_CACHE_HOME", "")
	o.way, o.bind = way.Shell(), loopback
	return o
}

func TestRemoteRanks(t *testing.T) {
	s, e := &sink{}, &sink{}
	acct := Run(t.Context(), planOn(t, Job{}, "echo $GORUN_RANK of $GORUN_SIZE node $GORUN_NODE of $GORUN_NODES", "a:2", "b:2"),
		remoteOptions(t, Options{Stdout: s, Stderr: e, Verbose: true}))
	if acct.Code != 0 {
		t.Fatalf("code %d: %s\n%s", acct.Code, acct.Summary(), e.text())
	}
	got := strings.Split(strings.TrimSpace(s.text()), "\n")
	slices.Sort(got)
	if want := []string{"0 of 4 node 0 of 2", "1 of 4 node 0 of 2", "2 of 4 node 1 of 2", "3 of 4 node 1 of 2"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	t.Logf("%s%v", e.text(), time.Since(acct.Start))
	nothingLeft(t, acct.Job)
}

// Some ranks here, in this process, and some by an agent: in either order.
func TestLocalAndRemoteRanks(t *testing.T) {
	for _, hosts := range [][]string{{"here:2", "b:2"}, {"b:2", "here:2"}} {
		t.Run(hosts[0], func(t *testing.T) {
			s, e := &sink{}, &sink{}
			before := openFDs(t)
			acct := Run(t.Context(), planOn(t, Job{}, "[ $GORUN_RANK = 3 ] && exit 3; echo $GORUN_RANK on $GORUN_NODE; sleep 1000", hosts...),
				remoteOptions(t, Options{Stdout: s, Stderr: e, Verbose: true}))
			if acct.Code != 3 || acct.Cause != 3 {
				t.Errorf("code %d, cause %d, want 3: %s%s", acct.Code, acct.Cause, acct.Summary(), e.text())
			}
			for _, line := range strings.Split(strings.TrimSpace(s.text()), "\n") {
				if !slices.Contains([]string{"0 on 0", "1 on 0", "2 on 1", ""}, line) {
					t.Errorf("line %q", line)
				}
			}
			for i, h := range acct.Hosts {
				if h.Host != strings.TrimSuffix(hosts[i], ":2") || h.Addr == "" || h.Prepared == 0 {
					t.Errorf("host %d: %+v", i, h)
				}
			}
			nothingLeft(t, acct.Job)
			if after := openFDs(t); after > before+2 {
				t.Errorf("%d descriptors, %d before", after, before)
			}
		})
	}
}
