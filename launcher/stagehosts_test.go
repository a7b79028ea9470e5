package launcher

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// stageJob prepares gorun in a directory that the hosts lack, with one rank on each host.
func stageJob(t *testing.T, h *testhosts.Hosts, dir string, args ...string) *hostsJob {
	t.Helper()
	j := newHostsJob(t, h, 1, args...)
	i := slices.Index(j.cmd.Args, "none") // of --stage none
	j.cmd.Args = slices.Delete(j.cmd.Args, i-1, i+1)
	j.cmd.Dir = dir
	return j
}

// stageHosts are hosts that have gorun's agent, and nothing else.
func stageHosts(t *testing.T, n int, o testhosts.Options) *testhosts.Hosts {
	t.Helper()
	h := newHosts(t, n, o)
	if o.User == "" && !o.HomeReadOnly {
		haveAgent(t, h)
	} else if j := newHostsJob(t, h, 1, "true"); j.run() != 0 {
		t.Fatalf("gorun: %s", j.err.String())
	}
	return h
}

func write(t *testing.T, file, text string, mode os.FileMode) {
	t.Helper()
	err := os.MkdirAll(filepath.Dir(file), 0o755)
	if err == nil {
		err = os.WriteFile(file, []byte(text), mode)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// cleanStage fails the test if anything of a job is left on the hosts.
func cleanStage(t *testing.T, h *testhosts.Hosts) {
	t.Helper()
	clean(t, h)
	for i := range h.Hosts {
		for _, dir := range []string{"/root", "/home", "/tmp", "/var/tmp", "/run", "/dev/shm"} {
			found, err := exec.Command("find", h.Path(i, dir), "-name", "*gorun-job-*").Output()
			if err != nil || len(found) > 0 {
				t.Errorf("left on %s: %s %v", h.Hosts[i].Name, found, err)
			}
		}
	}
}

// lines are the sorted lines of what ranks wrote, with the random parts of directories' names taken out.
func (j *hostsJob) lines() []string {
	text := regexp.MustCompile(`gorun-job-[0-9a-f]{16}-[0-9a-f]{8}`).ReplaceAllString(j.out.String(), "JOB")
	l := strings.Split(strings.TrimSpace(text), "\n")
	slices.Sort(l)
	return l
}

// where is a program that says what it is and what it reads.
const where = "#!/bin/sh\necho $(hostname) $0 $(pwd) $(cat \"$1\" 2>&1)\n"

func TestStageProgram(t *testing.T) {
	beside(t)
	h := stageHosts(t, 3, testhosts.Options{})
	dir := t.TempDir()
	write(t, filepath.Join(dir, "bin/where"), where, 0o755)
	report := filepath.Join(t.TempDir(), "report")
	// staged are the bytes that each host was sent.
	staged := func(t *testing.T) []int64 {
		t.Helper()
		var a Account
		text, err := os.ReadFile(report)
		if err == nil {
			err = json.Unmarshal(text, &a)
		}
		if err != nil {
			t.Fatal(err)
		}
		var n []int64
		for _, h := range a.Hosts {
			n = append(n, h.Staged)
		}
		return n
	}
	all := int64(len(where))
	t.Run("absent", func(t *testing.T) {
		j := stageJob(t, h, dir, "--report", report, "bin/where", "/etc/hostname")
		if got := j.run(); got != 0 || j.err.Len() > 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		own, _ := os.ReadFile("/etc/hostname")
		var want []string
		for i := range 3 {
			want = append(want, strings.TrimSpace(fmt.Sprintf("h%d /tmp/JOB/bin/where /tmp/JOB %s", i+1, strings.TrimSpace(string(own)))))
		}
		if d := cmp.Diff(j.lines(), want); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		if d := cmp.Diff(staged(t), []int64{all, all, all}); d != "" {
			t.Errorf("bytes sent, -got +want:\n%s", d)
		}
		cleanStage(t, h)
	})
	t.Run("an absolute path, and an executable", func(t *testing.T) {
		prog := filepath.Join(t.TempDir(), "rank program")
		if err := copyProgram("/proc/self/exe", prog); err != nil {
			t.Fatal(err)
		}
		j := stageJob(t, h, dir, prog, "rank", "join")
		if got := j.run(); got != 0 || len(j.lines()) != 3 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		cleanStage(t, h)
	})
	t.Run("there on two, as the same and as another", func(t *testing.T) {
		write(t, h.Path(0, dir+"/bin/where"), where, 0o755)
		write(t, h.Path(1, dir+"/bin/where"), strings.Replace(where, "echo", "echo wrong", 1), 0o755)
		j := stageJob(t, h, dir, "-v", "--report", report, "bin/where", "/dev/null")
		if got := j.run(); got != 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		want := []string{"h1 " + dir + "/bin/where " + dir, "h2 /tmp/JOB/bin/where " + dir, "h3 /tmp/JOB/bin/where /tmp/JOB"}
		if d := cmp.Diff(j.lines(), want); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		if d := cmp.Diff(staged(t), []int64{0, all, all}); d != "" {
			t.Errorf("bytes sent, -got +want:\n%s", d)
		}
		if want := "gorun: host h2: there is another " + dir + "/bin/where; the one from gorun's host is used\n"; !strings.Contains(j.err.String(), want) {
			t.Errorf("stderr %s, want %q in it", j.err.String(), want)
		}
		text, _ := os.ReadFile(h.Path(1, dir+"/bin/where"))
		if !strings.Contains(string(text), "wrong") {
			t.Errorf("the other program is now %q", text)
		}
		for i := range 2 {
			os.RemoveAll(h.Path(i, dir))
		}
		cleanStage(t, h)
	})
	t.Run("the same, but not executable", func(t *testing.T) {
		write(t, h.Path(0, dir+"/bin/where"), where, 0o644)
		defer os.RemoveAll(h.Path(0, dir))
		j := stageJob(t, h, dir, "bin/where", "/dev/null")
		if got := j.run(); got != 0 || !slices.Contains(j.lines(), "h1 /tmp/JOB/bin/where "+dir) {
			t.Errorf("exit code %d, %q, stderr %s", got, j.lines(), j.err.String())
		}
	})
	t.Run("a name that is in no PATH there", func(t *testing.T) {
		j := stageJob(t, h, dir, "where", "/dev/null")
		j.cmd.Env = append(os.Environ(), "PATH="+dir+"/bin:"+os.Getenv("PATH"))
		if got, want := j.run(), "h1: run where: not found in PATH; given by its path, it would be sent there"; got != 127 || !strings.Contains(j.err.String(), want) {
			t.Errorf("exit code %d, stderr %q, want 127, %q", got, j.err.String(), want)
		}
	})
	t.Run("none", func(t *testing.T) {
		j := newHostsJob(t, h, 1, "bin/where")
		j.cmd.Dir = dir
		if got, want := j.run(), "h1: run "+dir+"/bin/where: no such file or directory"; got != 127 || !strings.Contains(j.err.String(), want) {
			t.Errorf("exit code %d, stderr %q, want 127, %q", got, j.err.String(), want)
		}
		cleanStage(t, h)
	})
	t.Run("Go package", func(t *testing.T) {
		pkg := filepath.Join(t.TempDir(), "prog")
		write(t, pkg+"/go.mod", "module prog\n", 0o644)
		write(t, pkg+"/main.go", "package main\n\nimport (\"fmt\"; \"os\")\n\nfunc main() { exe, _ := os.Executable(); fmt.Println(os.Args[0], exe) }\n", 0o644)
		cache := t.TempDir()
		j := stageJob(t, h, filepath.Dir(pkg), "./prog")
		gocache, err := exec.Command("go", "env", "GOCACHE").Output()
		if err != nil {
			t.Fatal(err)
		}
		j.cmd.Env = append(os.Environ(), "XDG_CACHE_HOME="+cache, "GOCACHE="+strings.TrimSpace(string(gocache)))
		if got, want := j.run(), "./prog /tmp/JOB/.program/prog"; got != 0 || len(j.lines()) != 3 || j.lines()[2] != want {
			t.Errorf("exit code %d, stdout %q, stderr %s", got, j.lines(), j.err.String())
		}
		cleanStage(t, h)
	})
	for _, c := range []struct {
		name string
		prog func() string
		code int
		err  string
	}{
		{"another architecture", func() string {
			data, err := os.ReadFile("/proc/self/exe")
			if err != nil {
				t.Fatal(err)
			}
			data[18]++ // e_machine
			return string(data)
		}, 126, `(?m)^gorun: host h\d: run \./prog: it is a program for .*, and this host is `},
		{"a script without interpreter", func() string { return "#!/no/such\n" }, 127, `(?m)^gorun: host h\d: run \./prog: its interpreter /no/such is missing`},
		{"neither", func() string { return "\x01\x02\x03" }, 126, `(?m)^gorun: host h\d: run \./prog: neither a program`},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir+"/prog", c.prog(), 0o755)
			j := stageJob(t, h, dir, "./prog")
			if got := j.run(); got != c.code || !regexp.MustCompile(c.err).MatchString(j.err.String()) {
				t.Errorf("exit code %d, stderr %s, want %d, %s", got, j.err.String(), c.code, c.err)
			}
			cleanStage(t, h)
		})
	}
	t.Run("a library is missing", func(t *testing.T) {
		gcc := citest.Program(t, "gcc")
		dir := t.TempDir()
		write(t, dir+"/far.c", "int far(void) { return 0; }\n", 0o644)
		write(t, dir+"/main.c", "int far(void); int main(void) { return far(); }\n", 0o644)
		for _, args := range [][]string{{"-shared", "-fPIC", "-o", "libfar.so", "far.c"}, {"-o", "prog", "main.c", "-L.", "-lfar"}} {
			cmd := exec.Command(gcc, args...)
			cmd.Dir = dir
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		j := stageJob(t, h, dir, "./prog")
		if got := j.run(); got != 127 || !strings.Contains(j.err.String(), "libfar.so") {
			t.Errorf("exit code %d, stderr %s, want 127 and the library", got, j.err.String())
		}
		cleanStage(t, h)
	})
}

func TestStageFiles(t *testing.T) {
	t.Parallel()
	h := stageHosts(t, 2, testhosts.Options{})
	dir := t.TempDir()
	write(t, dir+"/where", where, 0o755)
	write(t, dir+"/data/f.csv", "data", 0o600)
	write(t, dir+"/data/more/g.csv", "data", 0o644) // the same content
	write(t, dir+"/data/h.csv", "other", 0o644)
	t.Run("relative", func(t *testing.T) {
		j := stageJob(t, h, dir, "--stage", "data/f.csv", "--stage", "data", "--stage", "where", "./where", "data/f.csv")
		if got := j.run(); got != 0 || j.err.Len() > 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		if d := cmp.Diff(j.lines(), []string{"h1 /tmp/JOB/where /tmp/JOB data", "h2 /tmp/JOB/where /tmp/JOB data"}); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		cleanStage(t, h)
	})
	t.Run("a directory, and a program by name", func(t *testing.T) {
		j := stageJob(t, h, dir, "--stage", "data", "--stage", "where", "sh", "-c", "echo \"$(cat data/f.csv data/more/g.csv data/h.csv; ls -a | tr '\\n' ' '; ./where /dev/null)\"")
		if got := j.run(); got != 0 || j.err.Len() > 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		if d := cmp.Diff(j.lines(), []string{"datadataother. .. data where h1 ./where /tmp/JOB", "datadataother. .. data where h2 ./where /tmp/JOB"}); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		cleanStage(t, h)
	})
	t.Run("an empty file, beside stdin", func(t *testing.T) {
		write(t, dir+"/empty", "", 0o600)
		j := stageJob(t, h, dir, "--stage", "empty", "--stage", "where", "sh", "-c", "cat empty; cat; ls")
		j.cmd.Stdin = strings.NewReader("words\n")
		if got := j.run(); got != 0 || j.err.Len() > 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		if d := cmp.Diff(j.lines(), []string{"empty", "empty", "where", "where", "words"}); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
	})
	t.Run("there on one, another one on the other", func(t *testing.T) {
		for i, text := range []string{"data", "wrong"} {
			write(t, h.Path(i, dir+"/data/f.csv"), text, 0o600)
		}
		write(t, h.Path(1, dir+"/data/h.csv"), "other", 0o600)
		defer os.RemoveAll(h.Path(0, dir))
		defer os.RemoveAll(h.Path(1, dir))
		j := stageJob(t, h, dir, "-v", "--stage", "data/f.csv", "--stage", "./data/h.csv", "./where", "data/f.csv")
		write(t, h.Path(0, dir+"/data/h.csv"), "other", 0o600)
		if got := j.run(); got != 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		if d := cmp.Diff(j.lines(), []string{"h1 /tmp/JOB/where " + dir + " data", "h2 /tmp/JOB/where /tmp/JOB data"}); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		for i, want := range []string{"data", "wrong"} {
			if text, err := os.ReadFile(h.Path(i, dir+"/data/f.csv")); string(text) != want {
				t.Errorf("host %d has %q, %v, want %q", i, text, err, want)
			}
		}
		if want := "host h2: there is another " + dir + "/data/f.csv; the ranks run in the job's own directory"; !strings.Contains(j.err.String(), want) {
			t.Errorf("stderr %s, want %q in it", j.err.String(), want)
		}
	})
	t.Run("absolute", func(t *testing.T) {
		file := dir + "/data/f.csv"
		j := stageJob(t, h, "/", "--stage", file, "sh", "-c", "cat "+file+"; pwd")
		if got := j.run(); got != 0 || j.err.Len() > 0 || j.out.String() != "data/\ndata/\n" {
			t.Errorf("exit code %d, stdout %q, stderr %s", got, j.out.String(), j.err.String())
		}
		if _, err := os.Stat(h.Path(0, dir)); err == nil {
			t.Errorf("%s is left on h1", dir)
		}
		cleanStage(t, h)
	})
	t.Run("absolute, of two jobs", func(t *testing.T) {
		probe := h.Path(0, "/tmp/probe")
		if err := os.Mkdir(probe, 0o700); err != nil {
			t.Fatal(err)
		}
		defer os.Remove(probe)
		marks(t, probe)
		os.Remove(probe)
		file := dir + "/data/f.csv"
		var jobs []*hostsJob
		for n := range 2 { // each goes on until it is told to end
			gate := fmt.Sprintf("/root/rank-%d", n)
			j := stageJob(t, h, "/", "--stage", file, "sh", "-c", fmt.Sprintf("touch /root/up$GORUN_RANK; until [ -e %s ]; do sleep 0.02; done; cat %s", gate, file))
			up(t, j.start(), h, 1)
			for i := range h.Hosts {
				os.Remove(h.Path(i, fmt.Sprintf("/root/up%d", i)))
			}
			jobs = append(jobs, j)
		}
		for n, j := range jobs {
			for i := range h.Hosts {
				write(t, h.Path(i, fmt.Sprintf("/root/rank-%d", n)), "", 0o600)
				defer os.Remove(h.Path(i, fmt.Sprintf("/root/rank-%d", n)))
			}
			if got := j.wait(); got != 0 || j.err.Len() > 0 || j.out.String() != "datadata" {
				t.Errorf("job %d: exit code %d, stdout %q, stderr %s", n, got, j.out.String(), j.err.String())
			}
		}
		for i := range h.Hosts {
			if _, err := os.Stat(h.Path(i, dir)); err == nil {
				t.Errorf("%s is left on %s", dir, h.Hosts[i].Name)
			}
		}
	})
	t.Run("absolute, and another one is there", func(t *testing.T) {
		file := dir + "/data/f.csv"
		write(t, h.Path(1, file), "mine", 0o600)
		defer os.RemoveAll(h.Path(1, dir))
		j := stageJob(t, h, "/", "--stage", file, "true")
		if got, want := j.run(), "gorun: host h2: --stage "+file+": there is another file of that name, and it is not replaced\n"; got != 122 || j.err.String() != want {
			t.Errorf("exit code %d, stderr %q, want 122, %q", got, j.err.String(), want)
		}
		if text, _ := os.ReadFile(h.Path(1, file)); string(text) != "mine" {
			t.Errorf("the file is now %q", text)
		}
	})
	t.Run("with --wdir", func(t *testing.T) {
		for i := range 2 {
			if err := os.Mkdir(h.Path(i, "/home/run"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		j := stageJob(t, h, dir, "--wdir", "/home/run", "--stage", "data/f.csv", "./where", "data/f.csv")
		if got := j.run(); got != 0 || j.err.Len() > 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		if d := cmp.Diff(j.lines(), []string{"h1 /tmp/JOB/.program/where /home/run data", "h2 /tmp/JOB/.program/where /home/run data"}); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		cleanStage(t, h)
	})
	t.Run("not sent", func(t *testing.T) {
		for _, c := range []struct {
			args []string
			want string
		}{
			{[]string{"cat", "data/f.csv"}, "host h1 has no " + dir + ": its ranks ran in a directory of the job's own; --stage data/f.csv sends it"},
			{[]string{"--stage", "data", "sh", "-c", "cat data/f.csv; exit 3", "sh", "data/f.csv", "none.csv", "/etc/hostname"}, ""},
			{[]string{"--wdir", "/", "cat", "data/f.csv"}, ""},
		} {
			j := stageJob(t, h, dir, append([]string{"-np", "1"}, c.args...)...)
			if got := j.run(); got == 0 || strings.Contains(j.err.String(), "a directory of the job's own") != (c.want != "") || !strings.Contains(j.err.String(), c.want) {
				t.Errorf("%q: exit code %d, stderr %s, want %q in it", c.args, got, j.err.String(), c.want)
			}
		}
		cleanStage(t, h)
	})
	t.Run("files of ranks are told", func(t *testing.T) {
		for n, where := range []string{"h1: 4 files of the ranks (d/1, d/2, d/3, ...)", "h1, h2: 8 files of the ranks (d/1, d/2, d/3)"} {
			j := stageJob(t, h, dir, "-np", strconv.Itoa(n+1), "--stage", "data/f.csv", "sh", "-c", "mkdir d; for i in 1 2 3 4; do echo >d/$i; done; chmod 0 d")
			want := "gorun: removed with the job's own directory on " + where + "; --wdir DIR keeps them\n"
			if got := j.run(); got != 0 || j.err.String() != want {
				t.Errorf("exit code %d, stderr %q, want %q", got, j.err.String(), want)
			}
		}
		cleanStage(t, h)
	})
}

// Two hosts with one file system: each has its own directory of the job, and what both put to one place goes once.
func TestStageShared(t *testing.T) {
	beside(t)
	h := stageHosts(t, 2, testhosts.Options{})
	shared, err := os.MkdirTemp("/var/lib", "gorun-test-") // seen by the hosts, as /tmp is not
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(shared) })
	for i := range h.Hosts {
		if out, err := h.Command(t.Context(), i, "mount", "--bind", shared, "/tmp").CombinedOutput(); err != nil {
			t.Fatalf("mount: %v: %s", err, out)
		}
	}
	dir := t.TempDir()
	write(t, dir+"/where", where, 0o755)
	for _, f := range []string{"/data/f", "/data/g"} {
		write(t, dir+f, f, 0o600)
	}
	// gone waits until nothing is left, by the keepers at last.
	gone := func(t *testing.T) {
		t.Helper()
		eventually(t, "the end of what was put", func() bool {
			left, err := os.ReadDir(shared)
			return err == nil && len(left) == 0
		})
		cleanStage(t, h)
	}
	files := []string{"--stage", "data/f", "--stage", dir + "/data/f", "--stage", dir + "/data/g"}
	t.Run("in order", func(t *testing.T) {
		for range 2 {
			j := stageJob(t, h, dir, append(files, "./where", dir+"/data/g")...)
			if got := j.run(); got != 0 || j.err.Len() > 0 {
				t.Fatalf("exit code %d, stderr %s", got, j.err.String())
			}
			names := regexp.MustCompile(`/tmp/gorun-job-\S*/where`).FindAllString(j.out.String(), -1)
			if len(names) != 2 || names[0] == names[1] {
				t.Errorf("output %q, want two directories", j.out.String())
			}
			for _, line := range j.lines() {
				// There is a directory of that name when the other host has made it.
				if !regexp.MustCompile(`^h\d /tmp/JOB/where (/tmp/JOB|` + dir + `) /data/g$`).MatchString(line) {
					t.Errorf("line %q", line)
				}
			}
			if left, err := os.ReadDir(shared); err != nil || len(left) > 0 {
				t.Errorf("left: %v %v", left, err)
			}
			cleanStage(t, h)
		}
	})
	t.Run("gorun is killed", func(t *testing.T) {
		j := stageJob(t, h, dir, append(files, "sh", "-c", "touch /root/up$GORUN_RANK; exec sleep 1000")...)
		j.start()
		up(t, j, h, 1)
		j.cmd.Process.Kill()
		j.wait()
		gone(t)
	})
	// What a host still waits for when its agent is killed, its keeper waits for.
	t.Run("agents are killed while they remove", func(t *testing.T) {
		another := dir + "/data/.gorun-job-$GORUN_JOB_ID-9-1" // as a third host makes it
		j := stageJob(t, h, dir, append(files, "sh", "-c", "touch "+another+"; touch /root/late$GORUN_RANK; until [ -e /tmp/go ]; do sleep 0.02; done")...)
		j.start()
		for i := range h.Hosts {
			eventually(t, "a rank", func() bool {
				_, err := os.Stat(h.Path(i, "/root/late"+strconv.Itoa(i)))
				return err == nil
			})
			os.Remove(h.Path(i, "/root/late"+strconv.Itoa(i)))
		}
		agents := []int{agentOn(t, h, 0), agentOn(t, h, 1)}
		data := filepath.Join(shared, strings.TrimPrefix(dir, "/tmp"), "data")
		write(t, shared+"/go", "", 0o600)
		eventually(t, "the end of the job's files", func() bool {
			left, err := os.ReadDir(data)
			return err == nil && len(left) == 1
		})
		for _, pid := range agents {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		j.wait()
		os.Remove(shared + "/go")
		left, err := filepath.Glob(data + "/.gorun-job-*-9-1")
		if err != nil || len(left) != 1 {
			t.Fatalf("%v %v, want what stands for a third host's", left, err)
		}
		if err := os.Remove(left[0]); err != nil {
			t.Error(err)
		}
		gone(t)
	})
}

// big makes a file that does not compress.
func big(t *testing.T, size int) (file, sum string) {
	t.Helper()
	data := make([]byte, size)
	rand.Read(data)
	file = filepath.Join(t.TempDir(), "big")
	if err := os.WriteFile(file, data, 0o644); err != nil {
		t.Fatal(err)
	}
	s := sha256.Sum256(data)
	return file, hex.EncodeToString(s[:])
}

// agentOn is the agent on a host.
func agentOn(t *testing.T, h *testhosts.Hosts, i int) (pid int) {
	t.Helper()
	eventually(t, "agent on "+h.Hosts[i].Name, func() bool {
		all, err := h.Processes(i)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range all {
			if len(p.Args) == 2 && p.Args[1] == "agent" {
				pid = p.PID
				return true
			}
		}
		return false
	})
	return pid
}

// arriving waits until the first bytes of a file have come to a host.
func arriving(t *testing.T, h *testhosts.Hosts, i int, name string) {
	t.Helper()
	eventually(t, name+" on "+h.Hosts[i].Name, func() bool {
		files, _ := filepath.Glob(h.Path(i, "/tmp/gorun-job-*/"+name))
		if len(files) == 0 {
			return false
		}
		info, err := os.Stat(files[0])
		return err == nil && info.Size() > 0
	})
}

func TestStageBig(t *testing.T) {
	beside(t)
	const size = 64 << 20
	h := stageHosts(t, 4, testhosts.Options{})
	file, sum := big(t, size)
	dir := filepath.Dir(file)
	args := []string{"--stage", "big", "sh", "-c", "sha256sum <big"}
	t.Run("a slow host", func(t *testing.T) {
		j := stageJob(t, h, dir, args...)
		said, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
		if err != nil {
			t.Fatal(err)
		}
		defer said.Close()
		stderr := func() string {
			text, _ := os.ReadFile(said.Name())
			return string(text)
		}
		j.cmd.Stderr = said
		j.start()
		arriving(t, h, 3, "big")
		slow := agentOn(t, h, 3)
		syscall.Kill(slow, syscall.SIGSTOP)
		stopped := time.Now()
		// The others have it all meanwhile, and gorun does not keep it for the slow one.
		for i := range 3 {
			eventually(t, "all of big", func() bool {
				if time.Since(stopped) > silentAgreed/4 { // where that takes long it must answer now and then, or is lost
					syscall.Kill(slow, syscall.SIGCONT)
					time.Sleep(100 * time.Millisecond)
					syscall.Kill(slow, syscall.SIGSTOP)
					stopped = time.Now()
				}
				files, _ := filepath.Glob(h.Path(i, "/tmp/gorun-job-*/big"))
				if len(files) != 1 {
					return false
				}
				info, err := os.Stat(files[0])
				return err == nil && info.Size() == size
			})
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", j.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		m := regexp.MustCompile(`RssAnon:\s+(\d+) kB`).FindSubmatch(status)
		if kb, _ := strconv.Atoi(string(m[1])); kb == 0 || kb > 96<<10 {
			t.Errorf("gorun has %d kB of memory", kb)
		}
		eventually(t, "word of the sending", func() bool { return stderr() != "" })
		syscall.Kill(slow, syscall.SIGCONT)
		if got := j.wait(); got != 0 {
			t.Fatalf("exit code %d, stderr %s", got, stderr())
		}
		if want := sum + "  -"; len(j.lines()) != 4 || j.lines()[0] != want || j.lines()[3] != want {
			t.Errorf("sums %q, want %s", j.lines(), want)
		}
		if !regexp.MustCompile(`^gorun: sending files to \d hosts?: \d+ of 256 MiB\n`).MatchString(stderr()) {
			t.Errorf("stderr %q", stderr())
		}
		cleanStage(t, h)
	})
	t.Run("gorun is killed", func(t *testing.T) {
		j := stageJob(t, h, dir, args...)
		j.start()
		arriving(t, h, 2, "big")
		j.cmd.Process.Kill()
		j.wait()
		cleanStage(t, h)
	})
	t.Run("interrupted", func(t *testing.T) {
		j := stageJob(t, h, dir, args...)
		j.start()
		arriving(t, h, 2, "big")
		j.cmd.Process.Signal(syscall.SIGINT)
		if got := j.wait(); got != 130 {
			t.Errorf("exit code %d, stderr %s, want 130", got, j.err.String())
		}
		cleanStage(t, h)
	})
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		t.Run("an agent gets "+signalName(sig), func(t *testing.T) {
			j := stageJob(t, h, dir, args...)
			j.start()
			arriving(t, h, 1, "big")
			syscall.Kill(agentOn(t, h, 1), sig)
			if got := j.wait(); got != 122 || !strings.Contains(j.err.String(), "gorun: host h2: ") {
				t.Errorf("exit code %d, stderr %s, want 122 and host h2", got, j.err.String())
			}
			cleanStage(t, h)
		})
	}
	t.Run("an agent is killed while ranks run", func(t *testing.T) {
		j := stageJob(t, h, dir, "--stage", "big", "sh", "-c", "touch /root/up$GORUN_RANK; exec sleep 1000")
		j.start()
		up(t, j, h, 1)
		syscall.Kill(agentOn(t, h, 1), syscall.SIGKILL)
		if got := j.wait(); got != 123 {
			t.Errorf("exit code %d, stderr %s, want 123", got, j.err.String())
		}
		cleanStage(t, h)
	})
}

func TestStagePlaces(t *testing.T) {
	beside(t)
	dir := t.TempDir()
	write(t, dir+"/where", where, 0o755)
	for _, c := range []struct {
		name string
		o    testhosts.Options
		at   string
	}{
		{"read-only home", testhosts.Options{HomeReadOnly: true}, "/tmp/JOB"},
		{"noexec elsewhere", testhosts.Options{TmpNoExec: true}, "/root/.cache/gorun/JOB"},
		{"without rights", testhosts.Options{User: testhosts.User}, "/tmp/JOB"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h := stageHosts(t, 1, c.o)
			j := stageJob(t, h, dir, "./where", "/dev/null")
			if got := j.run(); got != 0 || j.err.Len() > 0 {
				t.Fatalf("exit code %d, stderr %s", got, j.err.String())
			}
			if d := cmp.Diff(j.lines(), []string{"h1 " + c.at + "/where " + c.at}); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
			left, err := exec.Command("find", h.Path(0, "/tmp"), h.Path(0, "/root"), h.Path(0, "/home"), "-name", "gorun-job-*").Output()
			if err != nil || len(left) > 0 {
				t.Errorf("left: %s %v", left, err)
			}
		})
	}
	t.Run("disk full", func(t *testing.T) {
		t.Parallel()
		h := stageHosts(t, 2, testhosts.Options{HomeSize: "48m", TmpNoExec: true})
		file, _ := big(t, 64<<20)
		if err := os.Chmod(file, 0o755); err != nil {
			t.Fatal(err)
		}
		j := stageJob(t, h, dir, file)
		want := regexp.MustCompile(`host h1: make a directory for the job: /tmp: mounted noexec.*; /root/.cache/gorun: disk full: \d+ MiB are free, the job's files need 64`)
		if got := j.run(); got != 122 || !want.MatchString(j.err.String()) {
			t.Errorf("exit code %d, stderr %s, want 122, %v", got, j.err.String(), want)
		}
		cleanStage(t, h)
		// Nothing looks first whether there is room at a place that the user names.
		to := filepath.Dir(file)
		for i := range h.Hosts {
			if err := os.MkdirAll(h.Path(i, to), 0o755); err != nil {
				t.Fatal(err)
			}
			if out, err := h.Command(t.Context(), i, "mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", to).CombinedOutput(); err != nil {
				t.Fatalf("mount: %v: %s", err, out)
			}
		}
		j = stageJob(t, h, "/", "--stage", file, "true")
		want = regexp.MustCompile(`host h2: write ` + to + `/\.gorun-job-\S*: no space left on device`)
		if got := j.run(); got != 122 || !want.MatchString(j.err.String()) {
			t.Errorf("exit code %d, stderr %s, want 122, %v", got, j.err.String(), want)
		}
		cleanStage(t, h)
	})
}

// The program of a Go package is built for a host's architecture.
func TestBuildFor(t *testing.T) {
	gocache, err := exec.Command("go", "env", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("GOCACHE", strings.TrimSpace(string(gocache)))
	dir := filepath.Join(t.TempDir(), "prog")
	write(t, dir+"/go.mod", "module prog\n", 0o644)
	write(t, dir+"/main.go", "package main\n\nfunc main() {}\n", 0o644)
	p := Program{Name: "./prog", GoDir: dir}
	for arch, machine := range map[string]byte{"amd64": 62, "arm64": 183} {
		var out bytes.Buffer
		file, err := p.build(context.Background(), &out, arch)
		if err != nil {
			t.Fatalf("%v: %s", err, out.String())
		}
		data, err := os.ReadFile(file)
		if err != nil || len(data) < 20 || data[18] != machine || filepath.Base(file) != "prog" {
			t.Errorf("%s: %s, %v, machine %d", arch, file, err, data[18])
		}
	}
}
