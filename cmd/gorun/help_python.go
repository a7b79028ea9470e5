package main

const pythonHelp = `Programs that torchrun or accelerate launch start run unchanged: ranks have the variables
of torchrun (see help environment).

  torchrun --nproc_per_node 8 train.py      gorun -np 8 python train.py
  torchrun --nnodes 2 ... on each host      gorun -H a:8,b:8 python train.py, on one
  torchrun -m package.train                 gorun -np 8 python -m package.train
  torchrun --nproc_per_node gpu             gorun python train.py: a rank for each GPU
  torchrun --log-dir logs --tee 3           gorun -np 8 --output-dir logs
  torchrun --log-dir logs --redirects 3     gorun -np 8 --output-dir logs --files-only
  torchrun --max-restarts 3                 gorun --restarts 3
  torchrun --rdzv-id exp7                   gorun -x TORCHELASTIC_RUN_ID=exp7
  accelerate launch --num_processes 8       gorun -np 8

A job is not elastic: it has as many ranks, on the same hosts, from start to end, and nothing
stands for --nnodes 1:4. With --restarts it starts again as a whole with all of them; where a
host is gone for good, that is an error (122). --standalone, --node-rank, --master-addr and
the other --rdzv flags have no counterpart: gorun is started once, and knows all hosts. Where
these share no files, --stage train.py sends the script, and --stage DIR all of a directory.

PyTorch       torch.distributed.init_process_group() needs no arguments; device_mesh, DDP and
              FSDP follow from it. A rank's GPU is torch.device("cuda", LOCAL_RANK).
Lightning     Trainer(devices=8, num_nodes=2) must agree with -np: it checks.
accelerate    Accelerator() reads the same variables. What accelerate config has written is
              for accelerate launch: say it in Accelerator(...), or with -x (ACCELERATE_...).
DeepSpeed     deepspeed.init_distributed() reads the same variables.
JAX           jax.distributed.initialize() needs no arguments with --env-like ompi: JAX knows
              launchers by their variables, and takes gorun's ranks for those of mpirun.
              Otherwise num_processes and process_id are JAX_NUM_PROCESSES and JAX_PROCESS_ID.
              Each rank takes its own GPU (JAX_LOCAL_DEVICE_IDS), all if it has the host alone.
srun, mpirun  --env-like slurm and --env-like ompi give the variables that scripts written for
              those read: SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS, SLURM_NODEID, SLURM_NNODES;
              OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE. For mpi4py see help mpi.

torchrun sets OMP_NUM_THREADS=1; gorun sets none: -x OMP_NUM_THREADS=1.
Python buffers what it prints to a pipe: -x PYTHONUNBUFFERED=1 shows it at once.
A rank of JAX or mpi4py that raises an exception waits in its exit for the others (JAX up to
shutdown_timeout_seconds, 300): the job goes on till then. jax.distributed.initialize takes
the time as an argument; python -m mpi4py ends the job at once.
With -x PYTHONFAULTHANDLER=1 ranks that hang write their tracebacks at --timeout, and those
that crash (SIGSEGV) write where.
`
