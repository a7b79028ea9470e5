package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher"
)

// TestCheckWithBench runs gorun check with the real gorun-bench, on the host platform.
func TestCheckWithBench(t *testing.T) {
	if testing.Short() {
		t.Skip("builds gorun-bench and gorun")
	}
	bin := t.TempDir()
	build := exec.Command("go", "build", "-o", bin+"/", "../gorun", "../gorun-bench")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	run := func(t *testing.T, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), filepath.Join(bin, "gorun"), append([]string{"check"}, args...)...)
		cmd.Env = append(os.Environ(), "GORUN_DEVICE=host", "GORUN_OVERSUBSCRIBE=")
		var errs strings.Builder
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil || errs.Len() > 0 {
			t.Fatalf("gorun check %v: %v\n%s%s", args, err, errs.String(), out)
		}
		return string(out)
	}
	t.Run("deep", func(t *testing.T) {
		var got checkReport
		if err := json.Unmarshal([]byte(run(t, "--json", "-np", "2")), &got); err != nil {
			t.Fatal(err)
		}
		if r := got.Ranks; !got.OK || r == nil || len(r.Ranks) != 2 || r.Error != "" || len(r.Explain) == 0 || r.Ranks[1].Rank != 1 || r.Ranks[1].Device == "" || r.Ranks[1].Memory == 0 {
			t.Errorf("%+v of %+v", got.Ranks, got)
		}
	})
	t.Run("registration", func(t *testing.T) {
		var got struct {
			Ranks    int
			Buffers  []struct{ Memory, Registered, Released string }
			Problems []any
		}
		if err := json.Unmarshal([]byte(run(t, "--registration", "--json", "-np3")), &got); err != nil {
			t.Fatal(err)
		}
		count := map[string]int{}
		for _, b := range got.Buffers {
			count[b.Memory+": "+b.Registered+": "+b.Released]++
		}
		want := map[string]int{"private: none: ": 6, "private: refused: ": 6, "nccl.Alloc: graph, shared memory: graph closed": 12, "nccl.Alloc: local, shared memory: Registration.Close": 6,
			"arena: local, shared memory: Arena.Close": 6, "window: window: Window.Close": 6,
			"small nccl.Alloc: window: graph closed": 6}
		if d := cmp.Diff(count, want); d != "" || got.Ranks != 3 || len(got.Problems) > 0 {
			t.Errorf("%d ranks, problems %v; got - want +:\n%s", got.Ranks, got.Problems, d)
		}
		if text := run(t, "--registration"); !strings.HasSuffix(text, "\nAll as expected.\n") {
			t.Errorf("table:\n%s", text)
		}
	})
}

func TestCheckText(t *testing.T) {
	var f launcher.HostFacts
	err := json.Unmarshal([]byte(`{"host": "node-a", "user": {"uid": 1000, "name": "ann"}, "kernel": {"release": "6.1.0", "arch": "x86_64"},
		"cores": {"online": 8, "usable": 4, "limit": 2.5}, "memory": {"total": 68719476736, "available": 34359738368, "limit": 1073741824, "used": 1048576},
		"limits": {"nofile": {"soft": 1024, "hard": 4096}, "nproc": {"soft": -1, "hard": -1}, "memlock": {"soft": 8388608, "hard": -1}},
		"shm": {"path": "/dev/shm", "exists": true, "fs": "tmpfs", "size": 67108864, "free": 67108864, "flags": ["nosuid", "nodev"]},
		"tmp": {"path": "/tmp", "exists": true, "fs": "ext4", "size": 1073741824, "free": 536870912},
		"cache": {"path": "/home/ann/.cache/gorun", "error": "permission denied"}, "wdir": {"path": "/work"},
		"clock": {"now": "2026-11-29T12:00:00Z", "synchronized": true},
		"interfaces": [{"name": "lo", "up": true, "loopback": true, "addresses": ["127.0.0.1/8"]}, {"name": "eth0", "up": true, "addresses": ["10.0.0.7/24"]}, {"name": "eth1", "addresses": ["10.0.1.7/24"]}],
		"infiniband": ["mlx5_0"], "visible_gpus": 1, "driver": {"vendor": "NVIDIA", "version": "580.159.04"},
		"gpus": [{"vendor": "NVIDIA", "model": "NVIDIA H200", "bus": "0000:1b:00.0", "device": "/dev/nvidia0"}, {"vendor": "NVIDIA"}],
		"libraries": [{"name": "CUDA driver", "path": "/lib/libcuda.so.1", "from": "system", "version": "580.159.04"}, {"name": "NCCL", "error": "not found"}],
		"programs": [{"name": "./train", "error": "no such file or directory"}]}`), &f)
	if err != nil {
		t.Fatal(err)
	}
	r := &checkReport{Hosts: []hostReport{{nil, &f, []launcher.HostFault{{Stops: true, What: "program ./train: no such file or directory", Advice: "build it"}, {What: "small", Advice: "more"}}}},
		Ranks: &ranksReport{Ranks: []probedRank{{Device: "CUDA device 0 (NVIDIA H200)", UUID: "GPU-8a5e", Bus: "0000:1b:00.0", Driver: "13.0", Library: "/lib/libcuda.so.1", Free: 1 << 30, Memory: 2 << 30}, {Rank: 1, Error: "no GPU"}},
			Library: "NCCL", Version: "2.28.3", Path: "/lib/libnccl.so.2", Error: "rank 1: it fails"}}
	const want = `node-a, user ann
  kernel       Linux 6.1.0, x86_64
  cores        4 of 8, the control group allows 2.5
  memory       64 GiB, 32 GiB available; the control group allows 1 GiB, 1 MiB of it are used
  limits       open files 1024, processes unlimited, locked memory 8 MiB
  shm          /dev/shm: tmpfs, 64 MiB, 64 MiB free (nosuid, nodev)
  TMPDIR       /tmp: ext4, 1 GiB, 512 MiB free
  cache        /home/ann/.cache/gorun: permission denied
  wdir         /work: not there
  clock        2026-11-29 12:00:00 UTC, synchronized
  interfaces   lo 127.0.0.1/8
               eth0 10.0.0.7/24
  InfiniBand   mlx5_0
  GPUs         NVIDIA H200 at 0000:1b:00.0, /dev/nvidia0
               NVIDIA GPU
               1 of them visible to ranks
  driver       NVIDIA 580.159.04
  CUDA driver  580.159.04 /lib/libcuda.so.1 (system)
  NCCL         not found
  ssh client   none (gorun has its own)
  program      ./train: no such file or directory
ranks of gorun-bench
  rank 0       CUDA device 0 (NVIDIA H200), 0000:1b:00.0, GPU-8a5e, 1 GiB of 2 GiB free; driver 13.0 (/lib/libcuda.so.1)
  rank 1       no GPU
  NCCL         2.28.3 (/lib/libnccl.so.2)
  communicator rank 1: it fails

fault: program ./train: no such file or directory
  build it
warning: small
  more
`
	if d := cmp.Diff(r.text(false), want); d != "" {
		t.Errorf("got - want +:\n%s", d)
	}
}

// TestCheckTextOfHosts: what is alike is one line, what differs is a line each.
func TestCheckTextOfHosts(t *testing.T) {
	hosts := make([]hostReport, 4)
	for i, text := range []string{
		`{"host": "a", "user": {"uid": 1000, "name": "ann"}, "kernel": {"release": "6.1.0", "arch": "x86_64"}, "cores": {"online": 8, "usable": 8},
			"memory": {"total": 68719476736, "available": 34359738368, "limit": -1},
			"limits": {"nofile": {"soft": 1024, "hard": 4096}, "nproc": {"soft": -1, "hard": -1}, "memlock": {"soft": 8388608, "hard": -1}},
			"shm": {"path": "/dev/shm", "exists": true, "fs": "tmpfs", "size": 67108864, "free": 67108864, "flags": ["nosuid", "nodev"]},
			"tmp": {"path": "/tmp", "exists": true, "fs": "ext4", "size": 1073741824, "free": 536870912},
			"cache": {"path": "/home/ann/.cache/gorun", "error": "permission denied"}, "wdir": {"path": "/work"},
			"clock": {"now": "2026-11-29T12:00:00Z", "synchronized": true},
			"interfaces": [{"name": "lo", "up": true, "loopback": true, "addresses": ["127.0.0.1/8"]}, {"name": "eth0", "up": true, "addresses": ["10.0.0.7/24"]}, {"name": "eth1", "addresses": ["10.0.1.7/24"]}],
			"infiniband": ["mlx5_0"], "visible_gpus": 1, "driver": {"vendor": "NVIDIA", "version": "580.159.04"},
			"gpus": [{"vendor": "NVIDIA", "model": "NVIDIA H200"}, {"vendor": "NVIDIA"}],
			"libraries": [{"name": "CUDA driver", "path": "/lib/libcuda.so.1", "from": "system", "version": "580.159.04"}, {"name": "NCCL", "error": "not found"}],
			"programs": [{"name": "./train", "path": "/srv/train"}]}`,
		`{"host": "b", "user": {"uid": 1000, "name": "ann"}, "kernel": {"release": "6.1.0", "arch": "x86_64"}, "cores": {"online": 8, "usable": 4, "limit": 2.5},
			"memory": {"total": 68719476736, "available": 1, "limit": 1073741824, "used": 1048576},
			"limits": {"nofile": {"soft": 1024, "hard": 4096}, "nproc": {"soft": -1, "hard": -1}, "memlock": {"soft": 8388608, "hard": -1}},
			"shm": {"path": "/dev/shm", "exists": true, "fs": "tmpfs", "size": 67108864, "free": 1, "flags": ["nosuid", "nodev"]},
			"tmp": {"path": "/tmp", "exists": true, "fs": "ext4", "size": 1073741824, "free": 1},
			"cache": {"path": "/home/ann/.cache/gorun", "exists": true, "fs": "ext4", "size": 1073741824}, "wdir": {"path": "/work"},
			"clock": {"now": "2026-11-29T12:00:01Z"}, "gpus": [], "programs": [{"name": "./train", "sent": true}]}`,
		`{"host": "c", "user": {"uid": 1001}, "kernel": {"release": "6.1.0", "arch": "x86_64"}, "cores": {"online": 4, "usable": 4, "limit": 2.5},
			"memory": {"total": 68719476736, "available": 1, "limit": 1073741824, "used": 1048576},
			"limits": {"nofile": {"soft": 1024, "hard": 4096}, "nproc": {"soft": -1, "hard": -1}, "memlock": {"soft": 8388608, "hard": -1}},
			"shm": {"path": "/dev/shm"}, "tmp": {"path": "/tmp", "exists": true, "fs": "ext4", "size": 1073741824, "free": 1},
			"cache": {"path": "/home/ann/.cache/gorun", "exists": true, "fs": "ext4", "size": 1073741824},
			"clock": {"now": "2026-11-29T12:00:01Z", "synchronized": true}, "gpus": [], "programs": [{"name": "./train", "error": "program ./train: not there"}]}`,
	} {
		if err := json.Unmarshal([]byte(text), &hosts[i].HostFacts); err != nil {
			t.Fatal(err)
		}
	}
	hosts[0].hostLink = &hostLink{Name: "a", Reached: true, Local: true, Chosen: "10.0.0.7", On: "eth0", Reach: []launcher.HostReach{{Host: "b"}, {Host: "c"}}}
	hosts[1].hostLink = &hostLink{Name: "b", Reached: true, Sent: true, Agent: "/cache/gorun", Chosen: "10.0.0.8: of three", On: "eth0", moved: true, Skew: 2e9, Reach: []launcher.HostReach{{Host: "a"}, {Host: "c"}}}
	hosts[2].hostLink = &hostLink{Name: "c", Reached: true, Agent: "/cache/gorun", Reach: []launcher.HostReach{{Host: "a"}, {Host: "b", Err: "no route"}}}
	hosts[3].hostLink = &hostLink{Name: "d"}
	const want = `3 of 4 hosts are reached: a b c
1 is not: d
  user         a b: ann
               c: 1001
  kernel       Linux 6.1.0, x86_64
  cores        a: 8
               b c: 4, the control group allows 2.5
  memory       a: 64 GiB
               b c: 1 GiB
  limits       open files 1024, processes unlimited, locked memory 8 MiB
  shm          a b: /dev/shm: tmpfs, 64 MiB (nosuid, nodev)
               c: /dev/shm: not there
  TMPDIR       /tmp: ext4, 1 GiB
  cache        a: /home/ann/.cache/gorun: permission denied
               b c: /home/ann/.cache/gorun: ext4, 1 GiB
  wdir         a b: /work: not there
               c: none
  clock        a c: synchronized
               b: not synchronized, +2.0 s
  interfaces   a: eth0
               b c: none
  InfiniBand   a: mlx5_0
               b c: none
  GPUs         a: 2 of NVIDIA H200, 1 of them visible to ranks
               b c: none: ranks run on the host platform
  driver       a: NVIDIA 580.159.04
               b c: none
  libraries    a: CUDA driver 580.159.04
               b c: none
  program      a: ./train: /srv/train
               b: ./train: would be sent
               c: program ./train: not there
  gorun        a: this host
               b: was sent to /cache/gorun
               c: /cache/gorun
  address      a: that of ssh, on eth0
               b: 10.0.0.8: of three
               c: none at which all others reach it
  reaches      a b: all others that were tried
               c: 1 of 2 others

`
	if d := cmp.Diff((&checkReport{Hosts: hosts}).text(false), want); d != "" {
		t.Errorf("got - want +:\n%s", d)
	}
}

// TestCheckSettle: what ranks have opened works, whatever files say; what they have not is as it was.
func TestCheckSettle(t *testing.T) {
	for _, tt := range []struct {
		name  string
		ranks []launcher.HostFault
		want  []bool // whether the GPU's and the program's faults stop
	}{
		{"ranks are well", nil, []bool{false, true}},
		{"ranks are not", []launcher.HostFault{{What: "no device was opened"}}, []bool{true, true}},
	} {
		r := &checkReport{Hosts: []hostReport{{nil, nil, []launcher.HostFault{{Stops: true, GPU: true, What: "NCCL: not found"}, {Stops: true, What: "program"}}}}, Ranks: &ranksReport{Faults: tt.ranks}}
		r.settle()
		var got []bool
		for _, f := range r.Hosts[0].Faults {
			got = append(got, f.Stops)
		}
		if d := cmp.Diff(got, tt.want); d != "" {
			t.Errorf("%s: got - want +:\n%s", tt.name, d)
		}
	}
}
