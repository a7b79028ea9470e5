package main

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// runner is the script that runs a GPU bundle.
const runner = "../../.ci/gpu/run-gpu-tests.sh"

// gpuTest is a bundle of small scripts in place of the programs.
type gpuTest struct {
	t   *testing.T
	dir string
}

func newBundle(t *testing.T) *gpuTest {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: these are scripts")
	}
	b := &gpuTest{t, t.TempDir()}
	// Ranks one after the other are enough here.
	b.script("bin/gorun", `np=1
while [ $# -gt 0 ]; do
	case $1 in
	-np) np=$2; shift ;;
	--device) export GORUN_DEVICE=$2; shift ;;
	*) break ;;
	esac
	shift
done
r=0
while [ $r -lt $np ]; do GORUN_RANK=$r GORUN_SIZE=$np "$@" || exit; r=$((r + 1)); done`)
	b.script("bin/allreduce", `echo "rank $GORUN_RANK of $GORUN_SIZE"`)
	b.script("bin/train", `[ "$1" != -write ] || { echo a,b >"$2"; exit; }
[ -f "$2" ] || exit 9
[ $GORUN_RANK = 0 ] || exit 0
last=1.23456e-01
[ "$GORUN_SIZE$GORUN_DEVICE" != 2host ] || last=1.24e-01
echo "epoch 1   loss 0.5   100 samples/s"
echo "epoch 2   loss $last   100 samples/s"`)
	b.script("bin/gorun-bench", `[ "$GORUN_RANK" != 0 ] || { echo "NCCL version"; printf '{"ranks": %d, "args": "%s"}\n' $GORUN_SIZE "$*"; }`)
	for _, pkg := range []string{"cuda", "cuda/dl", "cuda/internal/cusys", "nccl/internal/ncclsys", "graphs", "examples/train", "cmd/gorun-bench", "rankenv"} {
		b.script("src/"+pkg+"/"+filepath.Base(pkg)+".test", `pwd; echo "args $*"; echo PASS`)
	}
	b.script("src/graphs/graphs.test", `echo '--- SKIP: TestA (0.0s)'; echo '    --- SKIP: TestB/x (0.0s)'; echo PASS`)
	b.script("src/nccl/nccl.test", `echo '=== RUN   TestFirst'; echo 'a line of another test'; echo '--- PASS: TestFirst (0.1s)'
printf -- '=== RUN   TestSum\n    sum_test.go:7: got "1\\2"\t\303\251\n--- FAIL: TestSum (0.1s)\n'
i=0; while [ $i -lt 100 ]; do echo "line $i"; i=$((i + 1)); done
echo FAIL; exit 1`)
	b.write("VERSION", "gorun v0.0.0-test\n", 0o644)
	return b
}

func (b *gpuTest) write(name, text string, mode fs.FileMode) {
	b.t.Helper()
	file := filepath.Join(b.dir, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), mode)); err != nil {
		b.t.Fatal(err)
	}
}

func (b *gpuTest) script(name, text string) { b.write(name, "#!/bin/sh\n"+text+"\n", 0o755) }

// gpuResults is results.json.
type gpuResults struct {
	Version, Multicast, Device string
	Passed, Failed, Skipped    int
	Steps                      []gpuStep
}

type gpuStep struct {
	Name, Status, Last string
	RC                 int
	Seconds            float64
	Skipped            []string `json:"tests_skipped"`
}

// run runs the script and returns its output, exit code and the folder of its files.
func (b *gpuTest) run(env []string, args ...string) (stdout string, code int, out string) {
	b.t.Helper()
	bash := citest.Program(b.t, "bash")
	out = filepath.Join(b.t.TempDir(), "out")
	cmd := exec.CommandContext(b.t.Context(), bash, append([]string{runner, "--out", out}, args...)...)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "NCCL_") || strings.HasPrefix(kv, "GORUN_") || strings.HasPrefix(kv, "NVSHMEM_") || strings.HasPrefix(kv, "TORCH_")
	})
	cmd.Env = append(append(cmd.Env, "GORUN_DEVICE=host"), env...)
	cmd.WaitDelay = 10 * time.Second
	text, err := cmd.CombinedOutput()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		b.t.Fatalf("%v\n%s", err, text)
	}
	return string(text), cmd.ProcessState.ExitCode(), out
}

func readJSON(t *testing.T, file string, to any) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, to)
	}
	if err != nil {
		t.Fatalf("%s: %v\n%s", file, err, text)
	}
}

func (r *gpuResults) statuses() map[string]string {
	m := map[string]string{}
	for _, s := range r.Steps {
		m[s.Name] = s.Status
	}
	return m
}

func (r *gpuResults) step(t *testing.T, name string) gpuStep {
	t.Helper()
	for _, s := range r.Steps {
		if s.Name == name {
			return s
		}
	}
	t.Fatalf("no step %q", name)
	return gpuStep{}
}

// TestBundle runs a whole bundle, in which a test fails.
func TestBundle(t *testing.T) {
	b := newBundle(t)
	text, code, out := b.run(nil, "--quick", b.dir)
	if code != 1 {
		t.Errorf("exit code %d, want 1\n%s", code, text)
	}
	var got gpuResults
	readJSON(t, filepath.Join(out, "results.json"), &got)
	want := map[string]string{
		"test cuda/dl": "passed", "test cuda/internal/cusys": "passed", "test nccl/internal/ncclsys": "passed", "test cuda": "passed",
		"test nccl": "failed", "test graphs": "passed", "test examples/train": "passed", "test cmd/gorun-bench library": "passed", "example allreduce np1": "passed", "example allreduce np2": "passed",
		"example train np1": "passed", "example train np1 host": "passed", "example train np1 losses": "passed",
		"example train np2": "passed", "example train np2 host": "passed", "example train np2 losses": "passed",
		"bench np1": "passed", "bench np2": "passed",
	}
	if d := cmp.Diff(got.statuses(), want); d != "" {
		t.Errorf("got - want +:\n%s", d)
	}
	if got.Passed != 17 || got.Failed != 1 || got.Skipped != 0 || got.Multicast != "unchanged" || got.Device != "host" || got.Version != "gorun v0.0.0-test" {
		t.Errorf("%+v", got)
	}
	if s := got.step(t, "test nccl"); s.RC != 1 || !strings.HasPrefix(s.Last, "    sum_test.go:7: got \"1\\2\"\t??\n--- FAIL: TestSum (0.1s)\nline 0\n") || !strings.Contains(s.Last, "line 99\nFAIL") {
		t.Errorf("%+v", s)
	}
	if s := got.step(t, "test graphs"); !slices.Equal(s.Skipped, []string{"TestA", "TestB/x"}) {
		t.Errorf("%+v", s)
	}
	if s := got.step(t, "test cuda"); len(s.Skipped) > 0 {
		t.Errorf("%+v", s)
	}
	if s := got.step(t, "test cuda/dl"); !strings.Contains(s.Last, filepath.Join(b.dir, "src/cuda/dl")+"\nargs -test.v -test.timeout 890s -test.short\nPASS") {
		t.Errorf("not in its package's folder, or with other flags: %+v", s)
	}
	if s := got.step(t, "example train np2 losses"); s.Last != "by epoch, times 1e9: 500000000 124000000; on the host platform: 500000000 124000000" {
		t.Errorf("%+v", s)
	}
	if !strings.Contains(text, "\n17 passed, 1 failed, 0 skipped; files in "+out+"\nfailed: test nccl\n") {
		t.Errorf("output:\n%s", text)
	}

	var figures struct {
		Facts   string
		Figures []struct {
			Ranks int
			Args  string
		}
	}
	readJSON(t, filepath.Join(out, "figures.json"), &figures)
	if len(figures.Figures) != 2 || figures.Figures[1].Ranks != 2 || !strings.HasPrefix(figures.Figures[1].Args, "--json -b 8 ") || !strings.Contains(figures.Facts, "kernel Linux") {
		t.Errorf("%+v", figures)
	}
	// The benchmark's own parser takes the flags that the script gives it.
	for _, f := range figures.Figures {
		if _, err := parse(strings.Fields(f.Args)); err != nil {
			t.Errorf("gorun-bench %s: %v", f.Args, err)
		}
	}

	files, err := os.ReadDir(out)
	if err != nil || len(files) > 8 {
		t.Errorf("%d files, error %v, want at most 8", len(files), err)
	}
	logs := readTar(t, filepath.Join(out, "logs.tar.gz"))
	if len(logs) != 16 || !strings.Contains(logs["logs/test_nccl.log"], "line 42\n") {
		t.Errorf("%d logs, want 16; that of nccl:\n%s", len(logs), logs["logs/test_nccl.log"])
	}
}

func readTar(t *testing.T, file string) map[string]string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	r := tar.NewReader(z)
	for {
		h, err := r.Next()
		if err != nil {
			return all
		}
		if h.Typeflag == tar.TypeReg {
			var b strings.Builder
			buf := make([]byte, 1<<16)
			for {
				n, err := r.Read(buf)
				b.Write(buf[:n])
				if err != nil {
					break
				}
			}
			all[h.Name] = b.String()
		}
	}
}

// TestBundleLosses: losses that differ by more than 1e-3 are a failure, also where a run has none.
func TestBundleLosses(t *testing.T) {
	for _, tt := range []struct {
		name, here, host, want string
	}{
		{"equal", "loss 0.25", "loss 0.25", "passed"},
		{"within 1e-3", "loss 1.0009", "loss 1", "passed"},
		{"above 1e-3", "loss 1.0011", "loss 1", "failed"},
		{"below 1e-3", "loss 0.9989", "loss 1", "failed"},
		{"exponents", "loss 1.0005e-03", "loss 0.001", "passed"},
		{"exponents apart", "loss 1e-04", "loss 1e-03", "failed"},
		{"not a number", "loss NaN", "loss NaN", "failed"},
		{"no loss", "no", "loss 1", "failed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBundle(t)
			b.script("bin/train", `[ "$1" != -write ] || { echo a,b >"$2"; exit; }
[ "$GORUN_DEVICE" = host ] && l="`+tt.host+`" || l="`+tt.here+`"
echo "epoch 1   $l   1 samples/s"
echo "epoch 2   $l   1 samples/s"`)
			// Without a GPU the device is none that the script knows, so that its own choice of host for the comparison is seen.
			_, _, out := b.run([]string{"GORUN_DEVICE=0", "PATH=" + fakeSMI(t) + ":" + os.Getenv("PATH")}, "--quick", "--np", "1", "--only", "train", b.dir)
			var got gpuResults
			readJSON(t, filepath.Join(out, "results.json"), &got)
			if s := got.step(t, "example train np1 losses"); s.Status != tt.want {
				t.Errorf("%+v, want %s", s, tt.want)
			}
		})
	}
}

// fakeSMI is a folder with an nvidia-smi that knows one GPU, or as many as are given.
func fakeSMI(t *testing.T, gpus ...int) string {
	dir := t.TempDir()
	lines := "GPU 0: NVIDIA Fake (UUID: GPU-0)\n"
	if len(gpus) > 0 {
		lines = strings.Repeat(lines, gpus[0])
	}
	if err := os.WriteFile(filepath.Join(dir, "nvidia-smi"), []byte("#!/bin/sh\n[ \"$1\" != -L ] || printf '"+strings.ReplaceAll(lines, "\n", "\\n")+"'\necho fake $*\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestBundleOnGPUs: what a machine with one GPU runs and demands.
func TestBundleOnGPUs(t *testing.T) {
	b := newBundle(t)
	b.script("bin/allreduce", `echo "require=$GORUN_REQUIRE_GPU nvls=$NCCL_NVLS_ENABLE nvshmem=$NVSHMEM_DISABLE_NVLS torch=$TORCH_SYMM_MEM_DISABLE_MULTICAST"`)
	text, code, out := b.run([]string{"GORUN_DEVICE=", "PATH=" + fakeSMI(t) + ":" + os.Getenv("PATH")}, "--no-multicast", "--only", "^example allreduce", b.dir)
	var got gpuResults
	readJSON(t, filepath.Join(out, "results.json"), &got)
	want := []gpuStep{
		{Name: "example allreduce np1", Status: "passed", Last: "require=1 nvls=0 nvshmem=1 torch=1"},
		{Name: "example allreduce np2", Status: "skipped", Last: "1 GPUs"},
	}
	for i := range got.Steps {
		got.Steps[i].Seconds = 0
	}
	if d := cmp.Diff(got.Steps, want, cmpopts.EquateEmpty()); d != "" || code != 0 || got.Multicast != "off" {
		t.Errorf("exit code %d, steps got - want +:\n%s\n%s", code, d, text)
	}
	facts, err := os.ReadFile(filepath.Join(out, "facts.txt"))
	if err != nil || !strings.Contains(string(facts), "fake --query-gpu") || !strings.Contains(string(facts), "  NCCL_NVLS_ENABLE=0\n") {
		t.Errorf("error %v, facts:\n%s", err, facts)
	}
}

// TestBundlePairs: with four GPUs packages run side by side, each on two of them; with fewer one after the other.
func TestBundlePairs(t *testing.T) {
	b := newBundle(t)
	run := func(gpus int, env ...string) (map[string]gpuStep, string) {
		text, code, out := b.run(append(env, "GORUN_DEVICE=", "PATH="+fakeSMI(t, gpus)+":"+os.Getenv("PATH")), "--pairs", "--only", "^test", b.dir)
		var got gpuResults
		readJSON(t, filepath.Join(out, "results.json"), &got)
		steps := map[string]gpuStep{}
		for _, s := range got.Steps {
			steps[s.Name] = s
		}
		if got.Failed != 0 || code != 0 {
			t.Errorf("%d GPUs: exit code %d\n%s", gpus, code, text)
		}
		return steps, text
	}
	// Each of the two that begin first goes on only when the other has begun.
	meet := `touch '%s/'$1; i=0; until [ -e '%s/'$2 ]; do i=$((i + 1)); [ $i -lt 600 ] || exit 9; sleep 0.05; done`
	meet = "meet() { " + strings.ReplaceAll(meet, "%s", b.dir) + "; }\n"
	b.script("src/nccl/nccl.test", meet+`meet nccl graphs; echo "on $CUDA_VISIBLE_DEVICES: $*"`)
	b.script("src/graphs/graphs.test", meet+`case "$*" in *-test.run*) meet graphs nccl ;; esac; echo "on $CUDA_VISIBLE_DEVICES: $*"`)
	steps, _ := run(5)
	if len(steps) != 9 {
		t.Errorf("steps %v, want 9", steps)
	}
	// Tests on stand-ins are left out where there are GPUs.
	const fakes = "/^fake$|//^fake$|///^fake$|////^fake$|/////^fake$"
	const flags = ": -test.v -test.timeout 890s -test.skip "
	if got, want := steps["test nccl"].Last, "on 0,1"+flags+fakes; got != want {
		t.Errorf("nccl: %q, want %q", got, want)
	}
	if got, want := steps["test graphs library"].Last, "on 2,3"+flags+fakes+" -test.run ^TestLibrary"; got != want {
		t.Errorf("graphs: %q, want %q", got, want)
	}
	if got := steps["test graphs others"].Last; !strings.HasSuffix(got, flags+"^TestLibrary|"+fakes) {
		t.Errorf("graphs: %q", got)
	}
	steps, _ = run(4, "CUDA_VISIBLE_DEVICES=7,GPU-5,1,3")
	if a, b := steps["test nccl"].Last, steps["test graphs library"].Last; !strings.HasPrefix(a, "on 7,GPU-5:") || !strings.HasPrefix(b, "on 1,3:") {
		t.Errorf("nccl: %q, graphs: %q", a, b)
	}
	b.script("src/nccl/nccl.test", `echo "on $CUDA_VISIBLE_DEVICES"`)
	steps, text := run(3)
	if len(steps) != 8 || steps["test nccl"].Last != "on " || !strings.HasPrefix(text, "--pairs: fewer than 4 GPUs, so one package after the other\n") {
		t.Errorf("steps %v\n%s", steps, text)
	}
}

// TestBundlePairsFail: a step that fails beside another is a failure, with its own output.
func TestBundlePairsFail(t *testing.T) {
	b := newBundle(t)
	text, code, out := b.run([]string{"GORUN_DEVICE=", "PATH=" + fakeSMI(t, 4) + ":" + os.Getenv("PATH")}, "--pairs", "--only", "^test", b.dir)
	var got gpuResults
	readJSON(t, filepath.Join(out, "results.json"), &got)
	if s := got.step(t, "test nccl"); code != 1 || got.Failed != 1 || got.Passed != 8 || s.RC != 1 || !strings.Contains(s.Last, "--- FAIL: TestSum") {
		t.Errorf("exit code %d, %+v\n%s", code, got, text)
	}
}

// TestBundleBounds: a step that does not end, one that writes without end, and a bundle whose logs are large.
func TestBundleBounds(t *testing.T) {
	b := newBundle(t)
	b.script("bin/allreduce", `echo before; exec sleep 600`)
	b.script("bin/flood", `exec cat /dev/zero`)
	b.script("bin/long", `head -c 3000000 /dev/urandom; echo the end`)
	_, code, out := b.run(nil, "--timeout", "3", "--np", "1", "--only", "allreduce|flood|long", b.dir)
	var got gpuResults
	readJSON(t, filepath.Join(out, "results.json"), &got)
	if s := got.step(t, "example allreduce np1"); s.Status != "failed" || s.RC != 124 || s.Last != "before\nended after 3 s, --timeout (or by SIGKILL)" || s.Seconds > 60 {
		t.Errorf("%+v", s)
	}
	if s := got.step(t, "example flood np1"); s.Status != "failed" || !strings.Contains(s.Last, "ended") {
		t.Errorf("%+v", s)
	}
	if s := got.step(t, "example long np1"); s.Status != "passed" || !strings.Contains(s.Last, "the end") {
		t.Errorf("%+v", s)
	}
	if code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	for name, text := range readTar(t, filepath.Join(out, "logs.tar.gz")) {
		if len(text) > 600<<10 {
			t.Errorf("%s has %d bytes, want at most 600 KiB", name, len(text))
		}
	}
}

// TestBundleEnded: what was written until the script is ended by a signal is kept.
func TestBundleEnded(t *testing.T) {
	b := newBundle(t)
	bash := citest.Program(t, "bash")
	begun := filepath.Join(b.dir, "begun")
	b.script("bin/allreduce", `echo "words of the rank"; touch '`+begun+`'; exec sleep 600`)
	out := filepath.Join(t.TempDir(), "out")
	cmd := exec.CommandContext(t.Context(), bash, runner, "--out", out, "--np", "1", "--only", "^(test graphs|example allreduce np1)$", b.dir)
	cmd.Env = append(os.Environ(), "GORUN_DEVICE=host")
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(begun); err == nil {
			break
		}
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 143 {
		t.Errorf("ended with %v, want exit code 143", err)
	}
	var got gpuResults
	readJSON(t, filepath.Join(out, "results.json"), &got)
	got.step(t, "test graphs")
	logs := readTar(t, filepath.Join(out, "logs.tar.gz"))
	if text := logs["logs/example_allreduce_np1.log"]; !strings.HasPrefix(text, "words of the rank\n") {
		t.Errorf("its log is %q; there are %v", text, slices.Sorted(maps.Keys(logs)))
	}
}

// TestBundlePacked runs the bundle from an archive.
func TestBundlePacked(t *testing.T) {
	b := newBundle(t)
	packed := t.TempDir()
	if text, err := exec.Command("tar", "czf", filepath.Join(packed, "bundle.tar.gz"), "-C", b.dir, "bin", "src").CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, text)
	}
	text, code, _ := b.run(nil, "--only", "^test graphs$", "--only", "arena", packed)
	if code != 0 || !strings.Contains(text, "1 passed, 0 failed, 0 skipped") {
		t.Errorf("exit code %d, output:\n%s", code, text)
	}
	if err := os.WriteFile(filepath.Join(packed, "bundle.tar.gz"), []byte("no archive"), 0o644); err != nil {
		t.Fatal(err)
	}
	if text, code, _ := b.run(nil, packed); code != 2 || !strings.Contains(text, "it is damaged") {
		t.Errorf("a damaged archive: exit code %d, output:\n%s", code, text)
	}
}

// TestBundleAll: --all runs the packages without GPU on the host platform.
func TestBundleAll(t *testing.T) {
	b := newBundle(t)
	b.script("src/rankenv/rankenv.test", `echo "device=$GORUN_DEVICE"`)
	text, code, out := b.run([]string{"GORUN_DEVICE=", "PATH=" + fakeSMI(t) + ":" + os.Getenv("PATH")}, "--all", "--only", "^test (rankenv|cuda)$", b.dir)
	var got gpuResults
	readJSON(t, filepath.Join(out, "results.json"), &got)
	if s := got.step(t, "test rankenv"); code != 0 || s.Last != "device=host" {
		t.Errorf("exit code %d, %+v\n%s", code, s, text)
	}
	got.step(t, "test cuda")
}

func TestBundleList(t *testing.T) {
	b := newBundle(t)
	text, code, out := b.run(nil, "--list", b.dir)
	if code != 0 || !strings.HasPrefix(text, "test cuda/dl\n") || !strings.Contains(text, "\nexample train np2 losses\nbench np1\nbench np2\n") {
		t.Errorf("exit code %d, output:\n%s", code, text)
	}
	if _, err := os.Stat(out); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("--list wrote files: %v", err)
	}
}

func TestBundleUsage(t *testing.T) {
	b := newBundle(t)
	empty := t.TempDir()
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"-h"}, 0, "run-gpu-tests.sh [flags] [BUNDLE]\n"},
		{[]string{"--frob"}, 2, "run-gpu-tests: unknown flag --frob; -h shows the flags\n"},
		{[]string{"--timeout"}, 2, "run-gpu-tests: --timeout needs a value; -h shows the flags\n"},
		{[]string{"--timeout", "0"}, 2, "run-gpu-tests: --timeout 0: want whole seconds\n"},
		{[]string{"--np", "a"}, 2, "run-gpu-tests: --np \"a\": want numbers\n"},
		{[]string{"--only", "(", b.dir}, 2, "run-gpu-tests: --only (: not a regular expression\n"},
		{[]string{"--only", "nothing", b.dir}, 2, "run-gpu-tests: no step matches; --list prints their names\n"},
		{[]string{"/nonexistent"}, 2, "run-gpu-tests: no folder /nonexistent\n"},
		{[]string{empty}, 2, "run-gpu-tests: " + empty + " holds no bundle; make gpu-bundle writes one\n"},
		{[]string{empty, b.dir}, 2, "run-gpu-tests: more than one bundle: " + empty + " and " + b.dir + "\n"},
	} {
		t.Run(strings.Join(tt.args, " "), func(t *testing.T) {
			text, code, _ := (&gpuTest{t, b.dir}).run(nil, tt.args...)
			if code != tt.code || !strings.HasPrefix(text, tt.want) || tt.code != 0 && text != tt.want {
				t.Errorf("exit code %d, output %q, want %d, %q", code, text, tt.code, tt.want)
			}
		})
	}
}

// TestBundleScripts packs a bundle without programs: its scripts work where it lies.
func TestBundleScripts(t *testing.T) {
	if _, err := os.Stat("../../.git"); err != nil {
		citest.Lacking(t, "a checkout: what is packed is what git lists")
	}
	for _, prog := range []string{"bash", "git"} {
		citest.Program(t, prog)
	}
	b := &gpuTest{t, t.TempDir()}
	b.script("go", `[ "$1" != env ] || echo `+runtime.GOARCH)
	dir := filepath.Join(b.dir, "packed")
	pack := exec.CommandContext(t.Context(), "../../.ci/gpu/bundle", dir)
	pack.Env = append(os.Environ(), "GO="+filepath.Join(b.dir, "go"), "PACK=gz", "VERSION=test")
	if out, err := pack.CombinedOutput(); err != nil {
		t.Fatalf("bundle: %v\n%s", err, out)
	}
	scripts, err := filepath.Glob(filepath.Join(dir, "*.sh"))
	if err != nil || len(scripts) != 5 {
		t.Errorf("scripts: %q, %v", scripts, err)
	}
	for _, script := range scripts {
		name := filepath.Base(script)
		if name == "common.sh" {
			continue
		}
		out, err := exec.CommandContext(t.Context(), script, "-h").CombinedOutput()
		if err != nil || !strings.HasPrefix(string(out), name+" [flags]") {
			t.Errorf("%s -h: %v\n%s", name, err, out)
		}
	}
}
