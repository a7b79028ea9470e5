package bootstrap

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/internal/server"
	"github.com/gorun-dev/gorun/rankenv"
)

func TestJoinAlone(t *testing.T) {
	for _, env := range []rankenv.Env{
		{Size: 1, LocalSize: 1, Nodes: 1, Device: "host"},
		{Launcher: "openmpi", Size: 1, LocalSize: 1, Nodes: 1, Device: "host"},
	} {
		j, err := join(t.Context(), env)
		if err != nil {
			t.Fatal(err)
		}
		if j.Size() != 1 || j.Device() != "host" || j.ID() == "" || !j.InProcess() {
			t.Errorf("size %d, device %q, job %q", j.Size(), j.Device(), j.ID())
		}
		if all, err := j.AllGather(t.Context(), []byte("x")); err != nil || len(all) != 1 || string(all[0]) != "x" {
			t.Errorf("all-gather: %q, %v", all, err)
		}
		j.Close()
	}
}

// lateContext is one whose deadline is over and whose timer has not run yet.
type lateContext struct{ context.Context }

func (lateContext) Deadline() (time.Time, bool) { return time.Now().Add(-time.Millisecond), true }

func TestJoinMistakes(t *testing.T) {
	for _, c := range []struct {
		name string
		env  rankenv.Env
		err  string
	}{
		{"gorun without a socket", rankenv.Env{Launcher: "gorun", Size: 2, LocalSize: 2, Nodes: 1}, "GORUN_CONTROL is not set"},
		{"no node", rankenv.Env{Launcher: "gorun", Size: 2, LocalSize: 2, Nodes: 1, Control: "gorun-none"}, "node at @gorun-none"},
		{"several hosts", rankenv.Env{Launcher: "slurm", Size: 4, LocalSize: 2, Nodes: 2}, "slurm started 2 of 4 ranks on this host: ranks of several hosts meet where gorun has started them"},
		{"unknown hosts", rankenv.Env{Launcher: "torchrun", Size: 4}, "set LOCAL_RANK and LOCAL_WORLD_SIZE"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := join(t.Context(), c.env)
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v, want %q", err, c.err)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := join(ctx, rankenv.Env{Size: 1}); !errors.Is(err, context.Canceled) {
		t.Errorf("join with a cancelled context: %v", err)
	}
	// Rank 0 never comes.
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	env := rankenv.Env{Launcher: "hydra", Job: "never-" + rand.Text(), Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Nodes: 1}
	for _, ctx := range []context.Context{ctx, lateContext{t.Context()}} {
		if _, err := join(ctx, env); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "wait for rank 0") {
			t.Errorf("rank 0 never comes: %v", err)
		}
	}
}

// Under another launcher rank 0 serves the others, in any order of joining, and until all have left.
func TestJoinUnderAnotherLauncher(t *testing.T) {
	for name, id := range map[string]string{"with id": "test-" + rand.Text(), "by parent": ""} {
		t.Run(name, func(t *testing.T) {
			const n = 4
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			errs := make([]error, n)
			late := make(chan struct{})
			var wg sync.WaitGroup
			for r := n - 1; r >= 0; r-- {
				wg.Go(func() {
					errs[r] = func() error {
						env := rankenv.Env{Launcher: "openmpi", Job: id, Rank: r, Size: n, LocalRank: r, LocalSize: n, Nodes: 1}
						j, err := joinForeign(ctx, env, os.Getpid())
						if err != nil {
							return err
						}
						defer j.Close()
						if err := j.Barrier(ctx); err != nil {
							return err
						}
						if r == 0 {
							close(late)
							return nil // goes on serving
						}
						<-late
						g, err := j.Group("rest", []int{1, 2, 3})
						if err != nil {
							return err
						}
						all, err := g.AllGather(ctx, fmt.Append(nil, r))
						if err == nil && string(all[2]) != "3" {
							err = fmt.Errorf("all-gather: %q", all)
						}
						return err
					}()
				})
			}
			wg.Wait()
			want(t, errs)
		})
	}
}

// A rank must start fast and stay small: it carries neither the gossip nor the ssh of the launcher.
func TestRankLinksNoLauncher(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, pkg := range strings.Fields(string(out)) {
		if strings.HasPrefix(pkg, "github.com/hashicorp/") || strings.HasPrefix(pkg, "golang.org/x/crypto") {
			t.Errorf("a rank links %s", pkg)
		}
	}
	if !strings.Contains(string(out), "gorun/rankenv") {
		t.Errorf("this is no list of packages:\n%s", out)
	}
}

// The node ends under its ranks.
func TestNodeEnds(t *testing.T) {
	jobs := served(t, 2)
	srv, _ := servers.Load(jobs[0])
	lost := make(chan Event, 1)
	jobs[0].Watch(func(e Event) {
		if e.Kind == HostLost {
			lost <- e
		}
	})
	waited := make(chan error)
	go func() { waited <- jobs[0].Barrier(t.Context()) }()
	ledger, err := jobs[0].Ledger(1)
	if err != nil {
		t.Fatal(err)
	}
	srv.(*server.Server).Close()
	if err := <-waited; !errors.Is(err, ErrLost) {
		t.Errorf("barrier: %v", err)
	}
	if e := <-lost; e.Node != 0 || e.Err == nil {
		t.Errorf("event: %+v", e)
	}
	if err := jobs[0].Put(t.Context(), "k", nil); !errors.Is(err, ErrLost) {
		t.Errorf("put: %v", err)
	}
	if _, err := jobs[0].Import(t.Context(), 1, "k"); !errors.Is(err, ErrLost) {
		t.Errorf("import: %v", err)
	}
	for _, j := range jobs {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	}
	// A ledger outlives its job as empty memory: a late reader must not fault.
	if a := ledger.FindAccount(0); a != nil {
		t.Errorf("account %+v in a closed job", a)
	}
	// Another test's ranks may still be on their way out.
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		maps, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(maps), "gorun-ledger") {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("ledgers are still mapped:\n%s", maps)
		}
	}
}

// What a rank waits for ends when it closes its job.
func TestCloseEndsWaits(t *testing.T) {
	onEach(t, 2, func(t *testing.T, jobs []*Job) {
		waits := map[string]func() error{
			"barrier": func() error { return jobs[0].Barrier(t.Context()) },
			"get":     func() error { _, err := jobs[0].Get(t.Context(), "k"); return err },
			"import":  func() error { _, err := jobs[0].Import(t.Context(), 1, "k"); return err },
		}
		errs := make(chan error)
		for name, wait := range waits {
			go func() {
				if err := wait(); !errors.Is(err, ErrClosed) {
					errs <- fmt.Errorf("%s: %v, want ErrClosed", name, err)
					return
				}
				errs <- nil
			}()
		}
		until(t, "the barrier waits", func() bool { return jobs[0].next.Load() >= 2 })
		jobs[0].Close()
		for range waits {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
	})
}
