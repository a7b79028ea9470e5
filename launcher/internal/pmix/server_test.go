package pmix

import (
	"encoding/binary"
	"errors"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/procman"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

func TestFence(t *testing.T) {
	j := start(t, 0, 0, 1)
	a, b, c := j.connect(t, 0), j.connect(t, 1), j.connect(t, 2)
	a.publish("a for its host", "a for others")
	b.publish("b for its host", "b for others")
	c.publish("c for its host", "c for others")
	a.fence(true)
	b.fence(true)
	c.fence(true)
	for _, k := range []*client{a, b, c} {
		k.wants(success)
	}
	// Ranks of the host see what is for them, others what is for others.
	for _, q := range []struct {
		by   *client
		of   int
		want string
	}{{a, 1, "b for its host"}, {a, 2, "c for others"}, {c, 0, "a for others"}, {b, 0, "a for its host"}} {
		q.by.get(q.of, "key")
		if got := q.by.got(); got != q.want {
			t.Errorf("rank %d gets %q of rank %d, want %q", q.by.rank, got, q.of, q.want)
		}
	}
	// What is published later is there after the next fence.
	c.publish("", "c again")
	a.fence(false)
	b.fence(false)
	c.fence(false)
	for _, k := range []*client{a, b, c} {
		k.wants(success)
	}
	a.get(2, "key")
	if got := a.got(); got != "c again" {
		t.Errorf("after the second fence rank 0 gets %q", got)
	}
}

func TestFencesOfSome(t *testing.T) {
	j := start(t, 0, 0, 1, 1)
	var k []*client
	for r := range 4 {
		k = append(k, j.connect(t, r))
	}
	k[1].publish("", "one")
	k[2].publish("", "two")
	// Two at a time, of other members; and two of the same, one behind the other.
	k[1].fence(true, 2, 1)
	k[0].fence(false, 0, 1)
	k[0].fence(false, 0, 1)
	k[1].fence(false, 0, 1)
	k[1].wants(success)
	k[0].wants(success)
	k[2].fence(true, 1, 2)
	k[2].wants(success)
	k[1].wants(success)
	k[1].fence(false, 0, 1)
	k[1].wants(success)
	k[0].wants(success)
	k[1].get(2, "key")
	if got := k[1].got(); got != "two" {
		t.Errorf("rank 1 gets %q of rank 2", got)
	}
	// Not one that the rank is not in.
	k[3].fence(false, 0, 1)
	k[3].wants(errBadParam)
	k[3].fence(false, 3, 9)
	k[3].wants(errBadParam)
}

// Without a fence, too, a rank gets what another one publishes, here or elsewhere.
func TestGetWaits(t *testing.T) {
	j := start(t, 0, 0, 1)
	a, b, c := j.connect(t, 0), j.connect(t, 1), j.connect(t, 2)
	a.get(1, "key", info{"pmix.immediate", true})
	a.wants(errNotFound)
	a.get(1, "pmix.something")
	a.wants(errNotFound)
	a.get(1, "key")
	a.get(2, "key")
	s := j.server(0)
	until(t, "two requests wait", func() bool { return len(s.Standing(0).Waits) == 2 })
	var texts []string
	for _, w := range s.Standing(0).Waits {
		texts = append(texts, w.What)
	}
	if diff := cmp.Diff([]string{"PMIx get from rank 101", "PMIx get from rank 102"}, texts); diff != "" {
		t.Errorf("what rank 0 waits for (-want +got):\n%s", diff)
	}
	a.publish("", "")
	b.publish("b", "")
	if got := a.got(); got != "b" {
		t.Errorf("of rank 1: %q", got)
	}
	c.publish("", "c")
	if got := a.got(); got != "c" {
		t.Errorf("of rank 2: %q", got)
	}
}

// A fence that can't be passed is told to those who wait.
func TestFenceWithoutEnded(t *testing.T) {
	j := start(t, 0, 0, 1)
	a, b, c := j.connect(t, 0), j.connect(t, 1), j.connect(t, 2)
	a.fence(false)
	a.get(1, "key")
	c.fence(false)
	until(t, "rank 0 waits", func() bool { return len(j.server(0).Standing(0).Waits) == 2 })
	w := j.server(0).Standing(0).Waits[0]
	w.For = 0
	var members [][2]int
	for _, m := range w.Members {
		members = append(members, m)
	}
	if diff := cmp.Diff([][2]int{{100, 3}}, members); diff != "" || w.What != "PMIx fence #1 (MPI_Init, MPI_Finalize)" || w.Group != "pmix all 1" {
		t.Errorf("rank 0 waits: %+v", w)
	}
	b.nc.Close()
	if why := j.server(1).Ended(1); !why.Unfinished {
		t.Errorf("rank 1 has left: %+v", why)
	}
	for range 2 {
		if st := a.status(); st != errGeneral && st != errNotFound {
			t.Errorf("rank 0: status %d", st)
		}
	}
	c.wants(errGeneral)
}

// Nor can one be passed that the ranks of another host have not come to, and don't come to any more; and no later one.
func TestFenceWithoutHost(t *testing.T) {
	for _, c := range []struct {
		hostOf []int
		want   string
	}{
		{[]int{0, 1}, "0: PMIx fence (MPI_Init, MPI_Finalize): rank 101 has ended\n"},
		{[]int{0, 1, 1, 2}, "0: PMIx fence (MPI_Init, MPI_Finalize): rank 102 has ended\n"},
	} {
		j := start(t, c.hostOf...)
		a := j.connect(t, 0)
		a.fence(false)
		for r := 1; r < len(c.hostOf); r++ {
			j.server(r).Ended(r)
		}
		for range 3 {
			a.wants(errGeneral)
			if got := <-j.said; got != c.want {
				t.Errorf("said %q, want %q", got, c.want)
			}
			a.fence(false)
		}
	}
}

// A rank may end while its host waits for others: it has come to this fence, and can't come to the next one.
func TestEndedInFence(t *testing.T) {
	j := start(t, 0, 1)
	a, b := j.connect(t, 0), j.connect(t, 1)
	b.fence(false)
	until(t, "rank 1 waits", func() bool { return len(j.server(1).Standing(1).Waits) == 1 })
	b.nc.Close()
	j.server(1).Ended(1)
	a.fence(false)
	a.wants(success)
	a.fence(false)
	a.wants(errGeneral)
}

// When all have ended in order the hosts are through with each other.
func TestEndOfAll(t *testing.T) {
	j := start(t, 0, 1, 1)
	var ranks []*client
	for r := range j.hostOf {
		ranks = append(ranks, j.connect(t, r))
		ranks[r].publish("", "address")
		ranks[r].fence(true)
	}
	for r, c := range ranks {
		c.wants(success)
		c.request(cmdFinalize, nil)
		c.wants(success)
		c.nc.Close()
		if why := j.server(r).Ended(r); why != (procman.Departure{}) {
			t.Errorf("rank %d: %+v", r, why)
		}
	}
	want := []string{"pmix fence all 1", "pmix fence all 2", "pmix published"}
	met := func() []string {
		j.mu.Lock()
		defer j.mu.Unlock()
		return slices.Sorted(maps.Keys(j.meet))
	}
	until(t, "the last exchange", func() bool { return len(met()) >= len(want) })
	for _, s := range j.servers {
		s.Close()
	}
	if diff := cmp.Diff(met(), want); diff != "" {
		t.Errorf("exchanges (-got +want):\n%s", diff)
	}
}

// A rank that ends without a word keeps nobody from what the others of its host have published; and what it has not published is not waited for.
func TestGetWithoutEnded(t *testing.T) {
	j := start(t, 0, 1, 1, 1)
	a, c, d := j.connect(t, 0), j.connect(t, 2), j.connect(t, 3)
	a.publish("", "")
	a.get(2, "key")
	c.publish("", "two")
	j.server(1).Ended(1)
	late := j.connect(t, 1) // a child of its process
	late.publish("", "late")
	d.publish("", "three")
	if got := a.got(); got != "two" {
		t.Errorf("of rank 2: %q", got)
	}
	a.get(3, "key")
	if got := a.got(); got != "three" {
		t.Errorf("of rank 3: %q", got)
	}

	j = start(t, 0, 1, 1)
	a, b := j.connect(t, 0), j.connect(t, 1)
	a.publish("", "")
	a.get(2, "key")
	b.publish("", "one")
	j.server(2).Ended(2)
	a.wants(errNotFound)
	a.get(2, "key")
	a.wants(errNotFound)
	a.get(1, "key")
	if got := a.got(); got != "one" {
		t.Errorf("of rank 1: %q", got)
	}
}

// Who asks for one rank is told of others of that rank's host, too, if they are known and it is not too much; of each once.
func TestTellsAhead(t *testing.T) {
	j := start(t, 0, 0, 0, 1, 1, 0)
	var k []*client
	for r := range j.hostOf {
		k = append(k, j.connect(t, r))
	}
	for r, text := range []string{"zero", "one", "two", "three", "four"} {
		k[r].publish(text, text+" from afar")
	}
	k[2].publish(strings.Repeat("2", maxAhead), "")
	told := func(of int) map[uint32]string {
		t.Helper()
		k[0].get(of, "key")
		u := k[0].answer()
		u.one()
		u.u32() // the status
		got := map[uint32]string{}
		for len(u.b) > 0 {
			u.one()
			in := &unpacker{b: u.bytes()}
			in.one()
			from := in.proc()
			got[from.rank] = string(in.b)
			if u.err != nil || in.err != nil {
				t.Fatal(u.err, in.err)
			}
		}
		return got
	}
	k[0].fence(true)
	for _, c := range k[1:] {
		c.fence(true)
	}
	for _, c := range k {
		c.wants(success)
	}
	for _, c := range []struct {
		of   int
		want map[uint32]string
	}{
		{1, map[uint32]string{1: "one"}},
		{2, map[uint32]string{2: strings.Repeat("2", maxAhead)}},
		{4, map[uint32]string{4: "four from afar", 3: "three from afar"}},
		{4, map[uint32]string{4: "four from afar"}},
		{3, map[uint32]string{3: "three from afar"}},
	} {
		if diff := cmp.Diff(told(c.of), c.want); diff != "" {
			t.Errorf("rank 0 asks for rank %d (-got +want):\n%s", c.of, diff)
		}
	}
}

// What a host can't give to the others at once is not taken.
func TestTooMuch(t *testing.T) {
	j := start(t, 0, 0, 1)
	a, b, c := j.connect(t, 0), j.connect(t, 1), j.connect(t, 2)
	much := strings.Repeat("x", maxPublished/2)
	a.publish("", much)
	a.publish("", much) // counts once
	b.publish("", much)
	c.publish("", "address")
	b.request(cmdCommit, func(p *packer) {
		p.count(1)
		p.u8(scopeGlobal)
		p.count(1)
		p.u8(1)
		p.bytes([]byte(much + "x"))
	})
	b.wants(errOutOfResource)
	want := departure{1, procman.Departure{Fault: "publishes too much by PMIx: 50331649 bytes with the other ranks of its host, the most is 50331648"}}
	if got := j.ended(t); got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	// What was taken all hosts have.
	c.get(1, "key")
	if got := c.got(); got != much {
		t.Errorf("rank 2 gets %d bytes of rank 1", len(got))
	}
}

func TestExchangeFails(t *testing.T) {
	j := start(t, 0, 1)
	j.mu.Lock()
	j.broken = errors.New("host 1 is lost")
	j.mu.Unlock()
	a := j.connect(t, 0)
	a.fence(false)
	a.wants(errGeneral)
}

func TestLeave(t *testing.T) {
	j := start(t, 0, 0, 0, 0)
	s := j.server(0)
	state := func(rank int) string { return s.Standing(rank).State }
	if got := state(0); got != "has not called MPI_Init" {
		t.Errorf("before: %q", got)
	}
	a := j.connect(t, 0)
	if got := state(0); got != "" {
		t.Errorf("connected: %q", got)
	}
	a.request(cmdFinalize, nil)
	a.wants(success)
	if got := state(0); got != "has called MPI_Finalize" {
		t.Errorf("after: %q", got)
	}
	a.nc.Close()
	if why := s.Ended(0); why != (procman.Departure{}) {
		t.Errorf("in order: %+v", why)
	}
	if got := state(0); got != "ended" {
		t.Errorf("ended: %q", got)
	}

	b := j.connect(t, 1)
	b.request(cmdAbort, func(p *packer) {
		p.count(1)
		p.u32(7)
		p.count(1)
		p.str("no\nmore")
		p.count(1)
		p.size(0)
	})
	b.wants(success)
	want := procman.Departure{Aborted: true, Code: 7, Text: "no more"}
	if got := j.ended(t); got != (departure{1, want}) {
		t.Errorf("abort: %+v", got)
	}
	b.nc.Close()
	want.Unfinished = true
	if got := s.Ended(1); got != want {
		t.Errorf("abort: %+v, want %+v", got, want)
	}

	// A child that lives on has the socket, too.
	d := j.connect(t, 3)
	d.request(cmdFinalize, nil)
	if why := s.Ended(3); why != (procman.Departure{}) {
		t.Errorf("with a child: %+v", why)
	}
	d.wants(success)
	d.gone()
	if why := s.Ended(2); why != (procman.Departure{Silent: true}) {
		t.Errorf("one that never spoke: %+v", why)
	}
}

func TestFault(t *testing.T) {
	tests := []struct {
		name  string
		speak func(*client)
		want  string
	}{
		{"old", func(c *client) { c.send(helloOf(c.ns, 0, "2.1.4", "v21")) }, `has a PMIx library that is too old: 3.0 or later is needed (Open MPI 4.0), found "2.1.4"`},
		{"oldest", func(c *client) { c.send(helloOf(c.ns, 0, "2.0.3", "")) }, `has a PMIx library that is too old: 3.0 or later is needed (Open MPI 4.0), found "2.0.3"`},
		{"another packing", func(c *client) { c.send(helloOf(c.ns, 0, "9.0.0", "v91")) }, `has a PMIx library ("9.0.0") that packs as "v91", not as "v3", which is announced`},
		{"too much", func(c *client) {
			c.send(helloOf(c.ns, 0, "4.2.2", packing))
			c.send(header{tag: 100, length: 1 << 30}.encode())
		}, "does not speak PMIx: a request of 1073741824 bytes, the limit is 67108864"},
		{"rubbish", func(c *client) {
			c.send(helloOf(c.ns, 0, "4.2.2", packing))
			c.send(append(header{tag: 100, length: 5}.encode(), "gorun"...))
		}, "does not speak PMIx: a request has 1735357045 values where one is expected"},
		{"short", func(c *client) {
			c.send(helloOf(c.ns, 0, "4.2.2", packing))
			c.receive(8)
			c.request(cmdFence, func(p *packer) { p.count(1); p.size(3) })
		}, "does not speak PMIx: a request ends inside a value"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			j := start(t, 0)
			c := j.dial(t, 0)
			tt.speak(c)
			if got, want := j.ended(t), (departure{0, procman.Departure{Fault: tt.want}}); got != want {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
			io.Copy(io.Discard, c.nc) // the connection is closed
		})
	}
}

// Whoever is no rank is not answered, and does no harm.
func TestStrangers(t *testing.T) {
	j := start(t, 0, 1)
	for _, b := range [][]byte{
		helloOf("another", 0, "4.2.2", packing),
		helloOf(j.servers[0].namespace, 1, "4.2.2", packing), // of the other host
		helloOf(j.servers[0].namespace, 1<<32-2, "4.2.2", packing),
		[]byte("GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
		{1, 2, 3},
	} {
		c := j.dial(t, 0)
		c.send(b)
		c.nc.(*net.TCPConn).CloseWrite()
		c.gone()
	}
	j.connect(t, 0)
	select {
	case d := <-j.ends:
		t.Errorf("the job ends: %+v", d)
	default:
	}
}

// stranger is another user: it says hello, and prints what it is told.
func stranger(address string) int {
	nc, err := net.Dial("tcp4", address)
	if err != nil {
		os.Stdout.WriteString(err.Error())
		return 1
	}
	nc.SetDeadline(time.Now().Add(bound / 4))
	nc.Write(helloOf(os.Getenv("PMIX_TEST_NAMESPACE"), 0, "4.2.2", packing))
	b, _ := io.ReadAll(nc)
	os.Stdout.WriteString("told " + string(b))
	return 0
}

func TestAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		citest.Lacking(t, "root's rights: only root can be another user")
	}
	const nobody = 65534
	j := start(t, 0)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The test binary may be where others may not look.
	copied := filepath.Join(os.TempDir(), filepath.Base(t.TempDir())+".pmix.test")
	b, err := os.ReadFile(exe)
	if err == nil {
		err = os.WriteFile(copied, b, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(copied) })
	cmd := exec.CommandContext(t.Context(), copied)
	cmd.Dir = "/"
	cmd.Env = []string{"PMIX_TEST_ROLE=" + j.servers[0].ln.Addr().String(), "PMIX_TEST_NAMESPACE=" + j.servers[0].namespace}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	if err != nil || string(out) != "told " {
		t.Errorf("another user is answered: %q, %v", out, err)
	}
	j.connect(t, 0)
}

func TestPeerUser(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	client, err := net.Dial("tcp4", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	nc, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	from, to := nc.RemoteAddr().(*net.TCPAddr), nc.LocalAddr().(*net.TCPAddr)
	if user, err := listedUser(from, to); err != nil || user != os.Geteuid() {
		t.Errorf("listed: user %d, %v", user, err)
	}
	if user, err := diagUser(from, to); err != nil && !errors.Is(err, syscall.ENOENT) || err == nil && user != os.Geteuid() {
		t.Errorf("by netlink: user %d, %v", user, err)
	}
	other := *from
	other.Port = to.Port
	if user, err := listedUser(&other, to); err == nil {
		t.Errorf("a socket that is not there is user %d's", user)
	}
	if user, err := diagUser(&other, to); err == nil {
		t.Errorf("by netlink, a socket that is not there is user %d's", user)
	}
	if user, err := peerUser(nc); err != nil || user != os.Geteuid() {
		t.Errorf("user %d, %v", user, err)
	}
	client.Close()
	for what, of := range map[string]func(from, to *net.TCPAddr) (int, error){"listed": listedUser, "by netlink": diagUser} {
		if user, err := of(from, to); err == nil {
			t.Errorf("%s, a closed socket is user %d's", what, user)
		}
	}
}

func TestRequests(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", t.TempDir())
	j := start(t, 0)
	c := j.connect(t, 0)
	const spawn, query, newer = 9, 15, 200
	for _, cmd := range []uint8{spawn, query, newer} {
		c.request(cmd, nil)
		c.wants(errNotSupported)
	}
	c.request(cmdRegisterEvent, nil)
	c.wants(success)
	c.request(cmdDeregisterEvent, nil) // has no answer
	c.request(cmdLog, func(p *packer) {
		p.count(1)
		p.u64(0)
		packInfos(p, info{"pmix.log.stderr", "two\nlines\n"}, info{"pmix.log.mail", "to nobody"})
		packInfos(p)
	})
	c.wants(success)
	if got := <-j.said; got != "0: two\nlines\n" {
		t.Errorf("said %q", got)
	}
	// A value of a type to come.
	c.request(cmdLog, func(p *packer) {
		p.count(1)
		p.u64(0)
		p.count(1)
		p.size(1)
		p.count(1)
		p.str("pmix.log.stderr")
		p.u32(0)
		p.dataType(400)
		p.u64(1)
	})
	c.wants(errNotSupported)

	file := filepath.Join(os.TempDir(), "segment")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "full")
	if err := os.MkdirAll(filepath.Join(other, "of files"), 0o700); err != nil {
		t.Fatal(err)
	}
	c.request(cmdJobControl, func(p *packer) {
		packProcs(p, proc{c.ns, 0})
		packInfos(p, info{"pmix.reg.cleanup", file + ",not/absolute," + file + ".never," + outside + "," + os.TempDir() + "/../" + filepath.Base(filepath.Dir(outside)) + "/outside"}, info{"pmix.reg.cleanupdir", other})
	})
	c.wants(success)
	c.nc.Close()
	if err := j.server(0).Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", file, err)
	}
	for _, path := range []string{other, outside} {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("what is not to go is gone: %v", err)
		}
	}
}

// What a rank is told of its job is read by real clients elsewhere; here it is only seen that it can be read, and has what it must.
func TestJobInfo(t *testing.T) {
	j := start(t, 0, 0, 1)
	c := j.connect(t, 1)
	c.request(cmdJobInfo, nil)
	u := c.answer()
	u.one()
	if got := u.str(); got != c.ns {
		t.Errorf("namespace %q", got)
	}
	job := map[string]any{}
	ranks := map[uint32]map[string]any{}
	hosts := 0
	for len(u.b) > 0 {
		u.one()
		key := u.str()
		value := u.value(dataType(u.u16()), 0)
		if u.err != nil {
			t.Fatal(u.err)
		}
		switch key {
		case keyNodeInfo:
			hosts++
		case keyBlob:
			b := &unpacker{b: value.([]byte)}
			b.one()
			of := map[string]any{}
			ranks[b.u32()] = of
			for len(b.b) > 0 {
				b.one()
				key := b.str()
				of[key] = b.value(dataType(b.u16()), 0)
			}
			if b.err != nil {
				t.Fatal(b.err)
			}
		default:
			job[key] = value
		}
	}
	for key, want := range map[string]any{keyJobSize: uint64(3), keyUniverseSize: uint64(8), keyLocalSize: uint64(2), keyLocalPeers: "0,1", keyNodes: uint64(2),
		keyNodeList: "host-0,host-1", keyProcDir: j.servers[0].dir + "/1"} {
		if diff := cmp.Diff(want, job[key]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", key, diff)
		}
	}
	want := map[string]any{keyLocalRank: uint64(0), keyNodeRank: uint64(0), keyGlobalRank: uint64(2), keyAppRank: uint64(2), keyNodeID: uint64(1), keyHostname: "host-1", keyAppNumber: uint64(0)}
	if diff := cmp.Diff(want, ranks[2]); diff != "" {
		t.Errorf("rank 2 (-want +got):\n%s", diff)
	}
	if hosts != 2 || len(ranks) != 3 {
		t.Errorf("%d hosts, %d ranks", hosts, len(ranks))
	}
}

func TestUnlike(t *testing.T) {
	got := unlike([]string{"a", "b", "a", "a-2", "a", "x,y"})
	if diff := cmp.Diff([]string{"a", "b", "a-3", "a-2", "a-4", "x_y"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A rank that does not read its answers is cut off, and holds up nobody.
func TestUnread(t *testing.T) {
	j := start(t, 0, 0)
	a, b := j.connect(t, 0), j.connect(t, 1)
	b.publish(strings.Repeat("x", 1<<20), "")
	a.nc.SetWriteDeadline(time.Now().Add(bound))
	p := &packer{}
	p.count(1)
	p.u8(cmdGet)
	p.count(1)
	p.str(a.ns)
	p.count(1)
	p.u32(1)
	packInfos(p)
	one := append(header{tag: 100, length: uint32(len(p.b))}.encode(), p.b...)
	for {
		if _, err := a.nc.Write(one); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal("the server neither reads nor closes")
			}
			break
		}
	}
	b.get(1, "key")
	if got := b.got(); len(got) != 1<<20 {
		t.Errorf("%d bytes", len(got))
	}
}

func FuzzHello(f *testing.F) {
	f.Add(helloOf("name", 3, "4.2.2", "v3")[headerSize:])
	f.Add(helloOf("name", 3, "2.0.1", "")[headerSize:])
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := parseHello(b); err == nil {
			h.check()
		}
	})
}

// FuzzRequest speaks rubbish to a server of one rank.
func FuzzRequest(f *testing.F) {
	for cmd := range uint8(20) {
		f.Add(append([]byte{0, 0, 0, 1, cmd}, 0, 0, 0, 1, 0, 15, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 2, 'a', 0, 0, 0, 0, 0, 0, 39, 0, 24))
	}
	p := &packer{}
	p.count(1)
	p.u8(cmdFence)
	packProcs(p, proc{"gorun-fuzz", rankWildcard})
	packInfos(p, info{"pmix.collect", true})
	f.Add(p.b)
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := Serve(procman.World{Job: "fuzz", Ranks: []int{0}, HostOf: []int{0}, AppOf: []int{0}, Hosts: []string{"a"}, End: func(int, procman.Departure) {}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { s.(*server).clean = nil; s.Close() }()
		c := &conn{s: s.(*server), kick: make(chan struct{}, 1)}
		c.handle(1, b)
	})
}

// FuzzLearn gives a server rubbish from another host.
func FuzzLearn(f *testing.F) {
	f.Add(binary.BigEndian.AppendUint32(nil, 0))
	f.Add([]byte{0, 0, 0, 1, 'x', 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 'y'})
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0})
	s := &server{w: procman.World{HostOf: []int{0, 1}, Hosts: []string{"a", "b"}}, ranks: []*rank{{}, {}}}
	f.Fuzz(func(t *testing.T, b []byte) { s.learn(1, b) })
}
