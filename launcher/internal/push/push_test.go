package push

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
	"github.com/gorun-dev/gorun/launcher/internal/way"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// The test's program plays gorun: what is pushed is this file.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "agent" {
		os.Exit(agent(os.Args[2:]))
	}
	goleak.VerifyTestMain(m)
}

// agent verifies itself, or says where it is and echoes.
func agent(args []string) int {
	if len(args) == 2 && args[0] == "verify" {
		if err := Verify(args[1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
	exe, _ := os.Readlink("/proc/self/exe")
	fmt.Printf("agent %s\n", exe)
	io.Copy(os.Stdout, os.Stdin)
	return 0
}

func builds(t *testing.T) *Builds {
	t.Helper()
	b, err := NewBuilds(filepath.Join(t.TempDir(), "gorun"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// talk opens an agent, and checks that it runs and answers bytes.
func talk(t *testing.T, w way.Way, target way.Target, o Options) (*Started, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	s, err := Open(ctx, w, target, o)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var all [256]byte
	for i := range all {
		all[i] = byte(i)
	}
	if _, err := s.Write(all[:]); err != nil {
		t.Errorf("write: %v", err)
	}
	s.CloseWrite()
	got, err := io.ReadAll(s)
	if want := "agent " + s.File + "\n" + string(all[:]); err != nil || string(got) != want {
		t.Errorf("agent: %q, %v, want %q", got, err, want)
	}
	if err := s.Wait(); err != nil {
		t.Errorf("end: %v", err)
	}
	return s, nil
}

// home makes the environment of an empty account.
func home(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("HOME", dir)
	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("XDG_RUNTIME_DIR", filepath.Join(dir, "run"))
	t.Setenv("TMPDIR", dir)
	return dir
}

func TestShells(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: sends some MiB to each shell")
	}
	b := builds(t)
	for _, shell := range []string{"/bin/sh", "dash", "bash", "zsh", "csh", "tcsh", "fish", "ksh", "busybox"} {
		t.Run(filepath.Base(shell), func(t *testing.T) {
			if _, err := exec.LookPath(shell); err != nil && (shell == "tcsh" || shell == "ksh") {
				t.Skip(err) // CI has neither
			}
			path := citest.Program(t, shell)
			dir := home(t)
			cmd := path + " -c"
			if shell == "busybox" {
				cmd = path + " sh -c"
			}
			w, err := way.NewCommand("/usr/bin/env HOST=%h " + cmd)
			if err != nil {
				t.Fatal(err)
			}
			var mu sync.Mutex
			most := 0
			o := Options{Builds: b, Progress: func(host string, sent, size int) {
				mu.Lock()
				defer mu.Unlock()
				if host != "x" || sent > size {
					t.Errorf("progress: %s %d of %d", host, sent, size)
				}
				most = max(most, sent)
			}}
			first, err := talk(t, w, way.Target{Name: "x"}, o)
			if err != nil {
				t.Fatal(err)
			}
			if want := filepath.Join(dir, ".cache/gorun/gorun-"+b.own.hash); first.File != want || !first.Pushed || most == 0 {
				t.Errorf("first: %s, pushed %v, %d bytes, want %s", first.File, first.Pushed, most, want)
			}
			second, err := talk(t, w, way.Target{Name: "x"}, o)
			if err != nil {
				t.Fatal(err)
			}
			if second.File != first.File || second.Pushed {
				t.Errorf("second: %s, pushed %v", second.File, second.Pushed)
			}
			if files := names(t, filepath.Join(dir, ".cache/gorun")); !cmp.Equal(files, []string{"gorun-" + b.own.hash}) {
				t.Errorf("cache: %v", files)
			}
		})
	}
}

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Error(err)
	}
	for _, e := range list {
		all = append(all, e.Name())
	}
	return all
}

// A cache that somebody else could write to is not used, nor is one that is a link.
func TestForeignCache(t *testing.T) {
	b := builds(t)
	for name, spoil := range map[string]func(dir string) error{
		"writable by all": func(dir string) error { return errors.Join(os.Mkdir(dir, 0o700), os.Chmod(dir, 0o777)) },
		"a link":          func(dir string) error { return os.Symlink(t.TempDir(), dir) },
		"a file":          func(dir string) error { return os.WriteFile(dir, nil, 0o600) },
		"of another user": func(dir string) error {
			if os.Getuid() != 0 {
				return syscall.EPERM
			}
			return errors.Join(os.Mkdir(dir, 0o700), os.Chown(dir, 7077, 7077))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := home(t)
			cache := filepath.Join(dir, ".cache")
			if err := os.Mkdir(cache, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := spoil(filepath.Join(cache, "gorun")); err == syscall.EPERM {
				citest.Lacking(t, "root's rights")
			} else if err != nil {
				t.Fatal(err)
			}
			// What a stranger put there under the right name must not run.
			os.WriteFile(filepath.Join(cache, "gorun", "gorun-"+b.own.hash), []byte("#!/bin/sh\necho evil\n"), 0o755)
			s, err := talk(t, way.Shell(), way.Target{Name: "x"}, Options{Builds: b})
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(s.File, cache) {
				t.Errorf("it ran from %s", s.File)
			}
			os.Remove(s.File)
			os.Remove(filepath.Dir(s.File)) // unless something else is in it
		})
	}
}

// Only the newest three builds are kept.
func TestPrune(t *testing.T) {
	dir := home(t)
	cache := filepath.Join(dir, ".cache", "gorun")
	if err := os.MkdirAll(cache, 0o700); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-time.Hour)
	for i, name := range []string{"gorun-0a", "gorun-0b", "gorun-0c", "gorun-0d", "other"} {
		file := filepath.Join(cache, name)
		if err := errors.Join(os.WriteFile(file, nil, 0o700), os.Chtimes(file, old.Add(time.Duration(i)*time.Minute), old.Add(time.Duration(i)*time.Minute))); err != nil {
			t.Fatal(err)
		}
	}
	b := builds(t)
	if _, err := talk(t, way.Shell(), way.Target{Name: "x"}, Options{Builds: b}); err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, n := range names(t, cache) {
		got[n] = true
	}
	if want := map[string]bool{"gorun-0c": true, "gorun-0d": true, "other": true, "gorun-" + b.own.hash: true}; !cmp.Equal(got, want) {
		t.Errorf("cache: %v, want %v", got, want)
	}
}

// Several jobs at once on an empty cache: each starts, and one file is left.
func TestAtOnce(t *testing.T) {
	dir := home(t)
	b := builds(t)
	var wait sync.WaitGroup
	for range 6 {
		wait.Go(func() {
			if _, err := talk(t, way.Shell(), way.Target{Name: "x"}, Options{Builds: b}); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	if files := names(t, filepath.Join(dir, ".cache/gorun")); !cmp.Equal(files, []string{"gorun-" + b.own.hash}) {
		t.Errorf("cache: %v", files)
	}
}

// heldWay opens sessions whose first writes pass, up to some bytes; the rest waits until it is let go.
type heldWay struct {
	way.Way
	pass int
	let  chan struct{}
}

type heldSession struct {
	way.Session
	w    *heldWay
	left int
}

func (w *heldWay) Open(ctx context.Context, t way.Target, line string) (way.Session, error) {
	s, err := w.Way.Open(ctx, t, line)
	return &heldSession{s, w, w.pass}, err
}

func (s *heldSession) Write(p []byte) (int, error) {
	n, err := s.Session.Write(p[:min(len(p), s.left)])
	if s.left -= n; err != nil || n == len(p) {
		return n, err
	}
	<-s.w.let
	s.left = 1 << 40
	m, err := s.Session.Write(p[n:])
	return n + m, err
}

// Two hosts with one cache directory, on which the shells have the same process id: what one has sent in part does not disturb the other.
func TestAtOnceOnTwoHosts(t *testing.T) {
	if out, err := exec.Command("unshare", "-p", "-f", "true").CombinedOutput(); err != nil {
		citest.Lacking(t, "a process namespace of one's own: %v: %s", err, out)
	}
	dir := home(t)
	cache := filepath.Join(dir, ".cache/gorun")
	b := builds(t)
	w, err := way.NewCommand("unshare -p -f /usr/bin/env HOST=%h /bin/sh -c") // the shell is process 1 of its own
	if err != nil {
		t.Fatal(err)
	}
	slow := &heldWay{w, 1 << 20, make(chan struct{})}
	let := sync.OnceFunc(func() { close(slow.let) })
	defer let()
	first := make(chan error, 1)
	go func() {
		s, err := talk(t, slow, way.Target{Name: "x"}, Options{Builds: b, Stall: time.Minute})
		if err == nil && (s.File != filepath.Join(cache, "gorun-"+b.own.hash) || !s.Pushed) {
			err = fmt.Errorf("it started %s, pushed %v", s.File, s.Pushed)
		}
		first <- err
	}()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		if files, _ := filepath.Glob(cache + "/.new-*"); len(files) > 0 {
			if info, err := os.Stat(files[0]); err == nil && info.Size() > 0 {
				break
			}
		}
		if time.Now().After(end) {
			t.Fatal("nothing arrives")
		}
	}
	s, err := talk(t, w, way.Target{Name: "y"}, Options{Builds: b})
	if err != nil {
		t.Error(err)
	} else if want := filepath.Join(cache, "gorun-"+b.own.hash); s.File != want || !s.Pushed {
		t.Errorf("the second started %s, pushed %v, want %s", s.File, s.Pushed, want)
	}
	let()
	if err := <-first; err != nil {
		t.Errorf("the first: %v", err)
	}
	if files := names(t, cache); !cmp.Equal(files, []string{"gorun-" + b.own.hash}) {
		t.Errorf("cache: %v", files)
	}
}

// fake makes a way that runs a shell script of the test's in place of the line.
func fake(t *testing.T, text string) way.Way {
	t.Helper()
	file := filepath.Join(t.TempDir(), "sh")
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	w, err := way.NewCommand(file + " %h")
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestFailures(t *testing.T) {
	// What the script's arguments are, for those that play the host.
	const mark = `set -- $(printf %s "$2" | tail -c 120); for m in "$@"; do case $m in gorun-*) break;; esac; done; `
	for _, c := range []struct {
		name, text string
		want       []string
	}{
		{"nologin", "echo This account is currently not available.; exit 1", []string{"x: start the agent: the session ended before it: exit status 1", "This account is currently not available."}},
		{"stderr", "echo no such thing >&2; exit 127", []string{"exit status 127", "no such thing"}},
		{"killed", "kill -9 $$", []string{"killed by SIGKILL"}},
		{"noise without end", "yes | head -c 80000000", []string{"the answer is not gorun's"}},
		{"line without end", mark + "echo $m $(yes | head -c 60000)", []string{"the answer is not gorun's"}},
		{"unknown verb", mark + "echo $m dance", []string{`its shell said "dance"`}},
		{"no directory", mark + "echo $m none it is all full", []string{"no directory on it takes the program and lets it run: it is all full"}},
		{"other system", mark + "echo $m arch amd64 FreeBSD; cat", []string{"its architecture is amd64 FreeBSD: gorun's agent runs on Linux, not on FreeBSD"}},
		{"other machine", mark + "echo $m arch riscv64 Linux; cat", []string{"its architecture is riscv64 Linux", "gorun-linux-riscv64"}},
		{"ends while it is sent to", mark + "echo $m send raw /tmp; exit 3", []string{"send gorun"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.name == "noise without end" && testing.Short() {
				t.Skip("-short: reads 80 MB")
			}
			_, err := talk(t, fake(t, c.text), way.Target{Name: "x"}, Options{Builds: builds(t)})
			if err == nil {
				t.Fatal("it started")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error: %v\nwant %q in it", err, want)
				}
			}
			if len(err.Error()) > 1500 {
				t.Errorf("error of %d bytes", len(err.Error()))
			}
		})
	}
	t.Run("silent", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		_, err := Open(ctx, fake(t, "exec sleep 100"), way.Target{Name: "x"}, Options{Builds: builds(t)})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error: %v, want the deadline", err)
		}
	})
}

// A command that takes the line for a program's name is told what it must do; the script in its complaint is left out.
func TestNoShell(t *testing.T) {
	for _, c := range []struct {
		name, text, said string
		advice           bool
	}{
		{"executes it", `exec "$2"`, "", true}, // dash quotes it
		{"quotes it", `printf 'OCI runtime exec failed: exec: "%s": stat %s: no such file or directory\n' "$2" "$2" >&2; exit 1`,
			`OCI runtime exec failed: exec: "...: no such file or directory`, true},
		{"quotes its end", `printf 'no %s: not found\n' "$2" | tail -c 200 >&2; exit 1`, "...: not found", true},
		{"quotes its beginning", `printf 'no %s: not found\n' "$2" | head -c 200 >&2; exit 1`, "no ...", true},
		{"not found", `echo no such thing >&2; exit 127`, "no such thing", true},
		{"something else", `echo go away >&2; exit 7`, "go away", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := talk(t, fake(t, c.text), way.Target{Name: "x"}, Options{Builds: builds(t)})
			e, ok := errors.AsType[*Error](err)
			if !ok {
				t.Fatalf("error: %v, want an *Error", err)
			}
			if c.said != "" && e.Said != c.said {
				t.Errorf("it said %q, want %q", e.Said, c.said)
			}
			if strings.Contains(err.Error(), "XDG_CACHE_HOME") {
				t.Errorf("the script is in the error: %v", err)
			}
			if got := strings.HasPrefix(way.Advice(err), "the command of --rsh must hand its last argument to a shell there"); got != c.advice {
				t.Errorf("advice %q, want any: %v", way.Advice(err), c.advice)
			}
		})
	}
}

// A host whose link is cut while gorun is sent to it is given up when nothing has arrived for a while.
func TestStall(t *testing.T) {
	// This one reads, and says nothing; that one does not even read.
	for _, does := range []string{"cat >/dev/null", "exec sleep 100"} {
		w := fake(t, `set -- $(printf %s "$2" | tail -c 120); for m in "$@"; do case $m in gorun-*) break;; esac; done; echo $m send raw /tmp; echo $m got; `+does)
		_, err := talk(t, w, way.Target{Name: "x"}, Options{Builds: builds(t), Stall: 300 * time.Millisecond})
		if want := "x: start the agent: send gorun: nothing has arrived for 300ms"; err == nil || err.Error() != want {
			t.Errorf("error: %v, want %s", err, want)
		}
	}
	if testing.Short() {
		return // no hosts
	}
	h := testhosts.New(t, 1, testhosts.Options{})
	cmd := h.Launcher(t.Context(), "ssh", "-F", h.SSHConfig, "h1")
	w, err := way.NewCommand(strings.Join(cmd.Args[:len(cmd.Args)-1], " "))
	if err != nil {
		t.Fatal(err)
	}
	var cut sync.Once
	_, err = talk(t, w, way.Target{Name: "h1"}, Options{Builds: builds(t), Stall: 2 * time.Second, Progress: func(host string, sent, size int) {
		cut.Do(func() {
			if err := h.Cut(0); err != nil {
				t.Error(err)
			}
		})
	}})
	if want := "h1: start the agent: send gorun: nothing has arrived for 2s"; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("error: %v, want %s", err, want)
	}
}

// A host of another architecture gets the program that stands beside gorun. Here gorun itself plays the one of another.
func TestOtherArchitecture(t *testing.T) {
	dir := t.TempDir()
	home(t)
	b, err := NewBuilds(filepath.Join(dir, "gorun"))
	if err != nil {
		t.Fatal(err)
	}
	host, program := b.own.arch, b.own.data
	b.own = newBuild(map[string]string{"amd64": "arm64", "arm64": "amd64"}[host], []byte("of another"))
	beside := filepath.Join(dir, "gorun-linux-"+host)
	if err := os.WriteFile(beside, program, 0o755); err != nil {
		t.Fatal(err)
	}
	s, err := talk(t, way.Shell(), way.Target{Name: "x"}, Options{Builds: b})
	if err != nil {
		t.Fatal(err)
	}
	if s.Arch != host || !s.Pushed || !strings.HasSuffix(s.File, "gorun-"+newBuild(host, program).hash) {
		t.Errorf("started %s, of %s, pushed %v", s.File, s.Arch, s.Pushed)
	}
	// One that does not run there is sent, and that is said.
	b.other = map[string]*build{}
	if err := os.WriteFile(beside, []byte("not quite a program"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, err = talk(t, way.Shell(), way.Target{Name: "x"}, Options{Builds: b})
	if err == nil || !strings.Contains(err.Error(), "no directory on it takes the program and lets it run") {
		t.Errorf("error: %v", err)
	}
}

// A build that fails, fails once: the other hosts are told the same.
func TestBuildFailsOnce(t *testing.T) {
	bin := t.TempDir()
	runs := filepath.Join(bin, "runs")
	if err := os.WriteFile(filepath.Join(bin, "go"), []byte("#!/bin/sh\necho run >>"+runs+"\necho no such module >&2\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	b := builds(t)
	other := map[string]string{"amd64": "arm64", "arm64": "amd64"}[b.own.arch]
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.For(over, other+" Linux"); !errors.Is(err, context.Canceled) {
		t.Errorf("error: %v, want %v: that host was given up, and nothing is wrong with the build", err, context.Canceled)
	}
	for range 3 {
		if _, err := b.For(t.Context(), other+" Linux"); err == nil || !strings.Contains(err.Error(), "it cannot be built here: go build: no such module") {
			t.Errorf("error: %v", err)
		}
	}
	if text, err := os.ReadFile(runs); err != nil || string(text) != "run\n" {
		t.Errorf("go was run %d times, %v, want once", strings.Count(string(text), "run"), err)
	}
}

// The architecture is known without a program that says it, where the kernel names it, and else by uname.
func TestArchitecture(t *testing.T) {
	for _, c := range []struct{ kernel, want string }{{"/proc/sys/kernel/arch", ""}, {"/nowhere", "riscv64 Linux"}} {
		if _, err := os.Stat(c.kernel); err != nil && c.want == "" {
			continue // Linux before 6.1
		}
		home(t)
		bin := t.TempDir()
		uname := "#!/bin/sh\n[ \"$1\" = -m ] && echo riscv64 || echo Linux\n"
		if err := os.WriteFile(filepath.Join(bin, "uname"), []byte(uname), 0o755); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("/bin/sh", "-c", strings.ReplaceAll(script, "/proc/sys/kernel/arch", c.kernel), "gorun", "MARK", "none:0")
		cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
		out, err := cmd.Output() // its stdin is empty: it ends where it would wait for a hash
		want := "\nMARK arch " + c.want + "\n"
		if c.want == "" {
			want = "\nMARK arch " + runtime.GOARCH + " Linux\n"
		}
		if x, ok := errors.AsType[*exec.ExitError](err); string(out) != want || !ok || x.ExitCode() != 1 || len(x.Stderr) > 0 {
			t.Errorf("%s: %q, %v, want %q", c.kernel, out, err, want)
		}
	}
}

// Real hosts, by OpenSSH's client.
func TestHosts(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: makes hosts")
	}
	b := builds(t)
	for _, c := range []struct {
		name string
		o    testhosts.Options
		dir  string // where the agent lies then
		err  string
	}{
		{"plain", testhosts.Options{}, "/root/.cache/gorun/", ""},
		{"noise", testhosts.Options{RC: "echo welcome; echo to h1 >&2\n", Shell: "/bin/bash"}, "/root/.cache/gorun/", ""},
		{"user", testhosts.Options{User: testhosts.User}, "/home/worker/.cache/gorun/", ""},
		{"home read only", testhosts.Options{HomeReadOnly: true}, "/var/tmp/gorun-0/", ""},
		{"home full", testhosts.Options{HomeSize: "1m"}, "/var/tmp/gorun-0/", ""},
		{"nowhere", testhosts.Options{HomeReadOnly: true, TmpNoExec: true}, "", "no directory on it takes the program and lets it run"},
		{"nologin", testhosts.Options{Shell: "/usr/sbin/nologin"}, "", "This account is currently not available."},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := testhosts.New(t, 1, c.o)
			cmd := h.Launcher(t.Context(), "ssh", "-F", h.SSHConfig, "h1")
			w, err := way.NewCommand(strings.Join(cmd.Args[:len(cmd.Args)-1], " ")) // the host comes with the target
			if err != nil {
				t.Fatal(err)
			}
			for _, pushed := range []bool{true, false} {
				s, err := talk(t, w, way.Target{Name: "h1"}, Options{Builds: b})
				if c.err != "" {
					if err == nil || !strings.Contains(err.Error(), c.err) {
						t.Errorf("error: %v, want %q in it", err, c.err)
					}
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				if s.File != c.dir+"gorun-"+b.own.hash || s.Pushed != pushed {
					t.Errorf("started %s, pushed %v, want %v from %s", s.File, s.Pushed, pushed, c.dir)
				}
				if c.o.RC != "" && !strings.Contains(s.Noise, "welcome") {
					t.Errorf("noise: %q", s.Noise)
				}
			}
			for _, dir := range []string{"/root", "/home", "/tmp", "/var/tmp", "/run"} {
				files, err := h.Files(0, dir)
				if err != nil {
					t.Error(err)
				}
				for _, f := range files {
					if strings.Contains(f, "gorun") && f != c.dir+"gorun-"+b.own.hash {
						t.Errorf("left behind: %s", f)
					}
				}
			}
		})
	}
}
