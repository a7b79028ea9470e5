package launcher

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/gorun-dev/gorun/launcher/internal/placement"
	"github.com/gorun-dev/gorun/rankenv"
)

// Bind says what ranks are bound to. The zero value leaves it to each host: a rank is bound to the NUMA node of its GPU where all ranks have one and
// they use all nodes; else it is not bound.
type Bind = placement.Bind

// Machine is what a host has for its ranks: CPUs and GPUs.
type Machine = placement.Machine

// HostPlace and RankPlace tell what a host gives its ranks.
type (
	HostPlace = placement.HostPlace
	RankPlace = placement.RankPlace
)

// Values of Job.GPUBind.
const (
	GPUBindNone = "none" // a rank sees all GPUs that the host shows, and chooses by its local rank
	GPUBindHide = "hide" // a rank sees its own GPU alone
	// GPUBindShare has ranks take the GPUs in turn, so that a host may have more ranks than GPUs: for trying programs out.
	GPUBindShare = "share"
)

// ReadMachine looks at this host for ranks that are to be bound so. Where the kernel lets nothing be bound that is an error only if it was asked for.
func ReadMachine(b Bind) (*Machine, error) {
	allowed, err := placement.Allowed()
	if err == nil {
		err = placement.Use(allowed) // changes nothing
	}
	switch {
	case err == nil:
		return placement.Read("/", allowed, b), nil
	case b.To != "" && b.To != placement.None:
		return nil, fmt.Errorf("--bind-to %v: the kernel lets no CPUs be chosen: %w", b, err)
	}
	if allowed == nil {
		for cpu := range runtime.NumCPU() {
			allowed = append(allowed, cpu)
		}
	}
	return placement.Read("/", allowed, Bind{To: placement.None}), nil
}

// VisibleGPUs counts the GPUs of this host that a program with the environment may use, by the traces that the kernel shows and
// without a vendor's library. root is "/".
func VisibleGPUs(root string, environ []string) int {
	gpus := placement.FindGPUs(root)
	return len(gpus.Visible(placement.LookupIn(environ)).Tokens)
}

// cpuShareVar tells a rank that is bound how many ranks have the same CPUs.
const cpuShareVar = "GORUN_CPU_SHARE"

// jaxDevicesVar has JAX take a rank's own GPU, where it would take all that the rank sees, or the one of the local rank although others are hidden. A rank that
// has the host alone takes all: JAX's users start one process a host.
const jaxDevicesVar = "JAX_LOCAL_DEVICE_IDS"

// placeVars is what the environment of a rank, which has own already, gets from its place.
func placeVars(r placement.Rank, own []string) []string {
	vars := slices.Clone(r.Vars)
	if r.Turn.Size > 0 {
		vars = append(vars, rankenv.LocalVars(own, r.Turn.Rank, r.Turn.Size)...)
	}
	if r.CPUs != nil {
		vars = append(vars, cpuShareVar+"="+strconv.Itoa(r.Share))
	}
	if _, chosen := lookup(own, jaxDevicesVar); r.Local != "" && !chosen {
		vars = append(vars, jaxDevicesVar+"="+r.Local)
	}
	return vars
}

// rankAsk is what a rank with an environment, in parts of which the first counts, asks of its host.
func rankAsk(environ ...[]string) placement.RankAsk {
	env := func(name string) (string, bool) {
		for _, part := range environ {
			if v, ok := placement.LookupIn(part)(name); ok {
				return v, true
			}
		}
		return "", false
	}
	device, _ := env("GORUN_DEVICE")
	return placement.RankAsk{Device: device, Env: env}
}

// bindThread binds the calling thread, which is locked, until unbind.
func bindThread(cpus placement.Set) (unbind func(), err error) {
	fail := func(err error) (func(), error) {
		return nil, fmt.Errorf("CPUs %v: %w; --bind-to none leaves that to the host", cpus, err)
	}
	before, err := placement.Allowed()
	if err != nil {
		return fail(err)
	}
	if err := placement.Use(cpus); err != nil {
		return fail(err)
	}
	unbind = func() { placement.Use(before) } // only for form: the thread has nothing to do but fork
	// The kernel takes away, without an error, what the control group does not allow any more.
	if got, err := placement.Allowed(); err != nil || !slices.Equal(got, cpus) {
		unbind()
		return fail(fmt.Errorf("only %v may be used by now", got))
	}
	return unbind, nil
}

// planPlace is what a plan says of the ranks' places on any host.
func (j Job) planPlace(p *Plan, apps []App) error {
	p.BindTo, p.GPUBind, p.Oversubscribe = j.BindTo, j.GPUBind, isOn(j.Oversubscribe)
	switch j.GPUBind {
	case "", GPUBindNone, GPUBindHide, GPUBindShare:
	default:
		return flagf("--gpu-bind", "%s: must be %s, %s or %s", j.GPUBind, GPUBindNone, GPUBindHide, GPUBindShare)
	}
	if choosesGPUs(j.GPUBind) && !slices.ContainsFunc(apps, func(a App) bool { return a.Device == "" }) {
		does := map[string]string{GPUBindHide: "shows each rank a GPU of its own", GPUBindShare: "gives the ranks GPUs in turn"}[j.GPUBind]
		return flagf("--gpu-bind", "%s %s, and --device %s is one for all: give one of them", j.GPUBind, does, apps[0].Device)
	}
	return nil
}

// choosesGPUs reports whether a value of Job.GPUBind says which GPU a rank takes.
func choosesGPUs(bind string) bool { return bind == GPUBindHide || bind == GPUBindShare }

// placeLocal works out what the ranks on this host get.
func (p *Plan) placeLocal(m *Machine) error {
	host := slices.IndexFunc(p.Hosts, func(h PlanHost) bool { return h.Local })
	if host < 0 {
		return nil
	}
	if m == nil {
		if p.BindTo.To != "" && p.BindTo.To != placement.None || choosesGPUs(p.GPUBind) {
			return fmt.Errorf("plan: Facts.Machine is missing: what this host has for its ranks")
		}
		return nil
	}
	a := placement.Ask{Bind: p.BindTo, Hide: p.GPUBind == GPUBindHide, Share: p.GPUBind == GPUBindShare}
	var ranks []*PlanRank
	for i := range p.Ranks {
		if r := &p.Ranks[i]; r.Host == host {
			ranks = append(ranks, r)
			a.Ranks = append(a.Ranks, rankAsk(r.Env, p.Apps[r.App].inherit))
		}
	}
	placed, err := m.Place(a)
	if err != nil {
		return usagef("host %s: %v", p.Hosts[host].Name, err)
	}
	h, told := m.Tell(placed)
	p.Hosts[host].Place = &h
	for i, r := range ranks {
		r.Place, r.cpus = &told[i], placed.Ranks[i].CPUs
		vars := placeVars(placed.Ranks[i], r.Env)
		if r.more = len(vars) > 0; !r.more {
			continue
		}
		names := setNames(vars, nil)
		r.Env = slices.DeleteFunc(r.Env, func(kv string) bool { name, _, _ := strings.Cut(kv, "="); return names[name] })
		r.Env = append(r.Env, vars...)
	}
	return nil
}

// placeRanks works out what the ranks of this host get, for a gorun elsewhere.
func (s *agentServer) placeRanks() (placement.Placement, error) {
	j := s.job
	var b Bind
	var err error
	if j.BindTo != "" {
		if b, err = placement.ParseBind(j.BindTo); err != nil {
			return placement.Placement{}, fmt.Errorf("--bind-to %w", err)
		}
	}
	m, err := ReadMachine(b)
	if err != nil {
		return placement.Placement{}, err
	}
	forward, login := j.Forward.Unpack(), os.Environ()
	a := placement.Ask{Bind: b, Hide: j.HideGPUs, Share: j.ShareGPUs}
	for _, r := range j.Ranks {
		a.Ranks = append(a.Ranks, rankAsk(r.Env.Unpack(), forward, login))
	}
	placed, err := m.Place(a)
	if err != nil {
		return placed, err
	}
	s.place.Host, s.place.Ranks = m.Tell(placed)
	return placed, nil
}

// placed takes note of what a host gives its ranks.
func (r *runner) placed(host int, h *HostPlace, ranks []RankPlace) {
	r.places[host] = h
	i := 0
	for k := range r.acct.Ranks {
		if r.plan.Ranks[k].Host != host || i == len(ranks) {
			continue
		}
		a := &r.acct.Ranks[k]
		a.Place = &ranks[i]
		i++
	}
}

// sayPlaces tells a person in a line what hosts could not do, and that they have more ranks than CPUs, unless that is what the user asked for, or than GPUs.
func (r *runner) sayPlaces() {
	var hosts alike[string]
	for i, h := range r.places {
		if h == nil {
			continue
		}
		var parts []string
		if h.Crowded != "" && !r.plan.Oversubscribe {
			parts = append(parts, h.Crowded)
		}
		if h.Shared != "" {
			parts = append(parts, h.Shared)
		}
		if h.Refused != "" {
			parts = append(parts, "not bound: "+h.Refused)
		}
		if text := strings.Join(parts, "; "); text != "" {
			hosts.add(text, r.plan.Hosts[i].Name)
		}
	}
	for _, text := range hosts.texts {
		if len(r.plan.Hosts) == 1 && r.plan.Hosts[0].Local {
			r.say("%s", text)
			continue
		}
		const shown = 4
		names := hosts.of[text]
		list := strings.Join(names[:min(len(names), shown)], ", ")
		if len(names) > shown {
			list += fmt.Sprintf(" and %d more", len(names)-shown)
		}
		if len(names) == 1 {
			r.say("host %s: %s", list, text)
		} else {
			r.say("hosts %s: %s on each", list, text)
		}
	}
}

// verbosePlaces says where each rank runs, for --verbose.
func (r *runner) verbosePlaces(host int) {
	h := r.places[host]
	if !r.o.Verbose || h == nil {
		return
	}
	var ranks alike[int]
	for i := range r.acct.Ranks {
		a := &r.acct.Ranks[i]
		if r.plan.Ranks[i].Host != host || a.PID == 0 || a.Place == nil {
			continue
		}
		ranks.add(placeText(a.Place), a.Rank)
	}
	for _, text := range ranks.texts {
		r.say("%s: host %s, %s", rankenv.RankText(ranks.of[text]), r.plan.Hosts[host].Name, text)
	}
}

// placeText is "CPUs 0-7 (NUMA node 0, near GPU 1), GPU 1 of 0,1".
func placeText(r *RankPlace) string {
	s := "CPUs " + cpuText(r)
	if gpu := gpuText(r); gpu != "" {
		s += ", GPU " + gpu
	}
	return s
}

// cpuText is "0-7 (NUMA node 0, near GPU 1)", or why a rank is not bound.
func cpuText(r *RankPlace) string {
	if !r.Bound {
		return r.CPUs + " (not bound: " + r.Why + ")"
	}
	return r.CPUs + " (" + r.Why + ")"
}

// gpuText is "1 of 0,1"; "" if the rank has none, or it isn't known.
func gpuText(r *RankPlace) string {
	switch r.GPU {
	case "":
		return ""
	case r.Visible:
		return r.GPU + " alone"
	}
	return r.GPU + " of " + r.Visible
}
