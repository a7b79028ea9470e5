package main

const mpiHelp = `A program that is linked with MPICH, Intel MPI or MVAPICH2 (libmpich.so.*, libmpi.so.12) is
started as by its own mpiexec: MPI_Init asks a process manager for the rank's place and for
the addresses of the others, by PMI 1.1, and gorun is that process manager on each host.

  --mpi auto    as the program's library asks for (default); programs without MPI get nothing
  --mpi pmi     PMI for every rank, where MPI cannot be seen in the program: a script
                (python3 with mpi4py), a program that has MPI by way of another library
                or is linked with libmpich.a
  --mpi off     nothing: each rank would be alone, rank 0 of 1

Of several programs each may have its own (--mpi behind its colon; mpi in its [[app]]).
Those that have PMI make one MPI_COMM_WORLD, in the order of their ranks: the ranks of
the others, which gorun started too, do not belong to it. MPI_APPNUM is GORUN_APP.

Ranks find the process manager by PMI_FD (a socket, descriptor 3), PMI_RANK and PMI_SIZE, and
have MPI_LOCALRANKID and MPI_LOCALNRANKS, as Hydra gives them; on several hosts also
MPIR_CVAR_CH3_INTERFACE_HOSTNAME, the address at which the others reach this one. What
another process manager has left in gorun's environment (PMI_*, PMIX_*), and what has Intel
MPI use another (I_MPI_PMI_LIBRARY), they do not get. With --keep-launcher-env or
-x PMI_RANK the other one's variables stay and gorun gives none, unless --mpi says so.
A script may run one MPI program in each rank, not several one after the other.

MPI_Abort ends the job with its code, whichever rank calls it. A rank that exits with code 0
after MPI_Init and before MPI_Finalize ends the job with code 1, unless all the others
end by themselves with code 0 within 2 s. MPI_Comm_spawn and MPI_Publish_name are errors to
the program that calls them. While ranks wait for others in MPI_Init or MPI_Finalize,
SIGIO to gorun and --timeout tell which others have not come (help signals).

gorun does not speak PMIx: programs with Open MPI (libmpi.so.40) need mpirun.
`
