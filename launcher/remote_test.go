package launcher

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/way"
)

func agentMain(args []string) {
	var err error
	if len(args) == 2 && args[0] == "verify" {
		err = VerifyAgent(args[1])
	} else {
		err = serveAgent(holdFork(os.Getenv("GORUN_TEST_HOLD")))
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
	p, err := job.Plan(Facts{Programs: []Program{prog}, Host: "here", Dir: t.TempDir(), Environ: os.Environ()})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// agentHome is a home directory with this program where gorun sends itself, which takes some time, and is not what these tests are for. It is
// removed at the end of the tests.
func agentHome(t *testing.T) string {
	t.Helper()
	if homeDir == "" {
		var err error
		if homeDir, err = os.MkdirTemp("", "gorun-home-"); err != nil {
			t.Fatal(err)
		}
		placeAgent(t, "/proc/self/exe", homeDir)
	}
	return homeDir
}

var homeDir string

// placeAgent puts a program where gorun would send it, below a home directory.
func placeAgent(t *testing.T, program, home string) {
	t.Helper()
	text, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(text)
	agent := filepath.Join(home, ".cache", "gorun", "gorun-"+hex.EncodeToString(sum[:]))
	syscall.ForkLock.RLock() // a child that is forked meanwhile would have it open to write, and it would be busy
	defer syscall.ForkLock.RUnlock()
	if err := errors.Join(os.MkdirAll(filepath.Dir(agent), 0o700), os.WriteFile(agent, text, 0o700)); err != nil {
		t.Fatal(err)
	}
}

// remoteOptions are those of a run whose hosts are all this machine, each with an agent of its own.
func remoteOptions(t *testing.T, o Options) Options {
	t.Helper()
	t.Setenv("HOME", agentHome(t))
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

// Many ranks may each have as many arguments as the kernel lets a program have.
func TestRemoteArguments(t *testing.T) {
	s, e := &sink{}, &sink{}
	p := planOn(t, Job{}, "echo $GORUN_RANK: $#", "a:40")
	for range 12 {
		for i := range p.Ranks {
			p.Ranks[i].Argv = append(p.Ranks[i].Argv, strings.Repeat("x", 120<<10))
		}
	}
	acct := Run(t.Context(), p, remoteOptions(t, Options{Stdout: s, Stderr: e}))
	if acct.Code != 0 {
		t.Fatalf("code %d: %s\n%s", acct.Code, acct.Summary(), e.text())
	}
	for i := range p.Ranks {
		if line := fmt.Sprintf("%d: 11\n", i); !strings.Contains("\n"+s.text(), "\n"+line) {
			t.Errorf("no line %q", line)
		}
	}
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

// A timeout ends the ranks here and those of an agent alike, also what a wrapper has started.
func TestTimeoutHereAndThere(t *testing.T) {
	acct := Run(t.Context(), planOn(t, Job{Timeout: 300 * time.Millisecond}, "sleep 1000 & wait", "here:2", "b:2"), remoteOptions(t, Options{Stdout: &sink{}, Stderr: &sink{}}))
	if acct.Code != ExitTimeout {
		t.Errorf("code %d, want %d: %s", acct.Code, ExitTimeout, acct.Summary())
	}
	for _, r := range acct.Ranks {
		if r.PID != 0 && r.Signal == "" {
			t.Errorf("rank %d on %s was not ended: %+v", r.Rank, r.Host, r)
		}
	}
	nothingLeft(t, acct.Job)
}

// A host that has not met others in time ends the job, and these are named.
func TestHostApart(t *testing.T) {
	r := &runner{places: make([]*HostPlace, 7), plan: &Plan{KillGrace: time.Hour}, acct: &Account{Reason: ReasonDone}, failed: -1, events: make(chan agentEvent, 1)}
	for i := range 7 {
		r.plan.Hosts = append(r.plan.Hosts, PlanHost{Name: fmt.Sprint("node", i)})
	}
	for _, test := range []struct {
		missing []int
		want    string
	}{
		{[]int{2}, "host node1: has not met node2 in 30s"},
		{[]int{0, 2, 3, 4, 5, 6}, "host node1: has not met node0, node2, node3, node4, 2 more in 30s"},
	} {
		h := &remoteHost{index: 1, name: "node1", began: time.Now(), events: r.events}
		if err := h.handle(&agentwire.Message{Met: &agentwire.Met{Missing: test.missing}}); err != nil {
			t.Fatal(err)
		}
		r.ending = false
		r.event(<-r.events)
		if r.acct.Error != test.want || r.acct.Reason != ReasonNotStarted {
			t.Errorf("reason %s, %q, want %s, %q", r.acct.Reason, r.acct.Error, ReasonNotStarted, test.want)
		}
	}
}

// Whatever an agent says, gorun does not fall over.
func FuzzAgentSays(f *testing.F) {
	for _, m := range []*agentwire.Message{
		{Started: &agentwire.Started{Ranks: []agentwire.StartedRank{{Rank: 1, PID: 7}, {Rank: 2}}}},
		{Exited: &agentwire.Exited{Rank: 1, Code: 3, State: &agentwire.State{Ended: []int{-1, 1, 9}, Suspicions: []agentwire.Suspicion{{By: 1, Rank: 8}}}}},
		{Reaped: &agentwire.Reaped{Killed: 1, Joined: []agentwire.Joined{{Rank: -3}}}},
		{RankFailed: &agentwire.RankFailed{Rank: 99, Failed: agentwire.Failed{Code: 1, Text: "x"}}},
		{Doubt: &agentwire.Doubt{Host: -1}}, {Doubt: &agentwire.Doubt{Host: 5, Unreached: true}}, {StdinWanted: &agentwire.StdinAt{Rank: 77}}, {Met: &agentwire.Met{}}, {Met: &agentwire.Met{Missing: []int{0, -1, 9}}}, {Prepare: &agentwire.Prepare{}},
	} {
		b, err := agentwire.Encode(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(append(b, b...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := &runner{stdin: &stdin{}, places: make([]*HostPlace, 2), plan: &Plan{KillGrace: time.Hour}, acct: &Account{}, failed: -1, events: make(chan agentEvent, eventRoom(3, 2)), lost: make([]bool, 2), bringing: []bool{true, true}, forking: 2}
		for i := range 3 {
			r.plan.Ranks = append(r.plan.Ranks, PlanRank{Rank: i, Host: min(i, 1)})
			r.acct.Ranks = append(r.acct.Ranks, RankAccount{Rank: i})
		}
		r.plan.Hosts = []PlanHost{{Name: "a", Local: true}, {Name: "b"}}
		r.acct.Hosts = make([]HostAccount, 2)
		h := &remoteHost{index: 1, stdin: r.stdin, size: 3, name: "b", ranks: []int{1, 2}, running: map[int]bool{1: true, 2: true}, events: r.events, doubt: r.doubt,
			unreached: func(int, int) {}, log: func(string) {}, gone: make(chan struct{}), wasReaped: make(chan struct{})}
		local := &localHost{node: &fakeNode{}, agent: &agent{starting: -1}}
		r.hosts = []hostAgent{local, &deafHost{remoteHost: h}}
		for in := bytes.NewReader(b); ; {
			m, err := agentwire.Read(in)
			if err == nil {
				err = h.handle(m)
			}
			if err != nil {
				break
			}
			for len(r.events) > 0 {
				r.event(<-r.events)
			}
		}
		for k, rank := range h.state().ended {
			r.acct.Ranks[rank].heard = k + 1
		}
		r.acct.suspicions = h.state().suspicions
		r.acct.settle(0, 0)
		r.acct.Summary()
		h.threads.Wait()
	})
}

// deafHost is a remote host that is told nothing.
type deafHost struct{ *remoteHost }

func (*deafHost) stopForks()                            {}
func (*deafHost) signal(syscall.Signal, func(int) bool) {}
func (*deafHost) refresh()                              {}
func (*deafHost) lose(int, string, string)              {}

// An agent that has much to remove is waited for as long as it is heard, and no longer.
func TestReapIsWaitedFor(t *testing.T) {
	a, b := net.Pipe()
	var far *agentwire.Mux
	accepted := make(chan error, 1)
	go func() {
		var err error
		far, err = agentwire.Accept(b)
		accepted <- err
	}()
	near, err := agentwire.Dial(a)
	if err := errors.Join(err, <-accepted); err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	defer far.Close()
	events := make(chan agentEvent, 1)
	h := &remoteHost{mux: near, events: events, gone: make(chan struct{}), wasReaped: make(chan struct{})}
	const silence = 2 * time.Second
	quit := time.After(silence * 3 / 2)
	go func() {
		for {
			select {
			case <-quit:
				close(h.wasReaped)
				return
			case <-time.After(silence / 50):
				far.Send(&agentwire.Message{Ping: &agentwire.Empty{}})
			}
		}
	}()
	h.awaitReaped(silence, time.Minute)
	select {
	case <-h.wasReaped:
	default:
		t.Error("it is not waited for, although it is heard")
	}
	if len(events) > 0 {
		t.Errorf("it is given up: %v", (<-events).err)
	}
	h.wasReaped = make(chan struct{})
	h.awaitReaped(time.Millisecond, time.Minute)
	if len(events) != 1 {
		t.Error("it is waited for, although it is silent")
	}
}
