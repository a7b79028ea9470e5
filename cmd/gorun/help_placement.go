package main

const placementHelp = `Each host decides where its ranks run when it starts them, from what its ranks may use
there: the cpuset and the quota of the control group, the affinity that gorun (or sshd)
was started with, and the cores, NUMA nodes and GPUs that the kernel shows.

  --bind-to none     a rank runs on any CPU that the host lets it use
  --bind-to core     each rank has cores of its own: an equal share of the host's, with
                     all their hardware threads, of one NUMA node if that has as many,
                     and of that of its GPU if that is known
  --bind-to core:N   N cores for each rank
  --bind-to numa     each rank has the CPUs of one NUMA node: of that of its GPU, where it
                     is known, else ranks with neighbouring numbers have the same node

Without --bind-to ranks are bound to the NUMA nodes of their GPUs where each rank has one,
its node is known, and ranks use all nodes of the host; else they are not bound. A rank
has threads of its own (Go's, data loaders, OpenMP's), so a default takes no CPU from it
that nobody else would use. MPI's default, one core, is --bind-to core:1.

A rank is bound before its program starts: Go's GOMAXPROCS, OpenMP and nproc count the
CPUs that it has. Memory is where a rank first touches it. gorun sets no OMP_NUM_THREADS:
give ranks that are not bound theirs with -x OMP_NUM_THREADS=N.

More ranks than CPUs (or than the quota grants) are not bound to cores, as ranks on one
core would wait for each other; one line says that they share CPUs, unless --oversubscribe
says that it is meant so.

A rank takes the GPU of its local rank among those that CUDA_VISIBLE_DEVICES lists (for
AMD HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, for Moore Threads MUSA_VISIBLE_DEVICES)
or the driver shows. On other hosts the login's value of those counts, or that of -x. The
elements of the list (numbers, UUIDs, prefixes, MIG instances) are taken as they are.

  --gpu-bind none    a rank sees all GPUs of the list, as NCCL's peer-to-peer copies and
                     programs that choose by LOCAL_RANK need it
  --gpu-bind hide    the list of a rank is its own GPU alone, which it sees as number 0;
                     LOCAL_RANK stays what it is
  --gpu-bind share   ranks take the GPUs in turn, so that a host may have more ranks than
                     GPUs: to try a program out, for it is slow. NCCL refuses two ranks of
                     a host on a GPU; so the ranks of each turn are told by NCCL_HOSTID
                     that they are a host of their own, and have LOCAL_RANK,
                     LOCAL_WORLD_SIZE and LOCAL_SIZE of it, and those of --env-like;
                     GORUN_LOCAL_RANK and MPI_LOCALRANKID tell the place on the host itself.
                     Turns reach each other by sockets. Memory of a GPU is for all its
                     ranks (JAX: XLA_PYTHON_CLIENT_MEM_FRACTION)

--dry-run says where ranks of this host would run, and why (--json: for programs); other
hosts are not asked. -v says where the ranks of all hosts run, and so does --report.
`
