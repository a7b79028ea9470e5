package pmi

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/procman"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// net is what connects the servers of several hosts.
type network struct {
	mu    sync.Mutex
	hosts map[string]map[int]func([][]byte, error)
	data  map[string]map[int][]byte
	fail  error
	wg    sync.WaitGroup
}

func (n *network) exchange(host int) func(string, []int, []byte, func([][]byte, error)) {
	return func(name string, hosts []int, data []byte, done func([][]byte, error)) {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.fail != nil {
			n.wg.Go(func() { done(nil, n.fail) })
			return
		}
		if n.data[name] == nil {
			n.data[name], n.hosts[name] = map[int][]byte{}, map[int]func([][]byte, error){}
		}
		n.data[name][host], n.hosts[name][host] = data, done
		if len(n.data[name]) < len(hosts) {
			return
		}
		var all [][]byte
		for _, h := range hosts {
			all = append(all, n.data[name][h])
		}
		for _, done := range n.hosts[name] {
			n.wg.Go(func() { done(all, nil) })
		}
	}
}

// job is a world on some hosts, whose ranks are clients in this process.
type job struct {
	t       *testing.T
	net     *network
	servers []procman.Server // by host
	hostOf  []int
	ranks   []*client
	ends    chan end
}

type end struct {
	rank int
	why  procman.Departure
}

type client struct {
	t    *testing.T
	file *os.File
	in   *bufio.Reader
}

// newJob starts a world whose ranks are those of the job from first on.
func newJob(t *testing.T, first int, hostOf ...int) *job {
	t.Helper()
	j := &job{t: t, hostOf: hostOf, ends: make(chan end, len(hostOf)), ranks: make([]*client, len(hostOf)),
		net: &network{data: map[string]map[int][]byte{}, hosts: map[string]map[int]func([][]byte, error){}}}
	w := procman.World{Job: "j1", HostOf: hostOf, AppOf: make([]int, len(hostOf)), Universe: 99}
	for r := range hostOf {
		w.Ranks = append(w.Ranks, first+r)
		w.AppOf[r] = r % 2
	}
	w.End = func(rank int, why procman.Departure) { j.ends <- end{rank, why} }
	for h := range slices.Max(hostOf) + 1 {
		w.Hosts = append(w.Hosts, string(rune('a'+h)))
	}
	for h := range w.Hosts {
		w := w
		w.Host, w.Exchange = h, j.net.exchange(h)
		if h > 0 {
			w.Addr = "10.0.0.7"
		}
		s, err := Serve(w)
		if err != nil {
			t.Fatal(err)
		}
		j.servers = append(j.servers, s)
	}
	t.Cleanup(func() {
		for _, c := range j.ranks {
			c.file.Close()
		}
		j.net.wg.Wait()
		for _, s := range j.servers {
			if err := s.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		}
	})
	for r, h := range hostOf {
		files, err := j.servers[h].Files(r)
		if err != nil || len(files) != 1 {
			t.Fatalf("rank %d: %d files, %v", r, len(files), err)
		}
		j.ranks[r] = &client{t, files[0], bufio.NewReader(files[0])}
	}
	return j
}

// say says something; the newline is added.
func (c *client) say(format string, args ...any) {
	c.t.Helper()
	if _, err := fmt.Fprintf(c.file, format+"\n", args...); err != nil {
		c.t.Fatal(err)
	}
}

// hear is the next answer.
func (c *client) hear() string {
	c.t.Helper()
	line, err := c.in.ReadString('\n')
	if err != nil {
		c.t.Fatalf("answer: %v", err)
	}
	return strings.TrimSuffix(line, "\n")
}

func (c *client) ask(what, want string) {
	c.t.Helper()
	c.say("%s", what)
	if got := c.hear(); got != want {
		c.t.Errorf("%s: got %s, want %s", what, got, want)
	}
}

const (
	initText = "cmd=init pmi_version=1 pmi_subversion=1"
	initDone = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
	passed   = "cmd=barrier_out rc=0"
)

// waits waits until a rank waits at a fence.
func (j *job) waits(r int) {
	j.t.Helper()
	for end := time.Now().Add(time.Minute); j.servers[j.hostOf[r]].Standing(r).Waits == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			j.t.Fatalf("rank %d does not wait at the fence after a minute", r)
		}
	}
}

func TestAnswers(t *testing.T) {
	j := newJob(t, 3, 0, 0)
	c := j.ranks[1]
	for _, a := range []struct{ say, want string }{
		{initText, initDone},
		{"cmd=init pmi_version=1 pmi_subversion=2", initDone},
		{"cmd=get_maxes", "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024"},
		{"cmd=get_appnum", "cmd=appnum rc=0 appnum=1"},
		{"cmd=get_my_kvsname", "cmd=my_kvsname rc=0 kvsname=gorun_j1"},
		{"cmd=get_universe_size", "cmd=universe_size rc=0 size=99"},
		{"cmd=put kvsname=gorun_j1 key=a value=b=c", "cmd=put_result rc=0 msg=success"},
		{"cmd=get kvsname=gorun_j1 key=a", "cmd=get_result rc=0 msg=success value=b=c"},
		{"cmd=put key=a value=x\\ y\\\\z", "cmd=put_result rc=0 msg=success"},
		{"cmd=get key=a", "cmd=get_result rc=0 msg=success value=x\\ y\\\\z"},
		{"cmd=put key=a value=x y = z ", "cmd=put_result rc=0 msg=success"},
		{"cmd=get key=a", "cmd=get_result rc=0 msg=success value=x y = z "},
		{"cmd=put kvsname=other key=a value=b", "cmd=put_result rc=1 info=fail msg=there_is_no_other_space_of_keys_than_gorun_j1"},
		{"cmd=get kvsname=other key=a", "cmd=get_result rc=1 msg=there_is_no_other_space_of_keys_than_gorun_j1 value=unknown"},
		{"cmd=get kvsname=gorun_j1 key=b", "cmd=get_result rc=1 msg=no_rank_has_put_b value=unknown"},
		{"cmd=get key=PMI_process_mapping", "cmd=get_result rc=0 msg=success value=(vector,(0,1,2))"},
		{"cmd=publish_name service=s port=p", "cmd=publish_result rc=1 info=fail msg=gorun_publishes_no_names"},
		{"cmd=unpublish_name service=s", "cmd=unpublish_result rc=1 info=fail msg=gorun_publishes_no_names"},
		{"cmd=lookup_name service=s", "cmd=lookup_result rc=1 info=fail msg=gorun_publishes_no_names"},
		{"mcmd=spawn\nnprocs=1\nexecname=/bin/x\ntotspawns=2\nspawnssofar=1\nargcnt=0\nendcmd\nmcmd=spawn\nspawnssofar=2\ntotspawns=2\nendcmd",
			"cmd=spawn_result rc=1 info=fail msg=gorun_starts_no_further_processes"},
		{"cmd=finalize", "cmd=finalize_ack rc=0"},
	} {
		c.ask(a.say, a.want)
	}
}

func TestEnviron(t *testing.T) {
	j := newJob(t, 4, 0, 1, 1)
	for _, c := range []struct {
		rank int
		want []string
	}{
		{0, []string{"PMI_FD=3", "PMI_RANK=0", "PMI_SIZE=3", "MPI_LOCALRANKID=0", "MPI_LOCALNRANKS=1"}},
		{2, []string{"PMI_FD=3", "PMI_RANK=2", "PMI_SIZE=3", "MPI_LOCALRANKID=1", "MPI_LOCALNRANKS=2", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME=10.0.0.7"}},
	} {
		if diff := cmp.Diff(j.servers[j.hostOf[c.rank]].Environ(c.rank), c.want); diff != "" {
			t.Errorf("rank %d (-got +want):\n%s", c.rank, diff)
		}
	}
	if _, err := j.servers[0].Files(0); err == nil {
		t.Error("a rank is started twice without an error")
	}
}

// What a rank has put is there for all others when they have passed the fence, on all hosts; no one passes before all have come.
func TestFence(t *testing.T) {
	for _, hosts := range [][]int{{0}, {0, 0, 0}, {0, 0, 1, 1, 2}, {2, 0, 1, 0}} {
		t.Run(fmt.Sprint(hosts), func(t *testing.T) {
			j := newJob(t, 0, hosts...)
			for _, c := range j.ranks {
				c.ask(initText, initDone)
			}
			for round := range 3 {
				for r, c := range j.ranks {
					c.ask(fmt.Sprintf("cmd=put key=k%d value=v%d.%d", r, round, r), "cmd=put_result rc=0 msg=success")
				}
				last := len(j.ranks) - 1
				for _, c := range j.ranks[:last] {
					c.say("cmd=barrier_in")
				}
				// The server has read the barrier of each, and answers none, also when it has read all.
				for r := range j.ranks[:last] {
					j.waits(r)
				}
				for r := range j.ranks[:last] {
					j.waits(r)
				}
				j.ranks[last].say("cmd=barrier_in")
				for r, c := range j.ranks {
					if got := c.hear(); got != passed {
						t.Fatalf("rank %d: got %s", r, got)
					}
				}
				for _, c := range j.ranks {
					for r := range j.ranks {
						c.ask(fmt.Sprintf("cmd=get key=k%d", r), fmt.Sprintf("cmd=get_result rc=0 msg=success value=v%d.%d", round, r))
					}
				}
			}
		})
	}
}

// How a rank left is known when its process has ended, also what it said last.
func TestEnded(t *testing.T) {
	for _, c := range []struct {
		name string
		say  []string
		want procman.Departure
		ends bool // the job
	}{
		{"nothing said", nil, procman.Departure{Silent: true}, false},
		{"in order", []string{initText, "cmd=finalize"}, procman.Departure{}, false},
		{"before the end", []string{initText}, procman.Departure{Unfinished: true}, false},
		{"begun again", []string{initText, "cmd=finalize", initText}, procman.Departure{Unfinished: true}, false},
		{"waiting", []string{initText, "cmd=barrier_in"}, procman.Departure{Unfinished: true}, false},
		{"abort", []string{initText, "cmd=abort exitcode=7"}, procman.Departure{Unfinished: true, Aborted: true, Code: 7}, true},
		{"abort with a word", []string{initText, "cmd=abort exitcode=-1 message=no\\ room\\\\"}, procman.Departure{Unfinished: true, Aborted: true, Code: -1, Text: `no room\`}, true},
		{"abort, as MPICH says", []string{initText, "cmd=abort exitcode=0 message=abort"}, procman.Departure{Unfinished: true, Aborted: true}, true},
		{"abort twice", []string{"cmd=abort exitcode=7", "cmd=abort exitcode=7"}, procman.Departure{Silent: true, Aborted: true, Code: 7}, true},
		{"rubbish", []string{"hello"}, procman.Departure{Silent: true, Fault: "does not speak PMI 1.1 on the descriptor in PMI_FD: no command: \"hello\""}, true},
		{"an unknown command", []string{initText, "cmd=dance"}, procman.Departure{Unfinished: true, Fault: "does not speak PMI 1.1 on the descriptor in PMI_FD: the command \"dance\" is not known"}, true},
		{"PMI 2", []string{"cmd=init pmi_version=2 pmi_subversion=0"}, procman.Departure{Silent: true, Fault: "does not speak PMI 1.1 on the descriptor in PMI_FD: it speaks PMI 2"}, true},
		{"two barriers", []string{"cmd=barrier_in", "cmd=barrier_in"}, procman.Departure{Silent: true, Fault: "does not speak PMI 1.1 on the descriptor in PMI_FD: it enters a barrier while it waits in one"}, true},
		{"an endless line", []string{"cmd=put key=a value=" + strings.Repeat("x", maxCommand)},
			procman.Departure{Silent: true, Fault: "does not speak PMI 1.1 on the descriptor in PMI_FD: more than 262144 bytes at once: \"cmd=put key=a value=" + strings.Repeat("x", 40) + "\""}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(t, 0, 0, 0)
			for _, s := range c.say {
				fmt.Fprintf(j.ranks[0].file, "%s\n", s) // an endless line is not taken to its end
			}
			// The socket stays open, as a child of the process may have it.
			if diff := cmp.Diff(j.servers[0].Ended(0), c.want); diff != "" {
				t.Errorf("departure (-got +want):\n%s", diff)
			}
			if got := j.servers[0].Standing(0).State; got != "ended" {
				t.Errorf("state %q, want ended", got)
			}
			select {
			case e := <-j.ends:
				e.why.Unfinished, e.why.Silent = c.want.Unfinished, c.want.Silent // that is known later
				if diff := cmp.Diff(e.why, c.want); !c.ends || e.rank != 0 || diff != "" {
					t.Errorf("rank %d ends the job, want that: %v (-got +want):\n%s", e.rank, c.ends, diff)
				}
			default:
				if c.ends {
					t.Error("the job is not ended")
				}
			}
			if len(j.ends) > 0 {
				t.Errorf("the job is ended again")
			}
		})
	}
}

// A rank that says rubbish sees the end of its socket.
func TestFaultIsSeen(t *testing.T) {
	j := newJob(t, 0, 0)
	j.ranks[0].say("rubbish")
	if _, err := j.ranks[0].in.ReadByte(); err != io.EOF {
		t.Errorf("got %v, want EOF", err)
	}
}

// noPass is the answer to who waits at a fence that cannot be passed: by another name, for MPICH before 4.1 looks at nothing else.
func noPass(why string) string { return "cmd=barrier_failed:_" + why + " rc=1 msg=" + why }

// Who waits at a fence that cannot be passed any more goes on, and is told.
func TestBrokenFence(t *testing.T) {
	for _, c := range []struct {
		name   string
		hostOf []int
		wait   []int
		ended  []int
		want   string
	}{
		{"of one host", []int{0, 0}, []int{0}, []int{1}, "rank_6_has_ended"},
		{"beside one that waits", []int{0, 0, 1}, []int{0, 2}, []int{1}, "rank_6_has_ended"},
		{"all of a host", []int{0, 1}, []int{0}, []int{1}, "rank_6_has_ended"},
		{"all of two hosts", []int{2, 0, 1, 1, 0}, []int{0}, []int{1, 4, 2, 3}, "rank_9_has_ended"},
	} {
		t.Run("a rank has ended/"+c.name, func(t *testing.T) {
			j := newJob(t, 5, c.hostOf...)
			for _, r := range c.wait {
				j.ranks[r].say("cmd=barrier_in")
			}
			for _, r := range c.ended {
				j.servers[c.hostOf[r]].Ended(r)
			}
			// From then on there is none that could be passed.
			for range 3 {
				for _, r := range c.wait {
					if got, want := j.ranks[r].hear(), noPass(c.want); got != want {
						t.Fatalf("rank %d: got %s, want %s", r, got, want)
					}
				}
				for _, r := range c.wait {
					j.ranks[r].say("cmd=barrier_in")
				}
			}
		})
	}
	t.Run("a host is lost", func(t *testing.T) {
		j := newJob(t, 0, 0, 1)
		j.net.fail = fmt.Errorf("host b is lost")
		j.ranks[0].ask("cmd=barrier_in", noPass("host_b_is_lost"))
	})
	t.Run("a host gives rubbish", func(t *testing.T) {
		j := newJob(t, 0, 0, 2)
		j.net.exchange(2)("pmi 1", []int{0, 2}, []byte{9}, func([][]byte, error) {})
		j.ranks[0].ask("cmd=barrier_in", noPass("host_c:_what_another_host_gives_is_no_list_of_keys_(0_bytes_are_left)"))
	})
}

// A rank may end while its host waits for others; the next fence is one that it can't come to.
func TestEndedInFence(t *testing.T) {
	j := newJob(t, 5, 0, 1)
	j.ranks[1].say("cmd=barrier_in")
	j.waits(1)
	j.servers[1].Ended(1)
	j.ranks[0].ask("cmd=barrier_in", passed)
	j.ranks[0].ask("cmd=barrier_in", noPass("rank_6_has_ended"))
}

// When all have ended in order the hosts are through with each other.
func TestEndOfAll(t *testing.T) {
	j := newJob(t, 0, 0, 1, 1)
	for _, c := range j.ranks {
		c.say("cmd=barrier_in")
	}
	for r, c := range j.ranks {
		if got := c.hear(); got != passed {
			t.Fatalf("rank %d: got %s", r, got)
		}
	}
	for r, h := range j.hostOf {
		j.servers[h].Ended(r)
	}
	for _, s := range j.servers {
		s.Close()
	}
	j.net.wg.Wait()
	var names []string
	for name := range j.net.data {
		names = append(names, name)
	}
	slices.Sort(names)
	if diff := cmp.Diff(names, []string{"pmi 1", "pmi 2"}); diff != "" {
		t.Errorf("exchanges (-got +want):\n%s", diff)
	}
}

func TestStanding(t *testing.T) {
	j := newJob(t, 2, 0, 0, 0)
	s := j.servers[0]
	if got := s.Standing(0); got.Rank != 2 || got.State != "has not called MPI_Init" {
		t.Errorf("got %+v", got)
	}
	j.ranks[0].ask(initText, initDone)
	if got := s.Standing(0); got.State != "" || got.Waits != nil {
		t.Errorf("begun: got %+v", got)
	}
	j.ranks[1].ask("cmd=finalize", "cmd=finalize_ack rc=0")
	if got := s.Standing(1); got.State != "has called MPI_Finalize" {
		t.Errorf("finished: got %+v", got)
	}
	j.ranks[0].say("cmd=barrier_in")
	j.waits(0)
	var all []node.Standing
	for r := range j.ranks {
		all = append(all, s.Standing(r))
	}
	all[0].Waits[0].For = 3 * time.Second
	got := node.Report(all, make([]int, 5), nil)
	want := []string{"ranks 3,4 of 5 have not entered PMI barrier #1 (MPI_Init, MPI_Finalize): rank 3 has called MPI_Finalize, rank 4 has not called MPI_Init; rank 2 waits for them since 3.0 s"}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("-got +want:\n%s", diff)
	}
}

// The ranks of a host may not fill its memory.
func TestTooMuch(t *testing.T) {
	j := newJob(t, 0, 0)
	value := strings.Repeat("v", 200<<10)
	for n := 0; ; n++ {
		j.ranks[0].say("cmd=put key=k%d value=%s", n, value)
		switch got := j.ranks[0].hear(); {
		case got == "cmd=put_result rc=0 msg=success":
			if n > maxPuts/len(value) {
				t.Fatalf("%d values of %d bytes were taken", n, len(value))
			}
			continue
		case got == "cmd=put_result rc=1 info=fail msg=the_ranks_of_a_host_put_more_than_50331648_bytes" && n == maxPuts/len(value):
			return
		default:
			t.Fatalf("value %d: got %s", n, got)
		}
	}
}

func TestProcessMapping(t *testing.T) {
	irregular := make([]int, 400)
	for i := range irregular {
		irregular[i] = i * i % 7 * (i % 3)
	}
	for _, c := range []struct {
		hostOf []int
		want   string
	}{
		{[]int{0}, "(vector,(0,1,1))"},
		{[]int{0, 0, 0, 0}, "(vector,(0,1,4))"},
		{[]int{0, 0, 1, 1}, "(vector,(0,2,2))"},
		{[]int{3, 3, 1, 1}, "(vector,(0,2,2))"},
		{[]int{0, 0, 1}, "(vector,(0,1,2),(1,1,1))"},
		{[]int{0, 1, 0, 1}, "(vector,(0,2,1))"},
		{[]int{0, 1, 0}, "(vector,(0,2,1),(0,1,1))"},
		{[]int{0, 1, 2, 0, 2}, "(vector,(0,3,1),(0,1,1),(2,1,1))"},
		{irregular, ""},
	} {
		got := processMapping(c.hostOf, maxValue-1)
		if got != c.want {
			t.Errorf("%v: got %s, want %s", c.hostOf, got, c.want)
		}
		if got == "" {
			continue
		}
		if back := ranksOf(t, got, len(c.hostOf)); !sameHosts(back, c.hostOf) {
			t.Errorf("%v: %s says %v", c.hostOf, got, back)
		}
	}
}

// ranksOf reads a mapping as MPICH does: the host of each rank.
func ranksOf(t *testing.T, mapping string, ranks int) []int {
	t.Helper()
	list := strings.TrimSuffix(strings.TrimPrefix(mapping, "(vector,"), ")")
	var hostOf []int
	for {
		for b := range strings.SplitSeq(strings.Trim(list, "()"), "),(") {
			var host, hosts, each int
			if _, err := fmt.Sscanf(b, "%d,%d,%d", &host, &hosts, &each); err != nil {
				t.Fatalf("%s: %v", mapping, err)
			}
			for h := range hosts {
				for range each {
					if hostOf = append(hostOf, host+h); len(hostOf) == ranks {
						return hostOf
					}
				}
			}
		}
	}
}

// sameHosts reports whether two lists put the same ranks on one host.
func sameHosts(a, b []int) bool {
	for i := range a {
		for k := range a {
			if (a[i] == a[k]) != (b[i] == b[k]) {
				return false
			}
		}
	}
	return len(a) == len(b)
}

func FuzzProcessMapping(f *testing.F) {
	f.Add([]byte{0, 0, 1, 1, 2})
	f.Add([]byte{1, 0, 1, 0, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == 0 || len(b) > 200 {
			return
		}
		hostOf := make([]int, len(b))
		for i, h := range b {
			hostOf[i] = int(h % 8)
		}
		got := processMapping(hostOf, 1<<20)
		if back := ranksOf(t, got, len(hostOf)); !sameHosts(back, hostOf) {
			t.Errorf("%v: %s says %v", hostOf, got, back)
		}
	})
}

func FuzzCommands(f *testing.F) {
	f.Add([]byte("cmd=init pmi_version=1 pmi_subversion=1\ncmd=barrier_in\n"))
	f.Add([]byte("mcmd=spawn\ntotspawns=1\nspawnssofar=1\nendcmd\ncmd=put key=a\\ b value=\\\n"))
	f.Add([]byte("cmd=put  key value==\n=\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		in := bufio.NewReaderSize(bytes.NewReader(b), 16)
		for {
			c, err := read(in)
			if err != nil {
				break
			}
			if strings.ContainsAny(c.name, "\n") || len(c.text("key")) > len(b) {
				t.Errorf("got %+v", c)
			}
			out := reply("x", "msg", message(plain(c.text("value"))))
			if back, err := parse(strings.TrimSuffix(string(out), "\n")); err != nil || back.name != "x" || bytes.Count(out, []byte{'\n'}) != 1 {
				t.Errorf("reply %q is read as %+v, %v", out, back, err)
			}
		}
	})
}

func FuzzGiven(f *testing.F) {
	f.Add((&given{pairs: []pair{{"a", "b"}, {"", "c"}}}).encode())
	f.Add((&given{broken: "rank 1 has ended"}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := decodeGiven(b)
		if err != nil {
			return
		}
		back, err := decodeGiven(g.encode())
		if diff := cmp.Diff(back, g, cmp.AllowUnexported(given{}, pair{})); err != nil || diff != "" {
			t.Errorf("%v (-got +want):\n%s", err, diff)
		}
	})
}
