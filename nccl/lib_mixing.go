package nccl

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// Graph mixing is the library's own order between a communicator's captured calls and what else is enqueued with it: other graphs, and eager calls. It costs each captured call two
// event nodes, and each eager call behind a capture two events: a fifth of a small captured call's time, and most of the launch's on the host. Where it can be off,
// it is, and this package keeps that order: lib_order.go. What the library's source (2.27.3 to 2.30.7) has behind the switch, and so is to be made good:
//
//   - its stream of a communicator waits, in front of each captured or eager call, for an event that the last one has recorded: the order itself;
//   - the same event has a graph wait for what was uploaded to the device during its capture: addresses of new connections and of buffers that were registered, and the
//     work of large groups, which goes to the device in a copy. So the first replay must wait for those: Comm.Captured;
//   - the library looks at such an event to see whether host functions of graphs, which push what proxies are to do for the network, are still to
//     come; without it an eager call would push its own before them. Within a host there are no proxies, between hosts mixing stays on.
//
// It does nothing on other ranks: mixing may be on here and off there.
const mixingName = "GRAPH_MIXING_SUPPORT"

// mixing is whether the library keeps that order, and why.
type mixing struct {
	off    bool
	config bool // by the communicator's settings, else by the process's environment
	why    string
}

const (
	mixingSince  ncclsys.Version = 22703 // as far back as the source was read
	mixingConfig ncclsys.Version = 22902 // from here on a communicator has a setting for it
)

func (m mixing) String() string {
	switch {
	case !m.off:
		return "on: " + m.why
	case m.why != "":
		return "off: " + m.why
	}
	return "off: the library adds no events to captured calls, this package orders them"
}

// userSetting is what the user has set, and where.
type userSetting struct{ name, value, from string }

func (u userSetting) String() string { return fmt.Sprintf("%s=%s (%s)", u.name, u.value, u.from) }

// processMixing is what holds for the process, as the library reads its environment once.
var processMixing struct {
	sync.Mutex
	users   map[string]userSetting
	decided *mixing // where it is the environment's, from the first communicator on
}

// decideMixing follows the opening of the library.
func (l *library) decideMixing() mixing {
	v := l.sys.Vendor()
	name := v.Prefix() + mixingName
	p := &processMixing
	p.Lock()
	defer p.Unlock()
	user, seen := p.users[name]
	if !seen {
		user.name = name
		user.value, user.from = v.Lookup()(name)
		if p.users == nil {
			p.users = map[string]userSetting{}
		}
		p.users[name] = user
	}
	if p.decided != nil && v == ncclsys.NCCL {
		return *p.decided
	}
	hosts := map[int]bool{}
	for _, r := range l.c.ranks {
		hosts[l.c.job.NodeOf(r)] = true
	}
	m := chooseMixing(v, l.sys.Version(), user, l.c.job.Nodes(), len(hosts), func(hosts int) string { return proxies(hosts, v.Prefix(), v.Lookup(), "/sys/class", l.apart) })
	if v == ncclsys.NCCL && !m.config {
		// In the library's environment only: what the process starts does not get it.
		if m.off && user.value == "" {
			if err := l.sys.Setenv(name, "0"); err != nil {
				m = mixing{why: err.Error()}
			}
		}
		p.decided = &m
	}
	return m
}

// chooseMixing decides from the version, the user's setting, and how many hosts job and communicator have; proxies says what speaks against it with so many.
func chooseMixing(v *ncclsys.Vendor, version ncclsys.Version, user userSetting, job, comm int, proxies func(hosts int) string) mixing {
	if user.value != "" {
		n, err := strconv.ParseInt(user.value, 0, 64)
		m := mixing{off: err == nil && n == 0, why: user.String()}
		if m.off && comm > 1 {
			m.why += "; between hosts an eager call behind a replay that has not ended can hang"
		}
		return m
	}
	if v != ncclsys.NCCL || version < mixingSince {
		return mixing{why: fmt.Sprintf("whether %s %s can do without was not looked into", v.Name, version)}
	}
	m := mixing{config: version >= mixingConfig}
	hosts := job
	if m.config {
		hosts = comm
	}
	m.why = proxies(hosts)
	m.off = m.why == ""
	return m
}

// proxies says why the library may move data by its proxies, or order its launches by what mixing does; "": it does not. class is the kernel's directory of
// devices by class; apart says why not all devices are known to be joined by a way that no network is faster than, "" where they are.
func proxies(hosts int, prefix string, look gpulib.Lookup, class string, apart func() string) string {
	if hosts > 1 {
		return fmt.Sprintf("there are %d hosts, and the network's proxies want it", hosts)
	}
	for _, s := range []string{"SHM_DISABLE", "P2P_USE_CUDA_MEMCPY", "SHM_USE_CUDA_MEMCPY", "LAUNCH_ORDER_IMPLICIT", "PROFILER_PLUGIN", "HOSTID"} {
		if value, from := look(prefix + s); value != "" && value != "0" && value != "none" {
			return fmt.Sprintf("%s=%s (%s) wants it", prefix+s, value, from)
		}
	}
	if value, _ := look(prefix + "NET_DISABLE_INTRA"); value == "1" {
		return ""
	}
	if nic := fastNIC(class); nic != "" {
		if why := apart(); why != "" {
			return fmt.Sprintf("%s: the library may connect them by a network device that is as fast (%s) unless %sNET_DISABLE_INTRA=1", why, nic, prefix)
		}
	}
	return ""
}

// apart says why the devices of the ranks on this host are not known to be joined by NVLink, "" where they are.
func (l *library) apart() string {
	devices, linked := l.c.dev.Linked()
	return apartText(devices, linked, l.c.job.LocalSize())
}

func apartText(devices int, linked bool, ranks int) string {
	switch {
	case devices < ranks:
		return fmt.Sprintf("whether the devices of this host are joined by NVLink is not known, since this rank sees %d of them and there are %d ranks", devices, ranks)
	case !linked:
		return "not all devices of this host are joined by NVLink"
	}
	return ""
}

// fastNIC is a network device that may be faster than the way between two devices of a host without NVLink, "" if there is none: anything for RDMA, and Ethernet
// from 50 Gb/s on.
func fastNIC(class string) string {
	if list, err := os.ReadDir(filepath.Join(class, "infiniband")); err == nil && len(list) > 0 {
		return list[0].Name()
	}
	list, err := os.ReadDir(filepath.Join(class, "net"))
	if err != nil {
		return ""
	}
	const least = 50_000 // Mb/s
	for _, d := range list {
		dir := filepath.Join(class, "net", d.Name())
		if _, err := os.Stat(filepath.Join(dir, "device")); err != nil {
			continue // not hardware
		}
		b, err := os.ReadFile(filepath.Join(dir, "speed"))
		if err != nil {
			continue // it is down
		}
		if speed, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && speed >= least {
			return d.Name()
		}
	}
	return ""
}
