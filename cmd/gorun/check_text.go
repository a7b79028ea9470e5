package main

import (
	"fmt"
	"strings"

	"github.com/gorun-dev/gorun/launcher"
)

// text is the report for people.
func (r *checkReport) text(verbose bool) string {
	var b strings.Builder
	if len(r.Hosts) > 0 && r.Hosts[0].hostLink != nil {
		r.writeHosts(&b)
	} else {
		for i := range r.Hosts {
			writeHost(&b, &r.Hosts[i])
		}
	}
	if r.Ranks != nil && len(r.Ranks.Ranks) > 0 {
		r.Ranks.write(&b, verbose)
	}
	b.WriteString("\n")
	tell := func(where string, f launcher.HostFault) {
		kind := "warning"
		if f.Stops {
			kind = "fault"
		}
		fmt.Fprintf(&b, "%s: %s%s\n  %s\n", kind, where, f.What, f.Advice)
	}
	r.eachFault(tell)
	if r.OK {
		b.WriteString("Nothing would stop a job.\n")
	}
	return b.String()
}

func line(b *strings.Builder, what, format string, args ...any) {
	fmt.Fprintf(b, "  %-12s %s\n", what, fmt.Sprintf(format, args...))
}

func writeHost(b *strings.Builder, h *hostReport) {
	fmt.Fprintf(b, "%s, user %s\n", h.Host, userName(h))
	h.facts(func(what, text string) {
		if text != "" {
			line(b, what, "%s", text)
		}
	})
}

// count is a limit for people.
func count(n int64) string {
	if n < 0 {
		return "unlimited"
	}
	return fmt.Sprint(n)
}

func (r *ranksReport) write(b *strings.Builder, verbose bool) {
	fmt.Fprintf(b, "ranks of %s\n", benchProgram)
	for _, p := range r.Ranks {
		what := fmt.Sprintf("rank %d", p.Rank)
		if p.Error != "" {
			line(b, what, "%s", firstLine(p.Error))
			continue
		}
		text := p.Device
		for _, s := range []string{p.Bus, p.UUID} {
			if s != "" {
				text += ", " + s
			}
		}
		text += fmt.Sprintf(", %s of %s free", launcher.FormatBytes(int64(p.Free)), launcher.FormatBytes(int64(p.Memory)))
		if p.Driver != "" {
			text += fmt.Sprintf("; driver %s (%s)", p.Driver, p.Library)
		}
		line(b, what, "%s", text)
	}
	if r.Library != "" {
		line(b, r.Library, "%s (%s)", r.Version, r.Path)
	}
	switch {
	case r.Error != "":
		line(b, "communicator", "%s", firstLine(r.Error))
	case len(r.Explain) > 0:
		line(b, "communicator", "of size %d; an all-reduce is right", len(r.Ranks))
	}
	if verbose {
		for _, l := range r.Explain {
			fmt.Fprintf(b, "    %s\n", l)
		}
	}
}

// firstLine is enough for the table: the fault below it has the rest.
func firstLine(s string) string {
	first, _, _ := strings.Cut(s, "\n")
	return first
}
