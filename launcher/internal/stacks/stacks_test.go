package stacks

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const dump = `panic: something else

goroutine 1 gp=0xc000002380 m=0 mp=0x5a2b40 [select, 2 minutes, locked to thread]:
github.com/gorun-dev/gorun/nccl.(*Comm).wait(0xc000120000, {0x1, 0x2})
	/src/gorun/nccl/comm.go:640 +0x1f
main.train.func1(...)
	/src/train/main.go:88
main.main()
	/src/train/main.go:40 +0xd2

goroutine 7 [sync.Mutex.Lock]:
internal/sync.runtime_SemacquireMutex(0x0?, 0x0?, 0x0?)
	/usr/local/go/src/runtime/sema.go:95 +0x25
main.lockForever(...)
	/src/train/main.go:3
created by main.main in goroutine 1
	/src/train/main.go:4 +0x85

goroutine 9 [IO wait]:
internal/poll.runtime_pollWait(0x7f, 0x72)
	/usr/local/go/src/runtime/netpoll.go:351 +0x85
github.com/gorun-dev/gorun/bootstrap.(*remote).read(0xc0)
	/src/gorun/bootstrap/remote.go:150 +0x11
created by github.com/gorun-dev/gorun/bootstrap.dial in goroutine 1
	/src/gorun/bootstrap/remote.go:72 +0x22

goroutine 11 [chan rece`

var parsed = []Goroutine{
	{ID: 1, State: "select", Frames: []Frame{
		{"github.com/gorun-dev/gorun/nccl.(*Comm).wait", "nccl/comm.go:640"}, {"main.train.func1", "train/main.go:88"}, {"main.main", "train/main.go:40"}}},
	{ID: 7, State: "sync.Mutex.Lock", By: "main.main", Frames: []Frame{
		{"internal/sync.runtime_SemacquireMutex", "runtime/sema.go:95"}, {"main.lockForever", "train/main.go:3"}}},
	{ID: 9, State: "IO wait", By: "github.com/gorun-dev/gorun/bootstrap.dial", Frames: []Frame{
		{"internal/poll.runtime_pollWait", "runtime/netpoll.go:351"}, {"github.com/gorun-dev/gorun/bootstrap.(*remote).read", "bootstrap/remote.go:150"}}},
}

func TestParseGo(t *testing.T) {
	if d := cmp.Diff(ParseGo([]byte(dump)), parsed); d != "" {
		t.Error(d)
	}
}

// lockForever is a frame to look for.
func lockForever(mu *sync.Mutex) {
	mu.Lock()
	defer mu.Unlock()
}

// The runtime that is linked here writes what ParseGo reads.
func TestParseOwn(t *testing.T) {
	var mu sync.Mutex
	mu.Lock()
	var wg sync.WaitGroup
	wg.Go(func() { lockForever(&mu) })
	defer wg.Wait()
	defer mu.Unlock()
	for limit := time.Now().Add(10 * time.Second); ; {
		b := make([]byte, 1<<20)
		for _, g := range ParseGo(b[:runtime.Stack(b, true)]) {
			for _, f := range g.Frames {
				if strings.HasSuffix(f.Func, "stacks.lockForever") && g.State == "sync.Mutex.Lock" {
					if !strings.HasPrefix(f.Line, "stacks/stacks_test.go:") || !strings.HasPrefix(g.By, "sync.(*WaitGroup).Go") {
						t.Errorf("%+v", g)
					}
					return
				}
			}
		}
		if time.Now().After(limit) {
			t.Fatalf("no goroutine in lockForever in\n%s", b[:runtime.Stack(b, true)])
		}
		runtime.Gosched()
	}
}

func FuzzParseGo(f *testing.F) {
	f.Add([]byte(dump))
	f.Add([]byte("goroutine 1 [running]:\nmain.f(...)\n\t/a.go:1"))
	f.Add([]byte("goroutine 1 []:\n(((\n\t\ncreated by \n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		all := ParseGo(b)
		if len(all) > maxGoroutines {
			t.Errorf("%d goroutines", len(all))
		}
		for _, g := range all {
			if len(g.Frames) > maxFrames {
				t.Errorf("%d frames", len(g.Frames))
			}
		}
		Tell([]Rank{{Rank: 0, Go: all}}, func([]int) string { return "rank 0" }, true)
	})
}

// FuzzSystemCall reads what a kernel of another version may write.
func FuzzSystemCall(f *testing.F) {
	f.Add("0 0x3 0x7ffe 0x20 0x0 0x0 0x0 0x7ffe 0x7f2a")
	f.Add("running")
	f.Add("-1 0x7ffe 0x7f2a")
	f.Fuzz(func(t *testing.T, line string) { systemCall(line, "/nowhere") })
}

func TestLook(t *testing.T) {
	cat := exec.Command("cat")
	in, err := cat.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cat.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cat.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		in.Close()
		if err := cat.Wait(); err != nil {
			t.Error(err)
		}
	}()
	// When it has echoed a line it goes on to wait for the next.
	fmt.Fprintln(in, "a")
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	var p Process
	for limit := time.Now().Add(10 * time.Second); time.Now().Before(limit); runtime.Gosched() {
		if p, err = Look("/proc", cat.Process.Pid); err != nil {
			t.Fatal(err)
		}
		if p.Threads[0].State == "sleeping" && p.Threads[0].Syscall != "" {
			break
		}
	}
	if p.PID != cat.Process.Pid || p.Command == "" || len(p.Threads) != 1 || p.Threads[0].doing() != "sleeping in read 0 (pipe)" {
		t.Errorf("%+v", p)
	}
	if _, err := Look(t.TempDir(), 1); err == nil {
		t.Error("a process that is not there")
	}
}

// A /proc that lets nobody see system calls (hidden by a security module), and names with parentheses.
func TestLookHidden(t *testing.T) {
	root := t.TempDir()
	for path, text := range map[string]string{
		"7/comm": "a) S (b\n", "7/task/7/stat": "7 (a) S (b) D 1 7 7", "7/task/7/comm": "a) S (b\n", "7/task/7/wchan": "nfs_wait",
		"7/task/9/stat": "9 (w) T 1", "7/task/9/comm": "w", "7/task/9/wchan": "0", "7/task/10/stat": "", "7/task/x/stat": "",
	} {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p, err := Look(root, 7)
	want := Process{PID: 7, Command: "a) S (b", Threads: []Thread{{Name: "a) S (b", State: "waiting for a device", Where: "nfs_wait"}, {Name: "w", State: "stopped"}}}
	if d := cmp.Diff(p, want); err != nil || d != "" {
		t.Error(err, d)
	}
}

func TestTell(t *testing.T) {
	name := func(ranks []int) string { return fmt.Sprint("ranks ", ranks) }
	wait := []Goroutine{parsed[0], parsed[2]}
	inside := Goroutine{ID: 8, State: "syscall", By: "main.main", Frames: []Frame{{"syscall.Syscall6", "syscall/syscall_linux.go:96"}, {module + "cuda.(*driver).wait", "cuda/host_drive.go:69"},
		{module + "cuda.(*Stream).Synchronize", "cuda/stream.go:46"}, {"main.step", "train/main.go:9"}, {module + "graphs.capture", "graphs/capture.go:9"}, {"main.train", "train/main.go:8"}}}
	odd := []Goroutine{inside, {ID: 1, State: "sleep", Frames: []Frame{{"time.Sleep", "runtime/time.go:1"}, {"main.main", "train/main.go:7"}}}, parsed[1]}
	all := []Rank{
		{Rank: 4, Go: wait}, {Rank: 0, Go: wait}, {Rank: 1, Go: wait}, {Rank: 3, Go: odd},
		{Rank: 5, Processes: []Process{
			{PID: 1, Command: "bash", Threads: []Thread{{State: "sleeping", Syscall: "wait"}}},
			{PID: 2, Command: "python3", Threads: []Thread{{State: "sleeping", Syscall: "read 5 (socket)"}, {State: "running"}, {State: "sleeping", Syscall: "futex"}, {State: "sleeping", Syscall: "futex"}}}}},
		{Rank: 6, Err: "its process has ended"},
	}
	want := strings.Split(strings.Trim(`
ranks [3]: main goroutine, sleep
  time.Sleep (runtime/time.go:1)
  main.main (train/main.go:7)
ranks [5]: bash, sleeping in wait
ranks [6]: its process has ended
ranks [0 1 4]: main goroutine, select
  github.com/gorun-dev/gorun/nccl.(*Comm).wait (nccl/comm.go:640)
  main.train.func1 (train/main.go:88)
  main.main (train/main.go:40)
ranks [3]: goroutine, sync.Mutex.Lock
  main.lockForever (train/main.go:3)
  started by main.main
ranks [3]: goroutine, syscall
  github.com/gorun-dev/gorun/cuda.(*Stream).Synchronize (cuda/stream.go:46)
  main.step (train/main.go:9)
  github.com/gorun-dev/gorun/graphs.capture (graphs/capture.go:9)
  main.train (train/main.go:8)
  started by main.main
ranks [5]: python3, sleeping in read 5 (socket)
  1 other thread running
  2 other threads sleeping in futex
`, "\n"), "\n")
	if d := cmp.Diff(Tell(all, name, false), want); d != "" {
		t.Error(d)
	}
	if got := strings.Join(Tell(all, name, true), "\n"); !strings.Contains(got, "bootstrap.(*remote).read (bootstrap/remote.go:150)") || !strings.Contains(got, "runtime_SemacquireMutex") || !strings.Contains(got, "cuda.(*driver).wait") {
		t.Errorf("with verbose:\n%s", got)
	}
	var many []Rank
	for r := range 100 {
		many = append(many, Rank{Rank: r, Go: []Goroutine{{ID: 1, State: fmt.Sprint("state ", r)}}})
	}
	if got := Tell(many, name, false); len(got) != maxStacks+1 || got[maxStacks] != "and 76 more" {
		t.Errorf("%d lines, the last %q", len(got), got[len(got)-1])
	}
}

// What is told of a rank has a bound, and the most telling of it comes first.
func TestFit(t *testing.T) {
	frames := func(name string, n int) (all []Frame) {
		for i := range n {
			all = append(all, Frame{fmt.Sprintf("%s%d", name, i), "m/main.go:1"})
		}
		return all
	}
	whole := Rank{Go: []Goroutine{{ID: 9, State: "IO wait", Frames: frames("runtime.f", 3)}}}
	for i := range 1000 {
		whole.Go = append(whole.Go, Goroutine{ID: 100 + i, State: "select", Frames: frames("main.work", 5)}, Goroutine{ID: 5000 + i, State: fmt.Sprint("state ", i), Frames: frames("main.odd", 5)})
	}
	whole.Go = append(whole.Go, Goroutine{ID: 1, State: "select", Frames: frames("main.f", 100)})
	for _, p := range []int{7, 8} {
		threads := make([]Thread, 512)
		for i := range threads {
			threads[i] = Thread{Name: "t", State: "sleeping", Syscall: "futex"}
		}
		whole.Processes = append(whole.Processes, Process{PID: p, Command: "p", Threads: threads})
	}
	for size, want := range map[int]struct{ goroutines, frames int }{64 << 20: {1003, 100}, 16 << 10: {30, 100}, 2 << 10: {3, 25}, 1: {1, 0}} {
		r := Rank{Go: slices.Clone(whole.Go), Processes: slices.Clone(whole.Processes)}
		r.Fit(size)
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if len(text) > size+1<<10 {
			t.Errorf("%d bytes for %d", len(text), size)
		}
		if n := len(r.Go); n < want.goroutines || n > 2*want.goroutines || len(r.Go[0].Frames) != want.frames || r.Go[0].ID != 1 {
			t.Errorf("%d bytes: %d goroutines, the first %d with %d frames; want some %d, 1 with %d", size, n, r.Go[0].ID, len(r.Go[0].Frames), want.goroutines, want.frames)
		}
		if len(r.Go) > 1 && r.Go[1].ID != 100 {
			t.Errorf("the second is %+v", r.Go[1])
		}
		if len(r.Processes) == 0 || len(r.Processes[0].Threads) == 0 || r.Processes[0].PID != 7 {
			t.Errorf("%d bytes: processes %+v", size, r.Processes)
		}
	}
}

// Names that processes give themselves do not write to a terminal.
func TestNamesAreClean(t *testing.T) {
	if got, want := clip("a\x1b[2Jb\x9b\xff\u0085c"), "a?[2Jb??c"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestCatches(t *testing.T) {
	for status, want := range map[string][2]bool{
		"Name:\ta\nSigIgn:\t0000000000000020\nSigCgt:\t0000000000004000\nCapInh:\t0\n": {false, true},
		"Name:\ta\nSigCgt:\t0000000000000020\n":                                        {true, false},
		"Name:\ta\nSigCgt:\tx\n":                                                       {},
		"":                                                                             {},
	} {
		if got := [2]bool{catches([]byte(status), syscall.SIGABRT), catches([]byte(status), syscall.SIGTERM)}; got != want {
			t.Errorf("%q: got %v, want %v", status, got, want)
		}
	}
}
