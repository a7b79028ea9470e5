package launcher

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// unstaged says that the rank that failed first ran in a directory of the job's own, without files that its arguments name and that this
// host has; "" if that is not so.
func (r *runner) unstaged() string {
	if r.acct.Reason != ReasonFailed {
		return ""
	}
	rank := &r.plan.Ranks[r.acct.Cause]
	h := r.remote(rank.Host)
	if h == nil || h.prepared == nil || !h.prepared.OwnDir || r.plan.Apps[rank.App].Dir != "" {
		return ""
	}
	var missing []string
	for _, arg := range rank.Argv[1:] {
		if !filepath.IsLocal(arg) || filepath.Clean(arg) == "." || r.plan.sends(arg) || slices.Contains(missing, arg) {
			continue
		}
		if _, err := os.Stat(filepath.Join(r.plan.Dir, arg)); err == nil {
			missing = append(missing, arg)
		}
	}
	if len(missing) == 0 {
		return ""
	}
	why := "has no " + r.plan.Dir
	if !h.prepared.NoDir {
		why = "lacks files of " + r.plan.Dir
	}
	s := "host " + h.name + " " + why + ": its ranks ran in a directory of the job's own;"
	for _, f := range missing {
		s += " --stage " + ShellQuote(f)
	}
	if len(missing) > 1 {
		return s + " send them"
	}
	return s + " sends it"
}

// sends reports whether a file of the ranks' directory is sent to the hosts, by itself or with a directory.
func (p *Plan) sends(name string) bool {
	name = filepath.Clean(name)
	return slices.ContainsFunc(p.Remote.Stage, func(f StageFile) bool {
		of := filepath.Clean(f.Name)
		return of == name || of == "." || strings.HasPrefix(name, of+"/")
	})
}
