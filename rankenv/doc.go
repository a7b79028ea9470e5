// Package rankenv is the contract between a launcher and a rank: which rank this
// process is, how many there are, and where the job's control socket is, written
// to and read from environment variables by one type.
//
// [Env.Environ] writes what gorun gives a rank: its own GORUN_* variables, and those
// that PyTorch (env://), JAX and DeepSpeed read, so that their programs start
// unchanged. [FromEnviron] reads it back, and understands the variables of other
// launchers (torchrun, Open MPI, Hydra, Slurm, Flux, ...) where GORUN_* are absent.
// [Vars] documents every variable, [Foreign] those that [Scrub] takes away.
package rankenv
