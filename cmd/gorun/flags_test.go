package main

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		job  launcher.Job
		rest []string
	}{
		{"program", []string{"p", "-np", "2"}, launcher.Job{}, []string{"p", "-np", "2"}},
		{"count", []string{"-np", "2", "p"}, launcher.Job{NP: 2}, []string{"p"}},
		{"attached", []string{"-np2", "p"}, launcher.Job{NP: 2}, []string{"p"}},
		{"short", []string{"-n", "2", "p"}, launcher.Job{NP: 2}, []string{"p"}},
		{"short attached", []string{"-n2", "p"}, launcher.Job{NP: 2}, []string{"p"}},
		{"equals", []string{"--np=2", "p"}, launcher.Job{NP: 2}, []string{"p"}},
		{"last wins", []string{"-n", "2", "-np", "3", "p"}, launcher.Job{NP: 3}, []string{"p"}},
		{"dashes", []string{"-n", "2", "--", "-p"}, launcher.Job{NP: 2}, []string{"-p"}},
		{"one dash alone is a program", []string{"-"}, launcher.Job{}, []string{"-"}},
		{"variables", []string{"-x", "A=b=c", "-x", "B", "-x", "C=", "p"}, launcher.Job{Env: []launcher.Setting{{Name: "A", Value: "b=c"}, {Name: "B", Inherit: true}, {Name: "C"}}}, []string{"p"}},
		{"times", []string{"--timeout=1m", "--kill-grace", "0", "p"}, launcher.Job{Timeout: time.Minute, KillGrace: launcher.NoGrace}, []string{"p"}},
		{"a value that looks like a flag", []string{"--wdir", "-v", "p"}, launcher.Job{Dir: "-v"}, []string{"p"}},
		{"nothing", nil, launcher.Job{}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			q, err := parse(c.args)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(q.job, c.job); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
			if !slices.Equal(q.rest, c.rest) {
				t.Errorf("rest %q, want %q", q.rest, c.rest)
			}
		})
	}
}

// A command line that launcher writes is read back as the same job.
func TestCommandLineIsReadBack(t *testing.T) {
	on, off := true, false
	job := launcher.Job{NP: 3, Program: "-p", Args: []string{"-np", "x"}, Dir: "d", Device: "host", Env: []launcher.Setting{{Name: "A", Value: "1"}, {Name: "B", Inherit: true}},
		Hosts: []launcher.Host{{Name: "a", Addr: "a", Slots: 2}, {Name: "::1", Addr: "::1", User: "me", Port: 22}}, Hostfile: "h", MapBy: &launcher.MapBy{PPR: 2}, Oversubscribe: &on, RM: "none",
		RSH: "r", SSHConfig: "c", AcceptNewHostKeys: &on, ConnectTimeout: time.Minute, Ports: launcher.PortRange{From: 7, To: 9}, Stage: []string{"f", "g"},
		Timeout: 90 * time.Second, KillGrace: launcher.NoGrace, TagOutput: &on, Timestamp: &on, Merge: &off, OutputDir: "o", FilesOnly: &on, Stdin: launcher.StdinNone, KeepLauncherEnv: &off, Report: "r"}
	line := "gorun -np 3 -H 'a:2,ssh://me@[::1]:22' --hostfile h --map-by ppr:2:node --oversubscribe -x A=1 -x B --wdir d --device host --stdin none --tag-output --timestamp --merge=false --output-dir o --files-only --timeout 1m30s " +
		"--kill-grace 0 --report r --keep-launcher-env=false --rm none --ssh-config c --accept-new-host-keys --rsh r --connect-timeout 1m0s --port-range 7-9 --stage f --stage g -- -p -np x"
	if d := cmp.Diff(job.CommandLine(), line); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
	args := strings.Fields(strings.ReplaceAll(line, "'", ""))[1:] // as the shell does
	q, err := parse(args)
	if err != nil {
		t.Fatal(err)
	}
	got := q.job
	got.Program, got.Args = q.rest[0], q.rest[1:]
	if d := cmp.Diff(got, job); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
}

func TestParseApps(t *testing.T) {
	apps := func(a ...launcher.App) []launcher.App { return a }
	for _, c := range []struct {
		name string
		args []string
		want launcher.Job
	}{
		{"two", []string{"-np", "2", "a", "x", ":", "-np", "3", "b"}, launcher.Job{Apps: apps(launcher.App{NP: 2, Program: "a", Args: []string{"x"}}, launcher.App{NP: 3, Program: "b", Args: []string{}})}},
		{"the first one's flags are the job's", []string{"-np1", "-x", "A=1", "--wdir", "d", "a", ":", "-np1", "-x", "B=1", "--wdir=e", "--device", "host", "b"},
			launcher.Job{Dir: "d", Env: []launcher.Setting{{Name: "A", Value: "1"}}, Apps: apps(launcher.App{NP: 1, Program: "a", Args: []string{}},
				launcher.App{NP: 1, Program: "b", Args: []string{}, Dir: "e", Device: "host", Env: []launcher.Setting{{Name: "B", Value: "1"}}})}},
		{"flags of the job alone", []string{"--timeout", "3", ":", "-np", "1", "a"}, launcher.Job{Timeout: 3 * time.Second, Apps: apps(launcher.App{NP: 1, Program: "a", Args: []string{}})}},
		{"dashes end the colons", []string{"-np", "1", "a", ":", "-np", "1", "--", "b", ":", "c"}, launcher.Job{Apps: apps(launcher.App{NP: 1, Program: "a", Args: []string{}}, launcher.App{NP: 1, Program: "b", Args: []string{":", "c"}})}},
	} {
		q, err := parse(c.args)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if d := cmp.Diff(q.job, c.want); d != "" || len(q.rest) > 0 {
			t.Errorf("%s: rest %q, -got +want:\n%s", c.name, q.rest, d)
		}
		// And written as a command line it is read as the same.
		line := strings.Fields(q.job.CommandLine())[1:]
		if again, err := parse(line); err != nil || cmp.Diff(again.job, q.job) != "" {
			t.Errorf("%s: %q is read as %+v, %v", c.name, line, again, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("-np", "2", "--timeout=3", "p")
	f.Add("-x", "A=1", "--", "-q")
	f.Add("-H", "a:2,[::1]", "--map-by=node", "--nnodes")
	f.Add("p", ":", "-np=1", "q")
	f.Add("--tag-output=false", "-n4", "-v", "")
	f.Fuzz(func(t *testing.T, a, b, c, d string) {
		args := []string{a, b, c, d}
		q, err := parse(args)
		if err != nil {
			if _, ok := errors.AsType[*launcher.UsageError](err); !ok {
				t.Errorf("%q: %v is a %T, want a *UsageError", args, err, err)
			}
			return
		}
		// A program is a word of the command line.
		for _, a := range q.job.Apps {
			if !slices.Contains(args, a.Program) {
				t.Errorf("%q: program %q", args, a.Program)
			}
		}
		// What is left is the end of what was given, untouched.
		if n := len(q.rest); !slices.Equal(q.rest, args[len(args)-n:]) {
			t.Errorf("%q: rest %q", args, q.rest)
		}
	})
}
