package placement

import (
	"fmt"
	"strings"
	"testing"
)

// Ranks that share GPUs take them in turn. Where there are as many, that is all; else those of each turn are as on a host of their own.
func TestShare(t *testing.T) {
	server, allowed := recordedHost(t, "server")
	laptop, cpus := recordedHost(t, "laptop")
	for _, c := range []struct {
		name   string
		root   string
		allow  Set
		ranks  int
		env    string
		want   []string // of each rank: its GPU, its variables, its turn
		shared string
	}{
		{"one", server, allowed, 3, "GORUN_NODE=1 CUDA_VISIBLE_DEVICES=5", []string{
			"5 GORUN_DEVICE=0 NCCL_HOSTID=gorun-1-0 turn 0/1",
			"5 GORUN_DEVICE=0 NCCL_HOSTID=gorun-1-1 turn 0/1",
			"5 GORUN_DEVICE=0 NCCL_HOSTID=gorun-1-2 turn 0/1"},
			"3 ranks share 1 GPU: slow, for trying out; they reach each other by sockets"},
		{"two, one and a half turns", server, allowed, 3, "GORUN_NODE=0 CUDA_VISIBLE_DEVICES=6,GPU-1", []string{
			"6 GORUN_DEVICE=0 NCCL_HOSTID=gorun-0-0 turn 0/2",
			"GPU-1 GORUN_DEVICE=1 NCCL_HOSTID=gorun-0-0 turn 1/2",
			"6 GORUN_DEVICE=0 NCCL_HOSTID=gorun-0-1 turn 0/1"},
			"3 ranks share 2 GPUs, up to 2 on one: slow, for trying out; they reach each other by sockets"},
		{"enough", server, allowed, 2, "CUDA_VISIBLE_DEVICES=3,2", []string{"3 GORUN_DEVICE=0", "2 GORUN_DEVICE=1"}, ""},
		{"the user's host", server, allowed, 2, "CUDA_VISIBLE_DEVICES=3 NCCL_HOSTID=mine", []string{
			"3 GORUN_DEVICE=0 turn 0/1", "3 GORUN_DEVICE=0 turn 0/1"},
			"2 ranks share 1 GPU: slow, for trying out; they reach each other by sockets"},
		{"none visible", server, allowed, 2, "CUDA_VISIBLE_DEVICES=", []string{"", ""}, ""},
		{"a laptop without a GPU", laptop, cpus, 2, "", []string{"", ""}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := ask(Bind{}, c.ranks, "", strings.Fields(c.env)...)
			a.Share = true
			m := Read(c.root, c.allow, Bind{})
			p, err := m.Place(a)
			if err != nil {
				t.Fatal(err)
			}
			for i, want := range c.want {
				r := p.Ranks[i]
				got := strings.TrimSpace(r.GPU + " " + strings.Join(r.Vars, " "))
				if r.Turn != (Turn{}) {
					got += fmt.Sprintf(" turn %d/%d", r.Turn.Rank, r.Turn.Size)
				}
				if got != want {
					t.Errorf("rank %d: got %q, want %q", i, got, want)
				}
			}
			if h, _ := m.Tell(p); h.Shared != c.shared {
				t.Errorf("got %q, want %q", h.Shared, c.shared)
			}
		})
	}
}

// Ranks that are given a device take no turn.
func TestShareBesideADevice(t *testing.T) {
	root, allowed := recordedHost(t, "server")
	a := ask(Bind{}, 3, "", "GORUN_NODE=0", "CUDA_VISIBLE_DEVICES=0")
	a.Share = true
	a.Ranks[0].Device = "host"
	p, err := Read(root, allowed, Bind{}).Place(a)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"", "NCCL_HOSTID=gorun-0-0", "NCCL_HOSTID=gorun-0-1"} {
		if got := strings.Join(p.Ranks[i].Vars, " "); !strings.HasSuffix(got, want) || (want == "") != (got == "") {
			t.Errorf("rank %d: got %q, want %q", i, got, want)
		}
	}
}
