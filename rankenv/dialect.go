package rankenv

import (
	"fmt"
	"strconv"
	"strings"
)

// maxRanks bounds what is believed of a size: far above every real job, far below what would overflow.
const maxRanks = 1 << 24

// A dialect is how one launcher tells a rank its place. Each field lists the names of a variable, the
// one that is set first counts.
type dialect struct {
	launcher             string
	is                   func(vars) bool // is the family there (and meant)?
	rank, size           []string
	localRank, localSize []string
	node, nodes          []string
	job                  func(vars) string
	finish               func(vars, *Env) error // what does not fit the table
}

// dialects are asked in this order. Where several agree, the first gives the name.
var dialects = []dialect{
	{
		launcher: "gorun", is: has("GORUN_RANK"),
		rank: []string{"GORUN_RANK"}, size: []string{"GORUN_SIZE"},
		localRank: []string{"GORUN_LOCAL_RANK"}, localSize: []string{"GORUN_LOCAL_SIZE"},
		node: []string{"GORUN_NODE"}, nodes: []string{"GORUN_NODES"},
		job: joined("", "GORUN_JOB_ID"), finish: finishGorun,
	},
	{
		launcher: "torchrun", is: func(v vars) bool { return v.has("RANK") && !v.has("CROSS_SIZE") },
		rank: []string{"RANK"}, size: []string{"WORLD_SIZE"},
		localRank: []string{"LOCAL_RANK"}, localSize: []string{"LOCAL_WORLD_SIZE"},
		node: []string{"GROUP_RANK"}, nodes: []string{"GROUP_WORLD_SIZE"},
		// The run id alone is "none" unless the user gives one.
		job: joined("torchrun", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"), finish: finishTorch,
	},
	{
		launcher: "openmpi", is: has("OMPI_COMM_WORLD_RANK"),
		rank: []string{"OMPI_COMM_WORLD_RANK"}, size: []string{"OMPI_COMM_WORLD_SIZE"},
		localRank: []string{"OMPI_COMM_WORLD_LOCAL_RANK"}, localSize: []string{"OMPI_COMM_WORLD_LOCAL_SIZE"},
		job: firstOf("openmpi", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
	},
	{
		launcher: "flux", is: func(v vars) bool { return v.has("FLUX_JOB_ID") && v.has("FLUX_TASK_RANK") },
		rank: []string{"FLUX_TASK_RANK"}, size: []string{"FLUX_JOB_SIZE"},
		localRank: []string{"FLUX_TASK_LOCAL_ID"}, nodes: []string{"FLUX_JOB_NNODES"},
		job: joined("flux", "FLUX_JOB_ID"),
	},
	{
		launcher: "slurm", is: func(v vars) bool { return v.has("SLURM_PROCID") && slurmStep(v) },
		rank: []string{"SLURM_PROCID"}, size: []string{"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
		localRank: []string{"SLURM_LOCALID"},
		node:      []string{"SLURM_NODEID"}, nodes: []string{"SLURM_STEP_NUM_NODES"},
		job: joined("slurm", "SLURM_JOB_ID", "SLURM_STEP_ID"), finish: finishSlurm,
	},
	{
		launcher: "hydra", is: func(v vars) bool { return v.has("PMI_RANK") || v.has("PMI_PORT") && v.has("PMI_ID") },
		rank: []string{"PMI_RANK", "PMI_ID"}, size: []string{"PMI_SIZE"},
		localRank: []string{"MPI_LOCALRANKID"}, localSize: []string{"MPI_LOCALNRANKS"},
		job: firstOf("hydra", "PMI_JOBID"),
	},
	{
		launcher: "horovod", is: has("HOROVOD_RANK"),
		rank: []string{"HOROVOD_RANK"}, size: []string{"HOROVOD_SIZE"},
		localRank: []string{"HOROVOD_LOCAL_RANK"}, localSize: []string{"HOROVOD_LOCAL_SIZE"},
		node: []string{"HOROVOD_CROSS_RANK"}, nodes: []string{"HOROVOD_CROSS_SIZE"},
		job: joined("horovod", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
	},
	{
		launcher: "deepspeed", is: func(v vars) bool { return v.has("RANK") && v.has("CROSS_SIZE") },
		rank: []string{"RANK"}, size: []string{"WORLD_SIZE"},
		localRank: []string{"LOCAL_RANK"}, localSize: []string{"LOCAL_SIZE"},
		node: []string{"CROSS_RANK"}, nodes: []string{"CROSS_SIZE"},
		job: joined("deepspeed", "MASTER_ADDR", "MASTER_PORT"), finish: finishTorch,
	},
	{
		launcher: "mvapich", is: has("MV2_COMM_WORLD_RANK"),
		rank: []string{"MV2_COMM_WORLD_RANK"}, size: []string{"MV2_COMM_WORLD_SIZE"},
		localRank: []string{"MV2_COMM_WORLD_LOCAL_RANK"}, localSize: []string{"MV2_COMM_WORLD_LOCAL_SIZE"},
		job: joined("mvapich"),
	},
}

// FromEnviron reads the place of a rank from "K=V" strings. Without any launcher's variables it is a job of one.
//
// GORUN_* win where they are there. Otherwise all families of other launchers are read: one that has a
// rank but no size is an error that names the missing variable; one that says it is alone gives way to
// one that says it is not; and two that disagree are an error that names both.
func FromEnviron(environ []string) (Env, error) {
	v := newVars(environ)
	var found []Env
	for _, d := range dialects {
		if !d.is(v) {
			continue
		}
		e, err := d.read(v)
		if err != nil {
			return Env{}, err
		}
		if e.Launcher == "gorun" && e.Size > 1 {
			return e, nil // what gorun itself sets for PyTorch and others is not another family
		}
		found = append(found, e)
	}
	if len(found) == 0 {
		return Env{Size: 1, LocalSize: 1, Nodes: 1, Device: v["GORUN_DEVICE"]}, nil
	}

	best := found[0]
	for _, e := range found[1:] {
		switch {
		case e.Size == 1 && best.Size > 1: // a job of one inside or around the real one
		case best.Size == 1 && e.Size > 1:
			best = e
		case e.Rank != best.Rank || e.Size != best.Size:
			return Env{}, fmt.Errorf("environment: %s says rank %d of %d, %s says rank %d of %d: unset the variables of one of them",
				best.Launcher, best.Rank, best.Size, e.Launcher, e.Rank, e.Size)
		}
	}
	best.Device = v["GORUN_DEVICE"]
	return best, nil
}

func (d dialect) read(v vars) (Env, error) {
	e := Env{Launcher: d.launcher}
	fail := func(err error) (Env, error) { return Env{}, fmt.Errorf("environment of %s: %w", d.launcher, err) }

	rankName, _ := v.first(d.rank)
	sizeName, ok := v.first(d.size)
	if !ok {
		return fail(fmt.Errorf("%s is set but %s is not", rankName, strings.Join(d.size, " or ")))
	}
	var err error
	if e.Rank, _, err = v.number(d.rank); err != nil {
		return fail(err)
	}
	if e.Size, _, err = v.number(d.size); err != nil {
		return fail(err)
	}
	if e.Rank >= e.Size {
		return fail(fmt.Errorf("%s=%d with %s=%d", rankName, e.Rank, sizeName, e.Size))
	}
	var hasLocalRank, hasNodes bool
	if e.LocalRank, hasLocalRank, err = v.number(d.localRank); err != nil {
		return fail(err)
	}
	if e.LocalSize, _, err = v.number(d.localSize); err != nil {
		return fail(err)
	}
	if e.Node, _, err = v.number(d.node); err != nil {
		return fail(err)
	}
	if e.Nodes, hasNodes, err = v.number(d.nodes); err != nil {
		return fail(err)
	}
	e.Job = d.job(v)
	if d.finish != nil {
		if err := d.finish(v, &e); err != nil {
			return fail(err)
		}
	}

	// What follows from the rest.
	switch {
	case e.Size == 1 || e.Nodes == 1 && e.LocalSize == 0:
		if !hasLocalRank {
			e.LocalRank = e.Rank
		}
		e.LocalSize = e.Size
	case e.LocalSize == 0:
		e.LocalRank = 0
	}
	if e.LocalSize == e.Size && !hasNodes {
		e.Nodes = 1
	}
	switch {
	case e.LocalSize > e.Size:
		return fail(fmt.Errorf("%d ranks on this host, but %d in all", e.LocalSize, e.Size))
	case e.LocalSize > 0 && e.LocalRank >= e.LocalSize:
		return fail(fmt.Errorf("local rank %d of %d", e.LocalRank, e.LocalSize))
	case e.Nodes > 0 && e.Node >= e.Nodes:
		return fail(fmt.Errorf("node %d of %d", e.Node, e.Nodes))
	case e.Nodes > e.Size:
		return fail(fmt.Errorf("%d nodes for %d ranks", e.Nodes, e.Size))
	case e.Nodes == 1 && e.LocalSize != e.Size:
		return fail(fmt.Errorf("%d ranks on this host, but %d in all on one node", e.LocalSize, e.Size))
	}
	return e, nil
}

func finishGorun(v vars, e *Env) error {
	for _, name := range []string{"GORUN_LOCAL_RANK", "GORUN_LOCAL_SIZE", "GORUN_NODE", "GORUN_NODES"} {
		if !v.has(name) {
			return fmt.Errorf("GORUN_RANK is set but %s is not", name)
		}
	}
	if e.LocalSize == 0 || e.Nodes == 0 {
		return fmt.Errorf("GORUN_LOCAL_SIZE=%d, GORUN_NODES=%d", e.LocalSize, e.Nodes)
	}
	e.Device = v["GORUN_DEVICE"]
	e.Control = v["GORUN_CONTROL"]
	e.GPU = v["JAX_LOCAL_DEVICE_IDS"]
	if err := v.numbers(field{"GORUN_RESTART", &e.Restart}, field{"GORUN_CPU_SHARE", &e.CPUShare}, field{"GORUN_APP", &e.App}); err != nil {
		return err
	}
	return finishElastic(v, e)
}

func finishTorch(v vars, e *Env) error {
	if err := v.numbers(field{"TORCHELASTIC_RESTART_COUNT", &e.Restart}); err != nil {
		return err
	}
	return finishElastic(v, e)
}

func finishElastic(v vars, e *Env) error {
	e.RunID, e.MasterAddr = v["TORCHELASTIC_RUN_ID"], v["MASTER_ADDR"]
	err := v.numbers(field{"TORCHELASTIC_MAX_RESTARTS", &e.Restarts}, field{"MASTER_PORT", &e.MasterPort})
	if err == nil && e.MasterPort > 65535 {
		err = fmt.Errorf("MASTER_PORT=%d: not a port", e.MasterPort)
	}
	return err
}

// slurmStep: SLURM_JOB_ID alone is also set in a batch script, and batch and interactive steps have
// numbers at the top of the range: neither is a rank.
func slurmStep(v vars) bool {
	id, err := strconv.ParseUint(v["SLURM_STEP_ID"], 10, 32)
	return err == nil && id < 0xfffffff0
}

func finishSlurm(v vars, e *Env) error {
	list, ok := v["SLURM_STEP_TASKS_PER_NODE"]
	if !ok {
		return nil
	}
	n, err := slurmTasks(list, e.Node)
	if err != nil {
		return err
	}
	e.LocalSize = n
	return nil
}

// slurmTasks finds a node's number of tasks in a list such as "4(x2),3": 4, 4, 3.
func slurmTasks(list string, node int) (int, error) {
	bad := func() (int, error) { return 0, fmt.Errorf("SLURM_STEP_TASKS_PER_NODE=%q: not a list of counts", list) }
	at := 0
	for item := range strings.SplitSeq(list, ",") {
		count, rest, repeated := strings.Cut(item, "(x")
		n, err := parseCount(count)
		if err != nil {
			return bad()
		}
		times := 1
		if repeated {
			digits, ok := strings.CutSuffix(rest, ")")
			if times, err = parseCount(digits); err != nil || !ok {
				return bad()
			}
		}
		if at += times; node < at {
			return n, nil
		}
		if at > maxRanks {
			return bad()
		}
	}
	return 0, fmt.Errorf("SLURM_STEP_TASKS_PER_NODE=%q has no node %d", list, node)
}

// vars is an environment; as in os.Getenv the first of two settings counts. An empty value is as good as none.
type vars map[string]string

func newVars(environ []string) vars {
	v := make(vars, len(environ))
	for _, kv := range environ {
		name, value, ok := strings.Cut(kv, "=")
		if _, twice := v[name]; ok && !twice && value != "" {
			v[name] = value
		}
	}
	return v
}

func (v vars) has(name string) bool { _, ok := v[name]; return ok }

func (v vars) first(names []string) (string, bool) {
	for _, name := range names {
		if v.has(name) {
			return name, true
		}
	}
	return "", false
}

// number is the value of the first variable that is set; 0 and false if none is.
func (v vars) number(names []string) (int, bool, error) {
	name, ok := v.first(names)
	if !ok {
		return 0, false, nil
	}
	n, err := parseCount(v[name])
	if err != nil {
		return 0, true, fmt.Errorf("%s=%q: not a number from 0 to %d", name, v[name], maxRanks)
	}
	return n, true, nil
}

// field is a variable and where its number goes.
type field struct {
	name string
	to   *int
}

// numbers reads variables; one that is not set is 0.
func (v vars) numbers(fields ...field) (err error) {
	for _, f := range fields {
		if *f.to, _, err = v.number([]string{f.name}); err != nil {
			return err
		}
	}
	return nil
}

func parseCount(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n > maxRanks {
		return 0, fmt.Errorf("%q is not a count", s)
	}
	return int(n), nil
}

func has(name string) func(vars) bool { return func(v vars) bool { return v.has(name) } }

// joined makes a job id of all the variables that are set; "" if none is.
func joined(launcher string, names ...string) func(vars) string {
	return func(v vars) string {
		var parts []string
		for _, name := range names {
			if v.has(name) {
				parts = append(parts, v[name])
			}
		}
		return jobID(launcher, parts)
	}
}

// firstOf makes a job id of the first variable that is set; "" if none is.
func firstOf(launcher string, names ...string) func(vars) string {
	return func(v vars) string {
		if name, ok := v.first(names); ok {
			return jobID(launcher, []string{v[name]})
		}
		return ""
	}
}

func jobID(launcher string, parts []string) string {
	if len(parts) == 0 {
		return ""
	}
	if launcher != "" {
		parts = append([]string{launcher}, parts...)
	}
	return strings.Join(parts, "-")
}
