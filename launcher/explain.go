package launcher

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/gorun-dev/gorun/launcher/internal/sshway"
)

// Route is the way to a host, as the configuration has it.
type Route struct {
	User    string   `json:"user,omitempty"`
	Addr    string   `json:"addr,omitempty"`    // the name or address to connect to
	Port    int      `json:"port,omitempty"`    // of its sshd
	Jumps   []string `json:"jumps,omitempty"`   // jump hosts in order: "me@gate:22"
	Command string   `json:"command,omitempty"` // what makes the connection, instead of gorun: --rsh, or ProxyCommand of the first host on the way
	Error   string   `json:"error,omitempty"`   // why the way is not known
}

// String is "ssh as me to 10.0.0.7 port 22 through me@gate:22".
func (r *Route) String() string {
	if r.Error != "" {
		return "not known: " + r.Error
	}
	if r.Addr == "" {
		return "by the command " + r.Command
	}
	s := fmt.Sprintf("ssh as %s to %s port %d", r.User, r.Addr, r.Port)
	if len(r.Jumps) > 0 {
		s += " through " + strings.Join(r.Jumps, ", ")
	}
	if r.Command != "" {
		s += ", by the command " + r.Command
	}
	return s
}

// FindRoutes finds the way to each host that is not local. It reads the ssh configuration and connects to nothing.
func (p *Plan) FindRoutes(ctx context.Context) {
	client := sshway.New(sshway.Config{File: p.Remote.SSHConfig})
	for i := range p.Hosts {
		h := &p.Hosts[i]
		switch {
		case h.Local:
		case p.Remote.RSH != "":
			h.Route = &Route{Command: p.Remote.RSH}
		default:
			r, err := client.Route(ctx, h.target())
			if err != nil {
				h.Route = &Route{Error: bare(err).Error()}
				continue
			}
			h.Route = &Route{User: r.User, Addr: r.Host, Port: r.Port, Jumps: r.Jumps, Command: r.Command}
		}
	}
}

// explain says of each rank why it is on its host.
func (p *Plan) explain(j Job, f Facts) {
	switch {
	case len(j.Hosts) > 0:
		p.HostsFrom = "-H or [[host]]"
	case j.Hostfile != "":
		p.HostsFrom = "hostfile " + j.Hostfile
	case f.Allocation.From != "":
		p.HostsFrom = f.Allocation.From
	}
	var m MapBy
	if j.MapBy != nil {
		m = *j.MapBy
	}
	for i := range p.Ranks {
		r := &p.Ranks[i]
		slots, n := p.Hosts[r.Host].Slots, r.LocalRank+1
		how := " (--map-by " + m.String() + ")"
		switch {
		case p.HostsFrom == "":
			r.Why = "this one: no hosts are given"
		case m.PPR > 0:
			r.Why = fmt.Sprintf("%d of %d on each host", n, m.PPR) + how
		case n > slots:
			r.Why = fmt.Sprintf("beyond its %s (--oversubscribe)", count(slots, "slot"))
		case m.Node:
			r.Why = fmt.Sprintf("turn %d of the hosts, slot %d of %d", n, n, slots) + how
		default:
			r.Why = fmt.Sprintf("slot %d of %d", n, slots) + how
		}
	}
}

// writeSurroundings says what was asked for of hosts, and what ranks have in their environment beside what the plan sets.
func (p *Plan) writeSurroundings(b *strings.Builder) {
	if p.HostsFrom != "" {
		fmt.Fprintf(b, "hosts from %s\n", p.HostsFrom)
	}
	for _, h := range p.Hosts {
		if h.Place != nil && h.Place.Crowded != "" {
			fmt.Fprintf(b, "crowded    %s\n", h.Place.Crowded)
		}
		if h.Place != nil && h.Place.Shared != "" {
			fmt.Fprintf(b, "shared     %s\n", h.Place.Shared)
		}
		if h.Place != nil && h.Place.Refused != "" {
			fmt.Fprintf(b, "not bound  %s\n", h.Place.Refused)
		}
	}
	if p.BindTo.To != "" {
		fmt.Fprintf(b, "bind to    %v\n", p.BindTo)
	}
	if p.GPUBind != "" {
		fmt.Fprintf(b, "gpu bind   %s\n", p.GPUBind)
	}
	if i := slices.IndexFunc(p.Ranks, func(r PlanRank) bool { return p.Hosts[r.Host].Local }); i >= 0 {
		r := &p.Ranks[i]
		fmt.Fprintf(b, "inherited  %s of gorun's environment\n", count(len(p.environ(r, nil))-len(r.Env), "variable"))
	}
	if slices.ContainsFunc(p.Hosts, func(h PlanHost) bool { return !h.Local }) {
		fmt.Fprintf(b, "inherited  on other hosts: the environment of a login there\n")
	}
}

// writeRankPlace says where a rank runs, and why.
func (p *Plan) writeRankPlace(b *strings.Builder, r *PlanRank) {
	h := &p.Hosts[r.Host]
	if r.Why != "" {
		fmt.Fprintf(b, "  host %s\n", r.Why)
	}
	if !h.Local {
		fmt.Fprintf(b, "  cpus decided on host %s when it starts\n  gpus decided on host %s when it starts\n", h.Name, h.Name)
	}
	if r.Place == nil {
		return
	}
	fmt.Fprintf(b, "  cpus %s\n", cpuText(r.Place))
	gpus := gpuText(r.Place)
	switch {
	case gpus != "":
	case r.Place.Visible != "":
		gpus = "none of its own; it sees " + r.Place.Visible
	default:
		gpus = "none"
	}
	fmt.Fprintf(b, "  gpus %s\n", gpus)
}
