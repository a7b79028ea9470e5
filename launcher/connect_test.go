package launcher

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/way"
)

// madeUp is a way to hosts whose agents are functions of this process.
type madeUp map[string]func(*agentwire.Mux)

func (w madeUp) Open(_ context.Context, t way.Target, line string) (way.Session, error) {
	near, far := net.Pipe()
	words := strings.Fields(line)
	mark := words[len(words)-2]
	s := &madeUpSession{Conn: near, ended: make(chan struct{})}
	go func() {
		defer close(s.ended)
		defer far.Close()
		fmt.Fprintf(far, "%s start /nowhere/gorun\n", mark)
		agentwire.WritePreface(far, buildName())
		if mux, err := agentwire.Accept(far); err == nil {
			w[t.Name](mux)
			mux.Close()
		}
	}()
	return s, nil
}

type madeUpSession struct {
	net.Conn
	ended chan struct{}
}

func (s *madeUpSession) CloseWrite() error      { return nil }
func (s *madeUpSession) Stderr() []byte         { return nil }
func (s *madeUpSession) Wait() error            { <-s.ended; return nil }
func (s *madeUpSession) Addrs() (_, _ net.Addr) { return nil, nil }

// talk receives until the message that it is asked for, with a function that picks it, or the session's end: then it is nil.
func talk(mux *agentwire.Mux, pick func(*agentwire.Message) bool) *agentwire.Message {
	for {
		m, err := mux.Receive()
		if err != nil {
			return nil
		}
		if pick(m) {
			return m
		}
	}
}

func toPrepare(m *agentwire.Message) bool { return m.Prepare != nil }
func toPing(m *agentwire.Message) bool    { return m.Ping != nil }

// A host that is prepared hears of gorun as long as others are not: its agent would take gorun for dead.
func TestPreparedHostIsNotForgotten(t *testing.T) {
	heard := make(chan struct{})
	hosts := madeUp{
		"a": func(mux *agentwire.Mux) {
			if talk(mux, toPrepare) == nil {
				return
			}
			mux.Send(&agentwire.Message{Prepared: &agentwire.Prepared{Node: agentwire.Node{Addr: "127.0.0.1:1"}}})
			for range 2 {
				if talk(mux, toPing) == nil {
					return
				}
			}
			close(heard)
			talk(mux, func(m *agentwire.Message) bool { return m.Bye != nil })
		},
		"b": func(mux *agentwire.Mux) {
			if talk(mux, toPrepare) == nil {
				return
			}
			for end := time.After(20 * beat); ; {
				select {
				case <-heard:
					mux.Send(&agentwire.Message{Failed: &agentwire.Failed{Text: "it was long enough"}})
				case <-end:
					mux.Send(&agentwire.Message{Failed: &agentwire.Failed{Text: "host a hears nothing of gorun"}})
				case <-time.After(beat):
					mux.Send(&agentwire.Message{Ping: &agentwire.Empty{}})
					continue
				}
				talk(mux, func(m *agentwire.Message) bool { return m.Bye != nil })
				return
			}
		},
	}
	acct := Run(t.Context(), planOn(t, Job{}, "true", "a", "b"), Options{way: hosts, bind: loopback})
	if acct.Reason != ReasonNotStarted || acct.Error != "host b: it was long enough" {
		t.Errorf("%s: %s", acct.Reason, acct.Error)
	}
}
