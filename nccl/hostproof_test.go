package nccl

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"testing"
)

// Each end finds out whether the other knows the key, and nothing that was said before helps who does not.
func TestHostProof(t *testing.T) {
	key, comm := bytes.Repeat([]byte{7}, 32), []byte("communicator 456")
	type ends struct {
		rank           int
		offer, receive error
	}
	// meet has rank 3 of the dialler's communicator connect to rank 5 of the receiver's.
	meet := func(dialler, receiver, named []byte) (e ends) {
		a, b := net.Pipe()
		done := make(chan struct{})
		go func() {
			defer close(done)
			e.rank, e.receive = acceptProof(b, receiver, comm, 5)
			b.Close()
		}()
		e.offer = offerProof(a, dialler, named, 3, 5)
		a.Close()
		<-done
		return e
	}
	other := bytes.Repeat([]byte{8}, 32)
	if e := meet(key, key, comm); e.offer != nil || e.receive != nil || e.rank != 3 {
		t.Errorf("with the key: %+v", e)
	}
	if e := meet(other, key, comm); !errors.Is(e.offer, errNoKey) || !errors.Is(e.receive, errNoKey) {
		t.Errorf("with different keys: %+v", e)
	}
	if e := meet(key, key, []byte("communicator 457")); e.offer == nil || e.receive == nil {
		t.Errorf("to another communicator: %+v", e)
	}

	// Who does not know the key, nor asks whether the receiver does: makes up the answer, or says again what a member has said.
	receive := func(b net.Conn) <-chan error {
		done := make(chan error, 1)
		go func() {
			_, err := acceptProof(b, key, comm, 5)
			b.Close()
			done <- err
		}()
		return done
	}
	a, b := net.Pipe()
	done := receive(b)
	heard := &listener{ReadWriter: a}
	if err := errors.Join(offerProof(heard, key, comm, 3, 5), <-done); err != nil {
		t.Fatal(err)
	}
	a.Close()
	hello, answer := heard.said[:proofHello], heard.said[proofHello:]
	for name, last := range map[string][]byte{"made up": make([]byte, len(answer)), "said again": answer} {
		a, b := net.Pipe()
		done := receive(b)
		a.Write(hello)
		io.ReadFull(a, make([]byte, challengeSize+sha256.Size))
		a.Write(last)
		a.Close()
		if err := <-done; !errors.Is(err, errNoKey) {
			t.Errorf("%s: %v, want %v", name, err, errNoKey)
		}
	}
}

// listener keeps what is written through it.
type listener struct {
	io.ReadWriter
	said []byte
}

func (l *listener) Write(b []byte) (int, error) {
	l.said = append(l.said, b...)
	return l.ReadWriter.Write(b)
}
