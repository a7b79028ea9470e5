package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// asMain makes the test binary gorun-bench.
const asMain = "GORUN_BENCH_TEST_MAIN"

// peersScript measures gorun beside its peers.
const peersScript = "../../.ci/gpu/peers.sh"

// peersTest is a folder with small scripts in place of the programs; each writes its command line to the file log.
type peersTest struct {
	t        *testing.T
	dir, out string
	wrapped  bool // by the script peers
	program  string
}

func newPeers(t *testing.T) *peersTest {
	p := &peersTest{t: t, dir: t.TempDir(), program: peersScript}
	p.out = filepath.Join(p.dir, "out")
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The only rank, alone: programs are not what is tested.
	p.script("bin/gorun", `shift 2; exec "$@"`)
	p.script("bin/gorun-bench", `if [ "$1" = compare ]; then `+asMain+`=1 exec '`+exe+`' "$@"; fi
log gorun-bench "$@"
while [ $# -gt 0 ]; do [ "$1" != -op ] || op=$2; shift; done
us=10; [ $op = all-reduce ] || us=20
for calls in eager captured; do
	[ $calls = eager ] || us=$((us / 5))
	printf '{"op":"%s","mode":"auto","calls":"%s","ranks":2,"bytes":8,"us":%d,"device":"GPU","library":"NCCL 2.28.3"}\n' $op $calls $us
done`)
	perf := `log ${0##*/} "$@"; echo "log line of a library" >&2
us=8; [ ${0##*/} = all_reduce_perf ] || us=25
case "$*" in *-G*) us=$((us / 2)) ;; esac
echo "# nccl-tests version 2.19.6 nccl-headers=22803 nccl-library=22803"
echo "#  size  count  type  redop  root  time  algbw  busbw  #wrong"
echo "      8      2  float    sum    -1  $us.00  0.0  0.0  N/A"`
	for _, prog := range []string{"all_reduce_perf", "all_gather_perf", "reduce_scatter_perf", "broadcast_perf", "sendrecv_perf"} {
		p.script("perf/"+prog, perf)
	}
	p.script("mpirun", `[ "$1" != --version ] || { echo "mpirun (OpenRTE) 4.1.4"; exit; }
log mpirun "$@"
while [ "${1#/}" = "$1" ]; do shift; done # up to the program
exec "$@"`)
	p.script("python", `log python "${@##*/}"
echo '{"op": "all-reduce", "calls": "eager", "bytes": 8, "us": 40.0, "torch": "2.11", "nccl": "2.28.9"}'`)
	return p
}

func (p *peersTest) script(name, text string) {
	p.t.Helper()
	file := filepath.Join(p.dir, name)
	text = "#!/bin/bash\nlog() { echo \"$*\" >>'" + p.dir + "/log'; }\n" + text + "\n"
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o755)); err != nil {
		p.t.Fatal(err)
	}
}

// run runs the script with the folder's programs.
func (p *peersTest) run(args ...string) (text string, code int) {
	p.t.Helper()
	bash := citest.Program(p.t, "bash")
	ctx, cancel := context.WithTimeout(p.t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, bash, append([]string{p.program}, args...)...)
	if wrapper := filepath.Join(p.dir, "peers"); p.wrapped {
		cmd = exec.CommandContext(ctx, wrapper, append([]string{p.program}, args...)...)
	}
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "NCCL_") || strings.HasPrefix(kv, "GORUN_") && !strings.HasPrefix(kv, "GORUN_CI=") || strings.HasPrefix(kv, "NVSHMEM_") || strings.HasPrefix(kv, "TORCH_")
	}), "NCCL_DEBUG=INFO")
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		p.t.Fatalf("%v\n%s", err, out)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// all are the flags that name the folder's programs.
func (p *peersTest) all(more ...string) []string {
	return append([]string{"--bin", p.dir + "/bin", "--nccl-tests", p.dir + "/perf", "--mpirun", p.dir + "/mpirun --root", "--python", p.dir + "/python", "--out", p.out}, more...)
}

func (p *peersTest) log() []string {
	text, err := os.ReadFile(filepath.Join(p.dir, "log"))
	if err != nil {
		p.t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// TestPeers runs two rounds and wants the right ratios of what the programs say.
func TestPeers(t *testing.T) {
	p := newPeers(t)
	text, code := p.run(p.all("--rounds", "2", "--np", "4", "--ops", "all-reduce,sendrecv")...)
	if code != 1 {
		t.Errorf("exit code %d, want 1: a bar is missed\n%s", code, text)
	}
	var c comparison
	readJSON(t, filepath.Join(p.out, "peers.json"), &c)
	got := map[string][]float64{}
	for _, b := range c.Points {
		v := []float64{b.Gorun.Median, float64(len(b.Gorun.Us))}
		for _, peer := range peerNames {
			if x := b.peer(peer); x != nil {
				v = append(v, x.Median, x.Ratio)
			}
		}
		got[b.Op+" "+b.Calls] = v
	}
	want := map[string][]float64{
		"all-reduce eager": {10, 2, 8, 1.25, 40, 0.25}, "all-reduce captured": {2, 2, 4, 0.5},
		"sendrecv eager": {20, 2, 25, 0.8}, "sendrecv captured": {4, 2, 12, 1. / 3},
	}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("median, rounds, then median and ratio of each peer: got - want +:\n%s", d)
	}
	table, err := os.ReadFile(filepath.Join(p.out, "peers.txt"))
	if err != nil || !strings.HasSuffix(text, string(table)) || !strings.Contains(text, "failed        1.250, want <= 1.08  time to nccl-tests', eager, each: all-reduce 8 1.250\n") {
		t.Errorf("error %v, output:\n%s", err, text)
	}

	files, err := os.ReadDir(p.out)
	if err != nil || len(files) != 3 {
		t.Errorf("%d files, error %v, want 3", len(files), err)
	}
	if raw := readTar(t, filepath.Join(p.out, "raw.tar.gz")); len(raw) != 14 || !strings.Contains(raw["raw/01.nccl-tests.sendrecv.captured.txt"], " 12.00 ") {
		t.Errorf("raw: %q", raw)
	}

	// The order of the programs, and their command lines.
	var order []string
	for _, l := range p.log() {
		f := strings.Fields(l)
		switch f[0] {
		case "mpirun":
			if want := "mpirun --root -np 4 " + p.dir + "/perf/"; !strings.HasPrefix(l, want) {
				t.Errorf("%q, want %s...", l, want)
			}
		case "gorun-bench":
			order = append(order, "gorun "+f[slices.Index(f, "-op")+1])
			bc, err := parse(f[1:])
			if err != nil {
				t.Errorf("%s: %v", l, err)
			} else if bc.min != 8 || bc.max != 1<<30 || len(bc.sizes()) != 10 || bc.n != 100 || bc.perGraph != 20 || bc.launches != 10 || bc.rounds != 1 || !slices.Equal(bc.modes, []string{"auto"}) {
				t.Errorf("%s: %+v", l, bc)
			}
		case "python":
			order = append(order, "python")
			if l != "python peers_torch.py -n 100 -g 20 -G 10" {
				t.Errorf("%q", l)
			}
		default:
			calls := "eager"
			if want := " -b 8 -e 1G -f 8 -g 1 -d float -o sum -c 0 -n 100 -w 20"; slices.Contains(f, "-G") {
				calls = "captured"
				want = " -b 8 -e 1G -f 8 -g 1 -d float -o sum -c 0 -n 20 -w 5 -G 10"
				if l != f[0]+want {
					t.Errorf("%q, want%s", l, want)
				}
			} else if l != f[0]+want {
				t.Errorf("%q, want%s", l, want)
			}
			order = append(order, f[0]+" "+calls)
		}
	}
	if d := cmp.Diff(order, []string{
		"gorun all-reduce", "all_reduce_perf eager", "all_reduce_perf captured", "gorun sendrecv", "sendrecv_perf eager", "sendrecv_perf captured", "python",
		"python", "all_reduce_perf captured", "all_reduce_perf eager", "gorun all-reduce", "sendrecv_perf captured", "sendrecv_perf eager", "gorun sendrecv",
	}); d != "" {
		t.Errorf("order, got - want +:\n%s", d)
	}
}

// TestPeersSettings: every process has multicast off where that is asked for, and no NCCL_DEBUG.
func TestPeersSettings(t *testing.T) {
	p := newPeers(t)
	const env = `log env "$NCCL_NVLS_ENABLE$NVSHMEM_DISABLE_NVLS$TORCH_SYMM_MEM_DISABLE_MULTICAST ${NCCL_DEBUG-no}"; exit 3`
	p.script("perf/broadcast_perf", env)
	p.script("python", env)
	p.script("bin/gorun-bench", `[ "$1" = compare ] || { `+env+"; }")
	p.run(p.all("--rounds", "1", "--ops", "broadcast", "--no-multicast")...)
	log := p.log()
	mpi := "mpirun --root -x NCCL_NVLS_ENABLE -x NVSHMEM_DISABLE_NVLS -x TORCH_SYMM_MEM_DISABLE_MULTICAST -np 2 " + p.dir + "/perf/broadcast_perf"
	for i, l := range log {
		log[i], _, _ = strings.Cut(l, " -b ")
	}
	if d := cmp.Diff(log, []string{"env 011 no", mpi, "env 011 no", mpi, "env 011 no", "env 011 no"}); d != "" {
		t.Errorf("got - want +:\n%s", d)
	}
}

// TestPeersFailures: programs that fail are told with what they said, and not run again and again.
func TestPeersFailures(t *testing.T) {
	p := newPeers(t)
	p.script("perf/all_reduce_perf", `echo "# half a table"; echo "no GPU" >&2; exit 7`)
	text, code := p.run(p.all("--rounds", "3", "--ops", "all-reduce")...)
	var c comparison
	readJSON(t, filepath.Join(p.out, "peers.json"), &c)
	var failed []string
	for _, f := range c.Failed {
		failed = append(failed, f.Run)
		if !strings.HasPrefix(f.Last, "# half a table\nno GPU\n") || !strings.Contains(f.Last, ": exit code 7 after ") {
			t.Errorf("%+v", f)
		}
	}
	want := []string{"01.nccl-tests.all-reduce.captured", "01.nccl-tests.all-reduce.eager", "02.nccl-tests.all-reduce.captured", "02.nccl-tests.all-reduce.eager"}
	if d := cmp.Diff(failed, want); d != "" || code != 1 {
		t.Errorf("exit code %d, failed runs, got - want +:\n%s\n%s", code, d, text)
	}
	if d := cmp.Diff(c.LeftOut, []string{"03.nccl-tests.all-reduce.eager: failed twice before", "03.nccl-tests.all-reduce.captured: failed twice before"}); d != "" {
		t.Errorf("left out, got - want +:\n%s", d)
	}
	if b := c.Points[0]; len(b.Gorun.Us) != 3 || b.Peers.NCCLTests != nil || len(b.Peers.PyTorch.Us) != 3 {
		t.Errorf("%+v", b)
	}
}

// TestPeersSeconds: no round begins that would not end in time.
func TestPeersSeconds(t *testing.T) {
	p := newPeers(t)
	p.script("python", `sleep 3; echo '{"op": "all-reduce", "calls": "eager", "bytes": 8, "us": 40.0}'`) // what the script measures is time
	text, _ := p.run(p.all("--rounds", "40", "--ops", "all-reduce", "--seconds", "5")...)
	var c comparison
	readJSON(t, filepath.Join(p.out, "peers.json"), &c)
	if c.Rounds != 1 || len(c.LeftOut) != 1 || !strings.HasPrefix(c.LeftOut[0], "rounds 2 to 40: the longest round took ") {
		t.Errorf("%d rounds, left out %q\n%s", c.Rounds, c.LeftOut, text)
	}
}

// TestPeersSignal: what has been measured is not lost, and the program that runs is ended.
func TestPeersSignal(t *testing.T) {
	p := newPeers(t)
	p.script("perf/broadcast_perf", `trap 'log ended; exit 1' TERM
kill -TERM $(cat '`+p.dir+`/pid'); while :; do sleep 0.1; done`)
	p.wrapped = true
	p.script("peers", `echo $$ >'`+p.dir+`/pid'; exec bash "$@"`)
	text, code := p.run(p.all("--rounds", "1", "--ops", "all-reduce,broadcast")...)
	var c comparison
	readJSON(t, filepath.Join(p.out, "peers.json"), &c)
	if code != 143 || len(c.Points) != 4 || len(c.LeftOut) != 1 || !strings.HasPrefix(c.LeftOut[0], "ended by a signal after ") {
		t.Errorf("exit code %d, %+v\n%s", code, c, text)
	}
	if log := p.log(); log[len(log)-1] != "ended" {
		t.Errorf("log: %q", log)
	}
}

// TestPeersHost lets gorun-bench measure, on the host platform, and compares what it really prints.
func TestPeersHost(t *testing.T) {
	p := newPeers(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p.script("bin/gorun-bench", asMain+`=1 GORUN_DEVICE=host exec '`+exe+`' "$@"`)
	text, code := p.run("--bin", p.dir+"/bin", "--nccl-tests", "", "--out", p.out, "--rounds", "2", "--ops", "all-reduce", "--sizes", "8:512:8", "--modes", "auto,plain", "--np", "1")
	var c comparison
	readJSON(t, filepath.Join(p.out, "peers.json"), &c)
	if code != 0 || len(c.Points) != 12 || c.Tools["gorun"] != "host platform" || c.Ranks != 1 { // 3 sizes, 2 modes, 2 kinds of calls
		t.Errorf("exit code %d, %+v\n%s", code, c, text)
	}
	for _, b := range c.Points {
		if len(b.Gorun.Us) != 2 || b.Gorun.Median <= 0 {
			t.Errorf("%+v", b)
		}
	}
}

func TestPeersUsage(t *testing.T) {
	p := newPeers(t)
	if err := os.Mkdir(filepath.Join(p.dir, "empty"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"-h"}, 0, "peers.sh [flags] --nccl-tests DIR\n"},
		{[]string{"--frob"}, 2, "peers: unknown argument --frob; -h shows the flags\n"},
		{[]string{"--np"}, 2, "peers: --np needs a value; -h shows the flags\n"},
		{nil, 2, "peers: --nccl-tests DIR is missing; -h shows the flags\n"},
		{p.all("--np", "0"), 2, "peers: --np 0: want a number\n"},
		{p.all("--rounds", "100"), 2, "peers: --rounds 100: want a number from 1 to 99\n"},
		{p.all("--seconds", "-1"), 2, "peers: --seconds -1: want whole seconds\n"},
		{p.all("--sizes", "8:1G"), 2, "peers: --sizes 8:1G: want MIN:MAX:FACTOR, such as 8:1G:8\n"},
		{p.all("--ops", "alltoall"), 2, "peers: --ops: no operation alltoall\n"},
		{p.all("--ops", ""), 2, "peers: --ops: none\n"},
		{p.all("--nccl-tests", p.dir+"/empty"), 2, "peers: --nccl-tests " + p.dir + "/empty: no program all_reduce_perf\n"},
		{p.all("--mpirun", "nonesuch-mpirun -x"), 2, "peers: --mpirun: no program nonesuch-mpirun\n"},
		{p.all("--python", "nonesuch-python"), 2, "peers: --python: no program nonesuch-python\n"},
	} {
		t.Run(strings.Join(tt.args, " "), func(t *testing.T) {
			text, code := (&peersTest{t: t, dir: p.dir, out: p.out, program: p.program}).run(tt.args...)
			if code != tt.code || !strings.HasPrefix(text, tt.want) || tt.code != 0 && text != tt.want {
				t.Errorf("exit code %d, output %q, want %d, %q", code, text, tt.code, tt.want)
			}
		})
	}
	if err := os.MkdirAll(filepath.Join(p.out, "raw"), 0o755); err != nil {
		t.Fatal(err)
	}
	if text, code := p.run(p.all()...); code != 2 || text != "peers: --out "+p.out+": has results already\n" {
		t.Errorf("exit code %d, output %q", code, text)
	}
}

// TestPeersTorch: Python reads the script.
func TestPeersTorch(t *testing.T) {
	python := citest.Program(t, "python3")
	text, err := exec.Command(python, "-c", `import ast, sys; ast.parse(open(sys.argv[1]).read())`, "../../.ci/gpu/peers_torch.py").CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, text)
	}
}
