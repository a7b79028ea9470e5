package hostfacts

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// well is a host with two GPUs on which nothing is wrong.
func well() *Facts {
	good := func(path string) Dir {
		return Dir{Path: path, Exists: true, Write: true, FS: "tmpfs", Size: 8 << 30, Free: 4 << 30}
	}
	return &Facts{
		Host: "a", User: User{UID: 1000}, Kernel: Kernel{Release: "6.1.0-18-amd64", Arch: "x86_64"}, Cores: Cores{Online: 8, Usable: 8},
		Memory: Memory{Total: 64 << 30, Available: 32 << 30, Limit: -1}, Limits: Limits{NoFile: Limit{1 << 20, 1 << 20}, NProc: Limit{-1, -1}, MemLock: Limit{8 << 20, 8 << 20}},
		Shm: good("/dev/shm"), Tmp: good("/tmp"), Cache: func() Dir { d := good("/home/a/.cache/gorun"); d.Owner = 1000; return d }(),
		Clock: Clock{Now: time.Date(2026, 11, 29, 0, 0, 0, 0, time.UTC), Synced: true}, Interfaces: []Interface{{Name: "lo", Up: true, Loopback: true}},
		GPUs:       []GPU{{Vendor: nvidia, Device: "/dev/nvidia0"}, {Vendor: nvidia, Device: "/dev/nvidia1"}},
		VisibleGPU: 2, Driver: Driver{Vendor: nvidia, Version: "580.159.04"},
		Libraries: []Library{{Name: "CUDA driver", Path: "/lib/libcuda.so.1", Version: "580.159.04"}, {Name: "NCCL", Path: "/lib/libnccl.so.2", Version: "2.28.3"}},
	}
}

func TestFaults(t *testing.T) {
	type fault struct {
		stops bool
		what  string
	}
	for _, tt := range []struct {
		name  string
		spoil func(f *Facts)
		want  []fault
	}{
		{"well", func(*Facts) {}, nil},
		{"no GPU", func(f *Facts) { f.GPUs, f.Driver, f.Libraries, f.VisibleGPU = nil, Driver{}, nil, 0 }, nil},
		{"kernel", func(f *Facts) { f.Kernel.Release = "4.18.0-553.el8" }, []fault{{true, "Linux 4.18.0-553.el8: gorun needs 5.4 or later"}}},
		{"kernel 5.4", func(f *Facts) { f.Kernel.Release = "5.4.0-generic" }, nil},
		{"kernel 5.10", func(f *Facts) { f.Kernel.Release = "5.10.0" }, nil},
		{"memfd", func(f *Facts) { f.Memfd = "operation not permitted" }, []fault{{true, "no anonymous shared memory: memfd_create: operation not permitted"}}},
		{"loopback", func(f *Facts) { f.Interfaces[0].Up = false }, []fault{{false, "the loopback interface is down: PyTorch and NCCL connect the ranks of a host through it"}}},
		{"directory", func(f *Facts) { f.Dir = &Dir{Path: "/x"} }, []fault{{true, "working directory /x: not there"}}},
		{"directory's error", func(f *Facts) { f.Dir = &Dir{Path: "/x", Err: "permission denied"} }, []fault{{true, "working directory /x: permission denied"}}},
		{"program", func(f *Facts) { f.Programs = []Program{{Name: "./p", Err: "no such file or directory"}} }, []fault{{true, "program ./p: no such file or directory"}}},
		{"files", func(f *Facts) { f.Limits.NoFile = Limit{256, -1} }, []fault{{false, "open files are limited to 256 (hard unlimited)"}}},
		{"processes", func(f *Facts) { f.Limits.NProc = Limit{100, 100} }, []fault{{false, "processes and threads of the user are limited to 100"}}},
		{"processes of root", func(f *Facts) { f.Limits.NProc = Limit{100, 100}; f.User.UID = 0; f.Cache.Owner = 0 }, nil},
		{"locked memory", func(f *Facts) { f.InfiniBand = []string{"mlx5_0"} }, []fault{{false, "locked memory is limited to 8 MiB: InfiniBand registers more"}}},
		{"memory", func(f *Facts) { f.Memory.Available = 100 << 20 }, []fault{{false, "100 MiB of memory are left"}}},
		{"memory of the group", func(f *Facts) { f.Memory.Limit, f.Memory.Used = 1<<30, 1<<30-1<<20 }, []fault{{false, "1 MiB of memory are left"}}},
		{"cores", func(f *Facts) { f.Cores.Limit = 0.25 }, []fault{{false, "the control group allows 0.25 of a core"}}},
		{"TMPDIR", func(f *Facts) { f.Tmp.Exists = false }, []fault{{false, "temporary directory /tmp: not there"}}},
		{"TMPDIR read only", func(f *Facts) { f.Tmp.Flags = []string{"ro"} }, []fault{{false, "temporary directory /tmp cannot be written"}}},
		{"TMPDIR full", func(f *Facts) { f.Tmp.Free = 1000 }, []fault{{false, "temporary directory /tmp has 1000 bytes left"}}},
		{"TMPDIR noexec", func(f *Facts) { f.Tmp.Flags = []string{"nosuid", "noexec"} }, []fault{{false, "temporary directory /tmp is mounted noexec: programs that are built there cannot run"}}},
		{"cache", func(f *Facts) { f.Cache.Write = false }, []fault{{false, "cache directory /home/a/.cache/gorun cannot be written"}}},
		{"cache of another", func(f *Facts) { f.Cache.Owner = 0 }, []fault{{false, "cache directory /home/a/.cache/gorun belongs to user 0: gorun does not use it"}}},
		{"cache noexec", func(f *Facts) { f.Cache.Flags = []string{"noexec"} }, []fault{{false, "cache directory /home/a/.cache/gorun is mounted noexec: programs that are built there cannot run"}}},
		{"cache full", func(f *Facts) { f.Cache.Free = 0 }, []fault{{false, "cache directory /home/a/.cache/gorun has 0 bytes left"}}},
		{"cache no directory", func(f *Facts) { f.Cache.Err = "/home/a is no directory" }, []fault{{false, "cache directory /home/a/.cache/gorun: /home/a is no directory"}}},
		{"clock", func(f *Facts) { f.Clock.Now = time.Unix(0, 0).UTC() }, []fault{{false, "the clock says 1970-01-01"}}},

		{"no driver", func(f *Facts) { f.Driver = Driver{}; f.VisibleGPU = 0; f.Libraries = nil },
			[]fault{{false, "2 GPUs are on the bus, and no driver is loaded: ranks run on the host platform"}}},
		{"driver's devices", func(f *Facts) { f.Driver.Errors = []string{"/dev/nvidiactl: permission denied"} },
			[]fault{{true, "NVIDIA driver: /dev/nvidiactl: permission denied"}}},
		{"before the first use", func(f *Facts) { f.Driver.Lacks = []string{"/dev/nvidia-uvm"} },
			[]fault{{false, "/dev/nvidia-uvm is not there: the driver makes it at the first use, but not in a container"}}},
		{"a GPU not given", func(f *Facts) { f.GPUs[0].Device, f.GPUs[1].Device = "", ""; f.VisibleGPU = 0 },
			[]fault{{true, "the NVIDIA driver is there, and no /dev/nvidia0: ranks have no GPU"}}},
		{"permission", func(f *Facts) { f.GPUs[1].Err = "permission denied" }, []fault{{true, "/dev/nvidia1: permission denied"}}},
		{"all of it, on the host platform", func(f *Facts) { f.Device = "host"; f.Driver.Errors = []string{"x"}; f.GPUs[1].Err = "x" }, nil},
		{"no NCCL", func(f *Facts) { f.Libraries[1] = Library{Name: "NCCL", Err: "not found"} }, []fault{{true, "NCCL: not found"}}},
		{"no NCCL, one GPU", func(f *Facts) { f.Libraries[1] = Library{Name: "NCCL", Err: "not found"}; f.VisibleGPU = 1 }, []fault{{false, "NCCL: not found"}}},
		{"no driver library", func(f *Facts) {
			f.Libraries[0] = Library{Name: "CUDA driver", Path: "/x", From: "GORUN_CUDA_LIB", Err: "cut off"}
		},
			[]fault{{true, "CUDA driver: /x (GORUN_CUDA_LIB): cut off"}}},
		{"updated driver", func(f *Facts) { f.Libraries[0].Version = "590.1.2" }, []fault{{true, "/lib/libcuda.so.1 is version 590.1.2, the kernel module 580.159.04"}}},
		{"compatibility package", func(f *Facts) {
			f.Libraries[0].Version, f.Libraries[0].Path = "590.1.2", "/usr/local/cuda/compat/libcuda.so.1"
		}, nil},
		{"old NCCL", func(f *Facts) { f.Libraries[1].Version = "2.18.6" }, []fault{{false, "NCCL 2.18.6 (/lib/libnccl.so.2) registers no buffers"}}},
		{"small shm", func(f *Facts) { f.Shm.Size = 64 << 20 }, []fault{{false, "/dev/shm has 64 MiB: NCCL may need more"}}},
		{"shm read only", func(f *Facts) { f.Shm.Write = false }, []fault{{true, "/dev/shm cannot be written: NCCL needs it"}}},
		{"stopping ones first", func(f *Facts) { f.Cores.Limit = 0.5; f.Memfd = "x" },
			[]fault{{true, "no anonymous shared memory: memfd_create: x"}, {false, "the control group allows 0.5 of a core"}}},
	} {
		f := well()
		tt.spoil(f)
		var got []fault
		for _, x := range f.Faults() {
			got = append(got, fault{x.Stops, x.What})
			if x.Advice == "" {
				t.Errorf("%s: %s: no advice", tt.name, x.What)
			}
		}
		if d := cmp.Diff(got, tt.want, cmp.AllowUnexported(fault{})); d != "" {
			t.Errorf("%s: got - want +:\n%s", tt.name, d)
		}
	}
}

func TestBytes(t *testing.T) {
	for _, tt := range []struct {
		n    int64
		want string
	}{{-1, "unlimited"}, {0, "0 bytes"}, {1023, "1023 bytes"}, {1536, "1.5 KiB"}, {64 << 20, "64 MiB"}, {25276059648, "23.54 GiB"}, {3 << 40, "3 TiB"}} {
		if got := Bytes(tt.n); got != tt.want {
			t.Errorf("%d: got %q, want %q", tt.n, got, tt.want)
		}
	}
}
