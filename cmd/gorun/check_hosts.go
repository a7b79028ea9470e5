package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"

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
	interrupted, signals := make(chan exitCode, 1), s.ending()
	go func() {
		for {
			select {
			case sig := <-signals:
				if launcher.EndsJob(sig) {
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
		are := "are"
		if len(missing) == 1 {
			are = "is"
		}
		fmt.Fprintf(b, "\n%d %s not: %s", len(missing), are, launcher.HostList(missing))
	}
	b.WriteString("\n")
	var order []string                     // of the lines
	of := map[string]map[string][]string{} // the hosts of each text of each line
	texts := map[string][]string{}         // in the order in which they were found
	for i := range r.Hosts {
		h := &r.Hosts[i]
		if !h.Reached {
			continue
		}
		h.facts(func(what, text string) {
			if of[what] == nil {
				order, of[what] = append(order, what), map[string][]string{}
			}
			if of[what][text] == nil {
				texts[what] = append(texts[what], text)
			}
			of[what][text] = append(of[what][text], h.Name)
		})
	}
	for _, name := range order {
		what := name
		for _, text := range texts[name] {
			if len(texts[name]) > 1 {
				text = launcher.HostList(of[name][text]) + ": " + cmp.Or(text, "none")
			}
			if text != "" {
				line(b, what, "%s", text)
			}
			what = ""
		}
	}
}
