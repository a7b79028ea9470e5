package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher"
)

// For every option: a flag wins over the variable, that over the job file, that over the default, and the winner is named.
func TestOrigins(t *testing.T) {
	file := filepath.Join(t.TempDir(), "job.toml")
	for _, o := range launcher.JobOptions {
		if o.Key == "" || o.Key == "job.program" || o.Key == "job.args" {
			continue // below
		}
		if err := os.WriteFile(file, []byte("job.program = 'p'\n"+o.Key+" = "+o.Example+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		find := func(args []string, env map[string]string, at string) launcher.Origin {
			t.Helper()
			q, err := parse(args)
			if err != nil {
				t.Fatal(err)
			}
			if q.file = file; at == "" {
				q.file = ""
			}
			sources, err := sourcesOf(q, func(name string) (string, bool) { v, ok := env[name]; return v, ok })
			if err != nil {
				t.Fatalf("%s: %v", o.Key, err)
			}
			for _, e := range launcher.Origins(sources...) {
				if e.Key == o.Key {
					return e
				}
			}
			t.Fatalf("%s is not among the settings", o.Key)
			return launcher.Origin{}
		}
		of := find(nil, nil, file)
		if want := file + ":2"; of.From != want || len(of.Value) == 0 {
			t.Errorf("%s: %+v, want from %s", o.Key, of, want)
			continue
		}
		if got := find(nil, nil, ""); got.From != "default" {
			t.Errorf("%s: from %q, want default", o.Key, got.From)
		}
		env := map[string]string{}
		if o.Env != "" {
			env[o.Env] = of.Value[0]
			if got := find(nil, env, file); got.From != "variable "+o.Env || !cmp.Equal(got.Value, of.Value) {
				t.Errorf("%s: %q from %q, want from variable %s", o.Key, got.Value, got.From, o.Env)
			}
		}
		flag := []string{o.Flags[0], of.Value[0]}
		if o.Arg == "" {
			flag = []string{o.Flags[0] + "=" + of.Value[0]}
		}
		if got := find(flag, env, file); got.From != "flag "+o.Flags[0] || !cmp.Equal(got.Value, of.Value) {
			t.Errorf("%s: %q from %q, want from flag %s", o.Key, got.Value, got.From, o.Flags[0])
		}
	}
}

// Hosts, variables and programs are named one by one.
func TestOriginsOfLists(t *testing.T) {
	file := filepath.Join(t.TempDir(), "job.toml")
	text := "[env]\nA = 1\nB = 1\n[nccl]\ndebug = 'INFO'\n[[host]]\nname = 'a'\n[[host]]\nname = 'b'\naddress = '10.0.0.7'\n[[app]]\nnp = 1\nprogram = 'p'\n[app.env]\nC = 'c d'\n[[app]]\nnp = 2\nprogram = 'q'\nargs = ['x y', 'z']\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	show := func(args ...string) string {
		t.Helper()
		q, err := parse(args)
		if err != nil {
			t.Fatal(err)
		}
		sources, err := sourcesOf(q, func(name string) (string, bool) { return "h", name == "GORUN_HOSTFILE" })
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		for _, o := range launcher.Origins(sources...) {
			if o.From != "default" {
				b.WriteString(o.Key + " = " + strings.Join(o.Value, "|") + " from " + strings.ReplaceAll(o.From, file, "FILE") + "\n")
			}
		}
		return b.String()
	}
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"file", []string{"-x", "B=2", "-x", "D", "-H", "x:2,y", file}, `
app.0.np = 1 from FILE:12
app.0.program = p from FILE:13
app.0.env.C = c d from FILE:15
app.1.np = 2 from FILE:17
app.1.program = q from FILE:18
app.1.args = x y|z from FILE:19
host.x = x:2 from flag -H
host.y = y from flag -H
env.B = 2 from flag -x
env.D = (that of gorun's environment) from flag -x
env.NCCL_DEBUG = INFO from FILE:5
env.A = 1 from FILE:2
`},
		{"command line", []string{"-f", file, "-np", "3", "p", "a", "b"}, `
job.np = 3 from flag -np
job.program = p from command line
job.args = a|b from command line
env.NCCL_DEBUG = INFO from FILE:5
env.A = 1 from FILE:2
env.B = 1 from FILE:3
launch.hostfile = h from variable GORUN_HOSTFILE
`},
		{"programs", []string{"-f", file, "-np", "3", "p", ":", "-np1", "--wdir", "d", "-x", "E=1", "q"}, `
app.0.np = 3 from flag -np
app.0.program = p from command line
app.1.np = 1 from flag -np
app.1.program = q from command line
app.1.wdir = d from flag --wdir
app.1.env.E = 1 from flag -x
env.NCCL_DEBUG = INFO from FILE:5
env.A = 1 from FILE:2
env.B = 1 from FILE:3
launch.hostfile = h from variable GORUN_HOSTFILE
`},
	} {
		if d := cmp.Diff(show(c.args...), strings.TrimPrefix(c.want, "\n")); d != "" {
			t.Errorf("%s: -got +want:\n%s", c.name, d)
		}
	}
}
