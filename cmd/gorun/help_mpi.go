package main

const mpiHelp = `A program that is linked with MPI is started as by its own mpiexec: MPI_Init asks a process
manager for the rank's place and for the addresses of the others, and gorun is that
process manager on each host. MPICH, Intel MPI and MVAPICH2 (libmpich.so.*, libmpi.so.12)
ask by PMI 1.1, Open MPI 4 and 5 (libmpi.so.40) by PMIx.

  --mpi auto    as the program's library asks for (default); programs without MPI get nothing
  --mpi pmi     PMI for every rank, where MPI cannot be seen in the program: a shell script,
                a program that has MPI by way of another library or is linked with libmpich.a
  --mpi pmix    PMIx for every rank, likewise
  --mpi off     nothing: each rank would be alone, rank 0 of 1

Python with a script that imports mpi4py counts as a program that is linked with mpi4py's
library, where that is found; else gorun says what to give. A tool counts as the program
that it is given by its path: gorun -np 4 valgrind ./prog. Where the text of a shell script
names one by its path, gorun says what to give.

Of several programs each may have its own (--mpi behind its colon; mpi in its [[app]]).
Those that have PMI make one MPI_COMM_WORLD, in the order of their ranks, and those that
have PMIx another one: the ranks of the others, which gorun started too, do not belong
to it. MPI_APPNUM is GORUN_APP.

MPI_Abort ends the job with its code, whichever rank calls it. A rank that exits with code 0
after MPI_Init and before MPI_Finalize ends the job with code 1, unless all the others
end by themselves with code 0 within 2 s. Ranks that wait in MPI_Init or MPI_Finalize for one
that has ended fail there; stderr says which. MPI_Comm_spawn and MPI_Publish_name are errors to
the program that calls them, with Open MPI MPI_Comm_create_from_group of a session, too.
While ranks wait for others in MPI_Init or MPI_Finalize, SIGIO to gorun and --timeout tell
which others have not come (help signals).

PMI: ranks find the process manager by PMI_FD (a socket, descriptor 3), PMI_RANK and PMI_SIZE,
and have MPI_LOCALRANKID and MPI_LOCALNRANKS, as Hydra gives them; on several hosts also
MPIR_CVAR_CH3_INTERFACE_HOSTNAME, the address at which the others reach this one.
A script may run one MPI program in each rank, not several one after the other.

PMIx: ranks find it by PMIX_NAMESPACE, PMIX_RANK and PMIX_SERVER_URI3 (a port on 127.0.0.1, for
this user alone); the library must be PMIx 3 or later. Open MPI is also told, where the user has
not said otherwise, not to bind ranks (OMPI_MCA_hwloc_base_binding_policy: gorun does, or
nobody); to leave the CPU to others where ranks are more (OMPI_MCA_mpi_oversubscribe); and on
several hosts the network interface at which the others reach this one
(OMPI_MCA_btl_tcp_if_include). Its files and shared memory are in directories of the job's
(TMPDIR, /dev/shm), which are gone at the end. Settings of Open MPI (OMPI_MCA_* in gorun's
environment) ranks get on all hosts, unless gorun itself runs under its mpirun.

What another process manager has left in gorun's environment (PMI_*, PMIX_*), and what has Intel
MPI use another (I_MPI_PMI_LIBRARY), ranks do not get. With --keep-launcher-env or
-x PMI_RANK the other one's variables stay and gorun gives none, unless --mpi says so.
`
