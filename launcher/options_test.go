package launcher

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// fullJob is a job in which every option is set, from the examples that help shows.
func fullJob(t *testing.T) Job {
	t.Helper()
	var j Job
	for _, o := range JobOptions {
		var err error
		switch o.Key {
		case "":
			value := map[string]string{"-H": "a:2,b", "-x": "A=1"}[o.Flags[0]]
			if value == "" {
				t.Fatalf("%s: no value for the test", o.Flags[0])
			}
			err = o.Set(&j, o.Flags[0], value)
		default:
			var one Job
			one, _, err = decodeJob("job.toml", []byte(o.Key+" = "+o.Example+"\n"))
			for _, v := range o.values(&one) {
				if err == nil {
					err = o.set(&j, v)
				}
			}
		}
		if err != nil {
			t.Fatalf("%s%v: %v", o.Key, o.Flags, err)
		}
		if len(o.values(&j)) == 0 {
			t.Errorf("%s%v: set, but has no value", o.Key, o.Flags)
		}
		if o.Help == "" || o.Key != "" && o.Example == "" || (o.Arg == "") != (o.kind == kindSwitch) && len(o.Flags) > 0 {
			t.Errorf("%s%v: wants a help text, an example, and a name for its value unless it is a switch", o.Key, o.Flags)
		}
	}
	return j
}

// Every field of a job has an option, which is merged.
func TestJobOptions(t *testing.T) {
	full := fullJob(t)
	for v, i := reflect.ValueOf(full), 0; i < v.NumField(); i++ {
		if v.Field(i).IsZero() && v.Type().Field(i).Name != "Apps" { // the programs of the command line, and [[app]]
			t.Errorf("Job.%s has no option", v.Type().Field(i).Name)
		}
	}
	if d := cmp.Diff(Merge(Job{}, full, Job{}), full); d != "" {
		t.Errorf("merged into an empty job: -got +want:\n%s", d)
	}
	// A flag wins over a file also with a value that is no: an empty, zero or false one.
	for _, o := range JobOptions {
		if o.kind != kindSwitch {
			continue
		}
		var strong Job
		if err := o.set(&strong, "false"); err != nil {
			t.Fatal(err)
		}
		weak := full
		if err := o.set(&weak, "true"); err != nil {
			t.Fatal(err)
		}
		merged := Merge(strong, weak)
		if got := o.values(&merged); !slices.Equal(got, []string{"false"}) {
			t.Errorf("%s=false over a file's true: %q", o.Flags[0], got)
		}
	}
	merged := Merge(Job{Timeout: NoTimeout, KillGrace: NoGrace}, full)
	if line := merged.CommandLine(); !strings.Contains(line, "--timeout 0 --kill-grace 0 ") {
		t.Errorf("no timeout and no grace over a file's: %s", line)
	}
}

// A default is a value that the option takes, and the one that a plan has.
func TestDefaults(t *testing.T) {
	var j Job
	for _, o := range JobOptions {
		if o.Default == "" {
			continue
		}
		if err := o.Set(&j, o.Flags[0], o.Default); err != nil {
			t.Error(err)
		}
	}
	hosts := []Host{{Name: "x", Addr: "x"}}
	j.Hosts = hosts
	got, err := j.Plan(testFacts)
	if err != nil {
		t.Fatal(err)
	}
	want, err := Job{Hosts: hosts}.Plan(testFacts)
	if err != nil {
		t.Fatal(err)
	}
	got.BindTo, got.GPUBind = Bind{}, "" // "none" is written in words
	if d := cmp.Diff(planJSON(t, got), planJSON(t, want)); d != "" {
		t.Errorf("with all defaults given, -got +want:\n%s", d)
	}
}

func planJSON(t *testing.T, p *Plan) string {
	t.Helper()
	text, err := json.MarshalIndent(p, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
