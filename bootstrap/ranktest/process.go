package ranktest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/rankenv"
)

const (
	// testVar names the test whose ranks run in a process; it makes the process one of them.
	testVar = "GORUN_RANKTEST"
	// errorFD carries the text of f's error.
	errorFD = 3
	// PortsVar gives RunHosts a range of ports.
	PortsVar = "GORUN_RANKTEST_PORTS"
)

// Result is how a rank's process ended.
type Result struct {
	Rank   int
	Code   int    // exit code; -1 if a signal ended it
	Signal string // "SIGKILL"
	Output string // stdout and stderr
	Err    string // the text of f's error
}

func (r Result) String() string {
	how := fmt.Sprintf("exited with code %d", r.Code)
	if r.Signal != "" {
		how = "killed by " + r.Signal
	}
	return fmt.Sprintf("rank %d %s:\n%s", r.Rank, how, r.Output)
}

// RunProcesses runs f on n ranks, each in a process of its own: the test binary executed again with
// -test.run of this test, under a real node. It returns how each ended; f's error becomes exit code 1 and Output's last line.
// The part of the test before the call runs in each process, too. One call a test: use subtests for more.
//
// A rank that returns has its job closed first. After 2 minutes the processes are made to dump their goroutines (SIGQUIT), are
// killed, and the test fails. env is added to the environment of each ("K=V").
func RunProcesses(t *testing.T, n int, f func(ctx context.Context, job *bootstrap.Job) error, env ...string) []Result {
	t.Helper()
	return RunHosts(t, make([]int, n), f, env...)
}

// RunHosts is RunProcesses for a job of several hosts: nodeOf says for each rank which of them it runs on. They are all this machine, each with a
// node of its own on the loopback interface. The environment's entry PortsVar=FROM-TO is for the nodes, too: the ports of the ranks' listeners.
func RunHosts(t *testing.T, nodeOf []int, f func(ctx context.Context, job *bootstrap.Job) error, env ...string) []Result {
	t.Helper()
	return RunHostsBeside(t, nodeOf, f, nil, env...)
}

// RunHostsBeside is RunHosts with something that this process does beside the ranks, once they are started, with the nodes of the hosts, by host. It is waited for.
func RunHostsBeside(t *testing.T, nodeOf []int, f func(ctx context.Context, job *bootstrap.Job) error, beside func(hosts []Host), env ...string) []Result {
	t.Helper()
	switch os.Getenv(testVar) {
	case "":
	case t.Name():
		runAsRank(t, f) // exits
	default:
		// This process is a rank of another test, and runs what is on the way to it.
		t.Fatalf("RunProcesses is called in %s before the subtest %s: put each call into a subtest of its own", t.Name(), os.Getenv(testVar))
	}
	if _, twice := started.LoadOrStore(t, true); twice {
		t.Fatalf("RunProcesses is called twice in %s: use a subtest for each", t.Name())
	}
	t.Cleanup(func() { started.Delete(t) })

	p := &processes{t: t, results: make([]Result, len(nodeOf)), bound: bound + grace, nodeOf: nodeOf}
	p.start(env)
	var aside sync.WaitGroup
	if beside != nil {
		aside.Go(func() { beside(p.hosts()) })
	}
	p.wait()
	aside.Wait()
	if p.late {
		var all strings.Builder
		for _, r := range p.results {
			fmt.Fprintf(&all, "%v\n", r)
		}
		t.Fatalf("ranks did not end in %v:\n%s", bound, all.String())
	}
	return p.results
}

// Host is one of the hosts of RunHostsBeside.
type Host struct {
	*node.Node
	ranks []*process
}

// Kill ends the host without a word: its node, and its ranks with SIGKILL. The launcher's heartbeat would tell of it: host 0 hears at once that the
// host is lost.
func (h Host) Kill() error {
	for _, r := range h.ranks {
		r.cmd.Process.Kill()
	}
	return h.Node.Close()
}

func (p *processes) hosts() []Host {
	hosts := make([]Host, len(p.nodes))
	for i, n := range p.nodes {
		hosts[i].Node = n
	}
	for r, host := range p.nodeOf {
		hosts[host].ranks = append(hosts[host].ranks, p.ranks[r])
	}
	return hosts
}

// started are the tests that have called RunProcesses.
var started sync.Map

// runAsRank is the test in a rank's process.
func runAsRank(t *testing.T, f func(context.Context, *bootstrap.Job) error) {
	unix.CloseOnExec(errorFD)
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	err := func() error {
		job, err := bootstrap.Join(ctx)
		if err != nil {
			return err
		}
		// No defer: a panic ends the process with the job open, as it would in a program.
		err = f(ctx, job)
		return errors.Join(err, job.Close())
	}()
	cancel()
	if err == nil {
		os.Exit(0)
	}
	report := os.NewFile(errorFD, "error")
	io.WriteString(report, err.Error())
	report.Close()
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func killSelf() {
	syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

type processes struct {
	t       *testing.T
	nodes   []*node.Node
	nodeOf  []int
	results []Result
	bound   time.Duration
	ranks   []*process
	late    bool
}

type process struct {
	cmd    *exec.Cmd
	output bytes.Buffer
	report bytes.Buffer
	done   chan struct{}
}

func (p *processes) start(extra []string) {
	t := p.t
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	id := "ranktest-" + rand.Text()
	cfg := node.Config{Job: id, NodeOf: p.nodeOf, Host: "localhost", Logf: quietLog(t)}
	t.Cleanup(func() {
		p.kill()
		for _, n := range slices.Backward(p.nodes) { // the first holds the job's state
			if err := n.Close(); err != nil {
				t.Errorf("close node: %v", err)
			}
		}
	})
	local := make([]int, slices.Max(p.nodeOf)+1) // ranks of each host
	for _, host := range p.nodeOf {
		local[host]++
	}
	for _, kv := range extra {
		if ports, ok := strings.CutPrefix(kv, PortsVar+"="); ok {
			if _, err := fmt.Sscanf(ports, "%d-%d", &cfg.Ports[0], &cfg.Ports[1]); err != nil {
				t.Fatalf("%s: %v", kv, err)
			}
		}
	}
	if len(local) > 1 {
		cfg.Key = make([]byte, 32)
		rand.Read(cfg.Key)
	}
	for host := range local {
		if len(local) > 1 {
			cfg.Node, cfg.Host = host, fmt.Sprintf("host%d", host)
		}
		n, err := node.Start(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		p.nodes = append(p.nodes, n)
		if len(local) > 1 {
			cfg.Seeds = append(cfg.Seeds, n.Addr())
		}
	}
	// What killed ranks leave in their temporary directory goes with it. Its name is short: paths in it have limits.
	tmp, err := os.MkdirTemp("", "ranks-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.kill()
		os.RemoveAll(tmp)
	})
	inherited, _ := rankenv.Scrub(os.Environ())
	next := make([]int, len(local))
	for rank, host := range p.nodeOf {
		place := rankenv.Env{
			Job: id, Rank: rank, Size: len(p.nodeOf), LocalRank: next[host], LocalSize: local[host], Node: host, Nodes: len(local),
			Device: os.Getenv("GORUN_DEVICE"), Control: p.nodes[host].Control(),
		}
		next[host]++
		env := append(append(inherited[:len(inherited):len(inherited)], place.Environ()...), testVar+"="+t.Name(), "TMPDIR="+tmp)
		p.ranks = append(p.ranks, p.startRank(exe, rank, append(env, extra...)))
	}
}

func (p *processes) startRank(exe string, rank int, env []string) *process {
	t := p.t
	t.Helper()
	r := &process{done: make(chan struct{})}
	r.cmd = exec.Command(exe, "-test.run="+exactly(t.Name()), "-test.count=1", "-test.timeout="+(bound+2*grace).String())
	r.cmd.Env = env
	r.cmd.Stdout, r.cmd.Stderr = &r.output, &r.output
	r.cmd.WaitDelay = grace // a grandchild may hold the output open
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	report, reportOut, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.cmd.ExtraFiles = []*os.File{reportOut}

	up := make(chan error, 1)
	go func() {
		// The parent-death signal belongs to the thread that forks: it lives as long as the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(r.done)
		defer report.Close()
		err := r.cmd.Start()
		reportOut.Close()
		up <- err
		if err != nil {
			return
		}
		io.Copy(&r.report, io.LimitReader(report, 1<<20))
		err = r.cmd.Wait()
		p.ended(rank, r, err)
	}()
	if err := <-up; err != nil {
		t.Fatalf("start rank %d: %v", rank, err)
	}
	return r
}

// ended enters how a process ended, and tells the node as the launcher would.
func (p *processes) ended(rank int, r *process, err error) {
	res := Result{Rank: rank, Code: r.cmd.ProcessState.ExitCode(), Output: r.output.String(), Err: r.report.String()}
	cause := fmt.Sprintf("exited with code %d", res.Code)
	if ws, ok := r.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		res.Signal = unix.SignalName(ws.Signal())
		cause = "killed by " + res.Signal
	}
	if bad := new(exec.ExitError); err != nil && !errors.As(err, &bad) {
		res.Output += fmt.Sprintf("\nranktest: wait: %v", err)
	}
	p.results[rank] = res
	node := p.nodes[p.nodeOf[rank]]
	if joined, _ := node.Joined(rank); !joined && res.Code == 0 {
		p.t.Errorf("rank %d ended without joining: the test does not reach RunProcesses in its process\n%s", rank, res.Output)
	}
	node.RankExited(rank, res.Code, cause)
}

func (p *processes) wait() {
	late := time.NewTimer(p.bound)
	defer late.Stop()
	for _, r := range p.ranks {
		select {
		case <-r.done:
			continue
		case <-late.C:
		}
		p.late = true
		for _, r := range p.ranks {
			r.cmd.Process.Signal(syscall.SIGQUIT) // no harm to one that has ended
		}
		dumped := time.NewTimer(grace)
		defer dumped.Stop()
		for _, r := range p.ranks {
			select {
			case <-r.done:
			case <-dumped.C:
			}
		}
		p.kill()
		return
	}
}

// kill ends every process that is left, and waits for it.
func (p *processes) kill() {
	for _, r := range p.ranks {
		select {
		case <-r.done:
		default:
			r.cmd.Process.Kill()
			<-r.done
		}
	}
}

// exactly is a pattern for -test.run that matches one test.
func exactly(name string) string {
	parts := strings.Split(name, "/")
	for i, part := range parts {
		parts[i] = "^" + regexp.QuoteMeta(part) + "$"
	}
	return strings.Join(parts, "/")
}

// quietLog logs to the test while it runs; a node may say something after it.
func quietLog(t *testing.T) func(string, ...any) {
	return func(format string, args ...any) {
		if t.Context().Err() == nil {
			t.Logf(format, args...)
		}
	}
}
