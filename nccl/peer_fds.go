package nccl

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Members of a communicator on one host hand each other file descriptors: each listens at an abstract unix socket before the members meet, tells the others its
// address in the meeting, and then each asks each other one for its descriptor:
//
//	asking   the key that all members know (16 bytes), its number (4)
//	asked    1 byte, and the descriptor
//
// An abstract socket is open to everybody of the network namespace, so both look at the other's user. A packet is a message (SOCK_SEQPACKET).

// fdKey is what tells members from strangers.
type fdKey [16]byte

const fdGreetingSize = len(fdKey{}) + 4

// fdAgain is how soon a socket is dialled again whose queue is full: its owner has yet to take whoever is in it.
const fdAgain = 5 * time.Millisecond

type fdGreeting struct {
	key  fdKey
	rank int
}

func (g fdGreeting) encode() []byte {
	return binary.LittleEndian.AppendUint32(g.key[:], uint32(g.rank))
}

func decodeFDGreeting(b []byte) (g fdGreeting, err error) {
	if len(b) != fdGreetingSize {
		return g, fmt.Errorf("greeting of %d bytes, want %d", len(b), fdGreetingSize)
	}
	n := copy(g.key[:], b)
	g.rank = int(int32(binary.LittleEndian.Uint32(b[n:])))
	return g, nil
}

// fdOffer is a member's socket. It serves one exchange, or is closed.
type fdOffer struct {
	listener *net.UnixListener
	name     string
}

func newFDOffer() (*fdOffer, error) {
	var b [16]byte
	rand.Read(b[:]) // never fails
	name := "gorun-" + hex.EncodeToString(b[:])
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: "@" + name, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("listen for the other members of this host: %w", err)
	}
	return &fdOffer{l, name}, nil
}

// address is for the other members of this host: the socket's name, without the NUL before it.
func (o *fdOffer) address() string { return o.name }

// close may be called twice, and after exchange.
func (o *fdOffer) close() { o.listener.Close() }

// exchange gives fd, which stays the caller's, to each other member, and returns theirs by member, -1 in the caller's place: close-on-exec, and the caller's to
// close. The addresses are the members' by member, the key is the same on all. It returns when this member has all descriptors and all others have this member's, or
// when ctx ends. After an error there are no descriptors; some other members may have got all of theirs. The offer is closed afterwards.
func (o *fdOffer) exchange(ctx context.Context, key fdKey, fd, rank int, addresses []string) ([]int, error) {
	x := fdExchange{listener: o.listener, key: key, fd: fd, asked: make([]bool, len(addresses)), given: make([]bool, len(addresses))}
	x.asked[rank], x.given[rank] = true, true
	all, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	fds := make([]int, len(addresses))
	var wg sync.WaitGroup
	for r, addr := range addresses {
		fds[r] = -1
		if r == rank {
			continue
		}
		wg.Go(func() {
			var err error
			if fds[r], err = askFD(all, addr, fdGreeting{key, rank}); err != nil {
				fail(fmt.Errorf("ask rank %d for its file descriptor: %w", r, err))
			}
		})
	}
	x.serve(all, fail)
	wg.Wait()

	var missing []int
	for r, got := range fds {
		if r != rank && (got < 0 || !x.given[r]) {
			missing = append(missing, r)
		}
	}
	if len(missing) == 0 {
		return fds, nil
	}
	closeFDs(fds)
	err := context.Cause(all)
	if ctx.Err() != nil {
		err = fmt.Errorf("exchange file descriptors with ranks %v: %w", missing, err)
	}
	return nil, err
}

// fdExchange is the side that is asked.
type fdExchange struct {
	listener *net.UnixListener
	key      fdKey
	fd       int

	mu    sync.Mutex // guards the rest
	asked []bool     // by member: who has greeted
	given []bool     // who has the descriptor
}

// serve answers those who come until all have the descriptor, or ctx ends. It closes the listener.
func (x *fdExchange) serve(ctx context.Context, fail func(error)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, done := context.WithCancel(ctx)
	defer done()
	defer x.listener.Close()
	defer context.AfterFunc(ctx, func() { x.listener.Close() })()
	for !x.complete() {
		conn, err := x.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // out of descriptors: ctx bounds it
			continue
		}
		if sameUser(conn) != nil {
			conn.Close()
			continue
		}
		wg.Go(func() {
			defer conn.Close()
			defer context.AfterFunc(ctx, func() { conn.Close() })()
			if err := x.answer(conn); err != nil {
				fail(err)
			}
			if x.complete() {
				done()
			}
		})
	}
}

// answer gives the descriptor to a member that has not had it. Strangers get nothing and are no error.
func (x *fdExchange) answer(conn *net.UnixConn) error {
	said := make([]byte, fdGreetingSize+1) // one more, so that a longer packet is seen as one
	n, err := conn.Read(said)
	if err != nil {
		return nil
	}
	g, err := decodeFDGreeting(said[:n])
	if err != nil || subtle.ConstantTimeCompare(g.key[:], x.key[:]) == 0 || !x.awaits(g.rank) {
		return nil
	}
	if _, _, err := conn.WriteMsgUnix([]byte{1}, unix.UnixRights(x.fd), nil); err != nil {
		return fmt.Errorf("give a file descriptor to rank %d: %w", g.rank, err)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.given[g.rank] = true
	return nil
}

// awaits reports whether the member has not come yet. From now on it has.
func (x *fdExchange) awaits(rank int) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if rank < 0 || rank >= len(x.asked) || x.asked[rank] {
		return false
	}
	x.asked[rank] = true
	return true
}

func (x *fdExchange) complete() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return !slices.Contains(x.given, false)
}

// askFD gets a member's descriptor; -1 with an error.
func askFD(ctx context.Context, addr string, g fdGreeting) (int, error) {
	conn, err := dialFD(ctx, addr)
	if err != nil {
		return -1, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := sameUser(conn); err != nil {
		return -1, err
	}
	if _, err := conn.Write(g.encode()); err != nil {
		return -1, err
	}
	return receiveFD(conn)
}

func dialFD(ctx context.Context, addr string) (*net.UnixConn, error) {
	for {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unixpacket", "@"+addr)
		if err == nil {
			return conn.(*net.UnixConn), nil
		}
		if !errors.Is(err, unix.EAGAIN) {
			return nil, err
		}
		select {
		case <-time.After(fdAgain):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// receiveFD reads the answer; -1 with an error.
func receiveFD(conn *net.UnixConn) (int, error) {
	said, control := make([]byte, 2), make([]byte, unix.CmsgSpace(4))
	n, oobn, flags, _, err := conn.ReadMsgUnix(said, control) // close-on-exec
	var fds []int
	if msgs, err := unix.ParseSocketControlMessage(control[:oobn]); err == nil {
		for _, m := range msgs {
			got, _ := unix.ParseUnixRights(&m)
			fds = append(fds, got...)
		}
	}
	if err == nil && n == 1 && len(fds) == 1 {
		return fds[0], nil
	}
	closeFDs(fds)
	switch {
	case errors.Is(err, io.EOF):
		err = errors.New("it refused this rank, or ended")
	case err != nil:
	case n == 1 && flags&unix.MSG_CTRUNC != 0 && len(fds) == 0:
		err = errors.New("it did not arrive: too many open files?")
	default:
		err = fmt.Errorf("answer of %d bytes with %d file descriptors, want one of each", n, len(fds))
	}
	return -1, err
}

// closeFDs closes those that are not -1.
func closeFDs(fds []int) {
	for _, fd := range fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// sameUser is an error if another user has made the other end.
func sameUser(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	if e := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); e != nil {
		err = e
	}
	if err == nil && int(cred.Uid) != os.Geteuid() {
		err = fmt.Errorf("the other side runs as uid %d (pid %d), this is uid %d", cred.Uid, cred.Pid, os.Geteuid())
	}
	return err
}
