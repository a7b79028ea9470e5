package launcher

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gorun-dev/gorun/launcher/internal/placement"
	"github.com/gorun-dev/gorun/rankenv"
)

// App is one program of a job that has several (MPI's MPMD). What is left at its zero value is as the job says, but for NP and
// Program, which must be there.
type App struct {
	NP      int
	Program string
	Args    []string
	Dir     string
	Env     []Setting // beside the job's, and over them
	Device  string
	MPI     string
}

// NewApp is the program of a job of which only what an app may have is set.
func NewApp(j Job) App {
	return App{NP: j.NP, Program: j.Program, Args: j.Args, Dir: j.Dir, Env: j.Env, Device: j.Device, MPI: j.MPI}
}

// job is the reverse of NewApp.
func (a App) job() Job {
	return Job{NP: a.NP, Program: a.Program, Args: a.Args, Dir: a.Dir, Env: a.Env, Device: a.Device, MPI: a.MPI}
}

// PlanApp is one program of a plan. Its ranks follow those of the app before it.
type PlanApp struct {
	Program int    `json:"program"`       // index in Plan.Programs
	Ranks   int    `json:"ranks"`         // how many run it
	Dir     string `json:"dir,omitempty"` // their working directory, which was given for them; "": Plan.Dir

	MPI string `json:"mpi,omitempty"` // the process manager that they find, MPIPMI or MPIPMIx; "": none

	script  ScriptMPI // that they run
	mpiWish string    // which the user wants, MPIAuto if it was not said
	inherit []string  // what those on the local host inherit, without what Env sets
}

// Programs are the names of the job's programs, in the order in which they were given; none if it names no program.
func (j Job) Programs() []string {
	var names []string
	for _, a := range j.Apps {
		names = append(names, a.Program)
	}
	if names == nil && j.Program != "" {
		names = []string{j.Program}
	}
	return names
}

// apps are the job's programs, complete: one if it has no Apps.
func (j Job) apps() ([]App, error) {
	if len(j.Apps) == 0 {
		return []App{NewApp(j)}, nil
	}
	if j.NP != 0 {
		return nil, flagf("-np", "%d is for a job with one program: this one has %d, and each has its own number of ranks", j.NP, len(j.Apps))
	}
	if j.Program != "" {
		return nil, usagef("programs are given twice: %s, and %s", j.Program, strings.Join(j.Programs(), ", "))
	}
	total := 0
	apps := slices.Clone(j.Apps)
	for i := range apps {
		a := &apps[i]
		if a.Program == "" {
			return nil, usagef("program %d of %d has no name", i, len(apps))
		}
		if a.NP == 0 {
			return nil, usagef("program %s: no number of ranks; each of several programs needs its own (-np, or np in its [[app]])", a.Program)
		}
		if a.NP < 1 || a.NP > MaxNP-total {
			return nil, usagef("program %s: number of ranks %d: must be from 1 to %d, for all programs together", a.Program, a.NP, MaxNP)
		}
		total += a.NP
		a.Env = slices.Concat(j.Env, a.Env)
		a.Device, a.MPI = cmp.Or(a.Device, j.Device), cmp.Or(a.MPI, j.MPI)
	}
	return apps, nil
}

// numRanks is how many ranks programs have together; 0: as many as there are slots.
func numRanks(apps []App) int {
	n := 0
	for _, a := range apps {
		n += a.NP
	}
	return n
}

// planApps makes the plan's programs and apps, and finds the variables for each app's ranks.
func (p *Plan) planApps(apps []App, np int, f Facts) ([][]Setting, error) {
	var settings [][]Setting
	for i, a := range apps {
		s, err := checkSettings(a.Env)
		if err != nil {
			return nil, err
		}
		settings = append(settings, s)
		prog := Program{Name: a.Program}
		if i < len(f.Programs) {
			prog = f.Programs[i]
		}
		at := slices.Index(p.Programs, prog)
		if at < 0 {
			at = len(p.Programs)
			p.Programs = append(p.Programs, prog)
		}
		pa := PlanApp{Program: at, Ranks: a.NP}
		if len(apps) == 1 {
			pa.Ranks = np
		}
		if len(apps) > 1 && a.Dir != "" {
			pa.Dir = absolute(f.Dir, a.Dir)
		}
		p.Apps = append(p.Apps, pa)
	}
	return settings, nil
}

// argv is what the ranks of an app are started with.
func (p *Plan) argv(app int, apps []App) []string {
	return append([]string{p.Programs[p.Apps[app].Program].Name}, apps[app].Args...)
}

// program is what a rank runs.
func (p *Plan) program(r *PlanRank) *Program { return &p.Programs[p.Apps[r.App].Program] }

// dirOf is the working directory of an app's ranks.
func (p *Plan) dirOf(app int) string {
	return cmp.Or(p.Apps[app].Dir, p.Dir)
}

// programsOn are the indices of the programs that ranks of a host run, in order.
func (p *Plan) programsOn(host int) []int {
	var on []int
	for _, r := range p.Ranks {
		if k := p.Apps[r.App].Program; r.Host == host && !slices.Contains(on, k) {
			on = append(on, k)
		}
	}
	slices.Sort(on)
	return on
}

// writeApps prints the programs and their directories.
func (p *Plan) writeApps(b *strings.Builder) {
	first := 0
	for i, a := range p.Apps {
		prog := p.Programs[a.Program]
		text := prog.Path
		if prog.GoDir != "" {
			text = fmt.Sprintf("%s (Go package in %s, built at launch)", prog.Name, prog.GoDir)
		} else if text == "" {
			text = prog.Name + " (looked for on each host)"
		}
		label := "program"
		if len(p.Apps) > 1 {
			label = fmt.Sprintf("program %d", i)
			text += ", " + rankenv.RankText(rankRange(first, a.Ranks))
			if a.Dir != "" {
				text += ", in " + a.Dir
			}
		}
		fmt.Fprintf(b, "%-10s %s\n", label, text)
		first += a.Ranks
	}
	fmt.Fprintf(b, "directory  %s\n", p.Dir)
}

func rankRange(from, n int) []int {
	ranks := make([]int, n)
	for i := range ranks {
		ranks[i] = from + i
	}
	return ranks
}

// inheritAll reports whether the ranks of every app are to inherit a variable.
func inheritAll(settings [][]Setting, name string) bool {
	return !slices.ContainsFunc(settings, func(of []Setting) bool { return !inherits(of, name) })
}

// sets reports whether a variable is set to a value.
func sets(settings []Setting, name string) bool {
	return slices.ContainsFunc(settings, func(s Setting) bool { return !s.Inherit && s.Name == name })
}

// lookup is the value of a variable in an environment: the first, which is what getenv finds.
func lookup(environ []string, name string) (string, bool) { return placement.LookupIn(environ)(name) }

// getenv is lookup where a variable that is not set is as good as an empty one.
func getenv(environ []string, name string) string {
	value, _ := lookup(environ, name)
	return value
}
