package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gorun-dev/gorun/launcher"
)

// hosts is a plan with all hosts of a job, nil if there is none but this one.
func (q *checkRequest) hosts(job launcher.Job, io stdio) (*launcher.Plan, error) {
	f, err := factsOf(job, io, false)
	if err != nil {
		return nil, err
	}
	var programs []launcher.Program
	for _, name := range job.Programs() {
		// What is missing here may be there; that is found out on each host.
		p, _ := launcher.FindProgram(name, os.Getenv("PATH"))
		p.Name = name
		if !slices.Contains(programs, p) {
			programs = append(programs, p)
		}
	}
	job.NP, job.MapBy, job.Program, job.Apps = 0, nil, "", nil // every host counts, also without a rank
	p, err := job.Plan(f)
	if err == nil {
		p.Programs = programs
	}
	if err != nil || !slices.ContainsFunc(p.Hosts, func(h launcher.PlanHost) bool { return !h.Local }) {
		return nil, err
	}
	if q.deep || q.np > 0 {
		return nil, usagef("--deep and -np are for the GPUs of this machine: not with other hosts; gorun check there opens its GPUs")
	}
	return p, nil
}

// elsewhere is gorun check of several hosts.
func (q *checkRequest) elsewhere(p *launcher.Plan, job launcher.Job, s stdio) error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), q.timeout, fmt.Errorf("not in %v (--timeout)", q.timeout))
	defer cancel()
	interrupted := make(chan exitCode, 1)
	go func() {
		for {
			select {
			case sig := <-s.signals:
				if sig == syscall.SIGINT || sig == syscall.SIGTERM || sig == syscall.SIGHUP {
					interrupted <- exitCode(128 + int(sig.(syscall.Signal)))
					cancel()
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	found, between, err := launcher.CheckHosts(ctx, p, job.Device, func(line string) { fmt.Fprintf(s.err, "gorun: %s\n", line) })
	select {
	case code := <-interrupted:
		return code
	default:
	}
	if err != nil && found == nil {
		return err
	}
	r := &checkReport{OK: true, Faults: between}
	for _, h := range found {
		l := &hostLink{Name: h.Name, Reached: h.Facts != nil, Local: h.Local, Agent: h.Agent, Sent: h.Sent, Addr: h.Addr, Chosen: h.Chosen, On: h.On, moved: h.Moved,
			Skew: h.Skew.Ahead.Nanoseconds(), SkewErr: h.Skew.Error.Nanoseconds(), Reach: h.Reach}
		if h.Faults == nil {
			h.Faults = []launcher.HostFault{}
		}
		r.Hosts = append(r.Hosts, hostReport{l, h.Facts, h.Faults})
	}
	return q.show(r, s)
}

// hostRows are what the table of several hosts shows of each.
var hostRows = []struct {
	name string
	of   func(*hostReport) string
}{
	{"user", func(h *hostReport) string {
		if h.User.Name == "" {
			return fmt.Sprint(h.User.UID)
		}
		return h.User.Name
	}},
	{"kernel", func(h *hostReport) string { return "Linux " + h.Kernel.Release + ", " + h.Kernel.Arch }},
	{"cores", func(h *hostReport) string {
		text := fmt.Sprint(h.Cores.Usable)
		if h.Cores.Limit > 0 {
			text += fmt.Sprintf(", the control group allows %.3g", h.Cores.Limit)
		}
		return text
	}},
	{"memory", func(h *hostReport) string {
		total := h.Memory.Total
		if h.Memory.Limit >= 0 {
			total = min(total, h.Memory.Limit)
		}
		return fmt.Sprintf("%.0f GiB", float64(total)/(1<<30))
	}},
	{"limits", func(h *hostReport) string {
		return fmt.Sprintf("open files %s, processes %s, locked memory %s", count(h.Limits.NoFile.Soft), count(h.Limits.NProc.Soft), launcher.FormatBytes(h.Limits.MemLock.Soft))
	}},
	{"shm", func(h *hostReport) string {
		return dirText(h.Shm.Path, h.Shm.Exists, h.Shm.FS, h.Shm.Size, h.Shm.Flags, h.Shm.Err)
	}},
	{"TMPDIR", func(h *hostReport) string {
		return dirText(h.Tmp.Path, h.Tmp.Exists, h.Tmp.FS, h.Tmp.Size, h.Tmp.Flags, h.Tmp.Err)
	}},
	{"cache", func(h *hostReport) string {
		return dirText(h.Cache.Path, h.Cache.Exists, h.Cache.FS, h.Cache.Size, h.Cache.Flags, h.Cache.Err)
	}},
	{"wdir", func(h *hostReport) string {
		if h.Dir == nil {
			return ""
		}
		return dirText(h.Dir.Path, h.Dir.Exists, h.Dir.FS, h.Dir.Size, h.Dir.Flags, h.Dir.Err)
	}},
	{"clock", func(h *hostReport) string {
		text := "not synchronized"
		if h.Clock.Synced {
			text = "synchronized"
		}
		if off := time.Duration(h.Skew).Abs(); off > 100*time.Millisecond && off > 2*time.Duration(h.SkewErr) {
			text += fmt.Sprintf(", %+.1f s", time.Duration(h.Skew).Seconds())
		}
		return text
	}},
	{"interfaces", func(h *hostReport) string {
		var names []string
		for _, i := range h.Interfaces {
			if i.Up && len(i.Addrs) > 0 && !i.Loopback {
				names = append(names, i.Name)
			}
		}
		return strings.Join(names, " ")
	}},
	{"InfiniBand", func(h *hostReport) string { return strings.Join(h.InfiniBand, " ") }},
	{"GPUs", func(h *hostReport) string {
		if len(h.GPUs) == 0 {
			return "none: ranks run on the host platform"
		}
		model := h.GPUs[0].Model
		if model == "" {
			model = h.GPUs[0].Vendor + " GPU"
		}
		text := fmt.Sprintf("%d of %s", len(h.GPUs), model)
		if h.VisibleGPU != len(h.GPUs) {
			text += fmt.Sprintf(", %d visible to ranks", h.VisibleGPU)
		}
		return text
	}},
	{"driver", func(h *hostReport) string { return strings.TrimSpace(h.Driver.Vendor + " " + h.Driver.Version) }},
	{"libraries", func(h *hostReport) string {
		var all []string
		for _, l := range h.Libraries {
			if l.Version != "" {
				all = append(all, l.Name+" "+l.Version)
			}
		}
		return strings.Join(all, ", ")
	}},
	{"program", func(h *hostReport) string {
		var all []string
		for _, p := range h.Programs {
			text := p.Name + ": " + p.Path
			switch {
			case p.Err != "":
				text = p.Err
			case p.Sent:
				text = p.Name + ": would be sent"
			case p.Same:
				text = p.Name + ": the same file is there"
			}
			all = append(all, text)
		}
		return strings.Join(all, "; ")
	}},
	{"gorun", func(h *hostReport) string {
		switch {
		case h.Local:
			return "this host"
		case h.Sent:
			return "was sent to " + h.Agent
		}
		return h.Agent
	}},
	{"address", func(h *hostReport) string {
		switch {
		case h.Chosen == "":
			return "none at which all others reach it"
		case h.moved || h.On == "":
			return h.Chosen
		}
		return "that of ssh, on " + h.On
	}},
	{"reaches", func(h *hostReport) string {
		n := 0
		var most time.Duration
		for _, r := range h.Reach {
			if r.Err == "" {
				n++
				most = max(most, r.Took)
			}
		}
		if n == len(h.Reach) {
			return "all others that were tried"
		}
		return fmt.Sprintf("%d of %d others", n, len(h.Reach))
	}},
}

func dirText(path string, exists bool, fs string, size int64, flags []string, err string) string {
	switch {
	case err != "":
		return path + ": " + err
	case !exists:
		return path + ": not there"
	}
	text := fmt.Sprintf("%s: %s, %s", path, fs, launcher.FormatBytes(size))
	if len(flags) > 0 {
		text += " (" + strings.Join(flags, ", ") + ")"
	}
	return text
}

// writeHosts is one table of several hosts: a line says what is alike, or a line each what differs and where.
func (r *checkReport) writeHosts(b *strings.Builder) {
	var names, missing []string
	for _, h := range r.Hosts {
		if h.Reached {
			names = append(names, h.Name)
		} else {
			missing = append(missing, h.Name)
		}
	}
	fmt.Fprintf(b, "%d of %d hosts are reached", len(names), len(r.Hosts))
	if len(names) > 0 {
		fmt.Fprintf(b, ": %s", launcher.HostList(names))
	}
	if len(missing) > 0 {
		fmt.Fprintf(b, "\n%d are not: %s", len(missing), launcher.HostList(missing))
	}
	b.WriteString("\n")
	for _, row := range hostRows {
		var values []string
		of := map[string][]string{}
		for i := range r.Hosts {
			h := &r.Hosts[i]
			if !h.Reached {
				continue
			}
			v := row.of(h)
			if of[v] == nil {
				values = append(values, v)
			}
			of[v] = append(of[v], h.Name)
		}
		what := row.name
		for _, v := range values {
			text := v
			if len(values) > 1 {
				if text == "" {
					text = "none"
				}
				text = launcher.HostList(of[v]) + ": " + text
			} else if text == "" {
				continue
			}
			line(b, what, "%s", text)
			what = ""
		}
	}
}
