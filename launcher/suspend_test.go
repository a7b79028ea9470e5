package launcher

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
)

// stopTime is both for how long a gorun is stopped that connects to its hosts, and what it has for that.
const stopTime = 3 * time.Second

// Ctrl-Z while hosts are being prepared: the agents of those that are and of those that are not are told, and hear of gorun again when it goes on; the stop
// does not count as time for connecting.
func TestSuspendWhileConnecting(t *testing.T) {
	if os.Getenv("STOPPED") != "" {
		connectAndStop(t)
		return
	}
	beside(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, "-test.run=^TestSuspendWhileConnecting$")
	cmd.Env = append(os.Environ(), "STOPPED=1")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	over := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
	defer over.Stop()
	var status unix.Siginfo
	for {
		err = unix.Waitid(unix.P_PID, pid, &status, unix.WSTOPPED|unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		t.Errorf("wait for a stop: %v", err)
	}
	time.Sleep(stopTime) // it is about time that passes
	syscall.Kill(pid, syscall.SIGCONT)
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v", err)
	}
	for _, want := range []string{"host a: told, and heard of gorun again\n", "host b: told, and heard of gorun again\n", "notstarted: host b: it went on\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("got %s, want %s", out.String(), want)
		}
	}
}

// connectAndStop is a gorun with agents of its own process, which is to be continued by another.
func connectAndStop(t *testing.T) {
	ready := make(chan struct{})
	stopped := func(mux *agentwire.Mux, host string) {
		if talk(mux, func(m *agentwire.Message) bool { return m.Pause != nil }) == nil {
			return
		}
		if m, err := mux.Receive(); err != nil || m.Ping == nil {
			fmt.Printf("host %s: %+v, %v\n", host, m, err)
			return
		}
		fmt.Printf("host %s: told, and heard of gorun again\n", host)
	}
	toBye := func(m *agentwire.Message) bool { return m.Bye != nil }
	done := make(chan struct{})
	hosts := madeUp{
		"a": func(mux *agentwire.Mux) {
			talk(mux, toPrepare)
			mux.Send(&agentwire.Message{Prepared: &agentwire.Prepared{Node: agentwire.Node{Addr: "127.0.0.1:1"}}})
			talk(mux, toPing) // it is among those that are prepared
			<-ready
			syscall.Kill(os.Getpid(), syscall.SIGTSTP)
			stopped(mux, "a")
			close(done)
			talk(mux, toBye)
		},
		"b": func(mux *agentwire.Mux) {
			talk(mux, toPrepare)
			close(ready)
			stopped(mux, "b")
			<-done
			mux.Send(&agentwire.Message{Failed: &agentwire.Failed{Text: "it went on"}})
			talk(mux, toBye)
		},
	}
	acct := Run(t.Context(), planOn(t, Job{ConnectTimeout: stopTime}, "true", "a", "b"), Options{way: hosts, bind: loopback, OwnProcess: true})
	fmt.Printf("%s: %s\n", acct.Reason, acct.Error)
}

// A host that begins to speak while others are told is told, too.
func TestSpeaking(t *testing.T) {
	a, b, late := &remoteHost{name: "a"}, &remoteHost{name: "b"}, &remoteHost{name: "late"}
	var s speaking
	s.add(a)
	s.add(b)
	told := make(chan string, 4)
	hosts := s.each(func(h *remoteHost) {
		if h == b {
			s.add(late)
		}
		told <- h.name
	})
	close(told)
	var got []string
	for name := range told {
		got = append(got, name)
	}
	slices.Sort(got)
	if want := []string{"a", "b", "late"}; !slices.Equal(got, want) || !slices.Equal(hosts, []*remoteHost{a, b, late}) {
		t.Errorf("told %v, want %v; returned %d hosts", got, want, len(hosts))
	}
}

func TestRunBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, ctx, over := newRunBound(t.Context(), 10*time.Second)
		defer over()
		time.Sleep(4 * time.Second)
		goOn := b.hold()
		time.Sleep(time.Hour)
		goOn()
		time.Sleep(6*time.Second - 1)
		if err := context.Cause(ctx); err != nil {
			t.Errorf("too early: %v", err)
		}
		goOn = b.hold()
		time.Sleep(time.Hour)
		goOn()
		time.Sleep(2 * time.Nanosecond)
		err := context.Cause(ctx)
		if !errors.Is(err, context.DeadlineExceeded) || err.Error() != "no answer within 10s (--connect-timeout)" {
			t.Errorf("got %v", err)
		}
		b.hold()() // that is too late

		_, ctx, over = newRunBound(t.Context(), time.Second)
		over()
		if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("given up: %v", err)
		}
		b = nil
		b.hold()()
	})
}

// An agent that was told that gorun stops waits for it before it knows what to run, too.
func TestAgentWaitsForStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		served := make(chan error, 1)
		go func() {
			mux, err := agentwire.Accept(far)
			if err == nil {
				s := &agentServer{mux: mux, messages: make(chan *agentwire.Message)}
				err = s.serve()
			}
			served <- err
		}()
		mux, err := agentwire.Dial(near)
		if err != nil {
			t.Fatal(err)
		}
		defer mux.Close()
		mux.Send(&agentwire.Message{Pause: &agentwire.Empty{}})
		time.Sleep(10 * prepareWait)
		mux.Send(&agentwire.Message{Ping: &agentwire.Empty{}})
		mux.Send(&agentwire.Message{Bye: &agentwire.Empty{}})
		if err := <-served; err != nil {
			t.Errorf("told to end: %v", err)
		}
	})
}
