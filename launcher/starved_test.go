package launcher

import (
	"os"
	"os/exec"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// Ranks that don't get a CPU have more time to end by themselves; those that do, and those that get none for long, are asked to end.
func TestLastWordsOfStarvedRanks(t *testing.T) {
	for _, c := range []struct {
		name   string
		hungry func() func() bool
		after  time.Duration // when the second rank ends by itself, since the first has failed
		sent   bool
	}{
		{"enough CPUs", func() func() bool { return nil }, lastWords + 10*time.Millisecond, true},
		{"starved", func() func() bool { return func() bool { return true } }, mostWords - 50*time.Millisecond, false},
		{"fed", func() func() bool { return func() bool { return false } }, lastWords + 10*time.Millisecond, true},
		{"fed after a time", func() func() bool {
			n := 0
			return func() bool { n++; return n < 3 }
		}, 3*lastWords + 10*time.Millisecond, true},
		{"starved for long", func() func() bool { return func() bool { return true } }, mostWords + lastWords + 10*time.Millisecond, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := &fakeJob{plan: &Plan{KillGrace: time.Minute, Hosts: []PlanHost{{Name: "a"}, {Name: "here", Local: true}}, Ranks: []PlanRank{{Rank: 0}, {Rank: 1, Host: 1}}}}
				j.hosts = []*fakeHost{
					{ranks: []*fakeRank{{rank: 0, after: time.Second, status: exitStatus{Code: 7}}}},
					{index: 1, hungry: c.hungry(), ranks: []*fakeRank{{rank: 1, after: time.Second + c.after, status: exitStatus{Code: 1}, slow: time.Hour}}},
				}
				if a := j.run(t); a.Code != 7 || (a.Ranks[1].Stopped != "") != c.sent {
					t.Errorf("code %d, the second rank was sent %q (want a signal: %v): %s", a.Code, a.Ranks[1].Stopped, c.sent, a.Summary())
				}
			})
		})
	}
}

// Processes that share a CPU wait for it. Those that run all the same, and do not end, are not starved for long: they spin.
func TestHungry(t *testing.T) {
	if _, err := os.Stat("/proc/self/schedstat"); err != nil {
		citest.Lacking(t, "%v", err)
	}
	var cpus unix.CPUSet
	runtime.LockOSThread() // ends with its goroutine, as it stays bound
	if err := unix.SchedGetaffinity(0, &cpus); err != nil {
		t.Fatal(err)
	}
	one := 0
	for !cpus.IsSet(one) {
		one++
	}
	cpus.Zero()
	cpus.Set(one)
	if err := unix.SchedSetaffinity(0, &cpus); err != nil {
		t.Fatal(err)
	}
	var pids []int
	for range 2 {
		cmd := exec.Command("sh", "-c", "while :; do :; done") // bound as this thread is
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		pids = append(pids, cmd.Process.Pid)
	}
	starving := hungry(func() []int { return pids })
	until := func(what string, f func(ran, waited time.Duration) bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			all := true
			for _, pid := range pids {
				for _, c := range cpuTimes(pid) {
					all = all && f(c.ran, c.waited)
				}
			}
			if all {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("two processes on one CPU have not %s it within 20 s", what)
			}
		}
	}
	var begun cpuTime // at most: this test may have waited for a CPU until starving began
	for _, pid := range pids {
		for _, c := range cpuTimes(pid) {
			begun = cpuTime{max(begun.ran, c.ran), max(begun.waited, c.waited)}
		}
	}
	until("waited for", func(_, waited time.Duration) bool { return waited >= begun.waited+lastWords/3+10*time.Millisecond })
	if !starving() {
		for _, c := range cpuTimes(pids[0]) {
			if c.ran < lastWords { // else this test has waited for the CPU for long
				t.Errorf("not starved after %+v", c)
			}
		}
	}
	until("run on", func(ran, waited time.Duration) bool {
		return ran >= begun.ran+lastWords && waited > begun.waited+lastWords
	})
	if starving() {
		t.Error("still starved when they have run for long")
	}
}

func TestRunnable(t *testing.T) {
	for text, want := range map[string]int{"23.37 20.82 11.81 47/717 8138\n": 47, "0.00 0.00 0.00 1/9 3": 1, "": 0, "a b c d": 0, "0.1 0.2 0.3": 0} {
		if got := runnable(text); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
}
