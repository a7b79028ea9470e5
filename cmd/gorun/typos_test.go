package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher"
	"github.com/gorun-dev/gorun/rankenv"
)

func TestMisspelt(t *testing.T) {
	for name, want := range map[string]string{
		"GORUN_TIMOUT": "GORUN_TIMEOUT", "GORUN_OVERSUBSCRIB": "GORUN_OVERSUBSCRIBE", "GORUN_WINDOW": "GORUN_WINDOWS", "GORUN_RSHH": "GORUN_RSH", "GORUN_NCCL_LIBS": "GORUN_NCCL_LIB",
		"TIMOUT": "", "GORUN": "", "GORUN_": "", "GORUN_NP": "", "GORUN_EXAMPLE_DATA": "",
		"GORUN_CI": "", "GORUN_REQUIRE_GPU": "", "GORUN_KEEPER": "", "GORUN_BENCH_COLD": "", "GORUN_BENCH_OUTPUT": "", "GORUN_CUDA_TEST_LIB": "", "GORUN_TEST_LIB": "", "GORUN_TEST_HOSTS": "",
		"GORUN_TEST_OUTPUT": "", "GORUN_TEST_SIGNAL": "", "GORUN_RANKTEST": "", "GORUN_RANKTEST_PORTS": "", "GORUN_TEST_STDIN": "",
	} {
		if got := misspelt(name); got != want {
			t.Errorf("misspelt(%s): got %q, want %q", name, got, want)
		}
	}
	for _, v := range rankenv.Vars {
		if got := misspelt(v.Name); got != "" {
			t.Errorf("misspelt(%s): got %q, but it is one", v.Name, got)
		}
	}
	for _, d := range flagDefs {
		if got := misspelt(d.env); got != "" {
			t.Errorf("misspelt(%s): got %q, but it is one", d.env, got)
		}
	}
}

func TestNotSet(t *testing.T) {
	t.Setenv("SET_HERE", "")
	want := func(name string) launcher.Setting { return launcher.Setting{Name: name, Inherit: true} }
	job := launcher.Job{Env: []launcher.Setting{want("GORUN_NCCL_LIB"), want("NOSUCH_A"), want("SET_HERE"), want("MASTER_PORT"), want("NOSUCH_B"), {Name: "NOSUCH_B", Value: "1"}}}
	if diff := cmp.Diff([]string{"GORUN_NCCL_LIB", "NOSUCH_A"}, notSet(job)); diff != "" {
		t.Errorf("one program (-want +got):\n%s", diff)
	}
	job.Apps = []launcher.App{{Program: "a", Env: []launcher.Setting{{Name: "NOSUCH_A", Value: "1"}}}, {Program: "b", Env: []launcher.Setting{want("NOSUCH_C")}}}
	if diff := cmp.Diff([]string{"GORUN_NCCL_LIB", "NOSUCH_A", "NOSUCH_C"}, notSet(job)); diff != "" {
		t.Errorf("two programs (-want +got):\n%s", diff)
	}
}
