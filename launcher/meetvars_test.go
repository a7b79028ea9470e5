package launcher

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What a user chooses for the ranks' meeting point, as a value or as the variable of here, reaches ranks of this and of other hosts,
// and JAX's variable agrees with it.
func TestPlanMeetingPoint(t *testing.T) {
	facts := testFacts
	facts.Environ = []string{"PATH=/bin", "MASTER_PORT=29511", "ROLE_NAME=mine"}
	inherit := func(name string) Setting { return Setting{Name: name, Inherit: true} }
	for _, c := range []struct {
		name string
		env  []Setting
		want []string // MASTER_ADDR, MASTER_PORT, JAX_COORDINATOR_ADDRESS, ROLE_NAME
	}{
		{"gorun's", nil, []string{"10.0.0.1", "4711", "10.0.0.1:4711", "default"}},
		{"of here", []Setting{inherit("MASTER_PORT"), inherit("ROLE_NAME")}, []string{"10.0.0.1", "29511", "10.0.0.1:29511", "mine"}},
		{"missing here", []Setting{inherit("MASTER_ADDR")}, []string{"10.0.0.1", "4711", "10.0.0.1:4711", "default"}},
		{"port", []Setting{{Name: "MASTER_PORT", Value: "29500"}}, []string{"10.0.0.1", "29500", "10.0.0.1:29500", "default"}},
		{"address", []Setting{{Name: "MASTER_ADDR", Value: "fe80::1"}}, []string{"fe80::1", "4711", "[fe80::1]:4711", "default"}},
		{"JAX's", []Setting{{Name: "MASTER_PORT", Value: "29500"}, {Name: "JAX_COORDINATOR_ADDRESS", Value: "j:1"}}, []string{"10.0.0.1", "29500", "j:1", "default"}},
	} {
		for where, hosts := range map[string][]Host{"here": nil, "another host": {{Name: "far", Slots: 1}}} {
			t.Run(c.name+" "+where, func(t *testing.T) {
				p, err := Job{NP: 1, Program: "/bin/true", Hosts: hosts, Env: c.env}.Plan(facts)
				if err != nil {
					t.Fatal(err)
				}
				r := &p.Ranks[0]
				at := launchVars("id", "sock", "10.0.0.1", 4711)
				env := p.environ(r, at)
				if hosts != nil {
					env = remoteEnviron([]string{"PATH=/far", "MASTER_PORT=1"}, p.Remote.Forward, r.Env, at)
				}
				var got []string
				for _, name := range []string{"MASTER_ADDR", "MASTER_PORT", "JAX_COORDINATOR_ADDRESS", "ROLE_NAME"} {
					value, _ := lookup(env, name)
					got = append(got, value)
				}
				if d := cmp.Diff(got, c.want); d != "" {
					t.Errorf("-got +want:\n%s", d)
				}
			})
		}
	}
}
