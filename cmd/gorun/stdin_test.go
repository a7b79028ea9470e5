package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// stdinSize is how much ranks read in these tests. GORUN_TEST_STDIN=1073741824 is what a release is tested with.
func stdinSize(t *testing.T) int64 {
	if s := os.Getenv("GORUN_TEST_STDIN"); s != "" {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if testing.Short() {
		return 4 << 20
	}
	return 64 << 20
}

// input is a stream of bytes that repeats at no distance that a buffer may have.
type input struct {
	rnd  rand.Source
	left int64
	sum  hash.Hash
}

func newInput(size int64) *input {
	return &input{rnd: rand.NewPCG(5, uint64(size)), left: size, sum: sha256.New()}
}

func (in *input) Read(p []byte) (int, error) {
	if in.left == 0 {
		return 0, io.EOF
	}
	n := int(min(int64(len(p)), in.left))
	for i := 0; i < n; i += 8 {
		var b [8]byte
		v := in.rnd.Uint64()
		for k := range b {
			b[k] = byte(v >> (8 * k))
		}
		copy(p[i:n], b[:])
	}
	in.left -= int64(n)
	in.sum.Write(p[:n])
	return n, nil
}

// memory is the peak of a process's resident memory in kB, 0 if it has just ended.
func (j *job) memory(pid int) int {
	j.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		j.t.Fatal(err)
	}
	m := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(status)
	if m == nil {
		return 0
	}
	kb, _ := strconv.Atoi(string(m[1]))
	return kb
}

// maxMemory is how much gorun may take at most, in kB. The race detector takes a multiple.
const maxMemory = (64 << 10) * raceMemory

func (j *job) lines() []string {
	got := strings.Split(strings.TrimSpace(j.out.String()), "\n")
	slices.Sort(got)
	return got
}

// Much goes to one rank, which pauses in between: it gets every byte, once, and the end; the others get the end alone.
func TestStdinToARank(t *testing.T) {
	home := remoteHome(t)
	size := stdinSize(t)
	none := sha256.Sum256(nil)
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		j := newJob(3, "--stdin", "1", "rank", "sum")
		w, err := j.cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		j.start()
		j.until(marks("up", 3)...)
		in := newInput(size)
		done := make(chan error, 1)
		half := make(chan struct{})
		go func() {
			_, err := io.CopyN(w, in, size/2)
			close(half)
			if err == nil {
				_, err = io.Copy(w, in)
			}
			w.Close()
			done <- err
		}()
		<-half
		syscall.Kill(j.mark("up1"), syscall.SIGSTOP)
		select {
		case err := <-done:
			t.Errorf("all of it was taken while the rank stood still (%v)", err)
		case <-time.After(300 * time.Millisecond):
		}
		if kb := j.memory(j.cmd.Process.Pid); kb == 0 || kb > maxMemory {
			t.Errorf("peak memory %d kB, want at most %d", kb, maxMemory)
		}
		syscall.Kill(j.mark("up1"), syscall.SIGCONT)
		if got := j.wait(); got != 0 {
			t.Errorf("exit code %d: %s", got, j.err.String())
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		sum := func(rank int, n int64, h []byte) string {
			return fmt.Sprintf("%d %d %s", rank, n, hex.EncodeToString(h))
		}
		if d := cmp.Diff(j.lines(), []string{sum(0, 0, none[:]), sum(1, size, in.sum.Sum(nil)), sum(2, 0, none[:])}); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
	})
}

// All ranks read the same; one of them closes its stdin early, and lives on until the others have read it all.
func TestStdinToAll(t *testing.T) {
	home := remoteHome(t)
	size := stdinSize(t) / 4 // for each of eight
	const early = 100_000
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		j := newJob(8, "--stdin", "all", "rank", "sum", fmt.Sprintf("5:%d", early))
		in := newInput(size)
		j.cmd.Stdin = in
		if got := j.run(); got != 0 {
			t.Fatalf("exit code %d: %s", got, j.err.String())
		}
		var want []string
		for rank := range 8 {
			n, h := size, in.sum
			if rank == 5 {
				part := newInput(size)
				io.CopyN(io.Discard, part, early)
				n, h = early, part.sum
			}
			want = append(want, fmt.Sprintf("%d %d %s", rank, n, hex.EncodeToString(h.Sum(nil))))
		}
		if d := cmp.Diff(j.lines(), want); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
	})
}

// The end of the input comes once, after the last byte, and always.
func TestStdinEnds(t *testing.T) {
	home := remoteHome(t)
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		for _, text := range []string{"", "hi\n", "no end"} {
			for _, c := range []struct {
				who  string
				want string
			}{{"0", text}, {"1", text}, {"all", text + text}, {"none", ""}} {
				j := newJob(2, "--stdin", c.who, "cat")
				j.cmd.Stdin = strings.NewReader(text)
				if got := j.run(); got != 0 || j.out.String() != c.want || j.err.Len() > 0 {
					t.Errorf("--stdin %s, %q: exit code %d, stdout %q, stderr %q, want %q", c.who, text, got, j.out.String(), j.err.String(), c.want)
				}
			}
		}
	})
}

// The ranks end, and nobody has read the input, which has no end.
func TestStdinIsNotRead(t *testing.T) {
	home := remoteHome(t)
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		for _, who := range []string{"1", "all"} {
			j := newJob(2, "--stdin", who, "rank", "signals", "10")
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			j.cmd.Stdin = r
			j.start()
			r.Close()
			full := make(chan struct{})
			go func() {
				defer close(full)
				w.Write(bytes.Repeat([]byte("endless "), 4<<20)) // ends when nobody can read it any more
			}()
			j.until(marks("up", 2)...)
			time.Sleep(100 * time.Millisecond) // it is taken into memory now, if it is
			if kb := j.memory(j.cmd.Process.Pid); kb == 0 || kb > maxMemory {
				t.Errorf("peak memory %d kB, want at most %d", kb, maxMemory)
			}
			j.cmd.Process.Signal(syscall.SIGUSR1)
			if got := j.wait(); got != 0 {
				t.Errorf("--stdin %s: exit code %d: %s", who, got, j.err.String())
			}
			<-full
			j.gone()
		}
	})
}

// What gorun inherits is shared with a shell, or with others of a pipeline: no flag of it changes.
func TestInheritedFlagsStay(t *testing.T) {
	home := remoteHome(t)
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		for _, who := range []string{"0", "all"} {
			j := newJob(2, "--stdin", who, "sh", "-c", "cat; echo err >&2; touch $RANKDIR/up$RANK; until [ -e $RANKDIR/go ]; do sleep 0.01; done")
			var ends [3]*os.File // gorun's
			var ours [3]*os.File
			for i := range ends {
				r, w, err := os.Pipe()
				if err != nil {
					t.Fatal(err)
				}
				defer r.Close()
				defer w.Close()
				ends[i], ours[i] = w, r
				if i == 0 {
					ends[i], ours[i] = r, w
				}
			}
			flags := func() (f [3]int) {
				for i, e := range ends {
					raw, _ := e.SyscallConn() // Fd would change it
					raw.Control(func(fd uintptr) { f[i], _ = unix.FcntlInt(fd, unix.F_GETFL, 0) })
				}
				return f
			}
			j.cmd.Stdin, j.cmd.Stdout, j.cmd.Stderr = ends[0], ends[1], ends[2]
			j.start()
			before := flags() // exec.Cmd has made them blocking
			ours[0].WriteString("text\n")
			ours[0].Close()
			j.until(marks("up", 2)...)
			if d := cmp.Diff(flags(), before); d != "" {
				t.Errorf("--stdin %s, while it runs: -got +want:\n%s", who, d)
			}
			if err := os.WriteFile(j.dir+"/go", nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if got := j.wait(); got != 0 {
				t.Errorf("exit code %d", got)
			}
			if d := cmp.Diff(flags(), before); d != "" {
				t.Errorf("--stdin %s, at the end: -got +want:\n%s", who, d)
			}
		}
	})
}
