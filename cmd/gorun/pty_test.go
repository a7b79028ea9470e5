package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// terminal is a pseudo-terminal; gorun under test is in its foreground.
type terminal struct {
	master *os.File
	mu     sync.Mutex
	text   bytes.Buffer // what it shows
}

// openTerminal makes a pseudo-terminal.
func openTerminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		citest.Lacking(t, "pseudo-terminals: %v", err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return master, slave
}

func onTerminal(t *testing.T, j *job) *terminal {
	t.Helper()
	master, slave := openTerminal(t)
	j.cmd.Stdin, j.cmd.Stdout, j.cmd.Stderr = slave, slave, slave
	j.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	j.start()
	slave.Close()
	term := &terminal{master: master}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			if err != nil {
				return // the last process has closed it
			}
			term.mu.Lock()
			term.text.Write(buf[:n])
			term.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		if !j.waited {
			j.cmd.Process.Kill()
			j.cmd.Wait()
			j.waited = true
		}
		<-done
		master.Close()
	})
	return term
}

// Type-ahead is the shell's: a job whose ranks do not read leaves it in the terminal.
func TestTypeAheadIsTheShells(t *testing.T) {
	j := newJob(t)
	j.cmd = exec.Command("sh", "-c", `gorun -np 2 rank signals 10; read x; echo "shell got <$x>"`)
	j.cmd.Env = append(os.Environ(), "RANKDIR="+j.dir)
	term := onTerminal(t, j)
	j.until("up0", "up1")
	term.master.WriteString("ls -l\n")
	j.eventually("echo", 20*time.Second, func() bool { return strings.Contains(term.shows(), "ls -l") })
	time.Sleep(3 * 50 * time.Millisecond) // it is taken now, if it is
	for pid, line := range j.processes() {
		if strings.HasPrefix(line, "gorun -np") {
			syscall.Kill(pid, syscall.SIGUSR1)
		}
	}
	if got := j.wait(); got != 0 {
		t.Errorf("exit code %d", got)
	}
	j.eventually("the shell's line", 20*time.Second, func() bool { return strings.Contains(term.shows(), "shell got <ls -l>") })
}

// In the background nothing is read: what is typed is for others. In the foreground again, it is.
func TestBackgroundReadsNothing(t *testing.T) {
	bash := citest.Program(t, "bash") // it has job control
	j := newJob(t)
	j.cmd = exec.Command(bash, "--norc", "-c", `set -m
gorun sh -c 'read x || echo "started there: end"' & wait
gorun sh -c 'touch $RANKDIR/up; read x; echo "got <$x>"'
bg; touch $RANKDIR/bg; until [ -e $RANKDIR/go ]; do sleep 0.05; done; fg; echo over`)
	j.cmd.Env = append(os.Environ(), "RANKDIR="+j.dir)
	term := onTerminal(t, j)
	j.until("up")
	j.eventually("end of input", 20*time.Second, func() bool { return strings.Contains(term.shows(), "started there: end") })
	term.master.WriteString("\x1a") // Ctrl-Z
	j.until("bg")
	term.master.WriteString("word\n")
	j.eventually("echo", 20*time.Second, func() bool { return strings.Contains(term.shows(), "word") })
	time.Sleep(500 * time.Millisecond) // it is taken now, if it is
	if strings.Contains(term.shows(), "got <word>") {
		t.Error("read in the background")
	}
	for pid, line := range j.processes() {
		if stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); strings.HasPrefix(line, "gorun ") && bytes.Contains(stat, []byte(") T ")) {
			t.Error("gorun was stopped, for it has read the terminal in the background")
		}
	}
	if err := os.WriteFile(filepath.Join(j.dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	j.eventually("the word", 20*time.Second, func() bool { return strings.Contains(term.shows(), "got <word>") })
	j.eventually("the end", 20*time.Second, func() bool { return strings.Contains(term.shows(), "over") })
	j.wait()
}

func (term *terminal) shows() string {
	term.mu.Lock()
	defer term.mu.Unlock()
	return term.text.String()
}

func TestTerminal(t *testing.T) {
	t.Run("ctrl-c", func(t *testing.T) {
		j := newJob(t, "-np", "2", "rank", "signals", "2")
		term := onTerminal(t, j)
		j.until(marks("up", 2)...)
		term.master.WriteString("\x03")
		if got := j.wait(); got != 130 {
			t.Errorf("exit code %d, want 130", got)
		}
		j.gone()
		// Once each: the ranks are in sessions of their own, the terminal does not signal them, too.
		for _, rank := range []string{"0", "1"} {
			if got := j.signals(rank); len(got) != 1 || got[0] != syscall.SIGINT {
				t.Errorf("rank %s saw %v, want SIGINT", rank, got)
			}
		}
	})
	home := remoteHome(t)
	for _, there := range []string{"", " elsewhere"} {
		job := func(t *testing.T, np string, args ...string) *job {
			if there == "" {
				return newJob(t, append([]string{"-np", np}, args...)...)
			}
			return remoteJob(t, home, "a,b", append([]string{"-np", np}, args...)...)
		}
		terminalInput(t, there, job)
	}
}

// terminalInput is what a rank, here or elsewhere, reads from a terminal.
func terminalInput(t *testing.T, there string, newJob func(t *testing.T, np string, args ...string) *job) {
	t.Run("prompt and answer"+there, func(t *testing.T) {
		j := newJob(t, "2", "sh", "-c", `[ $RANK = 0 ] || exit 0; printf 'N = '; read n; echo "got <$n>"; read n || echo end`)
		term := onTerminal(t, j)
		j.eventually("prompt", 20*time.Second, func() bool { return strings.Contains(term.shows(), "N = ") })
		term.master.WriteString("4 5\n")
		j.eventually("answer", 20*time.Second, func() bool { return strings.Contains(term.shows(), "got <4 5>") })
		term.master.WriteString("\x04") // end of file
		if got := j.wait(); got != 0 {
			t.Errorf("exit code %d", got)
		}
		j.eventually("end", 20*time.Second, func() bool { return strings.Contains(term.shows(), "end\r\n") })
	})
	t.Run("only what a rank asks for is read"+there, func(t *testing.T) {
		j := newJob(t, "1", "sh", "-c", `read x; echo "got <$x>"; exec rank signals 10`)
		term := onTerminal(t, j)
		term.master.WriteString("one\ntwo\nthree\n")
		j.until("up0")
		j.eventually("the line", 20*time.Second, func() bool { return strings.Contains(term.shows(), "got <one>") })
		time.Sleep(3 * 50 * time.Millisecond) // more is taken now, if it is
		j.cmd.Process.Signal(syscall.SIGUSR1)
		if got := j.wait(); got != 0 {
			t.Errorf("exit code %d", got)
		}
		// What waits in the terminal is the shell's that comes after gorun.
		if got, want := j.unread(t, term), len("two\nthree\n"); got != want {
			t.Errorf("%d bytes wait in the terminal, want %d", got, want)
		}
	})
	t.Run("all ranks read"+there, func(t *testing.T) {
		j := newJob(t, "2", "--stdin", "all", "sh", "-c", `read x; echo "rank $RANK got <$x>"; read x || echo "rank $RANK at end"`)
		term := onTerminal(t, j)
		term.master.WriteString("one\n\x04")
		if got := j.wait(); got != 0 {
			t.Errorf("exit code %d", got)
		}
		for _, want := range []string{"rank 0 got <one>", "rank 1 got <one>", "rank 0 at end", "rank 1 at end"} {
			j.eventually(want, 20*time.Second, func() bool { return strings.Contains(term.shows(), want) })
		}
	})
}

// unread is the number of bytes that wait to be read from the terminal.
func (j *job) unread(t *testing.T, term *terminal) int {
	t.Helper()
	n, err := unix.IoctlGetInt(int(term.master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDONLY|syscall.O_NOCTTY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n, err = unix.IoctlGetInt(int(f.Fd()), unix.TIOCINQ)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
