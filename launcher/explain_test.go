package launcher

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/launcher/internal/placement"
	"github.com/gorun-dev/gorun/launcher/internal/placement/recorded"
)

// recordedMachine is a recorded host.
func recordedMachine(t *testing.T, name string, b Bind) *Machine {
	t.Helper()
	root, list := recorded.Host(t, filepath.Join("internal", "placement", "testdata", name+".topo"))
	allowed, err := placement.ParseSet(list)
	if err != nil {
		t.Fatal(err)
	}
	return placement.Read(root, allowed, b)
}

// TestExplain compares what --dry-run says with golden files: on a server with 8 GPUs, and on hosts elsewhere, of which nobody is asked.
func TestExplain(t *testing.T) {
	hosts, err := ParseHosts("a:3,me@b,gate,docker,lost")
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(config, []byte(`Host gate
 Port 2200
Host outer
 HostName 192.0.2.1
 User jumper
Host docker
 ProxyCommand nc %h %p
Host lost
 ProxyJump lost2
Host lost2
 ProxyJump lost
Host b
 HostName 10.0.0.7
 Port 2222
 ProxyJump outer,gate
Host *
 User someone
`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		job  Job
		env  string
	}{
		{"explain-server", Job{NP: 8, Program: "./prog"}, "OMPI_COMM_WORLD_RANK=1"},
		{"explain-hide", Job{NP: 2, Program: "./prog", BindTo: Bind{To: placement.ToCore, Cores: 2}, GPUBind: GPUBindHide}, "CUDA_VISIBLE_DEVICES=6,GPU-3a5e"},
		{"explain-hosts", Job{NP: 7, Program: "./prog", Hosts: hosts, SSHConfig: config, MapBy: &MapBy{Node: true}, BindTo: Bind{To: placement.ToNUMA}}, "CUDA_VISIBLE_DEVICES=0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			facts := testFacts
			facts.Machine = recordedMachine(t, "server", c.job.BindTo)
			facts.Environ = []string{"PATH=/bin", c.env}
			p, err := c.job.Plan(facts)
			if err != nil {
				t.Fatal(err)
			}
			p.FindRoutes(t.Context())
			if p.Remote.SSHConfig != "" {
				p.Remote.SSHConfig = "ssh_config" // not this test's directory
			}
			var b bytes.Buffer
			if err := p.Write(&b); err != nil {
				t.Fatal(err)
			}
			golden(t, c.name+".txt", b.String())
			if len(p.Ranks) < 8 { // enough is enough
				js, err := json.MarshalIndent(p, "", "  ")
				if err != nil {
					t.Fatal(err)
				}
				golden(t, c.name+".json", string(js)+"\n")
			}
			// The rank is started as it was said.
			env := strings.Join(p.environ(&p.Ranks[0], nil), "\n") + "\n"
			for _, kv := range p.Ranks[0].Env {
				if name, _, _ := strings.Cut(kv, "="); strings.Count("\n"+env, "\n"+name+"=") != 1 || !strings.Contains("\n"+env, "\n"+kv+"\n") {
					t.Errorf("%s is not in the environment once:\n%s", kv, env)
				}
			}
		})
	}
}

func TestPlaceErrors(t *testing.T) {
	facts := testFacts
	facts.Environ = []string{"CUDA_VISIBLE_DEVICES=1"}
	facts.Machine = recordedMachine(t, "server", Bind{})
	for _, c := range []struct {
		name string
		job  Job
		want string
	}{
		{"word", Job{GPUBind: "x"}, "--gpu-bind x: must be none, hide or share"},
		{"a device for all", Job{GPUBind: GPUBindHide, Device: "0"}, "--gpu-bind hide shows each rank a GPU of its own, and --device 0 is one for all: give one of them"},
		{"a device for all that share", Job{GPUBind: GPUBindShare, Device: "0"}, "--gpu-bind share gives the ranks GPUs in turn, and --device 0 is one for all: give one of them"},
		{"too few", Job{NP: 2, GPUBind: GPUBindHide}, "host a: 2 ranks, but 1 GPU is visible (CUDA_VISIBLE_DEVICES=1): --gpu-bind hide needs a GPU for each rank"},
		{"list of a rank", Job{NP: 2, GPUBind: GPUBindHide, Env: []Setting{{Name: "CUDA_VISIBLE_DEVICES", Value: "GPU-2"}}},
			"host a: 2 ranks, but 1 GPU is visible (CUDA_VISIBLE_DEVICES=GPU-2): --gpu-bind hide needs a GPU for each rank"},
	} {
		if _, err := c.job.Plan(facts); err == nil || err.Error() != c.want {
			t.Errorf("%s: got %v, want %s", c.name, err, c.want)
		}
	}
	facts.Machine = nil
	if _, err := (Job{BindTo: Bind{To: placement.ToCore}}).Plan(facts); err == nil {
		t.Error("bound without facts of this host")
	}
}

// Programs of one job: one that computes on the host takes no GPU from the others, and each may have a list of its own.
func TestPlaceApps(t *testing.T) {
	facts := testFacts
	facts.Programs = []Program{{Name: "a", Path: "/a"}, {Name: "b", Path: "/b"}, {Name: "c", Path: "/c"}}
	facts.Environ = []string{"CUDA_VISIBLE_DEVICES=7,6"}
	facts.Machine = recordedMachine(t, "server", Bind{})
	job := Job{GPUBind: GPUBindHide, Apps: []App{{NP: 1, Program: "a", Device: "host"}, {NP: 2, Program: "b"},
		{NP: 1, Program: "c", Env: []Setting{{Name: "CUDA_VISIBLE_DEVICES", Value: "1,2,GPU-3a5e"}}}}}
	p, err := job.Plan(facts)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"7,6", "7", "6", "GPU-3a5e"} {
		var got []string
		for _, kv := range p.environ(&p.Ranks[i], nil) {
			if list, ok := strings.CutPrefix(kv, "CUDA_VISIBLE_DEVICES="); ok {
				got = append(got, list)
			}
		}
		if len(got) != 1 || got[0] != want {
			t.Errorf("rank %d sees %q, want %s", i, got, want)
		}
	}
}
