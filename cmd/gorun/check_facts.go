package main

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/launcher"
)

// facts tells what is known of a host, as lines of a table: say takes the name of a line, "" for one more of the same, and its text. Of one of
// several hosts it tells what can be compared: for each host the same names, once each, and an empty text where it has none.
func (h *hostReport) facts(say func(what, text string)) {
	several := h.hostLink != nil
	if several {
		say("user", userName(h)) // of one host the title has it
	}
	say("kernel", "Linux "+h.Kernel.Release+", "+h.Kernel.Arch)
	cores := fmt.Sprint(h.Cores.Usable)
	if !several && h.Cores.Online != h.Cores.Usable {
		cores += fmt.Sprintf(" of %d", h.Cores.Online)
	}
	if h.Cores.Limit > 0 {
		cores += fmt.Sprintf(", the control group allows %.3g", h.Cores.Limit)
	}
	say("cores", cores)
	say("memory", h.memoryText())
	say("limits", fmt.Sprintf("open files %s, processes %s, locked memory %s", count(h.Limits.NoFile.Soft), count(h.Limits.NProc.Soft), launcher.FormatBytes(h.Limits.MemLock.Soft)))
	say("shm", dirText(&h.Shm, several))
	say("TMPDIR", dirText(&h.Tmp, several))
	say("cache", dirText(&h.Cache, several))
	say("wdir", dirText(h.Dir, several))
	say("clock", h.clockText())
	h.interfaces(say)
	say("InfiniBand", strings.Join(h.InfiniBand, " "))
	h.gpus(say)
	say("driver", strings.TrimSpace(h.Driver.Vendor+" "+h.Driver.Version))
	h.libraries(say)
	if !several {
		say("ssh client", cmp.Or(h.SSH, "none (gorun has its own)"))
	}
	h.programs(say)
	if several {
		h.link(say)
	}
}

func userName(h *hostReport) string { return cmp.Or(h.User.Name, fmt.Sprint(h.User.UID)) }

func (h *hostReport) memoryText() string {
	size, m := launcher.FormatBytes, h.Memory
	if h.hostLink != nil { // in whole GiB: hosts of a kind differ by a little
		total := m.Total
		if m.Limit >= 0 {
			total = min(total, m.Limit)
		}
		return fmt.Sprintf("%.0f GiB", float64(total)/(1<<30))
	}
	text := fmt.Sprintf("%s, %s available", size(m.Total), size(m.Available))
	if m.Limit >= 0 {
		text += fmt.Sprintf("; the control group allows %s, %s of it are used", size(m.Limit), size(m.Used))
	}
	return text
}

// dirText is of a directory, nil for none. What is free on each of several hosts can't be compared.
func dirText(d *launcher.HostDir, several bool) string {
	switch {
	case d == nil:
		return ""
	case d.Err != "":
		return d.Path + ": " + d.Err
	case !d.Exists:
		return d.Path + ": not there"
	}
	text := fmt.Sprintf("%s: %s, %s", d.Path, d.FS, launcher.FormatBytes(d.Size))
	if !several {
		text += ", " + launcher.FormatBytes(d.Free) + " free"
	}
	if len(d.Flags) > 0 {
		text += " (" + strings.Join(d.Flags, ", ") + ")"
	}
	return text
}

func (h *hostReport) clockText() string {
	text := "not synchronized"
	if h.Clock.Synced {
		text = "synchronized"
	}
	if h.hostLink == nil {
		return h.Clock.Now.Format("2006-01-02 15:04:05 MST") + ", " + text
	}
	if off := time.Duration(h.Skew).Abs(); off > 100*time.Millisecond && off > 2*time.Duration(h.SkewErr) {
		text += fmt.Sprintf(", %+.1f s", time.Duration(h.Skew).Seconds())
	}
	return text
}

func (h *hostReport) interfaces(say func(what, text string)) {
	what := "interfaces"
	var names []string
	for _, i := range h.Interfaces {
		if !i.Up || len(i.Addrs) == 0 {
			continue
		}
		if h.hostLink == nil {
			say(what, i.Name+" "+strings.Join(i.Addrs, " "))
			what = ""
		} else if !i.Loopback {
			names = append(names, i.Name)
		}
	}
	if h.hostLink != nil {
		say(what, strings.Join(names, " "))
	}
}

func (h *hostReport) gpus(say func(what, text string)) {
	what, visible := "GPUs", ""
	if len(h.GPUs) == 0 {
		say(what, "none: ranks run on the host platform")
		return
	}
	if h.VisibleGPU != len(h.GPUs) {
		visible = fmt.Sprintf("%d of them visible to ranks", h.VisibleGPU)
	}
	if h.hostLink == nil {
		for _, g := range h.GPUs {
			say(what, g.String())
			what = ""
		}
		say("", visible)
		return
	}
	text := fmt.Sprintf("%d of %s", len(h.GPUs), cmp.Or(h.GPUs[0].Model, h.GPUs[0].Vendor+" GPU"))
	if visible != "" {
		text += ", " + visible
	}
	say(what, text)
}

func (h *hostReport) libraries(say func(what, text string)) {
	var versions []string
	for _, l := range h.Libraries {
		if l.Version != "" {
			versions = append(versions, l.Name+" "+l.Version)
		}
		switch {
		case h.hostLink != nil:
		case l.Err != "" && l.Path == "":
			say(l.Name, l.Err)
		case l.Err != "":
			say(l.Name, l.Path+": "+l.Err)
		default:
			say(l.Name, strings.TrimSpace(fmt.Sprintf("%s %s (%s)", l.Version, l.Path, l.From)))
		}
	}
	if h.hostLink != nil {
		say("libraries", strings.Join(versions, ", "))
	}
}

func (h *hostReport) programs(say func(what, text string)) {
	var all []string
	for _, p := range h.Programs {
		text := p.Name + ": " + cmp.Or(p.Err, p.Path)
		switch {
		case h.hostLink == nil:
			say("program", text)
			continue
		case p.Err != "":
			text = p.Err // with its name
		case p.Sent:
			text = p.Name + ": would be sent"
		case p.Same:
			text = p.Name + ": the same file is there"
		}
		all = append(all, text)
	}
	if h.hostLink != nil {
		say("program", strings.Join(all, "; "))
	}
}

// link tells how one of several hosts is reached, and what it reaches.
func (h *hostReport) link(say func(what, text string)) {
	switch {
	case h.Local:
		say("gorun", "this host")
	case h.Sent:
		say("gorun", "was sent to "+h.Agent)
	default:
		say("gorun", h.Agent)
	}
	switch {
	case h.Chosen == "":
		say("address", "none at which all others reach it")
	case h.moved || h.On == "":
		say("address", h.Chosen)
	default:
		say("address", "that of ssh, on "+h.On)
	}
	n := 0
	for _, r := range h.Reach {
		if r.Err == "" {
			n++
		}
	}
	if n == len(h.Reach) {
		say("reaches", "all others that were tried")
	} else {
		say("reaches", fmt.Sprintf("%d of %d others", n, len(h.Reach)))
	}
}
