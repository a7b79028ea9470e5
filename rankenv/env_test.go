package rankenv_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/rankenv"
)

func TestFromEnviron(t *testing.T) {
	gorun := rankenv.Env{
		Launcher: "gorun", Job: "j1", Rank: 2, Size: 4, LocalRank: 0, LocalSize: 2, Node: 1, Nodes: 2,
		Device: "1", Control: "gorun-x", MasterAddr: "10.0.0.1", MasterPort: 29500, Restart: 3, Restarts: 4, RunID: "run", GPU: "1", CPUShare: 2,
	}
	alone := gorun
	alone.Rank, alone.Size, alone.LocalSize, alone.Node, alone.Nodes = 0, 1, 1, 0, 1
	own := slices.DeleteFunc(alone.Environ(), func(v string) bool { return !strings.HasPrefix(v, "GORUN_") })
	for _, c := range []struct {
		name string
		env  string // separated by spaces
		want rankenv.Env
		err  string // part of the error
	}{
		{name: "none", env: "HOME=/ PATH=/bin", want: rankenv.Env{Size: 1, LocalSize: 1, Nodes: 1}},
		{name: "none, device set", env: "GORUN_DEVICE=host", want: rankenv.Env{Size: 1, LocalSize: 1, Nodes: 1, Device: "host"}},
		{name: "gorun", env: strings.Join(gorun.Environ(), " "), want: gorun},
		{name: "gorun inside mpirun", env: strings.Join(gorun.Environ(), " ") + " OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=9", want: gorun},
		{
			name: "mpirun inside a gorun job of one",
			env:  strings.Join(alone.Environ(), " ") + " OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=ns",
			want: rankenv.Env{Launcher: "openmpi", Job: "openmpi-ns", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Nodes: 1, Device: "1"},
		},
		{name: "gorun job of one", env: strings.Join(alone.Environ(), " "), want: alone},
		{
			name: "torchrun inside a gorun job of one",
			env:  "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1 " + strings.Join(own, " "),
			want: rankenv.Env{Launcher: "torchrun", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Nodes: 1, Device: "1"},
		},
		{name: "gorun without size", env: "GORUN_RANK=0", err: "GORUN_RANK is set but GORUN_SIZE is not"},
		{name: "gorun without local", env: "GORUN_RANK=0 GORUN_SIZE=2", err: "GORUN_LOCAL_RANK is not"},
		{name: "gorun contradicts itself", env: "GORUN_RANK=2 GORUN_SIZE=2", err: "GORUN_RANK=2 with GORUN_SIZE=2"},
		{
			name: "torchrun",
			env:  "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=1 TORCHELASTIC_MAX_RESTARTS=5",
			want: rankenv.Env{Launcher: "torchrun", Job: "torchrun-none-h-29500-1", Rank: 3, Size: 4, LocalRank: 1, LocalSize: 2, Node: 1, Nodes: 2, MasterAddr: "h", MasterPort: 29500, Restart: 1, Restarts: 5, RunID: "none"},
		},
		{name: "env:// by hand", env: "RANK=1 WORLD_SIZE=2", want: rankenv.Env{Launcher: "torchrun", Rank: 1, Size: 2}},
		{name: "rank without size", env: "RANK=1", err: "RANK is set but WORLD_SIZE is not"},
		{name: "size without rank", env: "WORLD_SIZE=4 SLURM_NTASKS=4", want: rankenv.Env{Size: 1, LocalSize: 1, Nodes: 1}},
		{name: "not a number", env: "RANK=one WORLD_SIZE=2", err: `RANK="one"`},
		{name: "negative", env: "RANK=-1 WORLD_SIZE=2", err: `RANK="-1"`},
		{
			name: "open mpi 5",
			env:  "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-a-7@1 PMIX_RANK=1",
			want: rankenv.Env{Launcher: "openmpi", Job: "openmpi-prterun-a-7@1", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Nodes: 1},
		},
		{
			name: "hydra",
			env:  "PMI_RANK=2 PMI_SIZE=4 PMI_FD=9 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=4 GFORTRAN_UNBUFFERED_PRECONNECTED=y",
			want: rankenv.Env{Launcher: "hydra", Rank: 2, Size: 4, LocalRank: 2, LocalSize: 4, Nodes: 1},
		},
		{name: "hydra by port", env: "PMI_PORT=h:1 PMI_ID=2", err: "PMI_ID is set but PMI_SIZE is not"},
		{
			name: "slurm step",
			env:  "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=8 SLURM_NTASKS=11 SLURM_STEP_NUM_TASKS=11 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_STEP_NUM_NODES=3 SLURM_STEP_TASKS_PER_NODE=4(x2),3",
			want: rankenv.Env{Launcher: "slurm", Job: "slurm-77-0", Rank: 8, Size: 11, LocalRank: 0, LocalSize: 3, Node: 2, Nodes: 3},
		},
		{name: "slurm batch script", env: "SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_NTASKS=4", want: rankenv.Env{Size: 1, LocalSize: 1, Nodes: 1}},
		{name: "slurm batch step", env: "SLURM_JOB_ID=77 SLURM_STEP_ID=4294967291 SLURM_PROCID=0 SLURM_NTASKS=4", want: rankenv.Env{Size: 1, LocalSize: 1, Nodes: 1}},
		{
			name: "slurm bad list",
			env:  "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_TASKS_PER_NODE=4(x",
			err:  "SLURM_STEP_TASKS_PER_NODE",
		},
		{
			name: "flux with its pmi",
			env:  "FLUX_JOB_ID=f1 FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=1 PMI_FD=3 PMI_RANK=1 PMI_SIZE=2",
			want: rankenv.Env{Launcher: "flux", Job: "flux-f1", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Nodes: 1},
		},
		{
			name: "horovod",
			env:  "HOROVOD_RANK=1 HOROVOD_SIZE=2 HOROVOD_LOCAL_RANK=0 HOROVOD_LOCAL_SIZE=1 HOROVOD_CROSS_RANK=1 HOROVOD_CROSS_SIZE=2",
			want: rankenv.Env{Launcher: "horovod", Rank: 1, Size: 2, LocalSize: 1, Node: 1, Nodes: 2},
		},
		{
			name: "deepspeed",
			env:  "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_SIZE=2 CROSS_RANK=0 CROSS_SIZE=1 MASTER_ADDR=h MASTER_PORT=1",
			want: rankenv.Env{Launcher: "deepspeed", Job: "deepspeed-h-1", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Nodes: 1, MasterAddr: "h", MasterPort: 1},
		},
		{
			name: "mvapich",
			env:  "MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=0 MV2_COMM_WORLD_LOCAL_SIZE=2",
			want: rankenv.Env{Launcher: "mvapich", Size: 2, LocalSize: 2, Nodes: 1},
		},
		{name: "families disagree", env: "RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", err: "torchrun says rank 1 of 2, openmpi says rank 0 of 2"},
		{
			name: "a job of one gives way",
			env:  "PMI_RANK=0 PMI_SIZE=1 SLURM_STEP_ID=1 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=5",
			want: rankenv.Env{Launcher: "slurm", Job: "slurm-5-1", Rank: 1, Size: 2},
		},
		{name: "local size above size", env: "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=3", err: "3 ranks on this host, but 2 in all"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := rankenv.FromEnviron(strings.Fields(c.env))
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("error %v, want one with %q", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(got, c.want); diff != "" {
				t.Errorf("got -, want +:\n%s", diff)
			}
		})
	}
}

func TestEnvironWithoutMeetingPoint(t *testing.T) {
	for _, kv := range (rankenv.Env{Size: 1, LocalSize: 1, Nodes: 1}).Environ() {
		if strings.HasPrefix(kv, "MASTER_") || strings.HasPrefix(kv, "JAX_COORDINATOR") {
			t.Errorf("%s is set without a meeting point", kv)
		}
		if strings.HasPrefix(kv, "TORCHELASTIC_RUN_ID=") {
			t.Errorf("%s is set without a run", kv)
		}
		if strings.HasPrefix(kv, "TORCHELASTIC_USE_AGENT_STORE=") && kv != "TORCHELASTIC_USE_AGENT_STORE=False" {
			t.Errorf("%s: PyTorch would look for an agent's store", kv)
		}
	}
}

// Each variable that Environ writes is documented, and the documented ones that gorun sets are written.
func TestVarsAreComplete(t *testing.T) {
	e := rankenv.Env{Job: "j", Size: 2, LocalSize: 2, Nodes: 1, Device: "host", Control: "c", MasterAddr: "::1", MasterPort: 1, CPUShare: 1, RunID: "r", GPU: "0"}
	var got []string
	for _, kv := range e.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		got = append(got, name)
	}
	var want []string
	for _, v := range rankenv.Vars {
		if v.By == rankenv.ByGorun || v.Name == "GORUN_DEVICE" {
			want = append(want, v.Name)
		}
		if v.Doc == "" {
			t.Errorf("%s has no documentation", v.Name)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("written -, documented +:\n%s", diff)
	}
}

func TestScrub(t *testing.T) {
	keep := []string{"PATH=/bin", "SLURM_JOB_ID=1", "NCCL_DEBUG=INFO", "GORUN_DEVICE=host", "OMP_NUM_THREADS=2", "RANKING=1", "odd"}
	drop := []string{"PMI_RANK=0", "PMIX_NAMESPACE=a", "OMPI_COMM_WORLD_RANK=1", "SLURM_STEP_ID=0", "SLURM_PROCID=1", "TORCHELASTIC_RUN_ID=x", "RANK=1", "FLUX_URI=u", "MV2_COMM_WORLD_RANK=0"}
	kept, removed := rankenv.Scrub(append(slices.Clone(keep), drop...))
	if diff := cmp.Diff(kept, keep); diff != "" {
		t.Errorf("kept: got -, want +:\n%s", diff)
	}
	if diff := cmp.Diff(removed, drop); diff != "" {
		t.Errorf("removed: got -, want +:\n%s", diff)
	}
	// Settings of Open MPI stay, unless its mpirun has made them.
	settings := []string{"OMPI_MCA_btl=^tcp", "OMPI_MCA_pml=ob1"}
	if kept, _ := rankenv.Scrub(settings); !slices.Equal(kept, settings) {
		t.Errorf("of Open MPI's settings are kept: %q", kept)
	}
	if kept, _ := rankenv.Scrub(append(settings, "OMPI_COMM_WORLD_RANK=1")); len(kept) != 0 {
		t.Errorf("of what mpirun has set is kept: %q", kept)
	}
	// A rank of gorun that starts gorun again leaves nothing of its place behind.
	e := rankenv.Env{Job: "j", Size: 2, LocalSize: 2, Nodes: 1, Control: "c", MasterAddr: "h", MasterPort: 1, RunID: "r", GPU: "0"}
	if kept, _ := rankenv.Scrub(e.Environ()); len(kept) != 0 {
		t.Errorf("kept of an outer job: %q", kept)
	}
}

func FuzzFromEnviron(f *testing.F) {
	f.Add("RANK=1\nWORLD_SIZE=2\nLOCAL_RANK=0")
	f.Add("SLURM_STEP_ID=0\nSLURM_PROCID=4\nSLURM_NTASKS=11\nSLURM_NODEID=1\nSLURM_STEP_NUM_NODES=3\nSLURM_STEP_TASKS_PER_NODE=4(x2),3")
	f.Add("GORUN_RANK=0\nGORUN_SIZE=2\nGORUN_LOCAL_RANK=0\nGORUN_LOCAL_SIZE=2\nGORUN_NODE=0\nGORUN_NODES=1")
	f.Add("FLUX_JOB_ID=f\nFLUX_TASK_RANK=0\nFLUX_JOB_SIZE=3\nFLUX_JOB_NNODES=1")
	f.Fuzz(func(t *testing.T, text string) {
		e, err := rankenv.FromEnviron(strings.Split(text, "\n"))
		if err != nil {
			return
		}
		if e.Rank < 0 || e.Rank >= e.Size || e.LocalSize < 0 || e.LocalSize > e.Size ||
			e.LocalSize > 0 && e.LocalRank >= e.LocalSize || e.Nodes > 0 && e.Node >= e.Nodes {
			t.Fatalf("impossible place: %+v", e)
		}
		if e.LocalSize == 0 || e.Nodes == 0 {
			return // not a place that gorun would give
		}
		again, err := rankenv.FromEnviron(e.Environ())
		if err != nil {
			t.Fatalf("own variables of %+v: %v", e, err)
		}
		e.Launcher = "gorun"
		if diff := cmp.Diff(again, e); diff != "" {
			t.Errorf("got -, want +:\n%s", diff)
		}
	})
}

func ExampleFromEnviron() {
	e, err := rankenv.FromEnviron([]string{"PMI_RANK=1", "PMI_SIZE=4", "MPI_LOCALRANKID=1", "MPI_LOCALNRANKS=4"})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("rank %d of %d, started by %s\n", e.Rank, e.Size, e.Launcher)

	_, err = rankenv.FromEnviron([]string{"RANK=1"})
	fmt.Println(err)
	// Output:
	// rank 1 of 4, started by hydra
	// environment of torchrun: RANK is set but WORLD_SIZE is not
}

// What Like gives is what FromEnviron reads of that launcher, and an outer job's leaves nothing by which a rank takes itself for one.
func TestLike(t *testing.T) {
	e := rankenv.Env{Rank: 3, Size: 6, LocalRank: 1, LocalSize: 2, Node: 1, Nodes: 3}
	for launcher, want := range map[string]rankenv.Env{
		rankenv.LikeOpenMPI: {Launcher: "openmpi", Rank: 3, Size: 6, LocalRank: 1, LocalSize: 2},
		rankenv.LikeSlurm:   {Launcher: "slurm", Job: "slurm-0", Rank: 3, Size: 6, LocalRank: 0, Node: 1}, // of the step it does not say how many hosts there are, and ranks on each
		"":                  {Size: 1, LocalSize: 1, Nodes: 1},
	} {
		vars := e.Like(launcher)
		step := []string{"SLURM_STEP_ID=0"} // without it gorun's own programs take it for a batch script
		if launcher != rankenv.LikeSlurm {
			step = nil
		}
		got, err := rankenv.FromEnviron(append(step, vars...))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(got, want); diff != "" {
			t.Errorf("%s: got -, want +:\n%s", launcher, diff)
		}
		if launcher == rankenv.LikeOpenMPI && !slices.Contains(vars, "OMPI_MCA_orte_hnp_uri=0.0;tcp://127.0.0.1:1") {
			t.Errorf("%q: JAX looks for the launcher's URI, and MPI_Init of Open MPI 4 fails if it has another form", vars)
		}
		kept, _ := rankenv.Scrub(vars)
		if kept = slices.DeleteFunc(kept, func(kv string) bool { return kv == "SLURM_NNODES=3" }); len(kept) != 0 { // that is of an allocation
			t.Errorf("%s: kept of an outer job: %q", launcher, kept)
		}
	}
}

// LocalVars changes each variable of another launcher that tells the place on the host, and no other.
func TestLocalVars(t *testing.T) {
	e := rankenv.Env{Job: "j", Rank: 5, Size: 8, LocalRank: 3, LocalSize: 4, Node: 1, Nodes: 2}
	moved := e
	moved.LocalRank, moved.LocalSize = 1, 2
	for _, launcher := range []string{"", rankenv.LikeOpenMPI, rankenv.LikeSlurm} {
		environ := append(e.Environ(), e.Like(launcher)...)
		want := slices.DeleteFunc(append(moved.Environ(), moved.Like(launcher)...), func(kv string) bool {
			return slices.Contains(environ, kv) || strings.HasPrefix(kv, "GORUN_")
		})
		if diff := cmp.Diff(rankenv.LocalVars(environ, 1, 2), want); diff != "" {
			t.Errorf("like %q: got -, want +:\n%s", launcher, diff)
		}
	}
}
