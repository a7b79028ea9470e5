package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// firstScript measures the time to the first all-reduce.
const firstScript = "../../.ci/gpu/first.sh"

func newFirst(t *testing.T) (p *peersTest, args []string) {
	p = newPeers(t)
	p.program = firstScript
	p.script("bin/gorun", `log gorun "$1" "$2" "${@:3}"; shift 2; exec "$@"`)
	p.script("bin/allreduce", `sleep 0.1; echo "1 launches on rank 0 of 2 (GPU): 2 elements, each is 3 as it should be"; sleep 0.1`)
	p.script("python", `log "$NCCL_NVLS_ENABLE" "$@"; echo "first all-reduce of 2 ranks, torch 2"`)
	return p, []string{"--bin", p.dir + "/bin", "--nccl-tests", p.dir + "/perf", "--mpirun", p.dir + "/mpirun", "--python", p.dir + "/python", "--out", p.out}
}

func TestFirst(t *testing.T) {
	p, args := newFirst(t)
	text, code := p.run(append(args, "--rounds", "3", "--np", "1,2", "--no-multicast")...)
	if code != 0 {
		t.Fatalf("exit code %d, output:\n%s", code, text)
	}
	data, err := os.ReadFile(filepath.Join(p.out, "first.json"))
	if err != nil {
		t.Fatal(err)
	}
	var rows []struct {
		Program string
		Ranks   int
		Median  float64   `json:"median_s"`
		End     float64   `json:"median_end_s"`
		First   []float64 `json:"first_s"`
	}
	if err := json.Unmarshal(data, &rows); err != nil {
		t.Fatalf("%v:\n%s", err, data)
	}
	var got []string
	for _, r := range rows {
		got = append(got, r.Program+strings.Repeat(" rank", r.Ranks)+strings.Repeat(" run", len(r.First)))
		// The stand-in prints its line after 0.1 s, which may be read late, and ends 0.1 s later.
		if r.Program == "gorun" && (r.Median < 0.1 || r.End < 0.2 || r.End <= r.Median) {
			t.Errorf("%s: the first all-reduce after %v s, the end after %v s", r.Program, r.Median, r.End)
		}
	}
	var want []string
	for _, ranks := range []string{" rank", " rank rank"} {
		for _, name := range []string{"gorun", "gorun-torch", "nccl-tests", "torchrun"} {
			want = append(want, name+ranks+" run run run")
		}
	}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("got - want +:\n%s", d)
	}
	log := strings.Join(p.log(), "\n")
	for _, line := range []string{"gorun -np 2 " + p.dir + "/bin/allreduce -n 2 -launches 1", "mpirun -x NCCL_NVLS_ENABLE -x NVSHMEM_DISABLE_NVLS -x TORCH_SYMM_MEM_DISABLE_MULTICAST -np 1 ", "all_reduce_perf -b 8 -e 8 ",
		"0 -m torch.distributed.run --standalone --nproc-per-node 2 "} {
		if !strings.Contains(log, line) {
			t.Errorf("nothing was called with %q:\n%s", line, log)
		}
	}
}

// A program that fails, or says nothing, is told, and the others are there.
func TestFirstFailure(t *testing.T) {
	for _, tt := range []struct{ program, want string }{
		{`echo no device >&2; exit 3`, "-launches 1: exit code 3\nno device\n"},
		{`:`, "-launches 1: exit code 0\n"},
	} {
		p, args := newFirst(t)
		p.script("bin/allreduce", tt.program)
		text, code := p.run(append(args, "--rounds", "1", "--np", "2")...)
		if code != 1 || !strings.Contains(text, tt.want) || !strings.Contains(text, "\ntorchrun ") || strings.Contains(text, "\ngorun  ") {
			t.Errorf("exit code %d, want 1, output:\n%s", code, text)
		}
	}
}

func TestFirstUsage(t *testing.T) {
	p, args := newFirst(t)
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"-h"}, 0, "first.sh [flags]\n"},
		{[]string{"--frob"}, 2, "first: unknown argument --frob; -h shows the flags\n"},
		{[]string{"--np"}, 2, "first: --np needs a value; -h shows the flags\n"},
		{append(args, "--np", "1,"), 2, "first: --np 1,: want numbers such as 1,2,4\n"},
		{append(args, "--nccl-tests", p.dir), 2, "first: --nccl-tests " + p.dir + ": no program all_reduce_perf\n"},
	} {
		if text, code := p.run(tt.args...); code != tt.code || !strings.HasPrefix(text, tt.want) {
			t.Errorf("%v: exit code %d, output %q, want %d, %q", tt.args, code, text, tt.code, tt.want)
		}
	}
}
