package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// hereAndThere runs a test with ranks that are gorun's own children, and with ranks on two hosts, in turn.
func hereAndThere(t *testing.T, home string, f func(t *testing.T, there bool, newJob func(np int, args ...string) *job)) {
	t.Helper()
	t.Run("here", func(t *testing.T) {
		f(t, false, func(np int, args ...string) *job {
			return newJob(t, append([]string{"-np", strconv.Itoa(np)}, args...)...)
		})
	})
	t.Run("there", func(t *testing.T) {
		f(t, true, func(np int, args ...string) *job {
			return remoteJob(t, home, "a:8,b:8", append([]string{"-np", strconv.Itoa(np), "--map-by", "node"}, args...)...)
		})
	})
}

// outputFile is what a rank's file of --output-dir holds.
func (j *job) outputFile(rank int, stream string) string {
	j.t.Helper()
	text, err := os.ReadFile(filepath.Join(j.dir, "out", "rank."+strconv.Itoa(rank), stream))
	if err != nil {
		j.t.Fatal(err)
	}
	return string(text)
}

// outputDir adds --output-dir; outputFile reads what is there.
func (j *job) outputDir(flags ...string) *job {
	j.cmd.Args = append(append([]string{j.cmd.Args[0], "--output-dir", filepath.Join(j.dir, "out")}, flags...), j.cmd.Args[1:]...)
	return j
}

func TestTimestamps(t *testing.T) {
	home := remoteHome(t)
	line := regexp.MustCompile(`^\[(\d)\] (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z) (\w+)(\d+)$`)
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		j := newJob(2, "--timestamp", "--tag-output", "sh", "-c", `for i in 1 2 3; do echo out$i; echo err$i >&2; done; printf 'end4'`).outputDir()
		begin := time.Now()
		if got := j.run(); got != 0 {
			t.Fatalf("exit code %d: %s", got, j.err.String())
		}
		end := time.Now()
		for stream, text := range map[string]string{"stdout": j.out.String(), "stderr": j.err.String()} {
			var files [2]string
			for l := range strings.Lines(text) {
				m := line.FindStringSubmatch(strings.TrimSuffix(l, "\n"))
				if m == nil {
					t.Fatalf("%s: line %q", stream, l)
				}
				if at, err := time.Parse(time.RFC3339, m[2]); err != nil || at.Before(begin.Truncate(time.Microsecond)) || at.After(end) {
					t.Errorf("%s: line %q: not between %v and %v, %v", stream, l, begin.UTC(), end.UTC(), err)
				}
				rank, _ := strconv.Atoi(m[1])
				files[rank] += strings.TrimPrefix(l, "["+m[1]+"] ")
			}
			for rank, want := range files {
				if want = strings.ReplaceAll(want, "end4\n", "end4"); want == "" {
					t.Errorf("%s: no line of rank %d", stream, rank)
				}
				if got := j.outputFile(rank, stream); got != want {
					t.Errorf("file of rank %d: %q, want %q", rank, got, want)
				}
			}
		}
	})
	// The time is that at which the host's agent had the line, although gorun is stopped and sees it later.
	t.Run("at the source", func(t *testing.T) {
		j := remoteJob(t, home, "a,b", "--timestamp", "sh", "-c",
			`[ $RANK = 1 ] || exit 0; touch $RANKDIR/up; until [ -e $RANKDIR/go ]; do sleep 0.01; done; echo now; touch $RANKDIR/said; exec sleep 1`).start()
		j.until("up")
		j.cmd.Process.Signal(syscall.SIGSTOP)
		if err := os.WriteFile(filepath.Join(j.dir, "go"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		j.until("said")
		time.Sleep(500 * time.Millisecond) // a busy machine's agent reads it meanwhile
		onAgain := time.Now()
		j.cmd.Process.Signal(syscall.SIGCONT)
		if got := j.wait(); got != 0 {
			t.Fatalf("exit code %d: %s", got, j.err.String())
		}
		stamp, _, _ := strings.Cut(j.out.String(), " ")
		if at, err := time.Parse(time.RFC3339, stamp); err != nil || !at.Before(onAgain) {
			t.Errorf("%q: want a time before %v, %v", j.out.String(), onAgain.UTC(), err)
		}
	})
}

func TestOutputDir(t *testing.T) {
	home := remoteHome(t)
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		t.Run("beside the terminal", func(t *testing.T) {
			j := newJob(3, "sh", "-c", `echo out $RANK; echo err $RANK >&2; printf 'no end'`).outputDir()
			if got := j.run(); got != 0 {
				t.Fatalf("exit code %d: %s", got, j.err.String())
			}
			for rank := range 3 {
				out, err := fmt.Sprintf("out %d\n", rank), fmt.Sprintf("err %d\n", rank)
				if got, want := j.outputFile(rank, "stdout"), out+"no end"; got != want {
					t.Errorf("stdout of rank %d: %q, want %q", rank, got, want)
				}
				if got := j.outputFile(rank, "stderr"); got != err {
					t.Errorf("stderr of rank %d: %q, want %q", rank, got, err)
				}
				if !strings.Contains(j.out.String(), out) || !strings.Contains(j.err.String(), err) {
					t.Errorf("of rank %d not all is shown: %q, %q", rank, j.out.String(), j.err.String())
				}
			}
		})
		t.Run("files only, exact, under flood", func(t *testing.T) {
			const size = 8 << 20
			j := newJob(3, "rank", "chunks", strconv.Itoa(size)).outputDir("--files-only")
			if got := j.run(); got != 0 || j.out.Len() > 0 || j.err.Len() > 0 {
				t.Fatalf("exit code %d, shown %q %q", got, j.out.String(), j.err.String())
			}
			for rank := range 3 {
				if j.outputFile(rank, "stdout") != string(rankText(rank, size)) {
					t.Errorf("stdout of rank %d differs from what it wrote", rank)
				}
			}
		})
		t.Run("files only, a failure", func(t *testing.T) {
			j := newJob(1, "sh", "-c", "echo why >&2; exit 3").outputDir("--files-only")
			if got := j.run(); got != 3 || !strings.Contains(j.err.String(), "why") {
				t.Errorf("exit code %d, stderr %q, want 3 and the last words", got, j.err.String())
			}
		})
		t.Run("disk full", func(t *testing.T) {
			// The file's text comes at the end, when no rank runs any more, and while one does.
			for _, script := range []string{"echo $RANK", "echo $RANK; [ $RANK = 0 ] || exec sleep 1000"} {
				j := newJob(2, "sh", "-c", script).outputDir()
				file := filepath.Join(j.dir, "out", "rank.1", "stdout")
				if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink("/dev/full", file); err != nil {
					t.Fatal(err)
				}
				got := j.run()
				if want := "gorun: write output to " + file + " (--output-dir): no space left on device\n"; got != 125 || !strings.HasPrefix(j.err.String(), want) {
					t.Errorf("exit code %d, stderr %q, want 125, %q", got, j.err.String(), want)
				}
				j.goneIn(2 * time.Second)
			}
		})
	})
	t.Run("no directory", func(t *testing.T) {
		j := newJob(t, "rank", "exit", "0").outputDir()
		if err := os.WriteFile(filepath.Join(j.dir, "out"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := j.run(); got != 125 || !strings.Contains(j.err.String(), "(--output-dir): not a directory") {
			t.Errorf("exit code %d, stderr %q", got, j.err.String())
		}
	})
}

func TestMerge(t *testing.T) {
	home := remoteHome(t)
	var want bytes.Buffer
	for i := range 500 {
		fmt.Fprintf(&want, "out %d\nerr %d\n", i, i)
	}
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		j := newJob(2, "--merge", "sh", "-c", `[ $RANK = 1 ] || exit 0; i=0; while [ $i != 500 ]; do echo out $i; echo err $i >&2; i=$((i+1)); done; exit 3`).outputDir()
		if got := j.run(); got != 3 {
			t.Errorf("exit code %d, want 3", got)
		}
		if got := j.out.String(); got != want.String() {
			t.Errorf("stdout is not what the rank wrote, in its order: %.300q", got)
		}
		if got := j.outputFile(1, "stdout"); got != want.String() {
			t.Errorf("the file is not what the rank wrote, in its order: %.300q", got)
		}
		if exists(filepath.Join(j.dir, "out", "rank.1", "stderr")) {
			t.Error("there is a file for a stderr of its own")
		}
		// stdout may have another reader than the account.
		if got := j.err.String(); !strings.Contains(got, "exited with code 3") || !strings.Contains(got, "err 499") {
			t.Errorf("stderr %q, want an account with the last words", got)
		}
	})
}
