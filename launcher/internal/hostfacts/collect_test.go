package hostfacts

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// tree writes files under a new root: "path=text", text with | for newlines.
func tree(t *testing.T, files ...string) string {
	t.Helper()
	root := t.TempDir()
	for _, f := range files {
		name, text, _ := strings.Cut(f, "=")
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(strings.ReplaceAll(text, "|", "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func at(root string, environ ...string) host { return host{Options{Root: root, Environ: environ}} }

// TestCollect looks at the machine that the test runs on.
func TestCollect(t *testing.T) {
	dir := t.TempDir()
	f := Collect(Options{Environ: append(os.Environ(), "TMPDIR="+dir, "XDG_CACHE_HOME="+dir), WDir: filepath.Join(dir, "none"), Device: "host"})
	if f.Kernel.Release == "" || f.Kernel.Arch == "" || f.Cores.Usable < 1 || f.Cores.Online < f.Cores.Usable || f.Memory.Total < 1<<20 || f.Memory.Available <= 0 {
		t.Errorf("kernel, cores, memory: %+v %+v %+v", f.Kernel, f.Cores, f.Memory)
	}
	if f.Limits.NoFile.Soft == 0 || f.User.UID != os.Getuid() || f.Clock.Now.IsZero() || f.Memfd != "" {
		t.Errorf("limits, user, clock, memfd: %+v %+v %+v %q", f.Limits, f.User, f.Clock, f.Memfd)
	}
	if !slices.ContainsFunc(f.Interfaces, func(i Interface) bool { return i.Loopback }) {
		t.Errorf("interfaces without loopback: %+v", f.Interfaces)
	}
	if d := f.Tmp; !d.Exists || !d.Write || d.FS == "" || d.Size <= 0 || d.Owner != os.Getuid() || !strings.HasPrefix(d.Mode, "d") {
		t.Errorf("directory %+v", d)
	}
	if d := f.Cache; d.Path != filepath.Join(dir, "gorun") || d.Exists || !d.Write || d.Err != "" {
		t.Errorf("cache, which is not there yet: %+v", d)
	}
	if d := f.Dir; d == nil || d.Exists {
		t.Errorf("working directory, which is not there: %+v", d)
	}
	b, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	var back Facts
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(&back, f); d != "" {
		t.Errorf("through JSON: got - want +:\n%s", d)
	}
}

// The limit of open files is the one that ranks get, not what Go makes of it for gorun.
func TestFilesOfRanks(t *testing.T) {
	if os.Getenv("TOLD") != "" {
		fmt.Printf("soft %d\n", limits().NoFile.Soft)
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", `ulimit -Sn 99; exec "$0" -test.run='^TestFilesOfRanks$'`, exe)
	cmd.Env = append(os.Environ(), "TOLD=1")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "soft 99\n") {
		t.Errorf("got %v, %s, want soft 99", err, out)
	}
}

func TestCacheOfNobody(t *testing.T) {
	for _, tt := range []struct {
		env  []string
		want string
	}{{nil, ""}, {[]string{"HOME=/h"}, "/h/.cache/gorun"}, {[]string{"HOME=/h", "XDG_CACHE_HOME=/x"}, "/x/gorun"}} {
		if got := at("/", tt.env...).cache(); got != tt.want {
			t.Errorf("%v: got %q, want %q", tt.env, got, tt.want)
		}
	}
	if f := Collect(Options{}); f.Cache.Err == "" || f.Tmp.Path != "/tmp" {
		t.Errorf("without an environment: cache %+v, temporary directory %+v", f.Cache, f.Tmp)
	}
}

func TestDirThatIsNone(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if d := dir(file); d.Err != file+" is no directory" {
		t.Errorf("a file: %+v", d)
	}
	if d := dir(filepath.Join(file, "below")); d.Err != "not a directory" {
		t.Errorf("below a file: %+v", d)
	}
}

func TestGroups(t *testing.T) {
	for _, tt := range []struct {
		name  string
		files []string
		cores float64
		limit int64
		used  int64
	}{
		{"none", nil, 0, -1, 0},
		{"no limit", []string{"proc/self/cgroup=0::/a/b", "sys/fs/cgroup/a/b/cpu.max=max 100000", "sys/fs/cgroup/a/b/memory.max=max", "sys/fs/cgroup/a/b/memory.current=5"}, 0, -1, 0},
		{"own", []string{"proc/self/cgroup=0::/a/b", "sys/fs/cgroup/a/b/cpu.max=150000 100000", "sys/fs/cgroup/a/b/memory.max=1000", "sys/fs/cgroup/a/b/memory.current=5"}, 1.5, 1000, 5},
		{"one above is less", []string{"proc/self/cgroup=0::/a/b", "sys/fs/cgroup/a/b/cpu.max=400000 100000", "sys/fs/cgroup/a/cpu.max=50000 100000",
			"sys/fs/cgroup/a/b/memory.max=1000", "sys/fs/cgroup/a/b/memory.current=5", "sys/fs/cgroup/a/memory.max=900", "sys/fs/cgroup/a/memory.current=7"}, 0.5, 900, 7},
		{"a container's", []string{"proc/self/cgroup=0::/", "sys/fs/cgroup/cpu.max=200000 100000"}, 2, -1, 0},
		{"the older kind", []string{"proc/self/cgroup=4:memory:/j|2:cpu,cpuacct:/j|1:name=systemd:/x|0::/", "sys/fs/cgroup/cpu/j/cpu.cfs_quota_us=250000", "sys/fs/cgroup/cpu/j/cpu.cfs_period_us=100000",
			"sys/fs/cgroup/memory/j/memory.limit_in_bytes=4096", "sys/fs/cgroup/memory/j/memory.usage_in_bytes=96"}, 2.5, 4096, 96},
		{"the older kind, no quota", []string{"proc/self/cgroup=2:cpu,cpuacct:/j", "sys/fs/cgroup/cpu/j/cpu.cfs_quota_us=-1", "sys/fs/cgroup/cpu/j/cpu.cfs_period_us=100000"}, 0, -1, 0},
		{"odd", []string{"proc/self/cgroup=x|::|0::rel|:|0:", "sys/fs/cgroup/cpu.max=1"}, 0, -1, 0},
	} {
		h := at(tree(t, tt.files...))
		limit, used := h.memoryLimit()
		if cores := h.coreLimit(); cores != tt.cores || limit != tt.limit || used != tt.used {
			t.Errorf("%s: got %v cores, memory %d of %d; want %v, %d of %d", tt.name, cores, used, limit, tt.cores, tt.used, tt.limit)
		}
	}
}

func TestOOMKills(t *testing.T) {
	for _, tt := range []struct {
		name  string
		files []string
		want  int
		ok    bool
	}{
		{"one hierarchy", []string{"proc/self/cgroup=0::/j", "sys/fs/cgroup/j/memory.events=low 0|oom 9|oom_kill 2|oom_group_kill 0", "sys/fs/cgroup/memory.events=oom_kill 5"}, 2, true},
		{"in a container", []string{"proc/self/cgroup=0::/docker/1", "sys/fs/cgroup/memory.events=oom_kill 5"}, 5, true},
		{"several", []string{"proc/self/cgroup=4:memory:/j|0::/", "sys/fs/cgroup/memory/j/memory.oom_control=oom_kill_disable 0|under_oom 0|oom_kill 3"}, 3, true},
		{"an old kernel", []string{"proc/self/cgroup=4:memory:/j", "sys/fs/cgroup/memory/j/memory.oom_control=oom_kill_disable 0", "proc/vmstat=oom_kill 7"}, 0, false},
		{"no group", []string{"proc/self/cgroup=0::/", "proc/vmstat=nr_free_pages 7|oom_kill 7|oom_kill_x 8"}, 7, true},
		{"nothing", nil, 0, false},
		{"odd", []string{"proc/vmstat=oom_kill x"}, 0, false},
	} {
		if n, ok := at(tree(t, tt.files...)).oomKills(); n != tt.want || ok != tt.ok {
			t.Errorf("%s: got %d, %v, want %d, %v", tt.name, n, ok, tt.want, tt.ok)
		}
	}
}

func TestMemory(t *testing.T) {
	h := at(tree(t, "proc/meminfo=MemTotal:        1000 kB|MemFree: 5 kB|MemAvailable:    600 kB|odd", "proc/self/cgroup=0::/j",
		"sys/fs/cgroup/j/memory.max=102400", "sys/fs/cgroup/j/memory.current=4096"))
	if d := cmp.Diff(h.memory(), Memory{Total: 1024000, Available: 614400, Limit: 102400, Used: 4096}); d != "" {
		t.Errorf("got - want +:\n%s", d)
	}
}

func TestCountCPUs(t *testing.T) {
	for _, tt := range []struct {
		list string
		want int
	}{{"0", 1}, {"0-3", 4}, {"0-3,8,10-11", 7}, {"", 0}, {"3-1", 0}, {"x", 0}, {"0-99999999999", 0}, {"-1", 0}} {
		if got := countCPUs(tt.list); got != tt.want {
			t.Errorf("%q: got %d, want %d", tt.list, got, tt.want)
		}
	}
}

const nvidiaText = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)  Tue Oct 7"

func TestGPUs(t *testing.T) {
	for _, tt := range []struct {
		name   string
		files  []string
		gpus   []GPU
		driver Driver
	}{
		{"none", []string{"sys/bus/pci/devices/0000:00:01.0/vendor=0x8086", "sys/bus/pci/devices/0000:00:01.0/class=0x030000"}, []GPU{}, Driver{}},
		{"NVIDIA", []string{
			"sys/bus/pci/devices/0000:1b:00.0/vendor=0x10de", "sys/bus/pci/devices/0000:1b:00.0/class=0x030200",
			"sys/bus/pci/devices/0000:1b:00.1/vendor=0x10de", "sys/bus/pci/devices/0000:1b:00.1/class=0x040300", // its audio
			"proc/driver/nvidia/gpus/0000:1b:00.0/information=Model: \t\t NVIDIA H200|IRQ:   \t\t 56|GPU UUID: \t GPU-8a5e|Bus Location: \t 0000:1b:00.0|Device Minor: \t 2",
			"proc/driver/nvidia/version=" + nvidiaText + "|GCC version:  gcc version 12.2.0", "dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia2"},
			[]GPU{{Vendor: nvidia, Model: "NVIDIA H200", UUID: "GPU-8a5e", Bus: "0000:1b:00.0", Device: "/dev/nvidia2"}}, Driver{Vendor: nvidia, Version: "580.159.04"}},
		{"not given to the container", []string{
			"proc/driver/nvidia/gpus/0000:1b:00.0/information=Model: NVIDIA H200|Device Minor: 0", "proc/driver/nvidia/gpus/0000:2b:00.0/information=Model: NVIDIA H200|Device Minor: 1",
			"proc/driver/nvidia/version=" + nvidiaText, "dev/nvidiactl", "dev/nvidia1"},
			[]GPU{{Vendor: nvidia, Model: "NVIDIA H200", Bus: "0000:1b:00.0"}, {Vendor: nvidia, Model: "NVIDIA H200", Bus: "0000:2b:00.0", Device: "/dev/nvidia1"}},
			Driver{Vendor: nvidia, Version: "580.159.04", Lacks: []string{"/dev/nvidia-uvm"}}},
		{"only devices", []string{"dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia0", "dev/nvidia1"}, []GPU{{Vendor: nvidia, Device: "/dev/nvidia0"}, {Vendor: nvidia, Device: "/dev/nvidia1"}},
			Driver{Vendor: nvidia, Errors: []string{"/proc/driver/nvidia/version: not there"}}},
		{"no driver", []string{"sys/bus/pci/devices/0000:1b:00.0/vendor=0x10de", "sys/bus/pci/devices/0000:1b:00.0/class=0x030200"}, []GPU{{Vendor: nvidia, Bus: "0000:1b:00.0"}}, Driver{}},
		{"AMD", []string{"sys/bus/pci/devices/0000:03:00.0/vendor=0x1002", "sys/bus/pci/devices/0000:03:00.0/class=0x120000", "dev/kfd", "sys/module/amdgpu/version=6.10.5"},
			[]GPU{{Vendor: amd, Bus: "0000:03:00.0"}}, Driver{Vendor: amd, Version: "6.10.5"}},
		{"a console's", []string{"sys/bus/pci/devices/0000:03:00.0/vendor=0x1002", "sys/bus/pci/devices/0000:03:00.0/class=0x030000"}, []GPU{}, Driver{}},
		{"Moore Threads", []string{"sys/bus/pci/devices/0000:03:00.0/vendor=0x1ed5", "sys/bus/pci/devices/0000:03:00.0/class=0x030200", "dev/mtgpu.0"},
			[]GPU{{Vendor: mooreThreads, Bus: "0000:03:00.0", Device: "/dev/mtgpu.0"}}, Driver{Vendor: mooreThreads}},
	} {
		h := at(tree(t, tt.files...))
		gpus := h.gpus()
		if d := cmp.Diff(gpus, tt.gpus); d != "" {
			t.Errorf("%s: GPUs: got - want +:\n%s", tt.name, d)
		}
		if d := cmp.Diff(h.driver(gpus), tt.driver); d != "" {
			t.Errorf("%s: driver: got - want +:\n%s", tt.name, d)
		}
	}
}

func FuzzTexts(f *testing.F) {
	f.Add(nvidiaText, "Model: x|Device Minor: 0", "0::/a/../b")
	f.Add("", ":", "1:cpu,cpuacct:/")
	f.Fuzz(func(t *testing.T, version, info, group string) {
		if v := nvidiaVersion(version); v != "" && strings.Trim(v, "0123456789.") != "" {
			t.Errorf("version %q of %q", v, version)
		}
		nvidiaInfo(info)
		if n := countCPUs(info); n < 0 {
			t.Errorf("%q: %d cores", info, n)
		}
		older(version, "5.4")
		root := t.TempDir()
		if err := os.MkdirAll(filepath.Join(root, "proc/self"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "proc/self/cgroup"), []byte(group), 0o600); err != nil {
			t.Fatal(err)
		}
		h := at(root)
		if c := h.coreLimit(); c < 0 {
			t.Errorf("%q: %v cores", group, c)
		}
		h.memoryLimit()
		h.oomKills()
	})
}
