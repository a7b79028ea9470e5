package launcher

import (
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// JAX takes a rank's GPU, counted among those that the rank sees.
func TestJAXDevices(t *testing.T) {
	for _, c := range []struct {
		name string
		job  Job
		gpus string // CUDA_VISIBLE_DEVICES
		want []string
	}{
		{name: "by local rank", job: Job{NP: 3}, gpus: "7,6,5,4", want: []string{"0", "1", "2"}},
		{name: "more ranks than GPUs", job: Job{NP: 3}, gpus: "7,6", want: []string{"0", "1", ""}},
		{name: "alone on the host", job: Job{NP: 1}, gpus: "7,6", want: []string{"0,1"}},
		{name: "one GPU", job: Job{NP: 2}, gpus: "7", want: []string{"0", ""}},
		{name: "hidden", job: Job{NP: 2, GPUBind: GPUBindHide}, gpus: "7,6", want: []string{"0", "0"}},
		{name: "shared", job: Job{NP: 3, GPUBind: GPUBindShare}, gpus: "7,6", want: []string{"0", "1", "0"}},
		{name: "a device for all", job: Job{NP: 2, Device: "1"}, gpus: "7,6", want: []string{"1", "1"}},
		{name: "no GPU", job: Job{NP: 2, Device: "host"}, gpus: "7,6", want: []string{"", ""}},
		{name: "chosen", job: Job{NP: 2, Env: []Setting{{Name: "JAX_LOCAL_DEVICE_IDS", Value: "0,1"}}}, gpus: "7,6", want: []string{"0,1", "0,1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			facts := testFacts
			facts.Machine = recordedMachine(t, "server", Bind{})
			facts.Environ = []string{"CUDA_VISIBLE_DEVICES=" + c.gpus, "JAX_LOCAL_DEVICE_IDS=9"} // of an outer job
			c.job.Program = "./prog"
			p, err := c.job.Plan(facts)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for i := range p.Ranks {
				ids, _ := lookup(p.environ(&p.Ranks[i], nil), "JAX_LOCAL_DEVICE_IDS")
				got = append(got, ids)
			}
			if d := cmp.Diff(got, c.want); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
		})
	}
}

// PyTorch's programs go by the run's id for checkpoints: restarts keep it, and a user may choose it.
func TestRunID(t *testing.T) {
	facts := testFacts
	facts.Environ = []string{"TORCHELASTIC_RUN_ID=outer", "TORCHELASTIC_MAX_RESTARTS=9"}
	n := 3
	for name, c := range map[string]struct {
		env  []Setting
		want string
	}{
		"drawn":   {nil, "r1"},
		"chosen":  {[]Setting{{Name: "TORCHELASTIC_RUN_ID", Value: "mine"}}, "mine"},
		"of here": {[]Setting{{Name: "TORCHELASTIC_RUN_ID", Inherit: true}}, "outer"},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := Job{NP: 2, Program: "./prog", Restarts: &n, Env: c.env}.Plan(facts)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for k := range 2 {
				p = p.attempt(k, "r1")
				env := p.environ(&p.Ranks[1], nil)
				for _, name := range []string{"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"} {
					value, _ := lookup(env, name)
					got = append(got, value)
				}
			}
			if d := cmp.Diff(got, []string{c.want, "0", "3", c.want, "1", "3"}); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
		})
	}
}

func TestEnvLike(t *testing.T) {
	facts := testFacts
	facts.Environ = []string{"OMPI_COMM_WORLD_RANK=7", "OMPI_COMM_WORLD_SIZE=8", "SLURM_PROCID=7"}
	for like, want := range map[string][]string{"": {"", ""}, "ompi": {"1", ""}, "slurm": {"", "1"}} {
		p, err := Job{NP: 2, Program: "./prog", EnvLike: like}.Plan(facts)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, name := range []string{"OMPI_COMM_WORLD_RANK", "SLURM_PROCID"} {
			value, _ := lookup(p.environ(&p.Ranks[1], nil), name)
			got = append(got, value)
		}
		if d := cmp.Diff(got, want); d != "" {
			t.Errorf("%s: -got +want:\n%s", like, d)
		}
	}
	if _, err := (Job{NP: 2, Program: "./prog", EnvLike: "pbs"}).Plan(facts); err == nil || err.Error() != "--env-like pbs: must be ompi or slurm" {
		t.Errorf("got %v", err)
	}
}

// Who shares GPUs finds its GPU's number in whatever variable its program chooses by; gorun's own say its place on the host.
func TestEnvLikeShared(t *testing.T) {
	facts := testFacts
	facts.Machine = recordedMachine(t, "server", Bind{})
	facts.Environ = []string{"CUDA_VISIBLE_DEVICES=7,6", "SLURM_LOCALID=9"}
	rank, size := []string{"LOCAL_RANK"}, []string{"LOCAL_WORLD_SIZE", "LOCAL_SIZE"}
	for like, of := range map[string]struct{ rank, size []string }{
		"":      {rank, size},
		"ompi":  {append(rank, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK"), append(size, "OMPI_COMM_WORLD_LOCAL_SIZE")},
		"slurm": {append(rank, "SLURM_LOCALID"), size},
	} {
		p, err := Job{NP: 3, Program: "./prog", EnvLike: like, GPUBind: GPUBindShare}.Plan(facts)
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range []struct{ rank, size string }{{"0", "2"}, {"1", "2"}, {"0", "1"}} {
			env := p.environ(&p.Ranks[i], nil)
			check := func(want string, names ...string) {
				for _, name := range names {
					if got, _ := lookup(env, name); got != want {
						t.Errorf("like %q, rank %d: %s=%s, want %s", like, i, name, got, want)
					}
				}
			}
			check(want.rank, of.rank...)
			check(want.size, of.size...)
			check(strconv.Itoa(i), "GORUN_LOCAL_RANK")
			check("3", "GORUN_LOCAL_SIZE")
			if _, is := lookup(env, "SLURM_LOCALID"); is != (like == "slurm") {
				t.Errorf("like %q, rank %d: SLURM_LOCALID: %t", like, i, is)
			}
		}
	}
}
