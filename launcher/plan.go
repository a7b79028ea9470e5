package launcher

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/rankenv"
)

// Plan is a job worked out: data that can be printed and compared, and that Run carries out.
type Plan struct {
	Program   Program       `json:"program"`
	Dir       string        `json:"dir"`
	Hosts     []PlanHost    `json:"hosts"` // those that have ranks, in the order in which they were given
	Ranks     []PlanRank    `json:"ranks"`
	Removed   []string      `json:"removed"` // names of inherited variables that another launcher left over
	TagOutput bool          `json:"tag_output"`
	Stdin     int           `json:"stdin"` // the rank that reads gorun's stdin, -1: none
	Timeout   time.Duration `json:"timeout_ns"`
	KillGrace time.Duration `json:"kill_grace_ns"` // 0: none
	Report    string        `json:"report,omitempty"`
	Remote    Remote        `json:"remote,omitzero"` // for the hosts that are not local

	inherit []string // what ranks on the local host inherit, without what Env sets
}

// PlanHost is one host of a plan.
type PlanHost struct {
	Name  string `json:"name"`           // for messages: as the user wrote it
	User  string `json:"user,omitempty"` // "": from the ssh configuration
	Addr  string `json:"addr,omitempty"` // what the way to the host is given: a name, an alias of the ssh configuration, an address; "" on the local host
	Port  int    `json:"port,omitempty"` // 0: from the ssh configuration
	Slots int    `json:"slots"`          // how many ranks it takes without oversubscription
	Local bool   `json:"local"`          // the host that gorun runs on: its ranks need no way
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
	Stage             []string      `json:"stage,omitempty"`    // files to send beside the program, absolute
	Forward           []string      `json:"forward,omitempty"`  // NAME=VALUE: what ranks get of gorun's environment beside the host's own
}

// PlanRank is one rank of a plan.
type PlanRank struct {
	Rank      int      `json:"rank"`
	Host      int      `json:"host"` // index in Plan.Hosts
	LocalRank int      `json:"local_rank"`
	Device    string   `json:"device,omitempty"`
	Argv      []string `json:"argv"`
	Env       []string `json:"env"` // set for this rank; AtLaunch names what comes later

}

// AtLaunch names the variables of a rank that a plan can't know: they are drawn when the job is launched.
var AtLaunch = []string{"GORUN_JOB_ID", "GORUN_CONTROL", "MASTER_ADDR", "MASTER_PORT", "JAX_COORDINATOR_ADDRESS"}

// Facts are what a plan depends on beside the job.
type Facts struct {
	Program Program
	Host    string   // this host's name
	Dir     string   // the current directory, absolute
	Environ []string // gorun's environment
}

// Plan works the job out. It touches nothing: the same job and facts give the same plan.
func (j Job) Plan(f Facts) (*Plan, error) {
	np := j.NP
	if np == 0 {
		np = 1
	}
	if np < 0 || np > MaxNP {
		return nil, usagef("number of ranks %d: must be from 1 to %d", np, MaxNP)
	}
	p := &Plan{Program: f.Program, Dir: f.Dir, Hosts: []PlanHost{{Name: f.Host, Slots: np, Local: true}}, TagOutput: j.TagOutput != nil && *j.TagOutput, Timeout: j.Timeout, KillGrace: j.KillGrace, Report: j.Report}
	switch {
	case j.KillGrace == 0:
		p.KillGrace = DefaultKillGrace
	case j.KillGrace < 0:
		p.KillGrace = 0
	}
	if j.Dir != "" {
		p.Dir = j.Dir
		if !strings.HasPrefix(p.Dir, "/") {
			p.Dir = strings.TrimSuffix(f.Dir, "/") + "/" + p.Dir
		}
	}
	switch j.Stdin {
	case "", StdinRank0:
	case StdinNone:
		p.Stdin = -1
	default:
		return nil, usagef("stdin %s: must be %s or %s", j.Stdin, StdinRank0, StdinNone)
	}
	device := j.Device
	settings, err := checkSettings(j.Env)
	if err != nil {
		return nil, err
	}
	inherit := f.Environ
	if !j.KeepLauncherEnv {
		var removed []string
		inherit, removed = rankenv.Scrub(f.Environ)
		for _, kv := range removed {
			name, _, _ := strings.Cut(kv, "=")
			if slices.ContainsFunc(settings, func(s Setting) bool { return s.Inherit && s.Name == name }) {
				inherit = append(inherit, kv)
			} else {
				p.Removed = append(p.Removed, name)
			}
		}
		slices.Sort(p.Removed)
	}
	argv := append([]string{f.Program.Name}, j.Args...)
	for r := range np {
		place := rankenv.Env{Launcher: "gorun", Rank: r, Size: np, LocalRank: r, LocalSize: np, Nodes: 1, Device: device}
		pr := PlanRank{Rank: r, LocalRank: r, Device: device, Argv: argv}
		pr.Env = place.Environ()
		for _, s := range settings {
			if s.Inherit {
				continue
			}
			pr.Env = slices.DeleteFunc(pr.Env, func(kv string) bool { return isVar(kv, s.Name) })
			pr.Env = append(pr.Env, s.Name+"="+s.Value)
		}
		p.Ranks = append(p.Ranks, pr)
	}
	set := map[string]bool{}
	for _, name := range AtLaunch {
		set[name] = true
	}
	for _, kv := range p.Ranks[0].Env {
		name, _, _ := strings.Cut(kv, "=")
		set[name] = true
	}
	seen := map[string]bool{}
	if j.Dir != "" {
		inherit = append([]string{"PWD=" + p.Dir}, inherit...)
	}
	for _, kv := range inherit {
		name, _, _ := strings.Cut(kv, "=")
		if set[name] || seen[name] {
			continue // getenv finds the first of two
		}
		seen[name] = true
		p.inherit = append(p.inherit, kv)
	}
	return p, nil
}

// userMay are variables that gorun gives to ranks and that a user may set instead.
var userMay = []string{"MASTER_ADDR", "MASTER_PORT", "JAX_COORDINATOR_ADDRESS", "ROLE_NAME"}

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
		if !s.Inherit && !slices.Contains(userMay, s.Name) {
			for _, v := range rankenv.Vars {
				if v.Name != s.Name {
					continue
				}
				if v.By == rankenv.ByGorun {
					return nil, usagef("variable %s: it tells a rank its place in the job, gorun sets it", s.Name)
				}
				if s.Name == "GORUN_DEVICE" {
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

// atLaunch is what is drawn when the job is launched, the same for all ranks of a host.
func (p *Plan) atLaunch(job, control, addr string, port int) []string {
	e := rankenv.Env{Job: job, Control: control, MasterAddr: addr, MasterPort: port}
	return slices.DeleteFunc(e.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return !slices.Contains(AtLaunch, name)
	})
}

func (p *Plan) hostNames() []string {
	var names []string
	for _, h := range p.Hosts {
		names = append(names, h.Name)
	}
	return names
}

// environ is the whole environment of a rank on the local host.
func (p *Plan) environ(r *PlanRank, atLaunch []string) []string {
	env := make([]string, 0, len(p.inherit)+len(r.Env)+len(atLaunch))
	env = append(env, p.inherit...)
	env = append(env, r.Env...)
	for _, kv := range atLaunch {
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
	n := "ranks"
	if len(p.Ranks) == 1 {
		n = "rank"
	}
	fmt.Fprintf(&b, "%d %s on %s\n", len(p.Ranks), n, strings.Join(p.hostNames(), ", "))
	if p.Program.GoDir != "" {
		fmt.Fprintf(&b, "program    %s (Go package in %s, built at launch)\n", p.Program.Name, p.Program.GoDir)
	} else {
		fmt.Fprintf(&b, "program    %s\n", p.Program.Path)
	}
	fmt.Fprintf(&b, "directory  %s\n", p.Dir)
	if p.Stdin >= 0 {
		fmt.Fprintf(&b, "stdin      to rank %d\n", p.Stdin)
	} else {
		fmt.Fprintf(&b, "stdin      to no rank\n")
	}
	if p.Timeout > 0 {
		fmt.Fprintf(&b, "timeout    %v\n", p.Timeout)
	}
	fmt.Fprintf(&b, "kill grace %v\n", p.KillGrace)
	if len(p.Removed) > 0 {
		fmt.Fprintf(&b, "removed    %s\n", strings.Join(p.Removed, " "))
	}
	fmt.Fprintf(&b, "at launch  %s\n", strings.Join(AtLaunch, " "))
	for _, r := range p.Ranks {
		device := r.Device
		if device == "" {
			device = "chosen by the rank"
		}
		fmt.Fprintf(&b, "\nrank %d: host %s, local rank %d, device %s\n", r.Rank, p.Hosts[r.Host].Name, r.LocalRank, device)
		fmt.Fprintf(&b, "  argv")
		for _, a := range r.Argv {
			b.WriteString(" " + shellQuote(a))
		}
		b.WriteString("\n")
		line := "  env "
		for _, kv := range r.Env {
			name, value, _ := strings.Cut(kv, "=")
			item := " " + name + "=" + shellQuote(value)
			if len(line)+len(item) > 100 && line != "  env " {
				b.WriteString(line + "\n")
				line = "      "
			}
			line += item
		}
		b.WriteString(line + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// shellQuote writes a word so that a shell reads it back.
func shellQuote(s string) string {
	plain := s != ""
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("_-+=:,./@%^", c) >= 0 {
			continue
		}
		plain = false
		if c < ' ' || c >= 0x7f {
			q := strconv.QuoteToASCII(s)
			return "$'" + strings.ReplaceAll(q[1:len(q)-1], "'", `\'`) + "'"
		}
	}
	if plain {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
