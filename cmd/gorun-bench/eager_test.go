package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// eagerScript measures small eager calls under many conditions.
const eagerScript = "../../.ci/gpu/eager.sh"

func newEager(t *testing.T) (p *peersTest, args []string) {
	p = newPeers(t)
	p.program = eagerScript
	p.script("bin/gorun", `[ -z "${GOGC-}" ] || log GOGC=$GOGC
while [ "$1" != gorun-bench ] && [ "${1##*.}" != test ]; do [ "$1" != --bind-to ] || log "$1" "$2"; shift; done
exec "$@"`)
	p.script("bin/eager", `log eager "$@"
echo '{"op":"all-reduce","mode":"c","calls":"eager","ranks":2,"bytes":8,"us":6.5,"enqueue_us":6.25}'`)
	p.script("nccl.test", `echo "goos: linux"; echo "BenchmarkLibraryAllReduce/8/raw-64  5000  7286 ns/op"; echo "BenchmarkLibraryAllReduce/8/raw-64  5000  9000 ns/op"`)
	p.script("mpirun", `[ "$1" != --version ] || { echo "mpirun (Open MPI) 4.1.6"; exit; }
log mpirun "$@"
while [ "${1#/}" = "$1" ]; do shift; done
exec "$@"`)
	return p, []string{"--bin", p.dir + "/bin", "--nccl-tests", p.dir + "/perf", "--mpirun", p.dir + "/mpirun", "--out", p.out, "--test", p.dir + "/nccl.test"}
}

// Two rounds, the first with all conditions.
func TestEager(t *testing.T) {
	p, args := newEager(t)
	text, code := p.run(append(args, "--rounds", "2", "--no-multicast")...)
	if code != 1 || !strings.Contains(text, "failed        1.250, want <= 1.08  time to nccl-tests', eager, each: all-reduce 8 1.250\n") {
		t.Errorf("exit code %d, want 1, a bar is missed:\n%s", code, text)
	}
	causes, err := os.ReadFile(filepath.Join(p.out, "causes.txt"))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for l := range strings.Lines(string(causes)) {
		if f := strings.Fields(l); len(f) == 6 && f[1] == "8" {
			got[f[0]] = strings.Join(f[2:], " ")
		}
	}
	want := map[string]string{"c": "1 6.50 (6.50-6.50) 6.25", "c-nccl": "1 6.50 (6.50-6.50) 6.25", "go-raw": "1 7.29 (7.29-7.29) -"}
	for _, name := range strings.Fields("tests tests-free tests-queue1") {
		want[name] = "1 8.00 (8.00-8.00) -"
	}
	for _, name := range strings.Fields("ours library nopreempt nogc procs1 procs2 trust plain bound queue1") {
		want[name] = "2 6.00 (2.00-10.00) -" // this gorun-bench always says both kinds of calls
	}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("got - want +:\n%s", d)
	}
	log := strings.Join(p.log(), "\n")
	for _, line := range []string{"GOGC=off", "--bind-to core", "-compare trust", "-mode plain", "mpirun -x NCCL_NVLS_ENABLE -x NVSHMEM_DISABLE_NVLS -x TORCH_SYMM_MEM_DISABLE_MULTICAST -np 2 --bind-to none ", "eager -np 2 -n 500 -w 20 -r 1 -memory nccl 8 64", "-calls captured -b 64K"} {
		if !strings.Contains(log, line) {
			t.Errorf("nothing was called with %q:\n%s", line, log)
		}
	}
}

func TestEagerUsage(t *testing.T) {
	p, args := newEager(t)
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"-h"}, 0, "eager.sh [flags] --nccl-tests DIR\n"},
		{[]string{"--frob"}, 2, "eager: unknown argument --frob; -h shows the flags\n"},
		{[]string{"--rounds"}, 2, "eager: --rounds needs a value; -h shows the flags\n"},
		{nil, 2, "eager: --nccl-tests DIR is missing; -h shows the flags\n"},
		{append(args, "--rounds", "x"), 2, "eager: x: want a number\n"},
		{append(args, "--conditions", "ours,magic"), 2, "eager: --conditions: no magic; there are ours "},
	} {
		if text, code := p.run(tt.args...); code != tt.code || !strings.HasPrefix(text, tt.want) {
			t.Errorf("%v: exit code %d, output %q, want %d, %q", tt.args, code, text, tt.code, tt.want)
		}
	}
}

// A condition that fails is told, and the others are there.
func TestEagerFailure(t *testing.T) {
	p, args := newEager(t)
	p.script("bin/eager", `echo no device >&2; exit 3`)
	text, _ := p.run(append(args, "--rounds", "1", "--conditions", "c,tests")...)
	failed, err := os.ReadFile(filepath.Join(p.out, "causes.failed"))
	if err != nil || !strings.Contains(string(failed), "no device\n") || !strings.Contains(text, "01.c: exit code 3\n") || !strings.Contains(text, "\ntests ") {
		t.Errorf("error %v, %q, output:\n%s", err, failed, text)
	}
}
