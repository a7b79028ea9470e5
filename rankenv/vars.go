package rankenv

// Var documents one environment variable.
type Var struct {
	Name string
	By   SetBy
	Doc  string
}

// SetBy says who sets a variable.
type SetBy uint8

const (
	ByGorun   SetBy = iota // gorun sets it for each rank
	ByUser                 // a setting of the user
	ByDefault              // gorun sets it for each rank of a job on several hosts, where neither the user nor the host has
)

// Vars is every variable that gorun gives to a rank, and every setting of a user that gorun's packages read in a rank.
var Vars = []Var{
	{"GORUN_JOB_ID", ByGorun, "id of the job, unique per launch"},
	{"GORUN_RANK", ByGorun, "rank of this process, from 0"},
	{"GORUN_SIZE", ByGorun, "number of ranks in the job"},
	{"GORUN_LOCAL_RANK", ByGorun, "rank among the ranks of this host, from 0"},
	{"GORUN_LOCAL_SIZE", ByGorun, "number of ranks on this host"},
	{"GORUN_NODE", ByGorun, "index of this host among the job's hosts"},
	{"GORUN_NODES", ByGorun, "number of hosts in the job"},
	{"GORUN_RESTART", ByGorun, "how often the job was restarted: 0 at first"},
	{"GORUN_CPU_SHARE", ByGorun, "how many ranks have the CPUs that this rank is bound to; not set where it is not bound"},
	{"GORUN_APP", ByGorun, "index of the rank's program among those of the job, from 0 (MPI_APPNUM)"},
	{"GORUN_CONTROL", ByGorun, "abstract unix socket of the host's bootstrap node, without the leading NUL"},

	{"RANK", ByGorun, "PyTorch: as GORUN_RANK"},
	{"WORLD_SIZE", ByGorun, "PyTorch: as GORUN_SIZE"},
	{"LOCAL_RANK", ByGorun, "PyTorch, DeepSpeed: as GORUN_LOCAL_RANK"},
	{"LOCAL_WORLD_SIZE", ByGorun, "PyTorch: as GORUN_LOCAL_SIZE"},
	{"GROUP_RANK", ByGorun, "PyTorch: as GORUN_NODE"},
	{"GROUP_WORLD_SIZE", ByGorun, "PyTorch: as GORUN_NODES"},
	{"ROLE_RANK", ByGorun, "PyTorch: as GORUN_RANK"},
	{"ROLE_WORLD_SIZE", ByGorun, "PyTorch: as GORUN_SIZE"},
	{"ROLE_NAME", ByGorun, "PyTorch: always \"default\""},
	{"MASTER_ADDR", ByGorun, "PyTorch: address of rank 0's host, for its meeting point"},
	{"MASTER_PORT", ByGorun, "PyTorch: port of the meeting point, kept for rank 0, which binds it with SO_REUSEADDR (as PyTorch, gRPC and Go do)"},
	{"TORCHELASTIC_RESTART_COUNT", ByGorun, "PyTorch: as GORUN_RESTART"},
	{"TORCHELASTIC_MAX_RESTARTS", ByGorun, "PyTorch: as --restarts"},
	{"TORCHELASTIC_RUN_ID", ByGorun, "PyTorch, Lightning: id of the run, which restarts keep; where it is set they take the rank from these variables"},
	{"TORCHELASTIC_USE_AGENT_STORE", ByGorun, "PyTorch: always \"False\": rank 0 serves the store"},
	{"LOCAL_SIZE", ByGorun, "DeepSpeed: as GORUN_LOCAL_SIZE"},
	{"CROSS_RANK", ByGorun, "DeepSpeed: as GORUN_NODE"},
	{"CROSS_SIZE", ByGorun, "DeepSpeed: as GORUN_NODES"},
	{"JAX_NUM_PROCESSES", ByGorun, "JAX: as GORUN_SIZE"},
	{"JAX_PROCESS_ID", ByGorun, "JAX: as GORUN_RANK"},
	{"JAX_LOCAL_DEVICE_IDS", ByGorun, "JAX: the rank's GPU, counted among those that it sees; all where it has the host alone"},
	{"JAX_COORDINATOR_ADDRESS", ByGorun, "JAX: MASTER_ADDR:MASTER_PORT"},

	{"NCCL_SOCKET_IFNAME", ByDefault, "NCCL, RCCL: \"=\" and the interface that holds the address at which the other hosts reach this one"},
	{"MCCL_SOCKET_IFNAME", ByDefault, "MCCL: as NCCL_SOCKET_IFNAME"},
	{"GLOO_SOCKET_IFNAME", ByDefault, "PyTorch's Gloo: the same interface"},

	{"GORUN_DEVICE", ByUser, "device of the rank: host, an index or a UUID; gorun sets it where it places ranks on devices"},
	{"GORUN_PEER", ByUser, "off: small collectives of a GPU library go by it, not by peer memory (nccl.Config.NoPeer); default auto"},
	{"GORUN_WINDOWS", ByUser, "off: captures make no windows unasked (graphs.NoWindows); default auto"},
	{"GORUN_CUDA_LIB", ByUser, "file of NVIDIA's driver library, instead of libcuda.so.1 where it is found"},
	{"GORUN_NCCL_LIB", ByUser, "file of NVIDIA's NCCL, instead of libnccl.so.2 where it is found"},
	{"GORUN_MUSA_LIB", ByUser, "file of Moore Threads' driver library"},
	{"GORUN_MCCL_LIB", ByUser, "file of Moore Threads' MCCL"},
	{"GORUN_HIP_LIB", ByUser, "file of AMD's HIP library"},
	{"GORUN_RCCL_LIB", ByUser, "file of AMD's RCCL"},
	{"GORUN_NVML_LIB", ByUser, "file of NVIDIA's management library"},
	{"GORUN_NVRTC_LIB", ByUser, "file of NVIDIA's run-time compiler"},
	{"GORUN_MTRTC_LIB", ByUser, "file of Moore Threads' run-time compiler"},
	{"GORUN_HIPRTC_LIB", ByUser, "file of AMD's run-time compiler"},
}

// Pattern names variables of one launcher: exactly Name, or all that begin with it if it ends in "*".
type Pattern struct {
	Name     string
	Launcher string
}

// Foreign is what Scrub removes: variables by which a program would take itself for a rank of another
// launcher's job. What describes an allocation (SLURM_JOB_ID, SLURM_JOB_NODELIST) or a user's setting
// (OMP_NUM_THREADS, NCCL_*, I_MPI_*; OMPI_MCA_*, where no mpirun has set them) stays.
var Foreign = []Pattern{
	{"PMI_*", "hydra"}, {"PMI2_*", "hydra"}, {"HYDI_*", "hydra"}, {"HYDRA_*", "hydra"}, {"MPI_LOCAL*", "hydra"},
	{"MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "hydra"}, {"GFORTRAN_UNBUFFERED_PRECONNECTED", "hydra"},
	{"PMIX_*", "openmpi"}, {"OMPI_*", "openmpi"}, {"PRTE_*", "openmpi"}, {"PRRTE_*", "openmpi"}, {"ORTE_*", "openmpi"},
	{"MV2_*", "mvapich"}, {"MPISPAWN_*", "mvapich"},
	{"SLURM_STEP*", "slurm"}, {"SLURM_PROCID", "slurm"}, {"SLURM_LOCALID", "slurm"}, {"SLURM_NODEID", "slurm"},
	{"SLURM_NTASKS", "slurm"}, {"SLURM_NPROCS", "slurm"}, {"SLURM_GTIDS", "slurm"}, {"SLURM_TASK_PID", "slurm"},
	{"SLURM_SRUN_COMM_*", "slurm"}, {"SLURM_LAUNCH_NODE_IPADDR", "slurm"}, {"SLURM_PMI*", "slurm"},
	{"SLURM_MPI_TYPE", "slurm"}, {"SLURM_DISTRIBUTION", "slurm"}, {"SLURMD_NODENAME", "slurm"},
	{"FLUX_*", "flux"},
	{"HOROVOD_RANK", "horovod"}, {"HOROVOD_SIZE", "horovod"}, {"HOROVOD_LOCAL_*", "horovod"},
	{"HOROVOD_CROSS_*", "horovod"}, {"HOROVOD_GLOO_*", "horovod"}, {"HOROVOD_CONTROLLER", "horovod"},
	{"TORCHELASTIC_*", "torchrun"},
	{"RANK", "torchrun"}, {"WORLD_SIZE", "torchrun"}, {"LOCAL_RANK", "torchrun"}, {"LOCAL_WORLD_SIZE", "torchrun"},
	{"GROUP_RANK", "torchrun"}, {"GROUP_WORLD_SIZE", "torchrun"}, {"ROLE_RANK", "torchrun"},
	{"ROLE_WORLD_SIZE", "torchrun"}, {"ROLE_NAME", "torchrun"}, {"MASTER_ADDR", "torchrun"}, {"MASTER_PORT", "torchrun"},
	{"LOCAL_SIZE", "deepspeed"}, {"CROSS_RANK", "deepspeed"}, {"CROSS_SIZE", "deepspeed"},
	{"JAX_NUM_PROCESSES", "jax"}, {"JAX_PROCESS_ID", "jax"}, {"JAX_LOCAL_DEVICE_IDS", "jax"}, {"JAX_COORDINATOR_ADDRESS", "jax"},
	{"GORUN_JOB_ID", "gorun"}, {"GORUN_RANK", "gorun"}, {"GORUN_SIZE", "gorun"}, {"GORUN_LOCAL_RANK", "gorun"},
	{"GORUN_LOCAL_SIZE", "gorun"}, {"GORUN_NODE", "gorun"}, {"GORUN_NODES", "gorun"}, {"GORUN_RESTART", "gorun"},
	{"GORUN_CPU_SHARE", "gorun"}, {"GORUN_CONTROL", "gorun"}, {"GORUN_APP", "gorun"},
}
