package pmix

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gorun-dev/gorun/launcher/internal/procman"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("PMIX_TEST_ROLE"); role != "" {
		os.Exit(stranger(role))
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if program, err := openMPI(); err == nil {
			os.RemoveAll(filepath.Dir(program))
		}
		os.Exit(code)
	}))
}

// bound is how long anything may take.
const bound = 60 * time.Second

// departure is what a server has told of a rank.
type departure struct {
	rank int
	why  procman.Departure
}

// job is servers of several hosts in this process.
type job struct {
	servers []*server
	ends    chan departure
	said    chan string
	hostOf  []int
	dirs    []string // that the servers have made

	mu     sync.Mutex // guards meet
	meet   map[string]*meeting
	broken error
}

type meeting struct {
	data map[int][]byte
	done []func([][]byte, error)
}

// start serves ranks whose hosts are given. Their numbers in the job are 100, 101, ...
func start(t *testing.T, hostOf ...int) *job {
	t.Helper()
	j := &job{ends: make(chan departure, 64), said: make(chan string, 64), hostOf: hostOf, meet: map[string]*meeting{}}
	hosts := slices.Max(hostOf) + 1
	w := procman.World{Job: fmt.Sprintf("test-%d-%s", os.Getpid(), t.Name()), HostOf: hostOf, AppOf: make([]int, len(hostOf)), Universe: len(hostOf) + 5}
	w.Job = strings.ReplaceAll(w.Job, "/", "-")
	for r := range hostOf {
		w.Ranks = append(w.Ranks, 100+r)
	}
	for h := range hosts {
		w.Hosts = append(w.Hosts, fmt.Sprintf("host-%d", h))
	}
	for h := range hosts {
		w := w
		w.Host = h
		w.Remove = func(path string) { j.dirs = append(j.dirs, path) }
		w.Exchange = func(name string, hosts []int, data []byte, done func([][]byte, error)) {
			j.exchange(h, name, hosts, data, done)
		}
		w.End = func(rank int, why procman.Departure) { j.ends <- departure{rank, why} }
		w.Say = func(rank int, text string) { j.said <- fmt.Sprintf("%d: %s", rank, text) }
		s, err := Serve(w)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
		j.servers = append(j.servers, s.(*server))
	}
	return j
}

func (j *job) exchange(host int, name string, hosts []int, data []byte, done func([][]byte, error)) {
	j.mu.Lock()
	m := j.meet[name]
	if m == nil {
		m = &meeting{data: map[int][]byte{}}
		j.meet[name] = m
	}
	m.data[host] = data
	m.done = append(m.done, done)
	full, err := len(m.done) == len(hosts), j.broken
	j.mu.Unlock()
	if err != nil {
		done(nil, err)
		return
	}
	if !full {
		return
	}
	var all [][]byte
	for _, h := range hosts {
		all = append(all, m.data[h])
	}
	for _, done := range m.done {
		done(all, nil)
	}
}

// server is that of a rank.
func (j *job) server(rank int) *server { return j.servers[j.hostOf[rank]] }

// ended is the next rank that a server wants the job to end for.
func (j *job) ended(t *testing.T) departure {
	t.Helper()
	select {
	case d := <-j.ends:
		return d
	case <-time.After(bound):
		t.Fatal("no server has asked for the end of the job")
	}
	panic("unreachable")
}

// client is one that speaks PMIx itself.
type client struct {
	t    *testing.T
	nc   net.Conn
	ns   string
	rank int
	tag  uint32
}

// helloOf is the first message of a client.
func helloOf(namespace string, rank int, version, packing string) []byte {
	b := []byte("native\x00")
	b = binary.BigEndian.AppendUint32(b, 8)
	b = binary.NativeEndian.AppendUint32(b, uint32(os.Geteuid()))
	b = binary.NativeEndian.AppendUint32(b, uint32(os.Getegid()))
	b = append(b, 0)
	b = append(b, namespace+"\x00"...)
	b = binary.BigEndian.AppendUint32(b, uint32(rank))
	b = append(b, version+"\x00"...)
	if packing != "" {
		b = append(b, packing+"\x00\x01hash\x00"...)
	}
	h := make([]byte, 8, headerSize+len(b))
	for i := range h {
		h[i] = 0xff
	}
	h = binary.NativeEndian.AppendUint32(h, uint32(len(b)))
	return append(append(h, 0, 0, 0, 0), b...)
}

// connect connects a rank, and says hello.
func (j *job) connect(t *testing.T, rank int) *client {
	t.Helper()
	c := j.dial(t, rank)
	c.send(helloOf(c.ns, rank, "4.2.2", packing))
	answer := c.receive(8)
	if st := binary.BigEndian.Uint32(answer); st != 0 {
		t.Fatalf("rank %d: the server says %d", rank, int32(st))
	}
	return c
}

func (j *job) dial(t *testing.T, rank int) *client {
	t.Helper()
	s := j.server(rank)
	nc, err := net.Dial("tcp4", s.ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(bound))
	return &client{t: t, nc: nc, ns: s.namespace, rank: rank, tag: 100}
}

func (c *client) send(b []byte) {
	c.t.Helper()
	if _, err := c.nc.Write(b); err != nil {
		c.t.Fatalf("rank %d: %v", c.rank, err)
	}
}

func (c *client) receive(n int) []byte {
	c.t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(c.nc, b); err != nil {
		c.t.Fatalf("rank %d: %v", c.rank, err)
	}
	return b
}

// gone waits until the server has closed the connection.
func (c *client) gone() {
	c.t.Helper()
	if _, err := c.nc.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Fatalf("rank %d: the server has not closed the connection: %v", c.rank, err)
	}
}

// request sends one.
func (c *client) request(cmd uint8, pack func(*packer)) {
	c.t.Helper()
	p := &packer{}
	p.count(1)
	p.u8(cmd)
	if pack != nil {
		pack(p)
	}
	c.tag++
	c.send(append(header{tag: c.tag, length: uint32(len(p.b))}.encode(), p.b...))
}

// answer is the next one.
func (c *client) answer() *unpacker {
	c.t.Helper()
	h, err := readHeader(c.nc, binary.BigEndian)
	if err != nil {
		c.t.Fatalf("rank %d: %v", c.rank, err)
	}
	return &unpacker{b: c.receive(int(h.length))}
}

// status is that of the next answer.
func (c *client) status() status {
	c.t.Helper()
	u := c.answer()
	u.one()
	st := status(u.u32())
	if u.err != nil {
		c.t.Fatalf("rank %d: %v", c.rank, u.err)
	}
	return st
}

// wants fails the test unless the next answer is a status.
func (c *client) wants(want status) {
	c.t.Helper()
	if got := c.status(); got != want {
		c.t.Fatalf("rank %d: status %d, want %d", c.rank, got, want)
	}
}

func packInfos(p *packer, infos ...info) {
	p.count(1)
	p.size(len(infos))
	if len(infos) == 0 {
		return
	}
	p.count(len(infos))
	for _, i := range infos {
		p.str(i.key)
		p.u32(0)
		p.value(i.value)
	}
}

func packProcs(p *packer, procs ...proc) {
	p.count(1)
	p.size(len(procs))
	p.count(len(procs))
	for _, q := range procs {
		p.proc(q)
	}
}

// publish commits texts for ranks of the host and of others.
func (c *client) publish(local, remote string) {
	c.t.Helper()
	c.request(cmdCommit, func(p *packer) {
		for scope, text := range []string{scopeLocal: local, scopeRemote: remote} {
			if text == "" {
				continue
			}
			p.count(1)
			p.u8(uint8(scope))
			p.count(1)
			p.u8(1)
			p.bytes([]byte(text))
		}
	})
	c.wants(success)
}

// fence begins one of some ranks; of all if none is given.
func (c *client) fence(collect bool, ranks ...int) {
	c.t.Helper()
	procs := []proc{{c.ns, rankWildcard}}
	if len(ranks) > 0 {
		procs = nil
	}
	for _, r := range ranks {
		procs = append(procs, proc{c.ns, uint32(r)})
	}
	c.request(cmdFence, func(p *packer) {
		packProcs(p, procs...)
		packInfos(p, info{"pmix.collect", collect})
	})
}

// get asks for what a rank has published.
func (c *client) get(rank int, key string, infos ...info) {
	c.t.Helper()
	c.request(cmdGet, func(p *packer) {
		p.count(1)
		p.str(c.ns)
		p.count(1)
		p.u32(uint32(rank))
		packInfos(p, infos...)
		p.count(1)
		p.str(key)
	})
}

// got is the answer to it.
func (c *client) got() string {
	c.t.Helper()
	u := c.answer()
	u.one()
	if st := status(u.u32()); st != success {
		return fmt.Sprintf("status %d", st)
	}
	u.one()
	in := &unpacker{b: u.bytes()}
	in.one()
	from := in.proc()
	if u.err != nil || in.err != nil || from.namespace != c.ns {
		c.t.Fatalf("rank %d: an answer from %v: %v, %v", c.rank, from, u.err, in.err)
	}
	return string(in.b)
}

// until waits for a condition.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("not in time: %s", what)
		}
	}
}
