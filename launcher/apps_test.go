package launcher

import (
	"bytes"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// two are the facts of a job of ./a and b.
var two = Facts{Programs: []Program{{Name: "./a", Path: "/srv/a"}, {Name: "b", Path: "/bin/b"}}, Host: "here", Dir: "/srv",
	Environ: []string{"PATH=/bin", "NCCL_DEBUG=WARN", "PMI_RANK=3", "TOKEN=x"}}

func mpmd() Job {
	return Job{Hosts: []Host{{Name: "here", Addr: "here", Slots: 2}, {Name: "x", Addr: "x", Slots: 2}}, Env: []Setting{{Name: "ALL", Value: "1"}, {Name: "ONE", Value: "1"}}, Device: "host",
		Apps: []App{{NP: 1, Program: "./a", Args: []string{"s"}, Env: []Setting{{Name: "ONE", Value: "a"}, {Name: "PMI_RANK", Inherit: true}}},
			{NP: 3, Program: "b", Dir: "sub", Device: "1", Env: []Setting{{Name: "NCCL_DEBUG", Value: "INFO"}, {Name: "TOKEN", Inherit: true}}}}}
}

func TestPlanApps(t *testing.T) {
	p, err := mpmd().Plan(two)
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := p.Write(&text); err != nil {
		t.Fatal(err)
	}
	golden(t, "plan-apps.txt", text.String())
	// The whole environment of the ranks, by program and host.
	environ := func(rank int) []string {
		r := &p.Ranks[rank]
		all := p.environ(r, nil)
		if !p.Hosts[r.Host].Local {
			all = remoteEnviron([]string{"PATH=/far"}, p.Remote.Forward, r.Env, nil)
		}
		return slices.DeleteFunc(all, func(kv string) bool {
			return !slices.Contains([]string{"PATH", "ALL", "ONE", "NCCL_DEBUG", "PMI_RANK", "TOKEN", "GORUN_DEVICE", "GORUN_APP", "PWD"}, kv[:strings.IndexByte(kv, '=')])
		})
	}
	for _, c := range []struct {
		rank int
		want []string
	}{
		{0, []string{"PATH=/bin", "NCCL_DEBUG=WARN", "TOKEN=x", "PMI_RANK=3", "GORUN_APP=0", "GORUN_DEVICE=host", "ALL=1", "ONE=a"}},
		{1, []string{"PWD=/srv/sub", "PATH=/bin", "TOKEN=x", "GORUN_APP=1", "GORUN_DEVICE=1", "ALL=1", "ONE=1", "NCCL_DEBUG=INFO"}},
		{3, []string{"GORUN_APP=1", "GORUN_DEVICE=1", "ALL=1", "ONE=1", "NCCL_DEBUG=INFO", "TOKEN=x", "PATH=/far"}},
	} {
		got := environ(c.rank)
		slices.Sort(got)
		slices.Sort(c.want)
		if d := cmp.Diff(got, c.want); d != "" {
			t.Errorf("rank %d, -got +want:\n%s", c.rank, d)
		}
	}
	if d := cmp.Diff([][]int{p.programsOn(0), p.programsOn(1)}, [][]int{{0, 1}, {1}}); d != "" {
		t.Errorf("programs on hosts, -got +want:\n%s", d)
	}
	// One program with different arguments is one program.
	j := Job{Apps: []App{{NP: 1, Program: "./a", Args: []string{"server"}}, {NP: 1, Program: "./a"}}}
	p, err = j.Plan(Facts{Programs: []Program{two.Programs[0], two.Programs[0]}, Host: "here", Dir: "/srv"})
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Programs) != 1 || len(p.Apps) != 2 || !slices.Equal(p.Ranks[0].Argv, []string{"./a", "server"}) || !slices.Equal(p.Ranks[1].Argv, []string{"./a"}) {
		t.Errorf("one program twice: %+v", p)
	}
}

// Ranks are numbered through the programs, and placed by their numbers.
func TestPlanAppsPlaces(t *testing.T) {
	for _, c := range []struct {
		mapBy MapBy
		want  []string
	}{
		{MapBy{}, []string{"./a here", "b here", "b x", "b x"}},
		{MapBy{Node: true}, []string{"./a here", "b x", "b here", "b x"}},
		{MapBy{PPR: 2}, []string{"./a here", "b here", "b x", "b x"}},
	} {
		j := mpmd()
		j.MapBy = &c.mapBy
		p, err := j.Plan(two)
		if err != nil {
			t.Error(err)
			continue
		}
		var got []string
		for _, r := range p.Ranks {
			got = append(got, r.Argv[0]+" "+p.Hosts[r.Host].Name)
		}
		if d := cmp.Diff(got, c.want); d != "" {
			t.Errorf("%v: -got +want:\n%s", c.mapBy, d)
		}
	}
}

func TestPlanAppsErrors(t *testing.T) {
	for _, c := range []struct {
		name string
		job  Job
		want string
	}{
		{"a number for all", Job{NP: 4, Apps: []App{{NP: 1, Program: "a"}, {NP: 1, Program: "b"}}}, "-np 4 is for a job with one program: this one has 2, and each has its own number of ranks"},
		{"no number", Job{Apps: []App{{NP: 1, Program: "a"}, {Program: "b"}}}, "program b: no number of ranks; each of several programs needs its own (-np, or np in its [[app]])"},
		{"too many", Job{Apps: []App{{NP: 1, Program: "a"}, {NP: MaxNP, Program: "b"}}}, "program b: number of ranks 16384: must be from 1 to 16384, for all programs together"},
		{"no program", Job{Apps: []App{{NP: 1}}}, "program 0 of 1 has no name"},
		{"twice", Job{Program: "p", Apps: []App{{NP: 1, Program: "a"}}}, "programs are given twice: p, and a"},
		{"variable", Job{Apps: []App{{NP: 1, Program: "a", Env: []Setting{{Name: "RANK", Value: "1"}}}}}, "variable RANK: it tells a rank its place in the job, gorun sets it"},
		{"a device and hidden ones", Job{GPUBind: GPUBindHide, Apps: []App{{NP: 1, Program: "a", Device: "1"}}},
			"--gpu-bind hide shows each rank a GPU of its own, and --device 1 is one for all: give one of them"},
		{"slots", Job{Hosts: []Host{{Name: "x", Addr: "x"}}, Apps: []App{{NP: 1, Program: "a"}, {NP: 1, Program: "b"}}}, "2 ranks, but host x has 1 slot; give their slots (-H x:2), or --oversubscribe"},
	} {
		_, err := c.job.Plan(two)
		if err == nil || err.Error() != c.want {
			t.Errorf("%s: got %v, want %s", c.name, err, c.want)
		}
	}
}

func TestDecodeApps(t *testing.T) {
	want := Job{Dir: "/w", Env: []Setting{{Name: "A", Value: "1"}}, Apps: []App{
		{NP: 1, Program: "./a", Args: []string{"s", ":"}, Env: []Setting{{Name: "B", Value: "x"}, {Name: "C", Value: "3"}}},
		{NP: 3, Program: "b", Dir: "/d", Device: "host"}}}
	for _, text := range []string{`
[job]
wdir = "/w"
[env]
A = 1
[[app]]
np = 1
program = "./a"
args = ["s", ":"]
[app.env]
B = "x"
C = 3
[[app]]
np = 3
program = "b"
wdir = "/d"
device = "host"
`, `app = [{np = 1, program = "./a", args = ["s", ":"], env = {C = 3, B = "x"}}, {np = 3, program = "b", wdir = "/d", device = "host"}]
job.wdir = "/w"
env = {A = 1}
`} {
		got, _, err := decodeJob("job.toml", []byte(text))
		if d := cmp.Diff(got, want); d != "" || err != nil {
			t.Errorf("%v, -got +want:\n%s", err, d)
		}
	}
	for _, c := range []struct{ name, text, want string }{
		{"key in the second app", "[[app]]\nnp = 1\nprogram = 'a'\n[[app]]\n np = 1\n programm = 'b'\n", "job.toml:6:2: unknown key app.programm; did you mean program?"},
		{"another table's", "[[app]]\ntimeout = 1\n", "job.toml:2:1: unknown key app.timeout; it belongs into [launch]"},
		{"type in the second app", "[[app]]\nnp = 1\nprogram = 'a'\n[[app]]\nprogram = 'b'\nnp = 'x'\n", "job.toml:6:1: app.np is of type string, must be of type integer"},
		{"element", "[[app]]\nnp = 1\nprogram = 'a'\nargs = ['x', 1]\n", "job.toml:4:14: an element of app.args is of type integer, must be of type string"},
		{"variable", "[[app]]\nnp = 1\nprogram = 'a'\n[app.env]\nRANK = 2\n", "job.toml:5:1: variable RANK: it tells a rank its place in the job, gorun sets it"},
		{"variables", "[[app]]\nnp = 1\nprogram = 'a'\nenv = 'A=1'\n", "job.toml:4:1: app.env must be a table: env = {NAME = \"VALUE\"}"},
		{"no np", "[[app]]\nnp = 1\nprogram = 'a'\n\n[[app]]\nprogram = 'b'\n", "job.toml:5:3: app \"b\" without np, its number of ranks"},
		{"no program", "[[app]]\nnp = 1\n", "job.toml:1:3: an app without a program"},
		{"a program of the job", "[job]\nnp = 2\n[[app]]\nnp = 1\nprogram = 'a'\n", "job.toml:2:1: programs are given by [[app]], each with its own np: then there is none in [job]"},
		{"too many", "[[app]]\nnp = 1\nprogram = 'a'\n[[app]]\nnp = 16384\nprogram = 'b'\n", "job.toml:4:3: program b: number of ranks 16384: must be from 1 to 16384, for all programs together"},
		{"one table", "[app]\nnp = 1\n", "job.toml:1:2: app must be an array of tables: [[app]]"},
	} {
		_, _, err := decodeJob("job.toml", []byte(c.text))
		if err == nil || err.Error() != c.want {
			t.Errorf("%s: got %v\nwant %s", c.name, err, c.want)
		}
	}
}

// An app has fields of a job, and each of them comes from there.
func TestAppIsPartOfJob(t *testing.T) {
	full := fullJob(t)
	app := NewApp(full)
	v := reflect.ValueOf(app)
	for i := range v.NumField() {
		name := v.Type().Field(i).Name
		if d := cmp.Diff(v.Field(i).Interface(), reflect.ValueOf(full).FieldByName(name).Interface()); d != "" {
			t.Errorf("App.%s, -got +want:\n%s", name, d)
		}
	}
	if d := cmp.Diff(NewApp(app.job()), app); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
	// And the options that say so are its fields.
	back := app.job()
	for _, o := range JobOptions {
		if got := len(o.values(&back)) > 0; got != o.App {
			t.Errorf("option %s%v: App is %v, but it is kept: %v", o.Key, o.Flags, o.App, got)
		}
	}
}

func TestMergeApps(t *testing.T) {
	file := Job{Apps: []App{{NP: 1, Program: "a"}}, Env: []Setting{{Name: "A", Value: "1"}}}
	if got := Merge(Job{Program: "p", NP: 2}, file); got.Program != "p" || got.Apps != nil || len(got.Env) != 1 {
		t.Errorf("a program over a file's apps: %+v", got)
	}
	if got := Merge(Job{Apps: []App{{NP: 2, Program: "b"}}}, file); len(got.Apps) != 1 || got.Apps[0].Program != "b" {
		t.Errorf("apps over a file's: %+v", got)
	}
	if got := Merge(Job{Apps: file.Apps}, Job{Program: "p", NP: 3, Args: []string{"x"}}); got.Program != "" || got.Args != nil {
		t.Errorf("apps over a file's program: %+v", got)
	}
}
