package hostfacts

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Fault is what is wrong with a host.
type Fault struct {
	Stops  bool   `json:"stops"`         // a job; else it is a warning
	GPU    bool   `json:"gpu,omitempty"` // it is about GPUs, by their files: where ranks have opened them, it was a false alarm
	What   string `json:"what"`
	Advice string `json:"advice"` // what mends it
}

// What jobs want at least. Below it a warning says so.
const (
	wantFiles   = 1024      // a rank has some ten descriptors, gorun eight for each rank
	wantProcs   = 512       // threads count: a rank has ten to thirty
	wantMemory  = 256 << 20 // a Go rank takes some 20 MiB, a rank on a GPU some hundred
	wantTmp     = 64 << 20  // a Go program that is built
	wantShm     = 256 << 20 // NCCL takes some 10 MiB for each pair of ranks; containers often have 64 MiB
	wantFree    = 16 << 20
	oldKernel   = "5.4"
	clockBefore = 2024
)

// Faults looks for what would stop a job on the host, and for what would hamper it: those that stop come first.
func (f *Facts) Faults() []Fault {
	var stops, warns []Fault
	stop := func(advice, format string, args ...any) {
		stops = append(stops, Fault{Stops: true, What: fmt.Sprintf(format, args...), Advice: advice})
	}
	warn := func(advice, format string, args ...any) {
		warns = append(warns, Fault{What: fmt.Sprintf(format, args...), Advice: advice})
	}

	if older(f.Kernel.Release, oldKernel) {
		stop("use a newer kernel", "Linux %s: gorun needs %s or later", f.Kernel.Release, oldKernel)
	}
	if f.Memfd != "" {
		stop("allow memfd_create (a seccomp profile of a container?)", "no anonymous shared memory: memfd_create: %s", f.Memfd)
	}
	if d := f.Dir; d != nil && (d.Err != "" || !d.Exists) {
		stop("make it, or give another with --wdir", "working directory %s: %s", d.Path, cmp.Or(d.Err, "not there"))
	}
	for _, p := range f.Programs {
		if p.Err != "" {
			stop("build or install it, or correct its name", "program %s: %s", p.Name, p.Err)
		}
	}
	if !slices.ContainsFunc(f.Interfaces, func(i Interface) bool { return i.Loopback && i.Up }) {
		warn("ip link set lo up", "the loopback interface is down: PyTorch and NCCL connect the ranks of a host through it")
	}

	if n := f.Limits.NoFile; n.Soft >= 0 && n.Soft < wantFiles {
		warn(fmt.Sprintf("ulimit -n %d", wantFiles*4), "open files are limited to %d (hard %s)", n.Soft, limitText(n.Hard))
	}
	if n := f.Limits.NProc; n.Soft >= 0 && n.Soft < wantProcs && f.User.UID != 0 {
		warn(fmt.Sprintf("ulimit -u %d", wantProcs*8), "processes and threads of the user are limited to %d", n.Soft)
	}
	if n := f.Limits.MemLock; n.Soft >= 0 && n.Soft < 1<<30 && len(f.InfiniBand) > 0 {
		warn("ulimit -l unlimited (memlock in /etc/security/limits.conf)", "locked memory is limited to %s: InfiniBand registers more", Bytes(n.Soft))
	}
	if free := f.free(); f.Memory.Total > 0 && free < wantMemory {
		warn("end something, or raise the limit", "%s of memory are left", Bytes(free))
	}
	if c := f.Cores; c.Limit > 0 && c.Limit < 1 {
		warn("raise the control group's CPU quota", "the control group allows %.2g of a core", c.Limit)
	}
	f.tmpFaults(warn)
	if f.Clock.Now.Year() < clockBefore {
		warn("set the clock", "the clock says %s", f.Clock.Now.Format("2006-01-02"))
	}
	if f.Device != "host" {
		i, j := len(stops), len(warns)
		f.gpuFaults(stop, warn)
		for _, list := range [][]Fault{stops[i:], warns[j:]} {
			for k := range list {
				list[k].GPU = true
			}
		}
	}
	return append(stops, warns...)
}

// free is what is left of memory, by the host and by the control group.
func (f *Facts) free() int64 {
	free := f.Memory.Available
	if f.Memory.Limit >= 0 {
		free = min(free, max(0, f.Memory.Limit-f.Memory.Used))
	}
	return free
}

func (f *Facts) tmpFaults(warn func(advice, format string, args ...any)) {
	switch t := f.Tmp; {
	case t.Err != "" || !t.Exists:
		warn("make it, or set TMPDIR to another directory", "temporary directory %s: %s", t.Path, cmp.Or(t.Err, "not there"))
	case !t.Write || t.Has("ro"):
		warn("set TMPDIR to a directory that can be written", "temporary directory %s cannot be written", t.Path)
	case t.Free < wantTmp:
		warn("make room, or set TMPDIR to another directory", "temporary directory %s has %s left", t.Path, Bytes(t.Free))
	case t.Has("noexec"):
		warn("set TMPDIR to a directory on another file system", "temporary directory %s is mounted noexec: programs that are built there cannot run", t.Path)
	}
	switch c := f.Cache; {
	case c.Err != "":
		warn("set XDG_CACHE_HOME to another directory; without it gorun builds programs anew for each launch", "cache directory %s: %s", c.Path, c.Err)
	case !c.Write || c.Has("ro"):
		warn("set XDG_CACHE_HOME to a directory that can be written; without it gorun builds programs anew for each launch", "cache directory %s cannot be written", c.Path)
	case c.Has("noexec"):
		warn("set XDG_CACHE_HOME to a directory on another file system", "cache directory %s is mounted noexec: programs that are built there cannot run", c.Path)
	case c.Exists && c.Owner != f.User.UID:
		warn("chown it, or set XDG_CACHE_HOME", "cache directory %s belongs to user %d: gorun does not use it", c.Path, c.Owner)
	case c.Exists && c.Free < wantFree:
		warn("make room, or set XDG_CACHE_HOME to another directory", "cache directory %s has %s left", c.Path, Bytes(c.Free))
	}
}

func (f *Facts) gpuFaults(stop, warn func(advice, format string, args ...any)) {
	reach := 0
	for _, g := range f.GPUs {
		if g.Device == "" {
			continue
		}
		reach++
		if g.Err != "" {
			stop("give the user access to it (a group such as video or render, or the container's settings)", "%s: %s", g.Device, g.Err)
		}
	}
	if f.Driver.Vendor == "" {
		if len(f.GPUs) > 0 {
			warn("load the driver (modprobe nvidia, amdgpu or mtgpu), or set GORUN_DEVICE=host", "%d GPUs are on the bus, and no driver is loaded: ranks run on the host platform", len(f.GPUs))
		}
		return
	}
	for _, e := range f.Driver.Errors {
		stop("load the driver, or give the container its devices; GORUN_DEVICE=host does without GPUs", "%s driver: %s", f.Driver.Vendor, e)
	}
	for _, dev := range f.Driver.Lacks {
		warn("nvidia-modprobe -u -c=0, or give it to the container", "%s is not there: the driver makes it at the first use, but not in a container", dev)
	}
	if f.Driver.Vendor == nvidia && reach == 0 {
		stop("give the container a GPU, or set GORUN_DEVICE=host", "the NVIDIA driver is there, and no /dev/nvidia0: ranks have no GPU")
	}
	for _, l := range f.Libraries {
		switch collective := l.Name == "NCCL" || l.Name == "RCCL" || l.Name == "MCCL"; {
		case l.Err == "":
		case collective && f.VisibleGPU < 2:
			warn("install it, or name it by "+envOf(l.Name), "%s", libraryText(l))
		case collective:
			stop("install it (pip install nvidia-nccl-cu13, or the distribution's package), or name it by "+envOf(l.Name), "%s", libraryText(l))
		default:
			stop("install the driver's user-space library, or name it by "+envOf(l.Name), "%s", libraryText(l))
		}
		// NVIDIA's compatibility packages are meant to be newer than the module.
		if l.Name == "CUDA driver" && l.Err == "" && strings.Count(l.Version, ".") >= 1 && f.Driver.Version != "" && l.Version != f.Driver.Version && !strings.Contains(l.Path, "compat") {
			stop("reload the kernel module, or restart the machine: the driver was updated under it", "%s is version %s, the kernel module %s", l.Path, l.Version, f.Driver.Version)
		}
		if l.Name == "NCCL" && older(l.Version, "2.19") {
			warn("install NCCL 2.19 or later", "NCCL %s (%s) registers no buffers", l.Version, l.Path)
		}
	}
	if f.VisibleGPU > 1 && f.Shm.Err == "" && (!f.Shm.Exists || f.Shm.Size < wantShm) {
		warn("mount a larger one (docker run --shm-size 1g)", "%s has %s: NCCL may need more", f.Shm.Path, Bytes(f.Shm.Size))
	}
	if f.VisibleGPU > 1 && f.Shm.Exists && !f.Shm.Write {
		stop("mount it as tmpfs, mode 1777", "%s cannot be written: NCCL needs it", f.Shm.Path)
	}
}

func libraryText(l Library) string {
	if l.Path == "" {
		return l.Name + ": " + l.Err
	}
	return fmt.Sprintf("%s: %s (%s): %s", l.Name, l.Path, l.From, l.Err)
}

func envOf(library string) string {
	for _, w := range libraries {
		if w.name == library {
			return w.search.Env
		}
	}
	return ""
}

// older compares versions such as "6.1.0-18-amd64" by their leading numbers; what has none is not older.
func older(version, than string) bool {
	a, b := numbers(version), numbers(than)
	if len(a) == 0 {
		return false
	}
	return slices.Compare(a, b) < 0
}

func numbers(version string) []int {
	var out []int
	for part := range strings.SplitSeq(version, ".") {
		digits := part[:len(part)-len(strings.TrimLeft(part, "0123456789"))]
		n, err := strconv.Atoi(digits)
		if err != nil {
			break
		}
		out = append(out, n)
		if digits != part {
			break
		}
	}
	return out
}

func limitText(n int64) string {
	if n < 0 {
		return "unlimited"
	}
	return strconv.FormatInt(n, 10)
}

// Bytes is a size for people: "7.8 GiB"; -1 is unlimited.
func Bytes(n int64) string {
	switch {
	case n < 0:
		return "unlimited"
	case n < 1<<10:
		return fmt.Sprintf("%d bytes", n)
	case n < 1<<20:
		return fmt.Sprintf("%.4g KiB", float64(n)/(1<<10))
	case n < 1<<30:
		return fmt.Sprintf("%.4g MiB", float64(n)/(1<<20))
	case n < 1<<40:
		return fmt.Sprintf("%.4g GiB", float64(n)/(1<<30))
	}
	return fmt.Sprintf("%.4g TiB", float64(n)/(1<<40))
}
