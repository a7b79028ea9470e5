package launcher

import (
	"cmp"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/shell"
	"github.com/gorun-dev/gorun/rankenv"
)

// Plan is a job worked out: data that can be printed and compared, and that Run carries out.
type Plan struct {
	Programs  []Program     `json:"programs"` // what the ranks run, each once
	Apps      []PlanApp     `json:"apps"`     // which ranks run what: one, unless the job has several programs
	Dir       string        `json:"dir"`
	DirGiven  bool          `json:"dir_given,omitempty"` // the user named Dir: a host without it is an error
	Hosts     []PlanHost    `json:"hosts"`               // those that have ranks, in the order in which they were given
	Ranks     []PlanRank    `json:"ranks"`
	Removed   []string      `json:"removed"` // names of inherited variables that another launcher left over
	TagOutput bool          `json:"tag_output"`
	Timestamp bool          `json:"timestamp,omitempty"`
	Merge     bool          `json:"merge,omitempty"`      // the ranks' stderr goes where their stdout goes
	OutputDir string        `json:"output_dir,omitempty"` // absolute; a file of each rank and stream is written there
	FilesOnly bool          `json:"files_only,omitempty"` // and nowhere else
	Stdin     int           `json:"stdin"`                // the rank that reads gorun's stdin, or NoStdin or AllStdin
	Timeout   time.Duration `json:"timeout_ns"`
	KillGrace time.Duration `json:"kill_grace_ns"` // 0: none
	Report    string        `json:"report,omitempty"`

	TimeoutSignal TimedSignal `json:"timeout_signal,omitzero"`
	OnFail        string      `json:"on_fail,omitempty"` // OnFailWait; else "": OnFailKill
	Restarts      Restarts    `json:"restarts,omitzero"`

	Unused []string `json:"unused,omitempty"` // names of hosts that got no rank
	Remote Remote   `json:"remote,omitzero"`  // for the hosts that are not local

	HostsFrom     string `json:"hosts_from,omitempty"` // who gave the hosts; "": nobody did
	BindTo        Bind   `json:"bind_to,omitzero"`
	GPUBind       string `json:"gpu_bind,omitempty"`
	Oversubscribe bool   `json:"oversubscribe,omitempty"`
}

// PlanHost is one host of a plan.
type PlanHost struct {
	Name  string `json:"name"`           // for messages: as the user wrote it
	User  string `json:"user,omitempty"` // "": from the ssh configuration
	Addr  string `json:"addr,omitempty"` // what the way to the host is given: a name, an alias of the ssh configuration, an address; "" on the local host
	Port  int    `json:"port,omitempty"` // 0: from the ssh configuration
	Slots int    `json:"slots"`          // how many ranks it takes without oversubscription
	Local bool   `json:"local"`          // the host that gorun runs on: its ranks need no way

	Place *HostPlace `json:"place,omitempty"` // what it gives its ranks; nil: not known before they start
	Route *Route     `json:"route,omitempty"` // the way to it; nil: it needs none, or FindRoutes was not called
}

// Remote is what concerns only the hosts that are not local.
type Remote struct {
	RSH               string        `json:"rsh,omitempty"`        // command instead of the built-in ssh client
	SSHConfig         string        `json:"ssh_config,omitempty"` // "": the user's and the system's
	AcceptNewHostKeys bool          `json:"accept_new_host_keys,omitempty"`
	ConnectTimeout    time.Duration `json:"connect_timeout_ns"`  // for all hosts together
	PortFrom          int           `json:"port_from,omitempty"` // ports that gorun's own connections between hosts may use, both inclusive; 0: any
	PortTo            int           `json:"port_to,omitempty"`
	NoStage           bool          `json:"no_stage,omitempty"` // the program is on every host
	Stage             []StageFile   `json:"stage,omitempty"`    // files to send beside the program
	Forward           []string      `json:"forward,omitempty"`  // NAME=VALUE: what ranks get of gorun's environment beside the host's own
}

// PlanRank is one rank of a plan.
type PlanRank struct {
	Rank      int      `json:"rank"`
	Host      int      `json:"host"` // index in Plan.Hosts
	LocalRank int      `json:"local_rank"`
	App       int      `json:"app"` // index in Plan.Apps
	Device    string   `json:"device,omitempty"`
	Argv      []string `json:"argv"`
	Env       []string `json:"env"` // set for this rank; AtLaunch names what comes later

	Why   string     `json:"why"`             // why it is on its host
	Place *RankPlace `json:"place,omitempty"` // what its host gives it; nil: not known before it starts
	cpus  []int      // that it is bound to; nil: it is not
	more  bool       // its place sets variables that others may inherit
}

// AtLaunch names the variables of a rank that a plan can't know: they are drawn when the job is launched.
var AtLaunch = []string{"GORUN_JOB_ID", "GORUN_CONTROL", "MASTER_ADDR", "MASTER_PORT", "JAX_COORDINATOR_ADDRESS", runIDVar}

// Facts are what a plan depends on beside the job.
type Facts struct {
	Programs   []Program   // the job's, in the order of Job.Programs; those that are missing are none of this host
	Scripts    []ScriptMPI // what their scripts say of MPI, likewise; may be shorter
	Host       string      // this host's name
	Dir        string      // the current directory, absolute
	Environ    []string    // gorun's environment
	Hostfile   []Host      // what is in the job's hostfile
	Allocation Allocation  // what a resource manager gave
	GPUs       int         // how many this host has
	Machine    *Machine    // what this host has for its ranks; nil: none of them is bound
}

// Plan works the job out. It touches nothing: the same job and facts give the same plan.
func (j Job) Plan(f Facts) (*Plan, error) {
	if j.NP < 0 || j.NP > MaxNP {
		return nil, usagef("number of ranks %d: must be from 1 to %d", j.NP, MaxNP)
	}
	apps, err := j.apps()
	if err != nil {
		return nil, err
	}
	p := &Plan{Dir: f.Dir, TagOutput: isOn(j.TagOutput), Timestamp: isOn(j.Timestamp), Merge: isOn(j.Merge), FilesOnly: isOn(j.FilesOnly),
		Timeout: max(j.Timeout, 0), KillGrace: j.KillGrace, Report: j.Report}
	switch {
	case j.KillGrace == 0:
		p.KillGrace = DefaultKillGrace
	case j.KillGrace < 0:
		p.KillGrace = 0
	}
	if err := j.planPolicy(p); err != nil {
		return nil, err
	}
	if err := j.planPlace(p, apps); err != nil {
		return nil, err
	}
	if j.Dir != "" {
		p.Dir, p.DirGiven = absolute(f.Dir, j.Dir), true
	}
	if j.OutputDir != "" {
		p.OutputDir = absolute(f.Dir, j.OutputDir)
	} else if p.FilesOnly {
		return nil, flagf("--files-only", "goes with --output-dir, which names the directory for the files")
	}
	on, err := j.placeRanks(p, f, numRanks(apps))
	if err != nil {
		return nil, err
	}
	settings, err := p.planApps(apps, len(on), f)
	if err != nil {
		return nil, err
	}
	if p.Stdin, err = j.planStdin(len(on)); err != nil {
		return nil, err
	}
	if err := j.planRemote(p, f, settings); err != nil {
		return nil, err
	}
	switch j.EnvLike {
	case "", rankenv.LikeOpenMPI, rankenv.LikeSlurm:
	default:
		return nil, flagf("--env-like", "%s: must be %s or %s", j.EnvLike, rankenv.LikeOpenMPI, rankenv.LikeSlurm)
	}
	p.planRanks(on, apps, f, settings, j.EnvLike)
	p.planInherited(j, f, settings)
	if err := p.planMPI(apps, f); err != nil {
		return nil, err
	}
	if err := p.placeLocal(f.Machine); err != nil {
		return nil, err
	}
	p.explain(j, f)
	return p, nil
}

// Values of Plan.Stdin that are no rank.
const (
	NoStdin  = -1
	AllStdin = -2
)

// planStdin is Plan.Stdin of a job of so many ranks.
func (j Job) planStdin(ranks int) (int, error) {
	switch j.Stdin {
	case "":
		return 0, nil
	case StdinNone:
		return NoStdin, nil
	case StdinAll:
		return AllStdin, nil
	}
	if _, err := parseStdin(j.Stdin); err != nil {
		return 0, flagf("--stdin", "%v", err)
	}
	rank, _ := strconv.Atoi(j.Stdin)
	if rank >= ranks {
		return 0, flagf("--stdin", "%d: there is no such rank, the job has %s (from 0)", rank, count(ranks, "rank"))
	}
	return rank, nil
}

// stdinRanks are the ranks that read gorun's stdin.
func (p *Plan) stdinRanks() []int {
	var ranks []int
	for r := range p.Ranks {
		if r == p.Stdin || p.Stdin == AllStdin {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func isOn(b *bool) bool { return b != nil && *b }

// planPolicy is what becomes of the job when something fails, or its time is over.
func (j Job) planPolicy(p *Plan) error {
	if j.OnFail != OnFailKill {
		p.OnFail = j.OnFail
	}
	if s := j.TimeoutSignal; s.Signal != 0 && j.Timeout != NoTimeout {
		if j.Timeout == 0 {
			return flagf("--timeout-signal", "%v: a signal before the timeout needs one: --timeout", s)
		}
		if s.Before >= j.Timeout {
			return flagf("--timeout-signal", "%v: the timeout is %v", s, j.Timeout)
		}
		p.TimeoutSignal = s
	}
	if j.RestartWindow != 0 && j.Restarts == nil {
		return flagf("--restart-window", "%v: without restarts; give --restarts N", j.RestartWindow)
	}
	if j.Restarts != nil && *j.Restarts > 0 {
		p.Restarts = Restarts{*j.Restarts, j.RestartWindow}
	}
	return nil
}

func absolute(dir, path string) string {
	if strings.HasPrefix(path, "/") {
		return path
	}
	return strings.TrimSuffix(dir, "/") + "/" + path
}

// placeRanks finds the hosts that get ranks, and the host of each rank.
func (j Job) placeRanks(p *Plan, f Facts, np int) ([]int, error) {
	hosts := j.Hosts
	allocated := false
	switch {
	case len(j.Hosts) > 0 && j.Hostfile != "":
		return nil, usagef("hosts are given twice, by -H (or [[host]]) and by the hostfile %s: give one of them", j.Hostfile)
	case j.Hostfile != "":
		if hosts = f.Hostfile; len(hosts) == 0 {
			return nil, usagef("hostfile %s: no host in it", j.Hostfile)
		}
	case len(j.Hosts) == 0:
		hosts, allocated = f.Allocation.Hosts, true
	}
	local := func(h Host) bool { return j.isLocal(f, h) }
	hosts, err := uniteHosts(hosts, local)
	if err != nil {
		return nil, err
	}
	mapBy := MapBy{}
	if j.MapBy != nil {
		mapBy = *j.MapBy
	}
	oversubscribe := isOn(j.Oversubscribe)
	if len(hosts) == 0 {
		hosts = []Host{{Name: f.Host, Addr: f.Host}}
		local = func(Host) bool { return true }
	}
	if len(hosts) == 1 && local(hosts[0]) && mapBy.PPR == 0 {
		// On this host alone any number of ranks may run, unless the user has said how many it takes.
		if h := &hosts[0]; len(j.Hosts) == 0 && j.Hostfile == "" && np == 0 && h.Slots <= 1 && j.Device == "" {
			np = max(f.GPUs, 1)
		}
		oversubscribe = oversubscribe || allocated || hosts[0].Slots == 0
		if hosts[0].Slots == 0 {
			hosts[0].Slots = max(np, 1)
		}
	}
	on, err := place(np, hosts, mapBy, oversubscribe)
	if err != nil {
		return nil, err
	}
	// Hosts without a rank are no part of the job.
	index := make([]int, len(hosts))
	used := make([]bool, len(hosts))
	for _, i := range on {
		used[i] = true
	}
	for i, h := range hosts {
		if !used[i] {
			p.Unused = append(p.Unused, h.Name)
			continue
		}
		index[i] = len(p.Hosts)
		ph := PlanHost{Name: h.Name, Slots: h.slots(), Local: local(h)}
		if mapBy.PPR > 0 && h.Slots == 0 {
			ph.Slots = mapBy.PPR
		}
		if !ph.Local {
			ph.User, ph.Addr, ph.Port = h.User, h.Addr, h.Port
		}
		p.Hosts = append(p.Hosts, ph)
	}
	for r, i := range on {
		on[r] = index[i]
	}
	return on, nil
}

// isLocal reports whether a host is the one that gorun runs on. Where a user, a port or another way is given, the way is wanted.
func (j Job) isLocal(f Facts, h Host) bool {
	if j.RSH != "" || h.User != "" || h.Port != 0 {
		return false
	}
	if strings.EqualFold(h.Addr, "localhost") || strings.EqualFold(h.Addr, f.Host) {
		return true
	}
	// A name without dots is looked up in the own domain first.
	if first, _, dotted := strings.Cut(f.Host, "."); dotted && strings.EqualFold(h.Addr, first) {
		return true
	}
	return slices.Contains(f.Allocation.Own, h.Addr)
}

// planRanks makes the ranks, of which on names the hosts.
func (p *Plan) planRanks(on []int, apps []App, f Facts, settings [][]Setting, like string) {
	local := make([]int, len(p.Hosts)) // ranks of each host so far
	size := make([]int, len(p.Hosts))
	for _, h := range on {
		size[h]++
	}
	app, left := 0, p.Apps[0].Ranks
	argv := p.argv(0, apps)
	for r, h := range on {
		for left == 0 {
			app++
			left, argv = p.Apps[app].Ranks, p.argv(app, apps)
		}
		left--
		place := rankenv.Env{Launcher: "gorun", Rank: r, Size: len(on), LocalRank: local[h], LocalSize: size[h], Node: h, Nodes: len(p.Hosts), Device: apps[app].Device, App: app, Restarts: p.Restarts.N}
		pr := PlanRank{Rank: r, Host: h, LocalRank: local[h], App: app, Device: apps[app].Device, Argv: argv}
		local[h]++
		pr.Env = append(place.Environ(), place.Like(like)...)
		for _, s := range settings[app] {
			value := s.Value
			if s.Inherit {
				// To this host's ranks it comes with all the rest, and where every program has it, to those of other hosts as well.
				var there bool
				value, there = lookup(f.Environ, s.Name)
				instead := slices.Contains(userMay, s.Name) // of gorun's own
				if !there || !instead && (p.Hosts[h].Local || inheritAll(settings, s.Name)) {
					continue
				}
			}
			pr.Env = slices.DeleteFunc(pr.Env, func(kv string) bool { return isVar(kv, s.Name) })
			pr.Env = append(pr.Env, s.Name+"="+value)
		}
		p.Ranks = append(p.Ranks, pr)
	}
}

// planInherited finds what ranks of the local host inherit of gorun's environment.
func (p *Plan) planInherited(j Job, f Facts, settings [][]Setting) {
	kept, removed := f.Environ, []string(nil)
	if !isOn(j.KeepLauncherEnv) {
		kept, removed = rankenv.Scrub(f.Environ)
	}
	for _, kv := range removed {
		name, _, _ := strings.Cut(kv, "=")
		if !slices.ContainsFunc(settings, func(of []Setting) bool { return inherits(of, name) }) {
			p.Removed = append(p.Removed, name)
		}
	}
	slices.Sort(p.Removed)
	first := 0 // rank of the app
	for i := range p.Apps {
		a := &p.Apps[i]
		var inherit []string
		if a.Dir != "" || p.DirGiven {
			inherit = append(inherit, "PWD="+p.dirOf(i))
		}
		inherit = append(inherit, kept...)
		for _, kv := range removed {
			if name, _, _ := strings.Cut(kv, "="); inherits(settings[i], name) {
				inherit = append(inherit, kv)
			}
		}
		a.inherit = without(inherit, setNames(p.Ranks[first].Env, AtLaunch))
		first += a.Ranks
	}
}

func inherits(settings []Setting, name string) bool {
	return slices.ContainsFunc(settings, func(s Setting) bool { return s.Inherit && s.Name == name })
}

// planRemote is what the hosts that are not local need.
func (j Job) planRemote(p *Plan, f Facts, settings [][]Setting) error {
	noStage := slices.Contains(j.Stage, StageNone)
	if noStage && len(j.Stage) > 1 {
		return flagf("--stage", "%s and files to send contradict each other", StageNone)
	}
	if !slices.ContainsFunc(p.Hosts, func(h PlanHost) bool { return !h.Local }) {
		return nil
	}
	if j.RSH != "" && j.SSHConfig != "" {
		return flagf("--ssh-config", "is for the built-in ssh client, and --rsh replaces it: give it to the command (ssh -F %s)", ShellQuote(j.SSHConfig))
	}
	if j.RSH != "" && isOn(j.AcceptNewHostKeys) {
		return flagf("--accept-new-host-keys", "is for the built-in ssh client, and --rsh replaces it: give it to the command (ssh -o StrictHostKeyChecking=accept-new)")
	}
	p.Remote = Remote{RSH: j.RSH, SSHConfig: j.SSHConfig, AcceptNewHostKeys: isOn(j.AcceptNewHostKeys), ConnectTimeout: j.ConnectTimeout,
		PortFrom: j.Ports.From, PortTo: j.Ports.To, NoStage: noStage}
	if p.Remote.ConnectTimeout == 0 {
		p.Remote.ConnectTimeout = DefaultConnectTimeout
	}
	if !noStage {
		for _, file := range j.Stage {
			s, err := stageFile(f.Dir, file)
			if err != nil {
				return err
			}
			p.Remote.Stage = append(p.Remote.Stage, s)
		}
	}
	_, removed := rankenv.Scrub(f.Environ)
	foreign := setNames(removed, nil)
	for _, kv := range without(f.Environ, nil) {
		name, _, _ := strings.Cut(kv, "=")
		// A rank's own value wins over it.
		set := !slices.ContainsFunc(settings, func(of []Setting) bool { return !sets(of, name) })
		if !set && (forwarded(name) && !foreign[name] || inheritAll(settings, name)) {
			p.Remote.Forward = append(p.Remote.Forward, kv)
		}
	}
	slices.Sort(p.Remote.Forward)
	return nil
}

// forwarded names the variables that ranks on other hosts get without being asked for: settings of the collectives' libraries, of Open MPI and
// of gorun's own that ranks read. All else there is the host's own, PATH and LD_LIBRARY_PATH above all.
func forwarded(name string) bool {
	if strings.HasPrefix(name, "NCCL_") || strings.HasPrefix(name, "MCCL_") || strings.HasPrefix(name, "OMPI_MCA_") {
		return true
	}
	return name != "GORUN_DEVICE" && slices.ContainsFunc(rankenv.Vars, func(v rankenv.Var) bool { return v.By != rankenv.ByGorun && v.Name == name }) ||
		strings.HasPrefix(name, "GORUN_") && strings.HasSuffix(name, "_LIB")
}

// setNames are the names of variables and the further names, as a set.
func setNames(vars, names []string) map[string]bool {
	set := make(map[string]bool, len(vars)+len(names))
	for _, name := range names {
		set[name] = true
	}
	for _, kv := range vars {
		name, _, _ := strings.Cut(kv, "=")
		set[name] = true
	}
	return set
}

// without is environ without the variables in set; of two settings of a variable the first stays, which is what getenv finds.
func without(environ []string, set map[string]bool) []string {
	out := make([]string, 0, len(environ))
	seen := make(map[string]bool, len(environ))
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		if !set[name] && !seen[name] {
			seen[name] = true
			out = append(out, kv)
		}
	}
	return out
}

// userMay are variables that gorun gives to ranks and that a user may set instead.
var userMay = []string{"MASTER_ADDR", "MASTER_PORT", "JAX_COORDINATOR_ADDRESS", jaxDevicesVar, "ROLE_NAME", runIDVar}

// checkSettings refuses variables that tell a rank its place, and keeps the last of several for one name.
func checkSettings(all []Setting) ([]Setting, error) {
	var out []Setting
	for _, s := range all {
		if s.Name == "" || strings.ContainsAny(s.Name, "=\x00") {
			return nil, usagef("variable %q: not a name", s.Name)
		}
		if strings.ContainsRune(s.Value, 0) {
			return nil, usagef("variable %s: its value holds a zero byte", s.Name)
		}
		if !slices.Contains(userMay, s.Name) {
			for _, v := range rankenv.Vars {
				if v.Name != s.Name {
					continue
				}
				if v.By == rankenv.ByGorun {
					return nil, usagef("variable %s: it tells a rank its place in the job, gorun sets it", s.Name)
				}
				if !s.Inherit && s.Name == "GORUN_DEVICE" {
					return nil, usagef("variable GORUN_DEVICE: use --device, or device in the job file")
				}
			}
		}
		out = slices.DeleteFunc(out, func(o Setting) bool { return o.Name == s.Name })
		out = append(out, s)
	}
	return out, nil
}

func isVar(kv, name string) bool {
	return len(kv) > len(name) && kv[len(name)] == '=' && kv[:len(name)] == name
}

// launchVars are the variables that AtLaunch names, the same for all ranks of a host.
func launchVars(job, control, addr string, port int) []string {
	e := rankenv.Env{Job: job, Control: control, MasterAddr: addr, MasterPort: port}
	return slices.DeleteFunc(e.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return !slices.Contains(AtLaunch, name)
	})
}

// followed is atLaunch with JAX's meeting point where rank, the rank's own variables, has that of PyTorch.
func followed(atLaunch, rank []string) []string {
	addr, here := lookup(rank, "MASTER_ADDR")
	port, there := lookup(rank, "MASTER_PORT")
	if !here && !there {
		return atLaunch
	}
	if !here {
		addr, _ = lookup(atLaunch, "MASTER_ADDR")
	}
	if !there {
		port, _ = lookup(atLaunch, "MASTER_PORT")
	}
	out := slices.Clone(atLaunch)
	for i, kv := range out {
		if isVar(kv, "JAX_COORDINATOR_ADDRESS") {
			out[i] = "JAX_COORDINATOR_ADDRESS=" + net.JoinHostPort(addr, port)
		}
	}
	return out
}

func (p *Plan) hostNames() []string {
	var names []string
	for _, h := range p.Hosts {
		names = append(names, h.Name)
	}
	return names
}

// remoteEnviron is the whole environment of a rank on a host whose login has the given one: of that, without what another launcher left
// over there, what neither the rank, atLaunch nor forward sets.
func remoteEnviron(login, forward, rank, atLaunch []string) []string {
	login, _ = rankenv.Scrub(login)
	set := setNames(rank, nil)
	env := append([]string(nil), rank...)
	for _, more := range [][]string{followed(atLaunch, rank), forward, login} {
		more = without(more, set)
		env = append(env, more...)
		for _, kv := range more {
			name, _, _ := strings.Cut(kv, "=")
			set[name] = true
		}
	}
	return env
}

// environ is the whole environment of a rank on the local host.
func (p *Plan) environ(r *PlanRank, atLaunch []string) []string {
	inherit := p.Apps[r.App].inherit
	if r.more {
		inherit = without(inherit, setNames(r.Env, nil))
	}
	env := make([]string, 0, len(inherit)+len(r.Env)+len(atLaunch))
	env = append(env, inherit...)
	env = append(env, r.Env...)
	for _, kv := range followed(atLaunch, r.Env) {
		name, _, _ := strings.Cut(kv, "=")
		if !slices.ContainsFunc(r.Env, func(kv string) bool { return isVar(kv, name) }) {
			env = append(env, kv)
		}
	}
	return env
}

// Write prints the plan for a person.
func (p *Plan) Write(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s on %s\n", count(len(p.Ranks), "rank"), strings.Join(p.hostNames(), ", "))
	p.writeHosts(&b)
	p.writeApps(&b)
	if p.OutputDir != "" {
		fmt.Fprintf(&b, "output to  %s\n", p.OutputDir)
	}
	switch p.Stdin {
	case AllStdin:
		b.WriteString("stdin      to all ranks\n")
	case NoStdin:
		b.WriteString("stdin      to no rank\n")
	default:
		fmt.Fprintf(&b, "stdin      to rank %d\n", p.Stdin)
	}
	if p.Timeout > 0 {
		fmt.Fprintf(&b, "timeout    %v", p.Timeout)
		if s := p.TimeoutSignal; s.Signal != 0 {
			fmt.Fprintf(&b, ", %s to the ranks %v before", signalName(s.Signal), s.Before)
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "kill grace %v\n", p.KillGrace)
	if p.OnFail == OnFailWait {
		fmt.Fprintf(&b, "on failure the other ranks go on\n")
	}
	if s := p.Restarts; s.N > 0 {
		fmt.Fprintf(&b, "restarts   %d", s.N)
		if s.Window > 0 {
			fmt.Fprintf(&b, " within %v", s.Window)
		}
		b.WriteString("\n")
	}
	if len(p.Removed) > 0 {
		fmt.Fprintf(&b, "removed    %s\n", strings.Join(p.Removed, " "))
	}
	p.writeSurroundings(&b)
	p.writeMPI(&b)
	p.Remote.write(&b)
	fmt.Fprintf(&b, "at launch  %s\n", strings.Join(AtLaunch, " "))
	for i := range p.Ranks {
		p.writeRank(&b, &p.Ranks[i])
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// writeRank prints a rank: where it runs, and with what.
func (p *Plan) writeRank(b *strings.Builder, r *PlanRank) {
	of := ""
	if len(p.Apps) > 1 {
		of = fmt.Sprintf("program %d, ", r.App)
	}
	fmt.Fprintf(b, "\nrank %d: %shost %s, local rank %d, device %s\n", r.Rank, of, p.Hosts[r.Host].Name, r.LocalRank, cmp.Or(r.Device, "chosen by the rank"))
	p.writeRankPlace(b, r)
	fmt.Fprintf(b, "  argv")
	for _, a := range r.Argv {
		b.WriteString(" " + ShellQuote(a))
	}
	b.WriteString("\n")
	line := "  env "
	for _, kv := range r.Env {
		name, value, _ := strings.Cut(kv, "=")
		item := " " + name + "=" + ShellQuote(value)
		if len(line)+len(item) > 100 && line != "  env " {
			b.WriteString(line + "\n")
			line = "      "
		}
		line += item
	}
	b.WriteString(line + "\n")
}

// writeHosts prints the hosts of a plan that has more than the local one.
func (p *Plan) writeHosts(b *strings.Builder) {
	if len(p.Hosts) > 1 || !p.Hosts[0].Local {
		for i, h := range p.Hosts {
			var ranks []int
			for _, r := range p.Ranks {
				if r.Host == i {
					ranks = append(ranks, r.Rank)
				}
			}
			way := "this host"
			if !h.Local {
				way = "through " + Host{User: h.User, Addr: h.Addr, Port: h.Port}.String()
			}
			fmt.Fprintf(b, "host       %s (%s), %s, %s\n", h.Name, way, count(h.Slots, "slot"), rankenv.RankText(ranks))
			if h.Route != nil {
				fmt.Fprintf(b, "route      to %s: %v\n", h.Name, h.Route)
			}
		}
	}
	if len(p.Unused) > 0 {
		fmt.Fprintf(b, "not used   %s\n", strings.Join(p.Unused, ", "))
	}
}

func (r *Remote) write(b *strings.Builder) {
	if r.ConnectTimeout == 0 {
		return // no host is remote
	}
	way := "built-in ssh client"
	if r.RSH != "" {
		way = r.RSH
	} else if r.SSHConfig != "" {
		way += ", configuration " + r.SSHConfig
	}
	fmt.Fprintf(b, "way        %s, within %v\n", way, r.ConnectTimeout)
	if r.AcceptNewHostKeys {
		fmt.Fprintf(b, "host keys  those of unknown hosts are accepted\n")
	}
	if r.PortFrom > 0 {
		fmt.Fprintf(b, "ports      %v\n", PortRange{r.PortFrom, r.PortTo})
	}
	if r.NoStage {
		fmt.Fprintf(b, "stage      nothing\n")
	} else {
		what := "the program, where it is not the same"
		for _, f := range r.Stage {
			what += ", " + f.Path
		}
		fmt.Fprintf(b, "stage      %s\n", what)
	}
	for _, kv := range r.Forward {
		name, value, _ := strings.Cut(kv, "=")
		fmt.Fprintf(b, "forwarded  %s=%s\n", name, ShellQuote(value))
	}
}

// ShellQuote writes a word so that a shell reads it back: what gorun shows as a command works as it stands.
func ShellQuote(s string) string { return shell.Quote(s) }
