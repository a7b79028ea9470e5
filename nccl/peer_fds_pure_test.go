package nccl

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// fdBound is far more than an exchange takes, also on a machine that does much else.
const fdBound = 20 * time.Second

var fdTestKey = fdKey{1, 2, 3, 15: 16}

// fdFile is a file in memory whose text names its rank.
func fdFile(rank int) (int, error) {
	fd, err := unix.MemfdCreate("peer-fds-test", unix.MFD_CLOEXEC)
	if err != nil {
		return -1, err
	}
	if _, err := unix.Pwrite(fd, fmt.Appendf(nil, "of rank %d", rank), 0); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// checkFDs closes the descriptors, and is an error unless each is its member's file and close-on-exec.
func checkFDs(fds []int, rank, n int) error {
	defer closeFDs(fds)
	if len(fds) != n {
		return fmt.Errorf("%d descriptors, want %d", len(fds), n)
	}
	for r, fd := range fds {
		if r == rank {
			if fd != -1 {
				return fmt.Errorf("descriptor %d in the rank's own place", fd)
			}
			continue
		}
		text := make([]byte, 100)
		got, err := unix.Pread(fd, text, 0)
		if err != nil {
			return err
		}
		if diff := cmp.Diff(string(text[:got]), fmt.Sprint("of rank ", r)); diff != "" {
			return fmt.Errorf("file of rank %d (-got +want):\n%s", r, diff)
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			return fmt.Errorf("descriptor of rank %d: flags %#x, %v: not close-on-exec", r, flags, err)
		}
	}
	return nil
}

// fdMembers are the members of an exchange in this process.
type fdMembers struct {
	offers    []*fdOffer
	addresses []string
	key       []fdKey
	files     []int
}

// newFDMembers opens the offers; when the test has ended, no descriptor may be left.
func newFDMembers(t *testing.T, n int) *fdMembers {
	t.Helper()
	if o, err := newFDOffer(); err != nil { // the first socket of a process opens what waits for sockets
		t.Fatal(err)
	} else {
		o.close()
	}
	before := openFiles(t)
	t.Cleanup(func() {
		if diff := cmp.Diff(openFiles(t), before); diff != "" {
			t.Errorf("open files at the end (-got +want):\n%s", diff)
		}
	})
	m := &fdMembers{}
	for r := range n {
		o, err := newFDOffer()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(o.close)
		fd, err := fdFile(r)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		m.offers, m.addresses, m.key, m.files = append(m.offers, o), append(m.addresses, o.address()), append(m.key, fdTestKey), append(m.files, fd)
	}
	return m
}

// openFiles is what the descriptors of this process lead to.
func openFiles(t *testing.T) []string {
	t.Helper()
	dir, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, fd := range dir {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil { // not the directory itself, which is closed
			files = append(files, to)
		}
	}
	slices.Sort(files)
	return files
}

// exchange has the given members exchange, and returns their errors; the descriptors of those who have none are checked and closed.
func (m *fdMembers) exchange(ctx context.Context, members ...int) []error {
	errs := make([]error, len(m.offers))
	var wg sync.WaitGroup
	for _, r := range members {
		wg.Go(func() {
			fds, err := m.offers[r].exchange(ctx, m.key[r], m.files[r], r, m.addresses)
			if err == nil {
				err = checkFDs(fds, r, len(m.offers))
			} else if fds != nil {
				err = fmt.Errorf("descriptors %v and an error: %w", fds, err)
			}
			errs[r] = err
		})
	}
	wg.Wait()
	return errs
}

func (m *fdMembers) all() []int {
	members := make([]int, len(m.offers))
	for r := range members {
		members[r] = r
	}
	return members
}

func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), fdBound)
	t.Cleanup(cancel)
	return ctx
}

func TestFDExchange(t *testing.T) {
	for _, n := range []int{1, 2, 3, 8} {
		t.Run(fmt.Sprint(n, " members"), func(t *testing.T) {
			m := newFDMembers(t, n)
			for r, err := range m.exchange(bounded(t), m.all()...) {
				if err != nil {
					t.Errorf("rank %d: %v", r, err)
				}
			}
		})
	}
}

// The descriptors are the same open files, not copies: what goes in here comes out there.
func TestFDExchangePipe(t *testing.T) {
	m := newFDMembers(t, 2)
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer closeFDs(pipe[:])
	got := make([]int, 2) // the end that each member has been given
	errs := make([]error, 2)
	ctx := bounded(t)
	var wg sync.WaitGroup
	for r := range 2 {
		wg.Go(func() {
			var fds []int
			if fds, errs[r] = m.offers[r].exchange(ctx, m.key[r], pipe[r], r, m.addresses); errs[r] == nil {
				got[r] = fds[1-r]
			} else {
				got[r] = -1
			}
		})
	}
	wg.Wait()
	defer closeFDs(got)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Write(got[0], []byte("through")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	n, err := unix.Read(got[1], b)
	if err != nil || string(b[:n]) != "through" {
		t.Errorf("read %q, %v", b[:n], err)
	}
}

func TestFDExchangeProcesses(t *testing.T) {
	for _, r := range ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		o, err := newFDOffer()
		if err != nil {
			return err
		}
		defer o.close()
		offers, err := job.AllGather(ctx, []byte(o.address()))
		if err != nil {
			return err
		}
		addresses := make([]string, len(offers))
		for i, b := range offers {
			addresses[i] = string(b)
		}
		fd, err := fdFile(job.Rank())
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		fds, err := o.exchange(ctx, fdTestKey, fd, job.Rank(), addresses)
		if err != nil {
			return err
		}
		return checkFDs(fds, job.Rank(), job.Size())
	}) {
		if r.Code != 0 {
			t.Errorf("%v", r)
		}
	}
}

// A member that does not come ends with the context, which names it on the others.
func TestFDExchangeAbsent(t *testing.T) {
	m := newFDMembers(t, 3)
	enough := errors.New("the job ends")
	ctx, cancel := context.WithCancelCause(bounded(t))
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		m.offers[2].listener.SetDeadline(time.Now().Add(fdBound))
		for range 2 { // both have come, and wait
			conn, err := m.offers[2].listener.Accept()
			if err != nil {
				t.Error(err)
				break
			}
			defer conn.Close()
		}
		cancel(enough)
	})
	for r, err := range m.exchange(ctx, 0, 1) {
		if r == 2 {
			continue
		}
		if !errors.Is(err, enough) || !strings.Contains(err.Error(), "2]") {
			t.Errorf("rank %d: got %v, want %v and rank 2", r, err, enough)
		}
	}
}

// A member whose socket is gone is noticed at once.
func TestFDExchangeGone(t *testing.T) {
	m := newFDMembers(t, 3)
	m.offers[2].close()
	errs := m.exchange(bounded(t), 0, 1)
	for r, err := range errs[:2] {
		if err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("rank %d: got %v, want that somebody is gone", r, err)
		}
	}
	if all := errors.Join(errs...).Error(); !strings.Contains(all, "ask rank 2 for its file descriptor") || !strings.Contains(all, "refused") {
		t.Errorf("got %s, want that rank 2 is gone", all)
	}
}

func TestFDExchangeWrongKey(t *testing.T) {
	m := newFDMembers(t, 2)
	m.key[1][15]++
	for r, err := range m.exchange(bounded(t), 0, 1) {
		if err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("rank %d: got %v, want a refusal", r, err)
		}
	}
}

func TestFDExchangeBadDescriptor(t *testing.T) {
	m := newFDMembers(t, 2)
	m.files[0] = -1
	errs := m.exchange(bounded(t), 0, 1)
	if !errors.Is(errs[0], unix.EBADF) || !strings.Contains(errs[0].Error(), "rank 1") {
		t.Errorf("rank 0: got %v, want EBADF", errs[0])
	}
	if errs[1] == nil || errors.Is(errs[1], context.DeadlineExceeded) {
		t.Errorf("rank 1: got %v, want the end of rank 0", errs[1])
	}
}

// Strangers hold nobody up, and get nothing, whatever they say.
func TestFDExchangeStrangers(t *testing.T) {
	random := make([]byte, fdGreetingSize)
	rand.Read(random)
	said := map[string][]byte{
		"nothing":                   nil,
		"little":                    {1},
		"random":                    random,
		"much":                      make([]byte, 100<<10),
		"a greeting and more":       append(fdGreeting{fdTestKey, 1}.encode(), 0),
		"the number of the asked":   fdGreeting{fdTestKey, 0}.encode(),
		"a number that is too high": fdGreeting{fdTestKey, 2}.encode(),
		"a negative number":         fdGreeting{fdTestKey, -1}.encode(),
	}
	m := newFDMembers(t, 2)
	strangers := map[string]*net.UnixConn{}
	for name, b := range said {
		conn, err := dialFD(bounded(t), m.addresses[0])
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		strangers[name] = conn
		if b == nil {
			continue
		}
		if _, _, err := conn.WriteMsgUnix(b, unix.UnixRights(m.files[1]), nil); err != nil {
			t.Fatalf("say %s: %v", name, err)
		}
	}
	for r, err := range m.exchange(bounded(t), 0, 1) {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	for name, conn := range strangers {
		conn.SetReadDeadline(time.Now().Add(fdBound))
		fd, err := receiveFD(conn)
		if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("who said %s got descriptor %d, %v", name, fd, err)
			closeFDs([]int{fd})
		}
	}
}

// Each member gets the descriptor once.
func TestFDExchangeTwice(t *testing.T) {
	m := newFDMembers(t, 3)
	ctx, cancel := context.WithCancel(bounded(t))
	ended := make(chan []error, 1)
	go func() { ended <- m.exchange(ctx, 0) }() // as ranks 1 and 2 do not ask for theirs, it goes on
	fd, err := askFD(ctx, m.addresses[0], fdGreeting{fdTestKey, 1})
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	if fd, err = askFD(ctx, m.addresses[0], fdGreeting{fdTestKey, 1}); err == nil || ctx.Err() != nil {
		t.Errorf("the second time: descriptor %d, %v", fd, err)
		closeFDs([]int{fd})
	}
	cancel()
	if err := (<-ended)[0]; !errors.Is(err, context.Canceled) {
		t.Errorf("rank 0: got %v, want %v", err, context.Canceled)
	}
}

// A queue full of strangers keeps no member away: they are taken from it, and who finds it full comes again.
func TestFDExchangeFullQueue(t *testing.T) {
	m := newFDMembers(t, 2)
	raw, err := m.offers[0].listener.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	const room = 4
	if e := raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), room) }); e != nil || err != nil {
		t.Fatal(e, err)
	}
	full := false
	for range 10 * room {
		conn, err := net.Dial("unixpacket", "@"+m.addresses[0])
		if full = errors.Is(err, unix.EAGAIN); full {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	if !full {
		t.Fatal("the queue takes more than it has room for")
	}
	soon, cancel := context.WithTimeout(t.Context(), 4*fdAgain)
	defer cancel()
	if conn, err := dialFD(soon, m.addresses[0]); err == nil || errors.Is(err, unix.EAGAIN) {
		t.Errorf("dialled a full queue: %v, %v; want that it is tried until the context ends", conn, err)
	}
	for r, err := range m.exchange(bounded(t), 0, 1) {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

// What is no answer with one descriptor is an error, and leaves none.
func TestFDAnswers(t *testing.T) {
	m := newFDMembers(t, 2)
	for _, c := range []struct {
		name string
		say  func(to *net.UnixConn) error
		want string
	}{
		{"the end", func(to *net.UnixConn) error { return nil }, "it refused this rank, or ended"},
		{"no descriptor", func(to *net.UnixConn) error { _, err := to.Write([]byte{1}); return err }, "answer of 1 bytes with 0 file descriptors"},
		{"two", func(to *net.UnixConn) error {
			_, _, err := to.WriteMsgUnix([]byte{1}, unix.UnixRights(m.files...), nil)
			return err
		}, "answer of 1 bytes with 2 file descriptors"},
		{"too many", func(to *net.UnixConn) error {
			_, _, err := to.WriteMsgUnix([]byte{1}, unix.UnixRights(slices.Repeat(m.files, 50)...), nil)
			return err
		}, "answer of 1 bytes with"},
		{"too long", func(to *net.UnixConn) error {
			_, _, err := to.WriteMsgUnix(make([]byte, 10), unix.UnixRights(m.files[0]), nil)
			return err
		}, "answer of 2 bytes with 1 file descriptors"},
	} {
		t.Run(c.name, func(t *testing.T) {
			here, there := socketPair(t)
			defer here.Close()
			if err := c.say(there); err != nil {
				t.Fatal(err)
			}
			there.Close()
			here.SetReadDeadline(time.Now().Add(fdBound))
			fd, err := receiveFD(here)
			if err == nil || errors.Is(err, os.ErrDeadlineExceeded) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got descriptor %d, %v, want %q", fd, err, c.want)
			}
			closeFDs([]int{fd})
		})
	}
}

// A process that has no room for the descriptor says so.
func TestFDAnswerNoRoom(t *testing.T) {
	m := newFDMembers(t, 1)
	here, there := socketPair(t)
	defer here.Close()
	defer there.Close()
	if _, _, err := there.WriteMsgUnix([]byte{1}, unix.UnixRights(m.files[0]), nil); err != nil {
		t.Fatal(err)
	}
	next, err := unix.FcntlInt(uintptr(m.files[0]), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(next)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	none := limit
	none.Cur = uint64(next)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	here.SetReadDeadline(time.Now().Add(fdBound))
	fd, got := receiveFD(here)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if got == nil || !strings.Contains(got.Error(), "too many open files") {
		t.Errorf("got descriptor %d, %v", fd, got)
		closeFDs([]int{fd})
	}
}

func socketPair(t *testing.T) (*net.UnixConn, *net.UnixConn) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range pair {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = c.(*net.UnixConn)
	}
	return conns[0], conns[1]
}

// Another user is refused, whichever side he is on, also with the key.
func TestFDExchangeAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		citest.Lacking(t, "root's rights: only root can be another user")
	}
	m := newFDMembers(t, 2)

	t.Run("asks", func(t *testing.T) {
		var fd int
		err := asNobody(func() (err error) {
			fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			return unix.Connect(fd, &unix.SockaddrUnix{Name: "@" + m.addresses[0]})
		})
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "another user's")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		conn := c.(*net.UnixConn)
		defer conn.Close()
		if _, err := conn.Write(fdGreeting{fdTestKey, 1}.encode()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(bounded(t))
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- m.exchange(ctx, 0)[0] }()
		conn.SetReadDeadline(time.Now().Add(fdBound))
		got, err := receiveFD(conn)
		if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("another user got descriptor %d, %v", got, err)
			closeFDs([]int{got})
			cancel() // rank 1 would be refused
		}
		// He has not taken rank 1's place.
		if err := errors.Join(m.exchange(ctx, 1)[1], <-ended); err != nil {
			t.Error(err)
		}
	})
	t.Run("is asked", func(t *testing.T) {
		var o *fdOffer
		if err := asNobody(func() (err error) { o, err = newFDOffer(); return err }); err != nil {
			t.Fatal(err)
		}
		defer o.close()
		fd, err := askFD(bounded(t), o.address(), fdGreeting{fdTestKey, 0})
		if err == nil || !strings.Contains(err.Error(), "the other side runs as uid 65534") {
			t.Errorf("got descriptor %d, %v", fd, err)
			closeFDs([]int{fd})
		}
	})
}

// asNobody runs f on a thread whose effective user is another one; the thread ends with it.
func asNobody(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for ever
		_, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 65534, ^uintptr(0))
		if e != 0 {
			done <- fmt.Errorf("become another user: %w", e)
			return
		}
		err := f()
		// The process is no secret of another user's.
		err = errors.Join(err, unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0))
		done <- err
	}()
	return <-done
}

func FuzzFDGreeting(f *testing.F) {
	f.Add([]byte{})
	f.Add(fdGreeting{fdTestKey, 7}.encode())
	f.Add(fdGreeting{fdTestKey, -1}.encode())
	f.Add(make([]byte, fdGreetingSize+1))
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := decodeFDGreeting(b)
		if err != nil {
			if len(b) == fdGreetingSize {
				t.Errorf("%x: %v", b, err)
			}
			return
		}
		if diff := cmp.Diff(g.encode(), b); diff != "" {
			t.Errorf("encoded again (-got +want):\n%s", diff)
		}
	})
}
