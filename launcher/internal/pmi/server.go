// Package pmi is the process manager's side of PMI 1.1, which MPICH and what is made of it speak (Intel MPI, MVAPICH2): commands of one line on a socket that the
// rank's process inherits, and whose number is in PMI_FD. A rank puts what others need to reach it, passes a barrier, and gets what the others have put.
package pmi

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/procman"
)

// What clients are told of sizes, in bytes. Older ones have buffers of this size themselves.
const (
	maxName  = 256
	maxKey   = 64
	maxValue = 1024
)

const (
	// maxPuts bounds what all ranks of a host may put, in bytes.
	maxPuts = 48 << 20
	// writeBound bounds the write of an answer: who does not read it has gone, or is no client.
	writeBound = 10 * time.Second
)

// server serves the ranks of one host.
type server struct {
	w       procman.World
	name    string // of the space of keys
	mapping string
	hosts   []int // of the world
	local   []int
	wg      sync.WaitGroup

	mu     sync.Mutex // guards the rest; no write to a rank is made under it
	closed bool
	ranks  map[int]*rank
	keys   map[string]string
	fresh  []pair // put since the last fence
	size   int    // bytes that were put
	fence  int    // that is under way or comes next, from 1
	given  bool   // this host has given its part
	broken string // no fence can be passed any more: why
}

// rank is a rank of this host.
type rank struct {
	number int
	conn   *os.File      // nil: it was not started
	eof    chan struct{} // closed when its socket has been read to the end

	// Guarded by server.mu.
	state    state
	last     bool // it has taken part in the fence that is under way
	since    time.Time
	ended    bool
	departed procman.Departure

	write sync.Mutex
}

type state int

const (
	silent   state = iota // has not called MPI_Init
	begun                 // has
	finished              // has called MPI_Finalize
)

// Serve serves the ranks of a world on this host.
func Serve(w procman.World) (procman.Server, error) {
	s := &server{w: w, name: "gorun_" + w.Job, mapping: processMapping(w.HostOf, maxValue-1), hosts: w.HostsOf(nil), local: w.Local(), ranks: map[int]*rank{}, keys: map[string]string{}, fence: 1}
	if len(s.name) >= maxName {
		return nil, fmt.Errorf("pmi: the job's id has %d bytes", len(w.Job))
	}
	for _, number := range s.local {
		s.ranks[number] = &rank{number: number, eof: make(chan struct{})}
	}
	return s, nil
}

// socketFD is the descriptor that a rank's process has: the first of Files.
const socketFD = "3"

func (s *server) Environ(number int) []string {
	env := []string{
		"PMI_FD=" + socketFD,
		"PMI_RANK=" + strconv.Itoa(number),
		"PMI_SIZE=" + strconv.Itoa(len(s.w.Ranks)),
		"MPI_LOCALRANKID=" + strconv.Itoa(slices.Index(s.local, number)),
		"MPI_LOCALNRANKS=" + strconv.Itoa(len(s.local)),
	}
	if s.w.Addr != "" {
		// Else some take the address that this host's name has in its own files, which may be 127.0.1.1.
		env = append(env, "MPIR_CVAR_CH3_INTERFACE_HOSTNAME="+s.w.Addr)
	}
	return env
}

func (s *server) Files(number int) ([]*os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("pmi: socket pair for rank %d: %w", s.w.Ranks[number], err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "pmi")
	if err := unix.SetNonblock(pair[0], true); err != nil { // so that Close ends a Read
		unix.Close(pair[0])
		theirs.Close()
		return nil, fmt.Errorf("pmi: socket of rank %d: %w", s.w.Ranks[number], err)
	}
	r := s.ranks[number]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || r.conn != nil {
		unix.Close(pair[0])
		theirs.Close()
		return nil, fmt.Errorf("pmi: rank %d is not to be started", s.w.Ranks[number])
	}
	r.conn = os.NewFile(uintptr(pair[0]), "pmi")
	s.wg.Go(func() { s.serve(r) })
	return []*os.File{theirs}, nil
}

// serve answers a rank until its socket ends.
func (s *server) serve(r *rank) {
	defer close(r.eof)
	in := bufio.NewReader(r.conn)
	for {
		c, err := read(in)
		if err == nil {
			err = s.handle(r, c)
		}
		var own *os.PathError // of the socket, not of what was said
		switch {
		case err == nil:
		case err == io.EOF || errors.As(err, &own) || errors.Is(err, os.ErrClosed):
			return
		default:
			s.fault(r, err)
			return
		}
	}
}

// fault gives up on a rank that says what it should not. Its socket is read no more, and it sees an end there.
func (s *server) fault(r *rank, err error) {
	s.mu.Lock()
	ended := r.ended || r.departed.Fault != "" || r.departed.Aborted
	if !ended {
		r.departed.Fault = "does not speak PMI 1.1 on the descriptor in PMI_FD: " + err.Error()
	}
	why := r.departed
	s.mu.Unlock()
	shutdown(r.conn, unix.SHUT_RDWR)
	if !ended {
		s.w.End(r.number, why)
	}
}

func shutdown(conn *os.File, how int) {
	if raw, err := conn.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { unix.Shutdown(int(fd), how) })
	}
}

// answer writes to a rank. One that does not take it is found out by the end of its process.
func (s *server) answer(r *rank, b []byte) {
	r.write.Lock()
	defer r.write.Unlock()
	r.conn.SetWriteDeadline(time.Now().Add(writeBound))
	r.conn.Write(b)
}

// refuse answers that something is not possible.
func (s *server) refuse(r *rank, name, why string) {
	s.answer(r, reply(name, "rc", "1", "info", "fail", "msg", message(why)))
}

// handle does what a rank says. An error is a fault of the rank's.
func (s *server) handle(r *rank, c *command) error {
	switch c.name {
	case "init":
		return s.begin(r, c)
	case "get_maxes":
		s.answer(r, reply("maxes", "rc", "0", "kvsname_max", strconv.Itoa(maxName), "keylen_max", strconv.Itoa(maxKey), "vallen_max", strconv.Itoa(maxValue)))
	case "get_appnum":
		s.answer(r, reply("appnum", "rc", "0", "appnum", strconv.Itoa(s.w.AppOf[r.number])))
	case "get_my_kvsname":
		s.answer(r, reply("my_kvsname", "rc", "0", "kvsname", s.name))
	case "get_universe_size":
		s.answer(r, reply("universe_size", "rc", "0", "size", strconv.Itoa(s.w.Universe)))
	case "put":
		return s.put(r, c)
	case "get":
		s.get(r, c)
	case "barrier_in":
		return s.barrier(r)
	case "publish_name":
		s.refuse(r, "publish_result", "gorun publishes no names")
	case "unpublish_name":
		s.refuse(r, "unpublish_result", "gorun publishes no names")
	case "lookup_name":
		s.refuse(r, "lookup_result", "gorun publishes no names")
	case "spawn":
		s.refuse(r, "spawn_result", "gorun starts no further processes")
	case "abort":
		s.abort(r, c)
	case "finalize":
		s.mu.Lock()
		r.state = finished
		s.mu.Unlock()
		s.answer(r, reply("finalize_ack", "rc", "0"))
	default:
		return fmt.Errorf("the command %.60q is not known", c.name)
	}
	return nil
}

func (s *server) begin(r *rank, c *command) error {
	version, err := c.number("pmi_version")
	if err == nil && version != 1 {
		err = fmt.Errorf("it speaks PMI %d", version)
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	r.state = begun
	s.mu.Unlock()
	s.answer(r, reply("response_to_init", "pmi_version", "1", "pmi_subversion", "1", "rc", "0"))
	return nil
}

func (s *server) put(r *rank, c *command) error {
	key, isKey := c.lookup("key")
	value, isValue := c.lookup("value")
	if !isKey || !isValue || key == "" {
		return errors.New("put without a key or a value")
	}
	why := s.checkSpace(c)
	s.mu.Lock()
	switch {
	case why != "":
	case s.size+len(key)+len(value) > maxPuts:
		why = fmt.Sprintf("the ranks of a host put more than %d bytes", maxPuts)
	default:
		s.size += len(key) + len(value)
		s.keys[key] = value
		s.fresh = append(s.fresh, pair{key, value})
	}
	s.mu.Unlock()
	if why != "" {
		s.refuse(r, "put_result", why)
		return nil
	}
	s.answer(r, reply("put_result", "rc", "0", "msg", "success"))
	return nil
}

// checkSpace says why the space of keys that is named is none; "": it is.
func (s *server) checkSpace(c *command) string {
	if name, named := c.lookup("kvsname"); named && name != s.name {
		return "there is no other space of keys than " + s.name
	}
	return ""
}

func (s *server) get(r *rank, c *command) {
	key := c.text("key")
	why := s.checkSpace(c)
	value, ok := "", false
	switch {
	case why != "":
	case key == "PMI_process_mapping":
		value, ok = s.mapping, s.mapping != ""
	default:
		s.mu.Lock()
		value, ok = s.keys[key]
		s.mu.Unlock()
	}
	if ok {
		s.answer(r, reply("get_result", "rc", "0", "msg", "success", "value", value))
		return
	}
	if why == "" {
		why = "no rank has put " + key
	}
	s.answer(r, reply("get_result", "rc", "1", "msg", message(why), "value", "unknown"))
}

// abort ends the job.
func (s *server) abort(r *rank, c *command) {
	why := procman.Departure{Aborted: true, Code: 1, Text: plain(c.text("message"))}
	if code, err := c.number("exitcode"); err == nil {
		why.Code = code
	}
	if why.Text == "abort" {
		why.Text = "" // what MPICH says when it has nothing to say
	}
	s.mu.Lock()
	again := r.departed.Aborted
	r.departed = why
	s.mu.Unlock()
	if !again {
		s.w.End(r.number, why)
	}
}

// barrier takes note that a rank waits at the fence. Its answer comes when all of the world do.
func (s *server) barrier(r *rank) error {
	s.mu.Lock()
	if r.last {
		s.mu.Unlock()
		return errors.New("it enters a barrier while it waits in one")
	}
	r.last, r.since = true, time.Now()
	s.mu.Unlock()
	s.tryFence()
	return nil
}

// tryFence gives this host's part when all of its ranks have come to the fence, or those that still can: other hosts may wait for it also when none can.
func (s *server) tryFence() {
	s.mu.Lock()
	if s.given || s.closed {
		s.mu.Unlock()
		return
	}
	if why := s.broken; why != "" { // all hosts know, and none gives any more
		s.mu.Unlock()
		s.pass(why)
		return
	}
	missing := ""
	for _, number := range s.local {
		switch r := s.ranks[number]; {
		case r.last:
		case r.ended:
			missing = fmt.Sprintf("rank %d has ended", s.w.Ranks[number])
		default:
			s.mu.Unlock()
			return
		}
	}
	s.given = true
	part := given{broken: missing, pairs: s.fresh}
	s.fresh = nil
	name := fmt.Sprintf("pmi %d", s.fence)
	s.mu.Unlock()
	if len(s.hosts) == 1 {
		s.pass(part.broken)
		return
	}
	s.w.Exchange(name, s.hosts, part.encode(), s.gathered)
}

// gathered takes what all hosts have given for a fence, and lets the ranks go on.
func (s *server) gathered(all [][]byte, err error) {
	broken := ""
	if err != nil {
		broken = err.Error()
	}
	parts := make([]*given, 0, len(all))
	for i, b := range all {
		g, err := decodeGiven(b)
		if err != nil {
			broken = fmt.Sprintf("host %s: %v", s.w.Hosts[s.hosts[i]], err)
			break
		}
		if g.broken != "" && broken == "" {
			broken = g.broken
		}
		parts = append(parts, g)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	for i, g := range parts {
		if s.hosts[i] == s.w.Host {
			continue
		}
		for _, p := range g.pairs {
			s.keys[p.key] = p.value
		}
	}
	s.wg.Go(func() { s.pass(broken) })
}

// pass lets the ranks go on that wait at the fence.
func (s *server) pass(broken string) {
	s.mu.Lock()
	s.fence++
	s.given = false
	if s.broken == "" {
		s.broken = broken
	}
	var wait []*rank
	for _, number := range s.local {
		if r := s.ranks[number]; r.last {
			r.last = false
			wait = append(wait, r)
		}
	}
	s.mu.Unlock()
	out := reply("barrier_out", "rc", "0")
	if broken != "" {
		// MPICH before 4.1 looks at the name alone: by that of success it would go on, and wait in its shared memory for ranks that never come. All show it.
		out = reply(message("barrier_failed: "+broken), "rc", "1", "msg", message(broken))
	}
	for _, r := range wait {
		s.answer(r, out)
	}
	if broken == "" {
		s.tryFence() // ranks may have ended while it was under way
	}
}

func (s *server) Ended(number int) procman.Departure {
	r := s.ranks[number]
	s.mu.Lock()
	started := r.conn != nil
	s.mu.Unlock()
	if started {
		// What is there is still read, and then comes an end, though a child of the process may have the socket, too.
		shutdown(r.conn, unix.SHUT_RD)
		procman.AwaitEnd(r.eof)
	}
	s.mu.Lock()
	r.ended, r.last = true, false
	why := r.departed
	why.Unfinished, why.Silent = r.state == begun, r.state == silent
	s.mu.Unlock()
	s.tryFence()
	return why
}

func (s *server) Standing(number int) node.Standing {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.ranks[number]
	st := node.Standing{Rank: s.w.Ranks[number]}
	switch {
	case r.ended:
		st.State = "ended"
	case r.last:
		st.Waits = []node.Wait{{What: fmt.Sprintf("PMI barrier #%d (MPI_Init, MPI_Finalize)", s.fence), For: time.Since(r.since), Group: fmt.Sprintf("pmi %d", s.fence), Members: node.Runs(s.w.Ranks)}}
	case r.state == silent:
		st.State = "has not called MPI_Init"
	case r.state == finished:
		st.State = "has called MPI_Finalize"
	}
	return st
}

func (s *server) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	for _, r := range s.ranks {
		if r.conn != nil {
			r.conn.Close()
		}
	}
	s.wg.Wait()
	return nil
}
