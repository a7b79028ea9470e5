package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// armHost runs a line as the sshd of a host would; the host is b if its name says so: there the kernel runs arm64 programs, through qemu, and
// says that it is one of arm64. Both are in namespaces of its own and end with it.
const armHost = `#!/bin/sh
[ "$1" = b ] || exec /bin/sh -c "$2"
exec unshare --user --map-root-user --mount --propagation private /bin/sh -ec '
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
printf %s ":arm64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:$QEMU:POCF" >/proc/sys/fs/binfmt_misc/register
[ ! -e /proc/sys/kernel/arch ] || mount --bind "$DIR/arch" /proc/sys/kernel/arch
PATH=$DIR/bin:$PATH exec /bin/sh -c "$1"' sh "$2"
`

// One job on a host of amd64 and one of arm64: each gets an agent and a program of its own architecture, and the ranks meet.
func TestTwoArchitectures(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("-short: builds gorun for two architectures")
	}
	if runtime.GOARCH != "amd64" {
		t.Skip("arm64 is the other architecture here: this machine is of " + runtime.GOARCH)
	}
	qemu := ""
	for _, name := range []string{"qemu-aarch64", "qemu-aarch64-static"} {
		if path, err := exec.LookPath(name); err == nil {
			qemu = path
			break
		}
	}
	if qemu == "" {
		citest.Lacking(t, "qemu-aarch64 (package qemu-user)")
	}
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return name
	}
	host := write("host", armHost, 0o755)
	write("arch", "aarch64\n", 0o644)
	write("bin/uname", "#!/bin/sh\n[ \"$1\" = -m ] && echo aarch64 || echo Linux\n", 0o755)
	env := append(os.Environ(), "DIR="+dir, "QEMU="+qemu)
	try := exec.Command(host, "b", "uname -m")
	try.Env = env
	if out, err := try.CombinedOutput(); err != nil || string(out) != "aarch64\n" {
		citest.Lacking(t, "binfmt_misc in namespaces (Linux 6.7 or later): %s", strings.TrimSpace(string(out)))
	}
	// The two are of one build, as gorun demands.
	for arch, name := range map[string]string{"amd64": "gorun", "arm64": "gorun-linux-arm64"} {
		cmd := exec.Command("go", "build", "-buildvcs=false", "-o", filepath.Join(dir, name), ".")
		cmd.Env = append(os.Environ(), "GOARCH="+arch, "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go build for %s: %v\n%s", arch, err, out)
		}
	}
	var caches []string // not below the job's home
	for _, name := range []string{"GOCACHE", "GOMODCACHE"} {
		out, err := exec.Command("go", "env", name).Output()
		if err != nil {
			t.Fatal(err)
		}
		caches = append(caches, name+"="+strings.TrimSpace(string(out)))
	}
	run := func(args ...string) *job {
		j := newJob(t, append([]string{"--rsh", host + " %h", "-H", "a,b"}, args...)...)
		j.cmd.Path = filepath.Join(dir, "gorun")
		j.cmd.Env = append(append(j.cmd.Env, caches...), "DIR="+dir, "QEMU="+qemu, "HOME="+filepath.Join(dir, "home"), "XDG_CACHE_HOME=")
		return j
	}
	j := run("./testdata/meet")
	got := j.run()
	for try := 1; try < 3 && got == 122 && strings.Contains(j.err.String(), "no answer for "); try++ { // on a busy machine an agent that is emulated is very slow
		j = run("./testdata/meet")
		got = j.run()
	}
	if got != 0 || j.out.String() != "amd64 arm64\n" {
		t.Errorf("exit code %d, stdout %q, want the ranks of both: %s", got, j.out.String(), j.err.String())
	}
	j = run("./testdata/meet", "fail")
	if got := j.run(); got != 5 || !regexp.MustCompile(`(?m)^gorun: rank 1 \(host b, pid \d+\) exited with code 5 `).MatchString(j.err.String()) {
		t.Errorf("exit code %d, want 5 of rank 1: %s", got, j.err.String())
	}
}
