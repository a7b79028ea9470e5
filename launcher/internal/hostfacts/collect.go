package hostfacts

import (
	"bufio"
	"cmp"
	"context"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// childWait bounds the wait for a child process that tells its limits.
const childWait = 10 * time.Second

// Options say what to look at.
type Options struct {
	Environ []string
	Root    string // "/"; tests have another for what is in files
	WDir    string // the job's working directory, "" for none
	Device  string // that ranks are told to use
}

// host looks at one.
type host struct{ Options }

// Collect gathers the facts of this host.
func Collect(o Options) *Facts {
	o.Root = cmp.Or(o.Root, "/")
	h := host{o}
	f := &Facts{Kernel: kernel(), Cores: h.cores(), Memory: h.memory(), Limits: limits(), Memfd: memfd(), Clock: h.clock(), Interfaces: interfaces(),
		InfiniBand: h.names("sys/class/infiniband"), Device: o.Device, GPUs: h.gpus()}
	f.Host, _ = os.Hostname() // "" is told as such
	f.User.UID = os.Getuid()
	if u, err := user.LookupId(strconv.Itoa(f.User.UID)); err == nil {
		f.User.Name = u.Username
	}
	f.User.Home = h.env("HOME")
	f.Shm = dir(filepath.Join(o.Root, "dev/shm"))
	f.Tmp = dir(cmp.Or(h.env("TMPDIR"), "/tmp"))
	f.Cache = Dir{Path: "~/.cache/gorun", Owner: -1, Err: "neither XDG_CACHE_HOME nor HOME is set"}
	if c := h.cache(); c != "" {
		f.Cache = dir(c)
	}
	f.Driver = h.driver(f.GPUs)
	f.Libraries = h.libraries(f.GPUs)
	if path, err := exec.LookPath("ssh"); err == nil {
		f.SSH = path
	}
	if o.WDir != "" {
		d := dir(o.WDir)
		f.Dir = &d
	}
	return f
}

// env is a variable's value, "" where it is not set; of two settings the first counts, as for getenv.
func (h host) env(name string) string {
	for _, kv := range h.Environ {
		if v, ok := strings.CutPrefix(kv, name+"="); ok {
			return v
		}
	}
	return ""
}

func (h host) path(p string) string { return filepath.Join(h.Root, p) }

func (h host) text(p string) string { return Text(h.Root, p) }

// Text is a small file's content without the white space around it; "" where it cannot be read. root is "/".
func Text(root, p string) string {
	b, err := os.ReadFile(filepath.Join(root, p))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// names are the entries of a directory.
func (h host) names(p string) []string {
	entries, err := os.ReadDir(h.path(p))
	if err != nil {
		return nil
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// cache is where gorun keeps what it has built, and agents that were sent here; "" where the environment does not tell.
func (h host) cache() string {
	if base := h.env("XDG_CACHE_HOME"); base != "" {
		return filepath.Join(base, "gorun")
	}
	if home := h.env("HOME"); home != "" {
		return filepath.Join(home, ".cache", "gorun")
	}
	return ""
}

func kernel() Kernel {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return Kernel{}
	}
	return Kernel{unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Machine[:])}
}

func (h host) cores() Cores {
	c := Cores{Online: countCPUs(h.text("sys/devices/system/cpu/online")), Limit: h.coreLimit()}
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err == nil {
		c.Usable = set.Count()
	} else {
		c.Usable = runtime.NumCPU()
	}
	if c.Online == 0 {
		c.Online = c.Usable
	}
	return c
}

// countCPUs counts a list such as "0-3,8": 0 where it is none.
func countCPUs(list string) int {
	n := 0
	for part := range strings.SplitSeq(list, ",") {
		first, last, is := strings.Cut(part, "-")
		a, err := strconv.Atoi(first)
		b := a
		if is && err == nil {
			b, err = strconv.Atoi(last)
		}
		if err != nil || a < 0 || b < a || b > 1<<20 {
			return 0
		}
		n += b - a + 1
	}
	return n
}

func (h host) memory() Memory {
	m := Memory{Limit: -1}
	sc := bufio.NewScanner(strings.NewReader(h.text("proc/meminfo")))
	for sc.Scan() {
		name, rest, _ := strings.Cut(sc.Text(), ":")
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		switch {
		case err != nil:
		case name == "MemTotal":
			m.Total = kib << 10
		case name == "MemAvailable":
			m.Available = kib << 10
		}
	}
	if limit, used := h.memoryLimit(); limit > 0 && limit < m.Total {
		m.Limit, m.Used = limit, used
	}
	return m
}

func limits() Limits {
	get := func(what int) Limit {
		var r unix.Rlimit
		if err := unix.Getrlimit(what, &r); err != nil {
			return Limit{-1, -1}
		}
		number := func(n uint64) int64 {
			if n > 1<<62 {
				return -1
			}
			return int64(n)
		}
		return Limit{number(r.Cur), number(r.Max)}
	}
	l := Limits{get(unix.RLIMIT_NOFILE), get(unix.RLIMIT_NPROC), get(unix.RLIMIT_MEMLOCK)}
	if n, err := childFiles(); err == nil {
		l.NoFile.Soft = n
	}
	return l
}

// childFiles is the limit of open files that a rank begins with: Go raises its own process's, and gives children what was before, which it does not tell.
func childFiles() (int64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), childWait)
	defer cancel()
	out, err := exec.CommandContext(ctx, "/bin/sh", "-c", "ulimit -Sn").Output()
	if err != nil {
		return 0, err
	}
	text := strings.TrimSpace(string(out))
	if text == "unlimited" {
		return -1, nil
	}
	return strconv.ParseInt(text, 10, 64)
}

// memfd tries what ranks of the host platform share their memory by.
func memfd() string {
	fd, err := unix.MemfdCreate("gorun-check", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return err.Error()
	}
	unix.Close(fd)
	return ""
}

func (h host) clock() Clock {
	c := Clock{Now: time.Now().UTC(), Source: h.text("sys/devices/system/clocksource/clocksource0/current_clocksource")}
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	const notSynchronized = 5 // TIME_ERROR
	c.Synced = err == nil && state != notSynchronized
	return c
}

func interfaces() []Interface {
	list, err := net.Interfaces()
	if err != nil {
		return nil
	}
	var out []Interface
	for _, i := range list {
		n := Interface{Name: i.Name, Up: i.Flags&net.FlagUp != 0, Loopback: i.Flags&net.FlagLoopback != 0, MTU: i.MTU, Addrs: []string{}}
		addrs, err := i.Addrs()
		if err != nil {
			continue // it has gone
		}
		for _, a := range addrs {
			n.Addrs = append(n.Addrs, a.String())
		}
		out = append(out, n)
	}
	return out
}
