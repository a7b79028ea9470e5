package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gorun-dev/gorun/launcher"
)

const checkLong = `gorun check looks at this machine: what a job needs of it, and what would stop one. With a
job file also at the job's program and directory.

With hosts (-H, --hostfile, an allocation, or those of the job file) it looks at all of them
at once, over ssh as a job would: whether they are reached, what they are like and in what
they differ, their clocks, whether the program is there or would be sent, and whether each
reaches the others by TCP and UDP. gorun itself is sent where it is missing, and stays in its
cache there; nothing else is left. No GPU is opened on other hosts: gorun check there does
that.

Without --deep nothing is opened: it reads /proc, /sys, /dev and files. With --deep, which is
the default where ranks would use GPUs, it starts gorun-bench as a rank on each GPU, which
opens the GPU's libraries, makes a communicator and checks an all-reduce; --deep=false leaves
that out, -np N asks for it.

With --registration ranks of gorun-bench (one a GPU; two on the host platform) call
collectives on private memory, on nccl.Alloc memory, in an arena and in windows, captured and
not, and the table shows for each buffer whether it was really registered, by NCCL's own log
(on the host platform by the communicator's counters), and when it was given back.

Exit code 0: nothing would stop a job; 1: something would (a line says what mends it); others
as in help exit-codes.`

// checkRequest is a command line of gorun check.
type checkRequest struct {
	registration bool
	deep         bool
	deepSet      bool
	json         bool
	verbose      bool
	np           int
	device       string
	timeout      time.Duration
	file         string
	launch       request // what flags say of hosts, and of the way to them
}

// hostFlags are those of a launch that say which hosts, and how they are reached.
var hostFlags = []string{"-H", "--hostfile", "--rm", "--wdir", "--stage", "--ssh-config", "--accept-new-host-keys", "--rsh", "--connect-timeout", "--port-range"}

// flagValue is a flag of a launch as cobra's flags have it.
type flagValue struct {
	def *flagDef
	q   *request
}

func (v flagValue) String() string   { return "" }
func (v flagValue) Type() string     { return v.def.arg }
func (v flagValue) IsBoolFlag() bool { return v.def.arg == "" }

func (v flagValue) Set(s string) error {
	return v.def.set(v.q, s)
}

// checkTime is how long the ranks of a check may take. Opening eight GPUs takes some ten seconds, making a communicator at most a minute.
const checkTime = 2 * time.Minute

func newCheckCmd(io stdio) *cobra.Command {
	q := &checkRequest{}
	c := &cobra.Command{
		Use:   "check [flags] [JOB.toml]",
		Short: "look at this machine, or at the hosts of a job: what would stop it",
		Long:  checkLong,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("check takes one job file, not %s and %s", args[0], args[1])
			}
			return nil
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return []string{"toml"}, cobra.ShellCompDirectiveFilterFileExt
		},
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				q.file = args[0]
			}
			q.deepSet = c.Flags().Changed("deep")
			if err := q.valid(c.Flags().Changed("np")); err != nil {
				return err
			}
			run := q.host
			if q.registration {
				run = q.registered
			}
			return run(io)
		},
	}
	f := c.Flags()
	f.BoolVar(&q.registration, "registration", false, "show which buffers are really registered, and when they are given back")
	f.BoolVar(&q.deep, "deep", false, "open the GPUs, and make a communicator (default: where ranks would use GPUs)")
	f.BoolVar(&q.json, "json", false, "JSON instead of a table")
	f.BoolVarP(&q.verbose, "verbose", "v", false, "show the library's own log lines (--registration), what the communicator can do (--deep)")
	f.IntVarP(&q.np, "np", "n", 0, "start `N` ranks, also -np N (default: one a GPU; two on the host platform)")
	f.StringVar(&q.device, "device", "", "device of the ranks, a `TOKEN`: host, an index, a UUID [GORUN_DEVICE]")
	f.DurationVar(&q.timeout, "timeout", checkTime, "end the ranks after this `TIME`")
	for _, name := range hostFlags {
		d := findFlag(name)
		v := flagValue{d, &q.launch}
		long := strings.TrimLeft(d.names[len(d.names)-1], "-")
		switch {
		case name == "-H":
			f.VarP(v, long, "H", d.helpAndEnv())
		case d.arg == "":
			f.VarPF(v, long, "", d.helpAndEnv()).NoOptDefVal = "true"
		default:
			f.Var(v, long, d.helpAndEnv())
		}
	}
	return c
}

// checkArgs makes -np, as launches have it, the flag that cobra knows.
func checkArgs(args []string) []string {
	out := make([]string, 0, len(args))
	for _, a := range args {
		if n, ok := attachedCount(a); ok {
			a = "--np=" + n
		} else if rest, ok := strings.CutPrefix(a, "-np"); ok && (rest == "" || rest[0] == '=') {
			a = "--np" + rest
		}
		out = append(out, a)
	}
	return out
}

func (q *checkRequest) valid(npSet bool) error {
	switch {
	case npSet && (q.np < 1 || q.np > launcher.MaxNP):
		return usagef("-np %d: must be a number from 1 to %d", q.np, launcher.MaxNP)
	case q.timeout <= 0:
		return usagef("--timeout %v: must be more than 0", q.timeout)
	case q.registration && q.deepSet:
		return usagef("--deep and --registration are different checks: give one")
	case q.registration && q.file != "":
		return usagef("--registration takes no job file")
	case q.registration && len(q.launch.job.Hosts)+len(q.launch.job.Hostfile) > 0:
		return usagef("--registration is of this machine's GPUs, and takes no hosts")
	case npSet && q.deepSet && !q.deep:
		return usagef("-np goes with --deep or --registration: else no ranks are started")
	}
	return nil
}

// job is what the check is for: the job file's, and what flags and variables say.
func (q *checkRequest) job() (launcher.Job, []launcher.Source, error) {
	job := q.launch.job
	job.NP, job.Device = q.np, q.device
	sources, err := countedOf(&request{job: job, file: q.file}, os.LookupEnv)
	if err != nil {
		return job, nil, err
	}
	return merge(sources), sources, nil
}

// ranks is how many ranks the check starts.
func (q *checkRequest) ranks(j launcher.Job, gpus int) int {
	switch {
	case q.np > 0:
		return q.np
	case gpus > 0 && j.Device == "":
		return gpus
	case gpus > 0 && j.Device != "host":
		return 1 // a GPU has one rank
	}
	return benchNP
}

// checkReport is what gorun check --json writes.
type checkReport struct {
	OK     bool                 `json:"ok"` // nothing would stop a job
	Hosts  []hostReport         `json:"hosts"`
	Ranks  *ranksReport         `json:"ranks,omitempty"`  // of --deep
	Faults []launcher.HostFault `json:"faults,omitempty"` // that concern several hosts
}

type hostReport struct {
	*hostLink
	*launcher.HostFacts
	Faults []launcher.HostFault `json:"faults"`
}

// hostLink is how a host of several is reached.
type hostLink struct {
	Name    string `json:"name"` // as the user wrote it
	Reached bool   `json:"reached"`
	Local   bool   `json:"local,omitempty"`      // gorun runs on it
	Agent   string `json:"agent,omitempty"`      // gorun's file there
	Sent    bool   `json:"agent_sent,omitempty"` // now
	Addr    string `json:"address,omitempty"`    // where other hosts reach it
	Chosen  string `json:"chosen,omitempty"`     // the same, and why it is that one; none: not all others reach it
	On      string `json:"interface,omitempty"`  // that holds it
	moved   bool
	Skew    int64                `json:"clock_skew_ns"`       // of its clock, ahead of this host's
	SkewErr int64                `json:"clock_skew_error_ns"` // give or take
	Reach   []launcher.HostReach `json:"reach,omitempty"`     // of other hosts, by this one
}

// host is gorun check without --registration.
func (q *checkRequest) host(io stdio) error {
	job, sources, err := q.job()
	if err != nil {
		return err
	}
	if q.file != "" {
		_, err := planOf(job, io, false)
		if _, missing := errors.AsType[*launcher.StartError](err); err != nil && !missing { // that is among the faults
			return hintBeside(placed(err, job, sources), job, q.file)
		}
	}
	hosts, err := q.hosts(job, io)
	if err != nil {
		return err
	}
	if hosts != nil {
		return q.elsewhere(hosts, job, io)
	}
	for _, i := range launcher.FindIdle(false, launcher.Source{Job: q.launch.job, Name: flagName}) {
		fmt.Fprintf(io.err, "gorun: %s\n", i.Text(true))
	}
	facts := launcher.CheckHost(job, os.Environ())
	h := hostReport{nil, facts, facts.Faults()}
	if h.Faults == nil {
		h.Faults = []launcher.HostFault{}
	}
	r := &checkReport{OK: true, Hosts: []hostReport{h}}
	deep := q.deep
	if !q.deepSet {
		deep = q.np > 0 || facts.VisibleGPU > 0 && job.Device != "host"
	}
	if deep {
		if r.Ranks, err = q.probe(io, job, facts.VisibleGPU); err != nil {
			return err
		}
		r.settle()
	}
	return q.show(r, io)
}

// show writes the report. Faults that would stop a job are an error.
func (q *checkRequest) show(r *checkReport, io stdio) error {
	r.eachFault(func(_ string, f launcher.HostFault) { r.OK = r.OK && !f.Stops })
	var err error
	if q.json {
		err = encoder(io.out).Encode(r)
	} else {
		_, err = io.out.Write([]byte(r.text(q.verbose)))
	}
	if err != nil {
		return fmt.Errorf("write stdout: %w", err)
	}
	if !r.OK {
		return exitCode(exitFaults)
	}
	return nil
}

// exitFaults is gorun check's exit code where something would stop a job.
const exitFaults = 1

// settle makes what files say about GPUs a warning where ranks have used them all the same.
func (r *checkReport) settle() {
	if len(r.Ranks.Faults) > 0 {
		return
	}
	for _, h := range r.Hosts {
		for i := range h.Faults {
			if h.Faults[i].GPU {
				h.Faults[i].Stops = false
			}
		}
	}
}

// eachFault calls f for all faults, with the host that it is about ("host h2: ", or "hosts h1 h2: " where they have the same) if there are several.
func (r *checkReport) eachFault(f func(where string, fault launcher.HostFault)) {
	for _, stops := range []bool{true, false} {
		var told []launcher.HostFault
		for i, h := range r.Hosts {
			for _, fault := range h.Faults {
				if fault.Stops != stops || slices.Contains(told, fault) {
					continue
				}
				told = append(told, fault)
				where := ""
				if h.hostLink != nil {
					names := []string{h.Name}
					for _, o := range r.Hosts[i+1:] {
						if slices.Contains(o.Faults, fault) {
							names = append(names, o.Name)
						}
					}
					where = "host " + h.Name + ": "
					if len(names) > 1 {
						where = "hosts " + launcher.HostList(names) + ": "
					}
				}
				f(where, fault)
			}
		}
		rest := r.Faults
		if r.Ranks != nil {
			rest = append(r.Ranks.Faults[:len(r.Ranks.Faults):len(r.Ranks.Faults)], rest...)
		}
		for _, fault := range rest {
			if fault.Stops == stops {
				f("", fault)
			}
		}
	}
}

// registered is gorun check --registration. gorun-bench's rank 0 writes the table.
func (q *checkRequest) registered(io stdio) error {
	job, _, err := q.job()
	if err != nil {
		return err
	}
	bench, err := findBench()
	if err != nil {
		return err
	}
	n := q.ranks(job, launcher.VisibleGPUs("/", os.Environ()))
	if n < 2 {
		return &launcher.StartError{Code: exitFaults, Msg: "registration is between ranks, and one GPU has one rank: --device host checks the host platform"}
	}
	args := []string{"registration"}
	if q.json {
		args = append(args, "-json")
	}
	if q.verbose {
		args = append(args, "-v")
	}
	acct, err := runRanks(launcher.Job{NP: n, Program: bench, Args: args, Device: job.Device, Timeout: q.timeout}, io, io.out, io.err)
	if err != nil {
		return err
	}
	if onlyFaults(acct) {
		return exitCode(exitFaults)
	}
	tell(io, acct)
	if acct.Code != launcher.ExitOK {
		return exitCode(acct.Code)
	}
	return nil
}

// benchFaults is the exit code of gorun-bench's checks where they have found something and told it.
const benchFaults = 3

// onlyFaults reports whether the ranks have done their work and found faults.
func onlyFaults(acct *launcher.Account) bool {
	for _, r := range acct.Ranks {
		if r.Code != benchFaults && r.Code != launcher.ExitOK || r.Signal != "" {
			return false
		}
	}
	return acct.Code == benchFaults
}

// findings of ranks that opened their devices.
type ranksReport struct {
	Ranks   []probedRank         `json:"ranks,omitempty"`
	Library string               `json:"library,omitempty"`
	Version string               `json:"version,omitempty"`
	Path    string               `json:"path,omitempty"`
	Explain []string             `json:"explain,omitempty"`
	Error   string               `json:"error,omitempty"`
	Faults  []launcher.HostFault `json:"faults"`
}

// probedRank is what gorun-bench probe writes about a rank.
type probedRank struct {
	Rank    int    `json:"rank"`
	Device  string `json:"device,omitempty"`
	UUID    string `json:"uuid,omitempty"`
	Bus     string `json:"bus,omitempty"`
	Driver  string `json:"driver,omitempty"`
	Library string `json:"driver_library,omitempty"`
	Free    uint64 `json:"free,omitempty"`
	Memory  uint64 `json:"memory,omitempty"`
	Error   string `json:"error,omitempty"`
}

// probe runs gorun-bench probe and judges what it has found.
func (q *checkRequest) probe(io stdio, job launcher.Job, gpus int) (*ranksReport, error) {
	r := &ranksReport{Faults: []launcher.HostFault{}}
	fault := func(stops bool, what, advice string) {
		r.Faults = append(r.Faults, launcher.HostFault{Stops: stops, What: what, Advice: advice})
	}
	bench, err := findBench()
	if err != nil {
		missing, advice, _ := strings.Cut(err.Error(), "; ")
		fault(false, "no device was opened: "+missing, strings.Join(strings.Fields(advice), " "))
		return r, nil
	}
	var out, errs strings.Builder
	acct, err := runRanks(launcher.Job{NP: q.ranks(job, gpus), Program: bench, Args: []string{"probe"}, Device: job.Device, Timeout: q.timeout}, io, &out, &errs)
	if err != nil {
		return nil, err
	}
	if acct.Reason == launcher.ReasonSignal {
		return nil, exitCode(acct.Code)
	}
	if acct.Code != launcher.ExitOK && !onlyFaults(acct) {
		what := strings.TrimSpace(acct.Summary())
		if text := strings.TrimSpace(errs.String()); text != "" && !strings.Contains(what, text) {
			if acct.Reason == launcher.ReasonTimeout { // then it says what the ranks did
				what, text = text, what
			}
			what = text + "\n" + what
		}
		fault(true, "ranks could not be run: "+strings.TrimPrefix(what, "gorun: "), "gorun -np "+strconv.Itoa(q.ranks(job, gpus))+" "+benchProgram+" probe shows it again; -x NCCL_DEBUG=INFO shows more")
		return r, nil
	}
	// The library may have written there, too (NCCL_DEBUG).
	text := ""
	for line := range strings.Lines(out.String()) {
		if strings.HasPrefix(line, "{") {
			text = line
		}
	}
	if err := json.Unmarshal([]byte(text), r); err != nil {
		return nil, fmt.Errorf("%s probe wrote %q: %w (is it of the same version as gorun?)", bench, out.String(), err)
	}
	for _, p := range r.Ranks {
		if p.Error != "" {
			fault(true, fmt.Sprintf("rank %d: %s", p.Rank, p.Error), "--device host, or GORUN_DEVICE=host, does without GPUs")
		}
	}
	if r.Error != "" {
		advice := "-x NCCL_DEBUG=INFO on a launch shows what the library did"
		if strings.Contains(r.Error, "no usable library") {
			advice = "install the library, or name its file by the variable in brackets"
		}
		fault(true, "communicator: "+r.Error, advice)
	}
	return r, nil
}
