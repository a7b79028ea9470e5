package way

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "hold" {
		hold(os.Args[2])
		return
	}
	goleak.VerifyTestMain(m)
}

// hold opens a session by the rsh command and says its process id, then waits to be killed.
func hold(rsh string) {
	c, err := NewCommand(rsh)
	if err == nil {
		var s Session
		if s, err = c.Open(context.Background(), Target{Name: "h", Addr: "h"}, "-"); err == nil {
			fmt.Println(s.(*commandSession).pid)
			s.Wait()
		}
	}
	fmt.Println(err)
	os.Exit(1)
}

func open(t *testing.T, c *Command, line string) Session {
	t.Helper()
	s, err := c.Open(t.Context(), Target{Name: "h", Addr: "h"}, line)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func openFDs(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

func TestShellSession(t *testing.T) {
	s := open(t, Shell(), `echo noise >&2; cat; exit 3`)
	if _, err := io.WriteString(s, "words\n"); err != nil {
		t.Fatal(err)
	}
	if err := s.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if err := s.CloseWrite(); err != nil {
		t.Errorf("closing stdin twice: %v", err)
	}
	out, err := io.ReadAll(s)
	if got, want := string(out), "words\n"; got != want || err != nil {
		t.Errorf("stdout %q, %v, want %q", got, err, want)
	}
	for range 2 {
		if diff := cmp.Diff(s.Wait(), error(&ExitError{Code: 3})); diff != "" {
			t.Errorf("Wait (-got +want):\n%s", diff)
		}
	}
	if got, want := string(s.Stderr()), "noise\n"; got != want {
		t.Errorf("stderr %q, want %q", got, want)
	}
	if l, r := s.Addrs(); l != nil || r != nil {
		t.Errorf("addresses %v, %v of a command", l, r)
	}
}

func TestSessionKilledByItself(t *testing.T) {
	s := open(t, Shell(), `kill -9 $$`)
	if diff := cmp.Diff(s.Wait(), error(&ExitError{Code: -1, Signal: "KILL"})); diff != "" {
		t.Errorf("Wait (-got +want):\n%s", diff)
	}
	if got, want := s.Wait().Error(), "killed by SIGKILL"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// Close ends a command that ignores SIGTERM, and what it started, and everything blocked on the session.
func TestClose(t *testing.T) {
	before := openFDs(t)
	s := open(t, Shell(), `trap '' TERM; sleep 1000 & echo $!; wait; wait; sleep 1000`)
	var child int
	if _, err := fmt.Fscanln(s, &child); err != nil {
		t.Fatal(err)
	}
	read := make(chan error)
	go func() {
		_, err := io.ReadAll(s)
		read <- err
	}()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if err := <-read; err != nil && !errors.Is(err, os.ErrClosed) {
		t.Errorf("Read: %v, want the end or that it is closed", err)
	}
	if diff := cmp.Diff(s.Wait(), error(&ExitError{Code: -1, Signal: "KILL"})); diff != "" {
		t.Errorf("Wait (-got +want):\n%s", diff)
	}
	waitGone(t, child)
	if _, err := s.Write([]byte("x")); err == nil {
		t.Error("Write to a closed session works")
	}
	if got := openFDs(t); got > before {
		t.Errorf("%d descriptors, %d before", got, before)
	}
}

// waitGone waits until the process is no more, or is a zombie of someone else.
func waitGone(t *testing.T, pid int) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err != nil || strings.Contains(string(b), ") Z ") || strings.Contains(string(b), ") X ") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %d is alive: %s", pid, b)
		}
		time.Sleep(time.Millisecond)
	}
}

// A command does not outlive its launcher, however that ends.
func TestNoOrphan(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "hold", "/bin/sh -c 'exec sleep 1000'")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	_, err = fmt.Fscanln(out, &pid)
	cmd.Process.Kill()
	cmd.Wait()
	if err != nil {
		t.Fatalf("process id: %v", err)
	}
	waitGone(t, pid)
}

// What a command leaves behind, such as OpenSSH's master connection, may hold its stderr: Wait returns.
func TestStderrHeld(t *testing.T) {
	s := open(t, Shell(), `echo said >&2; setsid sleep 1000 </dev/null >/dev/null & echo $!`)
	var pid int
	if _, err := fmt.Fscanln(s, &pid); err != nil {
		t.Fatal(err)
	}
	// setsid makes a process of its own only if it leads a group; in a script it does not, so the number holds.
	defer syscall.Kill(pid, syscall.SIGKILL)
	if err := s.Wait(); err != nil {
		t.Fatal(err)
	}
	if got, want := string(s.Stderr()), "said\n"; got != want {
		t.Errorf("stderr %q, want %q", got, want)
	}
	if err := unix.Kill(pid, 0); err != nil {
		t.Errorf("the process behind was not there: %v (the test shows nothing)", err)
	}
}

func TestOpenErrors(t *testing.T) {
	before := openFDs(t)
	c, err := NewCommand("/nonexistent/rsh")
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Open(t.Context(), Target{Name: "node-a", Addr: "node-a"}, "true")
	if got, want := fmt.Sprint(err), `node-a: configure: exec: "/nonexistent/rsh": stat /nonexistent/rsh: no such file or directory`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got, want := Advice(err), "check the command given with --rsh"; got != want {
		t.Errorf("advice %q, want %q", got, want)
	}
	if e, ok := errors.AsType[*Error](err); !ok || e.Temporary {
		t.Errorf("a missing command is worth another try: %#v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err = Shell().Open(ctx, Target{Name: "h"}, "true"); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want that it is cancelled", err)
	}
	if got := openFDs(t); got > before {
		t.Errorf("%d descriptors, %d before", got, before)
	}
}

func TestArgs(t *testing.T) {
	for _, c := range []struct {
		name, rsh string
		t         Target
		want      []string
		err       string
	}{
		{"rsh", "rsh", Target{Addr: "a"}, []string{"rsh", "a", "LINE"}, ""},
		{"name only", "rsh", Target{Name: "a"}, []string{"rsh", "a", "LINE"}, ""},
		{"user", "ssh -q", Target{User: "u", Addr: "fe80::1%eth0"}, []string{"ssh", "-q", "u@fe80::1%eth0", "LINE"}, ""},
		{"ssh port", "/usr/bin/ssh", Target{Addr: "a", Port: 22022}, []string{"/usr/bin/ssh", "-p", "22022", "a", "LINE"}, ""},
		{"other port", "rsh", Target{Addr: "a", Port: 22022}, nil, "rsh cannot be told port 22022 (a word with %h and %p in the rsh command can)"},
		{"option", "ssh", Target{Addr: "-oProxyCommand=x"}, nil, `host "-oProxyCommand=x" or user "" would be taken for an option`},
		{"option for docker", "docker exec %h", Target{User: "-x", Addr: "a"}, nil, `host "a" or user "-x" would be taken for an option`},
		{"docker", "docker exec -i %h /bin/sh -c", Target{Addr: "c1"}, []string{"docker", "exec", "-i", "c1", "/bin/sh", "-c", "LINE"}, ""},
		{"all tokens", "x %r@%h:%p %%h", Target{User: "u", Addr: "a", Port: 7}, []string{"x", "u@a:7", "%h", "LINE"}, ""},
		{"no user", "x %r@%h", Target{Name: "a", Addr: "a"}, nil, "%r: the user of a is not known"},
		{"quoted", `'my ssh' -o "User u"`, Target{Addr: "a"}, []string{"my ssh", "-o", "User u", "a", "LINE"}, ""},
		{"bad token", "x %q", Target{Addr: "a"}, nil, `rsh command "x %q": %q in "%q": tokens are %h, %r, %p and %%`},
		{"empty", " ", Target{Addr: "a"}, nil, "rsh command: no word in it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd, err := NewCommand(c.rsh)
			var got []string
			if err == nil {
				got, err = cmd.Args(c.t, "LINE")
			}
			text := ""
			if err != nil {
				text = err.Error()
			}
			if diff := cmp.Diff(text, c.err); diff != "" {
				t.Errorf("error (-got +want):\n%s", diff)
			}
			if diff := cmp.Diff(got, c.want); diff != "" {
				t.Errorf("arguments (-got +want):\n%s", diff)
			}
		})
	}
}

// splitWords and /bin/sh (without expansion of file names) agree.
func TestSplitWordsAsShell(t *testing.T) {
	for _, line := range []string{
		"a b  c", " a\tb\n", `'a b' "c d"`, `a'b'"c"d`, `"" ''`, `\a \\ \  "\a \\ \""`, `a\` + "\n" + `b`, `"a\` + "\n" + `b"`, `-o 'ProxyCommand=nc %h %p'`,
		`"it's"`, `'say "x"'`, `"\$x \` + "`" + `"`, "é '日本'",
	} {
		got, err := splitWords(line)
		if err != nil {
			t.Errorf("%q: %v", line, err)
			continue
		}
		out, err := exec.Command("/bin/sh", "-fc", `for w in `+strings.TrimSpace(line)+`; do printf '%s\0' "$w"; done`).Output()
		if err != nil {
			t.Fatalf("%q: sh: %v", line, err)
		}
		want := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
		if diff := cmp.Diff(got, want); diff != "" {
			t.Errorf("%q (-got +want):\n%s", line, diff)
		}
	}
	for _, line := range []string{`'a`, `"a`, `a\`, `a | b`, `$x`, `"$x"`, "a `b`", "a; b", "a > b", "a\x00b", "(a)", "a & b"} {
		if got, err := splitWords(line); err == nil {
			t.Errorf("%q: %q, want an error", line, got)
		}
	}
}

func FuzzSplitWords(f *testing.F) {
	f.Add(`ssh -o "User x" 'a b' \c`)
	f.Add(`a'b"c\d`)
	f.Fuzz(func(t *testing.T, line string) {
		words, err := splitWords(line)
		if err != nil {
			return
		}
		// Quoted again, they are the same words.
		var b strings.Builder
		for _, w := range words {
			b.WriteString("'" + strings.ReplaceAll(w, "'", `'\''`) + "' ")
		}
		again, err := splitWords(b.String())
		if err != nil {
			t.Fatalf("%q: %v", b.String(), err)
		}
		if diff := cmp.Diff(again, words); diff != "" {
			t.Errorf("%q (-got +want):\n%s", line, diff)
		}
	})
}

func TestTail(t *testing.T) {
	var all []byte
	var tail Tail
	for i := range 3000 {
		p := []byte(strconv.Itoa(i) + "\n")
		all = append(all, p...)
		if n, err := tail.Write(p); n != len(p) || err != nil {
			t.Fatal(n, err)
		}
	}
	if got, want := string(tail.Bytes()), string(all[len(all)-TailSize:]); got != want {
		t.Errorf("the last bytes are not kept: %d bytes, want %d", len(got), len(want))
	}
	tail.Write(all)
	if got, want := string(tail.Bytes()), string(all[len(all)-TailSize:]); got != want {
		t.Errorf("one long write: %d bytes, want %d", len(got), len(want))
	}
}
