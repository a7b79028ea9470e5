package main

import (
	"flag"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

var update = flag.Bool("update", false, "write golden files in the scripts")

// The test binary is gorun, and the rank program (rank_test.go), by the name it is called.
func TestMain(m *testing.M) {
	os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE")) // else each process of a -race run ends a second late
	if _, set := os.LookupEnv("GORUN_OVERSUBSCRIBE"); !set {      // what gorun says of that depends on the machine
		os.Setenv("GORUN_OVERSUBSCRIBE", "true")
	}
	if len(os.Args) > 1 && os.Args[1] == "agent" { // on other hosts it is called as its hash says
		os.Exit(realMain(os.Args[1:]))
	}
	testscript.Main(cleaning{m}, map[string]func(){
		"gorun": func() { os.Exit(realMain(os.Args[1:])) },
		"rank":  rankMain,
	})
}

// cleaning are the tests, and then the removal of what they share.
type cleaning struct{ m *testing.M }

func (c cleaning) Run() int {
	defer func() { os.RemoveAll(agentHome.dir) }()
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP} {
		if signal.Ignored(sig) { // in the background of a script; gorun would ignore it as well
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
	return c.m.Run()
}

func TestScripts(t *testing.T) {
	t.Parallel()
	home := remoteHome(t)
	files, err := filepath.Glob("testdata/script/*.txtar")
	if err != nil {
		t.Fatal(err)
	}
	if raceEnabled && testing.Short() { // those that run no jobs to speak of have nothing that runs at once
		files = slices.DeleteFunc(files, func(file string) bool {
			return slices.Contains([]string{"bench", "check", "complete", "environ", "gobuild", "help", "usage"}, strings.TrimSuffix(filepath.Base(file), ".txtar"))
		})
	}
	testscript.Run(t, testscript.Params{
		Files:               files,
		UpdateScripts:       *update,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("GORUN_OVERSUBSCRIBE", "true")
			e.Setenv("AGENTHOME", home) // where gorun has been sent already
			// One of the scripts wants gorun-bench missing.
			e.Setenv("PATH", strings.Join(slices.DeleteFunc(filepath.SplitList(e.Getenv("PATH")), func(dir string) bool {
				_, err := os.Stat(filepath.Join(dir, benchProgram))
				return err == nil
			}), string(filepath.ListSeparator)))
			// go build in a script finds the caches of the user, not of the script's empty home.
			for _, name := range []string{"GOCACHE", "GOMODCACHE", "GOFLAGS"} {
				e.Setenv(name, os.Getenv(name))
			}
			if e.Getenv("GOCACHE") == "" {
				cache, err := os.UserCacheDir()
				if err != nil {
					return err
				}
				e.Setenv("GOCACHE", cache+"/go-build")
			}
			return nil
		},
	})
}
