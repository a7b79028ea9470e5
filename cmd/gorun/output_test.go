package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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
	t.Parallel()
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
			size := min(8<<20, 2*outputSize(t))
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
				j.gone()
			}
		})
	})
	t.Run("restart", func(t *testing.T) {
		j := newJob(t, "--restarts", "1", "sh", "-c", `echo once; [ -e $RANKDIR/tried ] || { touch $RANKDIR/tried; exit 3; }`).outputDir()
		if got := j.run(); got != 0 {
			t.Errorf("exit code %d: %s", got, j.err.String())
		}
		if got, want := j.outputFile(0, "stdout"), "once\nonce\n"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
	t.Run("of an earlier job", func(t *testing.T) {
		first := newJob(t, "-np", "3", "sh", "-c", "echo $RANK; echo e >&2").outputDir()
		if got := first.run(); got != 0 {
			t.Fatalf("exit code %d: %s", got, first.err.String())
		}
		dir := filepath.Join(first.dir, "out")
		next := newJob(t, "-np", "1", "--restarts", "1", "--merge", "--output-dir", dir, "sh", "-c", `touch $RANKDIR/up; until [ -e $RANKDIR/go ]; do sleep 0.01; done; echo new >&2; exit $((1 - GORUN_RESTART))`).start()
		next.until("up")
		if files, err := filepath.Glob(filepath.Join(dir, "*", "*")); err != nil || !slices.Equal(files, []string{filepath.Join(dir, "rank.0", "stdout")}) {
			t.Errorf("files %q, %v, want rank 0's stdout alone", files, err)
		}
		// Not while a job runs, and that one is not disturbed.
		host, err := os.Hostname()
		if err != nil {
			t.Fatal(err)
		}
		third := newJob(t, "--output-dir", dir, "true")
		want := fmt.Sprintf("gorun: write output to %s (--output-dir): another job is writing there: gorun on %s, pid %d\n", dir, host, next.cmd.Process.Pid)
		if got := third.run(); got != 125 || third.err.String() != want {
			t.Errorf("beside it: exit code %d, stderr %q, want 125, %q", got, third.err.String(), want)
		}
		if err := os.WriteFile(filepath.Join(next.dir, "go"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := next.wait(); got != 0 {
			t.Errorf("exit code %d: %s", got, next.err.String())
		}
		if got, err := os.ReadFile(filepath.Join(dir, "rank.0", "stdout")); err != nil || string(got) != "new\nnew\n" {
			t.Errorf("%q, %v, want what both attempts wrote", got, err)
		}
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

// outputSize is how much each rank writes in these tests. GORUN_TEST_OUTPUT=268435456 is what a release is tested with.
func outputSize(t *testing.T) int {
	if s := os.Getenv("GORUN_TEST_OUTPUT"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	switch {
	case testing.Short() && raceEnabled: // several times what pipes and buffers hold, still
		return 1 << 18
	case testing.Short():
		return 1 << 20
	}
	return 4 << 20
}

// checker takes the output of rank "chunks" and holds each line against the rank that wrote it.
type checker struct {
	tags bool
	rest []byte
	sums []hash.Hash
	size []int
	bad  string // the first line that is not whole
}

func newChecker(ranks int, tags bool) *checker {
	c := &checker{tags: tags, size: make([]int, ranks)}
	for range ranks {
		c.sums = append(c.sums, sha256.New())
	}
	return c
}

func (c *checker) Write(p []byte) (int, error) {
	c.rest = append(c.rest, p...)
	for {
		n := bytes.IndexByte(c.rest, '\n') + 1
		if n == 0 {
			return len(p), nil
		}
		c.line(c.rest[:n])
		c.rest = c.rest[n:]
	}
}

func (c *checker) line(line []byte) {
	text := line
	tag := -1
	if c.tags {
		head, after, ok := bytes.Cut(line, []byte("] "))
		n, err := strconv.Atoi(strings.TrimPrefix(string(head), "["))
		if !ok || err != nil {
			c.fault(line)
			return
		}
		tag, text = n, after
	}
	number, _, _ := bytes.Cut(text, []byte(" "))
	rank, err := strconv.Atoi(string(number))
	if err != nil || rank < 0 || rank >= len(c.sums) || c.tags && tag != rank {
		c.fault(line)
		return
	}
	c.sums[rank].Write(text)
	c.size[rank] += len(text)
}

func (c *checker) fault(line []byte) {
	if c.bad == "" {
		c.bad = fmt.Sprintf("%.80q", line)
	}
}

func (c *checker) check(t *testing.T, size int) {
	t.Helper()
	if c.bad != "" || len(c.rest) > 0 {
		t.Errorf("lines are not whole: %s, at the end %.80q", c.bad, c.rest)
	}
	for rank := range c.sums {
		want := rankText(rank, size)
		if sum := sha256.Sum256(want); c.size[rank] != len(want) || !bytes.Equal(c.sums[rank].Sum(nil), sum[:]) {
			t.Errorf("of rank %d came %d bytes, it wrote %d, or they differ", rank, c.size[rank], len(want))
		}
	}
}

// Ranks write lines in odd chunks, all at once, to a pipe, a file, and a reader that pauses: every byte comes, lines are whole, and
// gorun's memory is bounded.
func TestOutputIsExact(t *testing.T) {
	home := remoteHome(t)
	const ranks = 4
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		for _, tags := range []bool{false, true} {
			for _, sink := range []string{"pipe", "file", "slow reader"} {
				t.Run(fmt.Sprintf("%s, tags=%v", sink, tags), func(t *testing.T) {
					size := outputSize(t)
					j := newJob(ranks, "--tag-output="+strconv.FormatBool(tags), "rank", "chunks", strconv.Itoa(size))
					c := newChecker(ranks, tags)
					var r, w *os.File
					var err error
					if sink == "file" {
						w, err = os.Create(filepath.Join(j.dir, "f"))
					} else {
						r, w, err = os.Pipe()
					}
					if err != nil {
						t.Fatal(err)
					}
					j.cmd.Stdout = w
					j.start()
					w.Close()
					peak := 0
					if r != nil {
						defer r.Close()
						buf := make([]byte, 1<<20)
						for n, k := 0, 0; ; k++ {
							if n, err = r.Read(buf); err != nil {
								break
							}
							c.Write(buf[:n])
							if sink == "slow reader" && k < 5 {
								time.Sleep(50 * time.Millisecond) // longer than a pause of the ranks
							}
							if k%1000 == 5 {
								peak = max(peak, j.memory(j.cmd.Process.Pid))
							}
						}
					}
					if got := j.wait(); got != 0 || j.err.Len() > 0 {
						t.Fatalf("exit code %d, stderr %q", got, j.err.String())
					}
					if r == nil {
						f, err := os.Open(filepath.Join(j.dir, "f"))
						if err != nil {
							t.Fatal(err)
						}
						defer f.Close()
						if _, err := io.CopyBuffer(c, struct{ io.Reader }{f}, make([]byte, 1<<20)); err != nil {
							t.Fatal(err)
						}
					}
					if peak > maxMemory {
						t.Errorf("peak memory %d kB, want at most %d", peak, maxMemory)
					}
					c.check(t, size)
				})
			}
		}
	})
}

// What a rank writes just before its sudden end arrives, all of it.
func TestLastOutputArrives(t *testing.T) {
	home := remoteHome(t)
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		for _, c := range []struct {
			args []string
			code int
		}{{[]string{"rank", "1:last"}, 137}, {[]string{"rank", "1:last", "3"}, 3}} {
			j := newJob(2, c.args...).outputDir()
			if got := j.run(); got != c.code {
				t.Errorf("%v: exit code %d, want %d", c.args, got, c.code)
			}
			want := strings.Repeat("0123456789abcde\n", 1<<16)
			if j.out.String() != want || j.outputFile(1, "stdout") != want {
				t.Errorf("%v: %d bytes are shown, %d in the file, want %d", c.args, j.out.Len(), len(j.outputFile(1, "stdout")), len(want))
			}
			if !strings.HasPrefix(j.err.String(), "last words\ngorun: rank 1 ") || j.outputFile(1, "stderr") != "last words" {
				t.Errorf("%v: stderr %q", c.args, j.err.String())
			}
		}
	})
}

// Many ranks write without end to a reader that hardly reads: they are held up, gorun's memory is bounded, and Ctrl-C ends it at once.
func TestSlowReader(t *testing.T) {
	home := remoteHome(t)
	hereAndThere(t, home, func(t *testing.T, there bool, newJob func(int, ...string) *job) {
		ranks := 64
		if there {
			ranks = 16
		}
		j := newJob(ranks, "sh", "-c", "touch $RANKDIR/up$RANK; exec yes all work and no play makes a dull rank")
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		j.cmd.Stdout = w
		j.start()
		w.Close()
		j.until(marks("up", ranks)...)
		if _, err := io.ReadFull(r, make([]byte, 8<<20)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(200 * time.Millisecond) // more is taken into memory now, if it is
		all := map[string]int{"gorun": j.cmd.Process.Pid}
		if there {
			for pid, line := range j.processes() {
				if strings.Contains(line, " agent ") {
					all["agent "+strconv.Itoa(pid)] = pid
				}
			}
			if len(all) < 3 {
				t.Errorf("agents: %v", all)
			}
		}
		for what, pid := range all {
			if kb := j.memory(pid); kb == 0 || kb > maxMemory {
				t.Errorf("%s: peak memory %d kB, want at most %d", what, kb, maxMemory)
			}
		}
		begin := time.Now()
		j.cmd.Process.Signal(syscall.SIGINT)
		if got := j.wait(); got != 130 {
			t.Errorf("exit code %d, want 130", got)
		}
		d := time.Since(begin)
		t.Logf("ended %v after Ctrl-C", d)
		if d > 5*time.Second {
			t.Errorf("ended %v after Ctrl-C", d)
		}
		j.gone()
	})
}

// A line that is longer than any buffer: memory is bounded, the tag stands once before it, and another rank's line is not in it.
func TestVeryLongLine(t *testing.T) {
	home := remoteHome(t)
	size := 100 << 20
	if testing.Short() {
		size = 4 << 20
	}
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		j := newJob(2, "--tag-output", "rank", "long", strconv.Itoa(size))
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		j.cmd.Stdout = w
		j.start()
		w.Close()
		var others []byte // what is no x
		xs, peak := 0, 0
		for buf, n, k := make([]byte, 1<<20), 0, 0; err == nil; k++ {
			n, err = r.Read(buf)
			rest := bytes.Trim(buf[:n], "x")
			xs += bytes.Count(buf[:n], []byte("x"))
			others = append(others, bytes.ReplaceAll(rest, []byte("x"), nil)...)
			if k%100 == 50 {
				peak = max(peak, j.memory(j.cmd.Process.Pid))
			}
		}
		if got := j.wait(); got != 0 || j.err.Len() > 0 {
			t.Errorf("exit code %d, stderr %q", got, j.err.String())
		}
		if got := string(others); xs != size || got != "[0] [1] other\n" && got != "[1] other\n[0] " && got != "[0] \n[1] other\n" {
			t.Errorf("%d of %d bytes, and %q", xs, size, got)
		}
		if peak > maxMemory {
			t.Errorf("peak memory %d kB, want at most %d", peak, maxMemory)
		}
	})
}

// Text without a line end is shown after a short pause, and the rest of its line, too; tags stand before lines, not before writes.
func TestPromptIsShown(t *testing.T) {
	home := remoteHome(t)
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		j := newJob(2, "--tag-output", "sh", "-c", `[ $RANK = 0 ] || exit 0; printf 'N = '; read n; echo "<$n>"; printf AB; sleep 0.02; echo CD`)
		in, err := j.cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		j.cmd.Stdout = nil
		out, err := j.cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		j.start()
		prompt := make([]byte, len("[0] N = "))
		if _, err := io.ReadFull(out, prompt); err != nil || string(prompt) != "[0] N = " {
			t.Fatalf("got %q, %v", prompt, err)
		}
		io.WriteString(in, "4\n")
		rest, err := io.ReadAll(out)
		if got, want := string(rest), "<4>\n[0] ABCD\n"; got != want || err != nil {
			t.Errorf("got %q, %v, want %q", got, err, want)
		}
		if got := j.wait(); got != 0 {
			t.Errorf("exit code %d: %s", got, j.err.String())
		}
	})
}

// Progress lines and characters of several bytes come as they were written, although they come in pieces and another rank writes, too.
func TestProgressAndCharacters(t *testing.T) {
	home := remoteHome(t)
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		j := newJob(2, "--tag-output", "sh", "-c", `if [ $RANK = 1 ]; then for i in 1 2 3 4 5 6; do echo other; sleep 0.05; done; exit; fi
			printf '10%%\r'; sleep 0.1; printf '20%%\r'; sleep 0.1; printf '\ncosts 5 \342'; sleep 0.1; printf '\202'; sleep 0.1; printf '\254\n'`)
		if got := j.run(); got != 0 {
			t.Fatalf("exit code %d: %s", got, j.err.String())
		}
		text := strings.ReplaceAll(j.out.String(), "[1] other\n", "")
		// The newline after the last progress line may stand alone, if another line came between.
		for _, cut := range []string{"\r[0] \n", "\r\n"} {
			for _, mark := range []string{"costs 5 €\n", "costs 5 \n[0]+ €\n"} {
				if text == "[0] 10%\r[0] 20%"+cut+"[0] "+mark {
					return
				}
			}
		}
		t.Errorf("got %q", text)
	})
}

// The reader of gorun's stdout goes: the job ends as a program in a pipeline does.
func TestReaderGoes(t *testing.T) {
	home := remoteHome(t)
	hereAndThere(t, home, func(t *testing.T, _ bool, newJob func(int, ...string) *job) {
		for _, flags := range [][]string{nil, {"--tag-output", "--timestamp"}} {
			j := newJob(4, append(flags, "rank", "flood")...)
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			j.cmd.Stdout = w
			j.start()
			w.Close()
			if _, err := io.ReadFull(r, make([]byte, 1<<20)); err != nil {
				t.Fatal(err)
			}
			r.Close()
			if got := j.wait(); got != 141 || j.err.Len() > 0 {
				t.Errorf("%v: exit code %d, stderr %q, want 141", flags, got, j.err.String())
			}
			j.gone()
		}
	})
}
