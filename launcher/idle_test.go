package launcher

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Each setting that does nothing in a job file is told with its place, and only those; Plan refuses the jobs that it is said to refuse.
func TestIdle(t *testing.T) {
	for _, c := range []struct {
		file    string // the lines of a job file, behind its program; / for a newline
		want    string
		refused bool
	}{
		{"", "", false},
		{"[launch]/window = '1h'", "j:4: window has no effect without restarts", true},
		{"[launch]/window = '1h'/restarts = 0", "", false},
		{"[launch]/window = '1h'/restarts = 3", "", false},
		{"[launch]/timeout_signal = 'USR1@30s'", "j:4: timeout_signal has no effect without timeout", true},
		{"[launch]/timeout_signal = 'USR1@30s'/timeout = 0", "", false},
		{"[launch]/timeout_signal = 'USR1@30s'/timeout = '1m'", "", false},
		{"[launch]/timeout_signal = 'USR1@30s'/timeout = '30s'", "j:4: timeout_signal has no effect where timeout comes before it", true},
		{"[output]/files_only = true", "j:4: files_only has no effect without dir, the directory for the files", true},
		{"[output]/files_only = false", "", false},
		{"[output]/files_only = true/dir = 'd'", "", false},
		{"[output]/tag = true/files_only = true/dir = 'd'", "j:4: tag has no effect with files_only: files have no tags", false},
		{"[launch]/tag_output = true/[output]/files_only = true/dir = 'd'", "j:4: tag has no effect with files_only: files have no tags", false},
		{"[output]/tag = true/dir = 'd'", "", false},
		{"device = '0'/[launch]/gpu_bind = 'hide'", "j:5: gpu_bind has no effect where each rank is given its device", true},
		{"device = '0'/[launch]/gpu_bind = 'none'", "", false},
		{"[launch]/gpu_bind = 'hide'", "", false},
		{"np = 2/[launch]/stdin = 2", "j:5: stdin has no effect with so small a np: ranks are numbered from 0", true},
		{"np = 2/[launch]/stdin = 1", "", false},
		{"np = 2/[launch]/stdin = 'all'", "", false},
		{"[[host]]/name = 'b'/[launch]/rm = 'slurm'", "j:6: rm has no effect where hosts are given", false},
		{"[[host]]/name = 'b'/[launch]/rm = 'none'", "", false},
		{"[launch]/rm = 'none'", "", false},
		{"[launch]/map_by = 'node'", "j:4: map_by has no effect unless ranks run on other hosts", false},
		{"[launch]/map_by = 'slot'", "", false},
		{"[launch]/map_by = 'ppr:2:node'", "", false},
		{"[launch]/rsh = 'r'", "j:4: rsh has no effect unless ranks run on other hosts", false},
		{"[launch]/ssh_config = 'c'", "j:4: ssh_config has no effect unless ranks run on other hosts", false},
		{"[launch]/accept_new_host_keys = true", "j:4: accept_new_host_keys has no effect unless ranks run on other hosts", false},
		{"[launch]/accept_new_host_keys = false", "", false},
		{"[launch]/connect_timeout = '9s'", "j:4: connect_timeout has no effect unless ranks run on other hosts", false},
		{"[launch]/port_range = '4-5'", "j:4: port_range has no effect unless ranks run on other hosts", false},
		{"[launch]/stage = ['f']", "j:4: stage has no effect unless ranks run on other hosts", false},
		{"[[host]]/name = 'b'/[launch]/map_by = 'node'/rsh = 'r'/connect_timeout = '9s'/port_range = '4-5'/stage = 'f'", "", false},
		{"[[host]]/name = 'b'/[launch]/ssh_config = 'c'/accept_new_host_keys = true", "", false},
		{"[[host]]/name = 'b'/[launch]/ssh_config = 'c'/rsh = 'r'", "j:6: ssh_config has no effect with rsh, which replaces the built-in ssh client", true},
		{"[[host]]/name = 'b'/[launch]/rsh = 'r'/accept_new_host_keys = true", "j:7: accept_new_host_keys has no effect with rsh, which replaces the built-in ssh client", true},
		{"[[host]]/name = 'b'/[launch]/rsh = 'r'/accept_new_host_keys = false", "", false},
		{"[launch]/kill_grace = 0/on_fail = 'wait'/keep_launcher_env = true/report = 'r'/oversubscribe = true/bind_to = 'none'/[output]/merge = true/timestamp = true", "", false},
	} {
		j, places, err := decodeJob("j", []byte("[job]\nprogram = 'p'\n"+strings.ReplaceAll(c.file, "/", "\n")+"\n"))
		if err != nil {
			t.Errorf("%s: %v", c.file, err)
			continue
		}
		var got []string
		refused := false
		for _, i := range FindIdle(len(j.Hosts) > 0, Source{Job: j, Places: places}) {
			got = append(got, i.From+": "+i.Text(false))
			refused = refused || i.Refused
		}
		if d := cmp.Diff(strings.Join(got, "\n"), c.want); d != "" || refused != c.refused {
			t.Errorf("%s: refused: %v, want %v; -got +want:\n%s", c.file, refused, c.refused, d)
		}
		_, err = j.Plan(Facts{Host: "a", Dir: "/", Machine: &Machine{}, Programs: []Program{{Name: "p", Path: "/p"}}})
		if _, usage := err.(*UsageError); usage != c.refused {
			t.Errorf("%s: Plan says %v, want an error: %v", c.file, err, c.refused)
		}
	}
}

// Where an idle setting comes from, by the strongest place; flags have their names there.
func TestIdleSource(t *testing.T) {
	var flags, env Job
	for _, set := range []struct {
		j           *Job
		flag, value string
	}{{&env, "--tag-output", "true"}, {&flags, "--tag-output", "true"}, {&env, "--files-only", "true"}, {&env, "--output-dir", "d"}, {&env, "--rsh", "r"}} {
		if err := optionOf(set.flag).Set(set.j, set.flag, set.value); err != nil {
			t.Fatal(err)
		}
	}
	name := func(o *Option) string { return o.Flags[0] }
	var got []string
	for _, i := range FindIdle(false, Source{Job: flags, Name: name}, Source{Job: env, Name: name}) {
		got = append(got, strings.Repeat("+", i.Source)+i.Text(true))
	}
	if d := cmp.Diff(got, []string{"--tag-output has no effect with --files-only: files have no tags", "+--rsh has no effect unless ranks run on other hosts"}); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
}

// Each option is known to need another, or to work alone.
func TestNeedsAreComplete(t *testing.T) {
	alone := strings.Fields(`job.np job.program job.args -H launch.hostfile launch.oversubscribe launch.bind_to -x job.wdir job.device job.env_like job.mpi output.timestamp output.merge output.dir
		launch.timeout launch.kill_grace launch.on_fail launch.restarts launch.report launch.keep_launcher_env`)
	for _, o := range JobOptions {
		id := optionID(&o)
		if needy := slices.ContainsFunc(needs, func(n need) bool { return n.key == id }); needy == slices.Contains(alone, id) {
			t.Errorf("%s: does it do something without other options? List it in needs, or here", id)
		}
	}
	for _, n := range needs {
		if strings.Contains(n.why, "%") != (n.other != "") {
			t.Errorf("%s: %q, %q", n.key, n.why, n.other)
		}
	}
}
