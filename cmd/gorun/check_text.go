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
		for _, h := range r.Hosts {
			writeHost(&b, h.HostFacts)
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

func writeHost(b *strings.Builder, f *launcher.HostFacts) {
	size := launcher.FormatBytes
	who := f.User.Name
	if who == "" {
		who = fmt.Sprint(f.User.UID)
	}
	fmt.Fprintf(b, "%s, user %s\n", f.Host, who)
	line(b, "kernel", "Linux %s, %s", f.Kernel.Release, f.Kernel.Arch)
	cores := fmt.Sprint(f.Cores.Online)
	if f.Cores.Usable != f.Cores.Online {
		cores = fmt.Sprintf("%d of %d", f.Cores.Usable, f.Cores.Online)
	}
	if f.Cores.Limit > 0 {
		cores += fmt.Sprintf(", the control group allows %.3g", f.Cores.Limit)
	}
	line(b, "cores", "%s", cores)
	memory := fmt.Sprintf("%s, %s available", size(f.Memory.Total), size(f.Memory.Available))
	if f.Memory.Limit >= 0 {
		memory += fmt.Sprintf("; the control group allows %s, %s of it are used", size(f.Memory.Limit), size(f.Memory.Used))
	}
	line(b, "memory", "%s", memory)
	line(b, "limits", "open files %s, processes %s, locked memory %s", count(f.Limits.NoFile.Soft), count(f.Limits.NProc.Soft), size(f.Limits.MemLock.Soft))
	dir := func(what string, path string, exists bool, fs string, total, free int64, flags []string, err string) {
		text := path + ": "
		switch {
		case err != "":
			text += err
		case !exists:
			text += "not there"
		default:
			text += fmt.Sprintf("%s, %s, %s free", fs, size(total), size(free))
			if len(flags) > 0 {
				text += " (" + strings.Join(flags, ", ") + ")"
			}
		}
		line(b, what, "%s", text)
	}
	dir("shm", f.Shm.Path, f.Shm.Exists, f.Shm.FS, f.Shm.Size, f.Shm.Free, f.Shm.Flags, f.Shm.Err)
	dir("TMPDIR", f.Tmp.Path, f.Tmp.Exists, f.Tmp.FS, f.Tmp.Size, f.Tmp.Free, f.Tmp.Flags, f.Tmp.Err)
	dir("cache", f.Cache.Path, f.Cache.Exists, f.Cache.FS, f.Cache.Size, f.Cache.Free, f.Cache.Flags, f.Cache.Err)
	if f.Dir != nil {
		dir("wdir", f.Dir.Path, f.Dir.Exists, f.Dir.FS, f.Dir.Size, f.Dir.Free, f.Dir.Flags, f.Dir.Err)
	}
	synced := "not synchronized"
	if f.Clock.Synced {
		synced = "synchronized"
	}
	line(b, "clock", "%s, %s", f.Clock.Now.Format("2006-01-02 15:04:05 MST"), synced)
	what := "interfaces"
	for _, i := range f.Interfaces {
		if !i.Up || len(i.Addrs) == 0 {
			continue
		}
		line(b, what, "%s %s", i.Name, strings.Join(i.Addrs, " "))
		what = ""
	}
	if len(f.InfiniBand) > 0 {
		line(b, "InfiniBand", "%s", strings.Join(f.InfiniBand, " "))
	}
	if len(f.GPUs) == 0 {
		line(b, "GPUs", "none: ranks run on the host platform")
	}
	what = "GPUs"
	for _, g := range f.GPUs {
		line(b, what, "%s", g)
		what = ""
	}
	if len(f.GPUs) > 0 && f.VisibleGPU != len(f.GPUs) {
		line(b, "", "%d of them visible to ranks", f.VisibleGPU)
	}
	if f.Driver.Vendor != "" {
		line(b, "driver", "%s %s", f.Driver.Vendor, f.Driver.Version)
	}
	for _, l := range f.Libraries {
		switch {
		case l.Err != "" && l.Path == "":
			line(b, l.Name, "%s", l.Err)
		case l.Err != "":
			line(b, l.Name, "%s: %s", l.Path, l.Err)
		default:
			line(b, l.Name, "%s", strings.TrimSpace(fmt.Sprintf("%s %s (%s)", l.Version, l.Path, l.From)))
		}
	}
	if f.SSH != "" {
		line(b, "ssh client", "%s", f.SSH)
	} else {
		line(b, "ssh client", "none (gorun has its own)")
	}
	for _, p := range f.Programs {
		path := p.Path
		if p.Err != "" {
			path = p.Err
		}
		line(b, "program", "%s: %s", p.Name, path)
	}
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
		line(b, "communicator", "of %d ranks; an all-reduce is right", len(r.Ranks))
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
