package launcher

import (
	"slices"
	"strconv"
	"strings"
)

// need is an option that does nothing unless others are set, or where others are.
type need struct {
	key     string
	idle    func(j *Job, away bool) bool // it does nothing in a job whose ranks run on other hosts, too, or not
	why     string                       // goes on after "has no effect"; % is the option other
	other   string
	refused bool // Plan refuses such a job: what was asked for is not what would happen
}

const notAway = "unless ranks run on other hosts"

// needs are all of these options. One that is missing here works alone.
var needs = []need{
	{key: "launch.window", why: "without %", other: "launch.restarts", refused: true, idle: func(j *Job, _ bool) bool { return j.Restarts == nil }},
	{key: "launch.timeout_signal", why: "without %", other: "launch.timeout", refused: true, idle: func(j *Job, _ bool) bool { return j.Timeout == 0 }},
	{key: "launch.timeout_signal", why: "where % comes before it", other: "launch.timeout", refused: true, idle: func(j *Job, _ bool) bool { return j.Timeout > 0 && j.TimeoutSignal.Before >= j.Timeout }},
	{key: "output.files_only", why: "without %, the directory for the files", other: "output.dir", refused: true, idle: func(j *Job, _ bool) bool { return isOn(j.FilesOnly) && j.OutputDir == "" }},
	{key: "output.tag", why: "with %: files have no tags", other: "output.files_only", idle: func(j *Job, _ bool) bool { return isOn(j.TagOutput) && isOn(j.FilesOnly) }},
	{key: "launch.gpu_bind", why: "where each rank is given its %", other: "job.device", refused: true, idle: func(j *Job, _ bool) bool {
		apps, err := j.apps()
		return err == nil && choosesGPUs(j.GPUBind) && !slices.ContainsFunc(apps, func(a App) bool { return a.Device == "" })
	}},
	{key: "launch.stdin", why: "with so small a %: ranks are numbered from 0", other: "job.np", refused: true, idle: func(j *Job, _ bool) bool {
		apps, err := j.apps()
		rank, number := strconv.Atoi(j.Stdin)
		n := numRanks(apps)
		return err == nil && number == nil && n > 0 && rank >= n
	}},
	{key: "launch.rm", why: "where hosts are given", idle: func(j *Job, _ bool) bool { return j.RM != RMNone && (len(j.Hosts) > 0 || j.Hostfile != "") }},
	{key: "launch.map_by", why: notAway, idle: func(j *Job, away bool) bool { return !away && *j.MapBy == MapBy{Node: true} }},
	{key: "launch.rsh", why: notAway, idle: func(_ *Job, away bool) bool { return !away }},
	{key: "launch.ssh_config", why: notAway, idle: func(_ *Job, away bool) bool { return !away }},
	{key: "launch.ssh_config", why: "with %, which replaces the built-in ssh client", other: "launch.rsh", refused: true, idle: func(j *Job, away bool) bool { return away && j.RSH != "" }},
	{key: "launch.accept_new_host_keys", why: notAway, idle: func(j *Job, away bool) bool { return !away && isOn(j.AcceptNewHostKeys) }},
	{key: "launch.accept_new_host_keys", why: "with %, which replaces the built-in ssh client", other: "launch.rsh", refused: true,
		idle: func(j *Job, away bool) bool { return away && isOn(j.AcceptNewHostKeys) && j.RSH != "" }},
	{key: "launch.connect_timeout", why: notAway, idle: func(_ *Job, away bool) bool { return !away }},
	{key: "launch.port_range", why: notAway, idle: func(_ *Job, away bool) bool { return !away }},
	{key: "launch.stage", why: notAway, idle: func(_ *Job, away bool) bool { return !away }},
}

// Idle is a setting that does nothing in its job.
type Idle struct {
	Option  *Option
	Source  int    // the index of the source that it comes from
	From    string // that place
	Refused bool   // Plan refuses the job for it
	need    *need
}

// FindIdle finds the settings of a job, which sources make, that do nothing in it. away says that ranks may run on other hosts.
func FindIdle(away bool, sources ...Source) []Idle {
	var j Job
	for _, s := range sources {
		j = Merge(j, s.Job)
	}
	var found []Idle
	for i := range needs {
		n := &needs[i]
		o := optionByKey(n.key)
		if len(o.values(&j)) == 0 || !n.idle(&j, away) {
			continue
		}
		for k := range sources {
			if len(o.values(&sources[k].Job)) > 0 {
				found = append(found, Idle{o, k, sources[k].from(o, o.Key, o.Also), n.refused, n})
				break
			}
		}
	}
	return found
}

// Text says it as a job file names options, or as flags do: "window has no effect without restarts".
func (i *Idle) Text(flags bool) string {
	name := func(o *Option) string {
		if flags {
			return o.Flags[0]
		}
		_, key, _ := strings.Cut(o.Key, ".")
		return key
	}
	why := i.need.why
	if i.need.other != "" {
		why = strings.ReplaceAll(why, "%", name(optionByKey(i.need.other)))
	}
	return name(i.Option) + " has no effect " + why
}
