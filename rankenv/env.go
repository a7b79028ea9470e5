package rankenv

import (
	"net"
	"os"
	"strconv"
)

// Env is what a rank knows about its place in the job before it talks to anyone.
type Env struct {
	Launcher   string // dialect the values were read from: "gorun", "torchrun", "openmpi", "hydra", "slurm", ...; "" without a launcher
	Job        string // job id, unique per launch; "" if another launcher gives none
	Rank       int
	Size       int
	LocalRank  int
	LocalSize  int    // 0 if another launcher does not say (LocalRank is 0 then, too)
	Node       int    // index of this rank's host among the job's hosts
	Nodes      int    // 0 if another launcher does not say
	Device     string // opaque device token for cuda.Open: "" (choose), "host", an index, a UUID
	Control    string // abstract unix socket of this host's bootstrap node, without the leading NUL; "" without one
	MasterAddr string // PyTorch's and JAX's meeting point, an address of rank 0's host
	MasterPort int
	Restart    int    // how often the job was restarted
	Restarts   int    // how often it may be
	RunID      string // id of the launch, the same after restarts
	GPU        string // index of the rank's GPU among those that it sees, or a list of them; "" if it has none or that is not known
	CPUShare   int    // how many ranks have the CPUs that this rank is bound to; 0: it is not bound
	App        int    // index of the rank's program among those of the job; 0 if there is one, or another launcher does not say
}

// Current reads os.Environ.
func Current() (Env, error) { return FromEnviron(os.Environ()) }

// Environ returns the variables that tell a rank its place: GORUN_*, PyTorch's env://, JAX's, DeepSpeed's.
// The variables of the meeting point (MASTER_*, JAX_COORDINATOR_ADDRESS) are there only where
// the meeting point is set.
func (e Env) Environ() []string {
	var vars []string
	str := func(name, value string) {
		if value != "" {
			vars = append(vars, name+"="+value)
		}
	}
	num := func(name string, n int) { vars = append(vars, name+"="+strconv.Itoa(n)) }

	str("GORUN_JOB_ID", e.Job)
	num("GORUN_RANK", e.Rank)
	num("GORUN_SIZE", e.Size)
	num("GORUN_LOCAL_RANK", e.LocalRank)
	num("GORUN_LOCAL_SIZE", e.LocalSize)
	num("GORUN_NODE", e.Node)
	num("GORUN_NODES", e.Nodes)
	num("GORUN_RESTART", e.Restart)
	if e.CPUShare > 0 {
		num("GORUN_CPU_SHARE", e.CPUShare)
	}
	num("GORUN_APP", e.App)
	str("GORUN_DEVICE", e.Device)
	str("GORUN_CONTROL", e.Control)

	num("RANK", e.Rank)
	num("WORLD_SIZE", e.Size)
	num("LOCAL_RANK", e.LocalRank)
	num("LOCAL_WORLD_SIZE", e.LocalSize)
	num("GROUP_RANK", e.Node)
	num("GROUP_WORLD_SIZE", e.Nodes)
	num("ROLE_RANK", e.Rank)
	num("ROLE_WORLD_SIZE", e.Size)
	str("ROLE_NAME", "default")
	num("TORCHELASTIC_RESTART_COUNT", e.Restart)
	num("TORCHELASTIC_MAX_RESTARTS", e.Restarts)
	str("TORCHELASTIC_RUN_ID", e.RunID)
	str("TORCHELASTIC_USE_AGENT_STORE", "False") // rank 0 serves the store
	num("LOCAL_SIZE", e.LocalSize)
	num("CROSS_RANK", e.Node)
	num("CROSS_SIZE", e.Nodes)
	num("JAX_NUM_PROCESSES", e.Size)
	num("JAX_PROCESS_ID", e.Rank)
	str("JAX_LOCAL_DEVICE_IDS", e.GPU)

	str("MASTER_ADDR", e.MasterAddr)
	if e.MasterPort > 0 {
		num("MASTER_PORT", e.MasterPort)
	}
	if e.MasterAddr != "" && e.MasterPort > 0 {
		str("JAX_COORDINATOR_ADDRESS", net.JoinHostPort(e.MasterAddr, strconv.Itoa(e.MasterPort)))
	}
	return vars
}
