package rankenv

import (
	"slices"
	"strconv"
	"strings"
)

// Launchers whose variables Like gives.
const (
	LikeOpenMPI = "ompi"
	LikeSlurm   = "slurm"
)

// Like returns the variables by which another launcher tells a rank its place, for programs and wrapper scripts that read those; nil for a launcher
// that is none of the above. MPI_Init goes by others. OMPI_MCA_orte_hnp_uri is what JAX knows mpirun by: with it, and JAX_COORDINATOR_ADDRESS that Environ gives,
// jax.distributed.initialize needs no arguments. Open MPI reads it, too, and wants the form of an address, to which it does not turn.
func (e Env) Like(launcher string) []string {
	var vars []string
	num := func(n int, names ...string) {
		for _, name := range names {
			vars = append(vars, name+"="+strconv.Itoa(n))
		}
	}
	switch launcher {
	case LikeOpenMPI:
		num(e.Rank, "OMPI_COMM_WORLD_RANK")
		num(e.Size, "OMPI_COMM_WORLD_SIZE", "OMPI_UNIVERSE_SIZE")
		num(e.LocalRank, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK")
		num(e.LocalSize, "OMPI_COMM_WORLD_LOCAL_SIZE")
		vars = append(vars, "OMPI_MCA_orte_hnp_uri=0.0;tcp://127.0.0.1:1")
	case LikeSlurm:
		num(e.Rank, "SLURM_PROCID")
		num(e.Size, "SLURM_NTASKS", "SLURM_NPROCS")
		num(e.LocalRank, "SLURM_LOCALID")
		num(e.Node, "SLURM_NODEID")
		num(e.Nodes, "SLURM_NNODES")
	}
	return vars
}

// LocalVars returns the variables of environ by which programs of other launchers know a rank's place on its host, such as LOCAL_RANK and what Like gives,
// with another place. GORUN_LOCAL_RANK and GORUN_LOCAL_SIZE are not among them, nor what MPI libraries go by.
func LocalVars(environ []string, rank, size int) []string {
	var vars []string
	for _, kv := range environ {
		switch name, _, _ := strings.Cut(kv, "="); {
		case slices.Contains([]string{"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK", "SLURM_LOCALID"}, name):
			vars = append(vars, name+"="+strconv.Itoa(rank))
		case slices.Contains([]string{"LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"}, name):
			vars = append(vars, name+"="+strconv.Itoa(size))
		}
	}
	return vars
}
