package launcher

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestDecodeJob(t *testing.T) {
	on, three := true, 3
	got, _, err := decodeJob("job.toml", []byte(`
[job]
np = 4
program = "./train"
args = ["-epochs", "3"]
wdir = "/tmp"
device = "host"

[env]
NCCL_DEBUG = "INFO"
OMP_NUM_THREADS = 4
CHECK = true
LIMIT = 1000000.0
RATE = 0.001

[launch]
timeout = "10m"
kill_grace = 0
stdin = "none"
keep_launcher_env = true
report = "r.json"
on_fail = "wait"
timeout_signal = "SIGUSR1@30s"
restarts = 3
window = "1h"

[output]
tag = true
timestamp = true
merge = true
dir = "logs"
files_only = true
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Job{NP: 4, Program: "./train", Args: []string{"-epochs", "3"}, Dir: "/tmp", Device: "host",
		Env:     []Setting{{Name: "CHECK", Value: "true"}, {Name: "LIMIT", Value: "1000000.0"}, {Name: "NCCL_DEBUG", Value: "INFO"}, {Name: "OMP_NUM_THREADS", Value: "4"}, {Name: "RATE", Value: "0.001"}},
		Timeout: 10 * time.Minute, KillGrace: NoGrace, TagOutput: &on, Timestamp: &on, Merge: &on, OutputDir: "logs", FilesOnly: &on, Stdin: StdinNone, KeepLauncherEnv: &on, Report: "r.json",
		OnFail: OnFailWait, TimeoutSignal: TimedSignal{syscall.SIGUSR1, 30 * time.Second}, Restarts: &three, RestartWindow: time.Hour}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
	line := "gorun -np 4 -x CHECK=true -x LIMIT=1000000.0 -x NCCL_DEBUG=INFO -x OMP_NUM_THREADS=4 -x RATE=0.001 --wdir /tmp --device host --stdin none " +
		"--tag-output --timestamp --merge --output-dir logs --files-only --timeout 10m0s --kill-grace 0 --timeout-signal USR1@30s --on-fail wait --restarts 3 --restart-window 1h0m0s --report r.json --keep-launcher-env ./train -epochs 3"
	if got := got.CommandLine(); got != line {
		t.Errorf("command line:\n got %s\nwant %s", got, line)
	}
}

const twoHosts = "[[host]]\nname = \"a\"\nslots = 1\n\n[[host]]\nname = \"b\"\n"

// An editor of Windows begins UTF-8 with a mark, and ends lines with two characters.
func TestDecodeJobOfWindows(t *testing.T) {
	got, places, err := decodeJob("job.toml", []byte("\ufeff[job]\r\nnp = 2\r\nprogram = \"true\"\r\n"))
	if err != nil || got.NP != 2 || got.Program != "true" || places["job.np"] != "job.toml:2" {
		t.Errorf("%+v, np at %q, %v", got, places["job.np"], err)
	}
	if _, _, err := decodeJob("job.toml", []byte("\ufeff[job]\r\nnp = x\r\n")); err == nil || err.Error() != `job.toml:2:6: expected value but found "x" instead; text stands in quotes: np = "x"` {
		t.Errorf("got %v", err)
	}
}

func TestDecodeJobHosts(t *testing.T) {
	got, _, err := decodeJob("job.toml", []byte(`
[job]
program = "./train"
[[host]]
name = "a"
slots = 8
max_slots = 9
[[host]]
name = "b"
address = "[fe80::1%eth0]"
user = "me"
port = 2222
[launch]
map_by = "ppr:2:node"
oversubscribe = true
rm = "none"
ssh_config = "cfg"
accept_new_host_keys = true
connect_timeout = 60
port_range = "40000-40100"
stage = ["data.bin", "x y"]
`))
	if err != nil {
		t.Fatal(err)
	}
	on := true
	want := Job{Program: "./train", Hosts: []Host{{Name: "a", Addr: "a", Slots: 8, MaxSlots: 9}, {Name: "b", Addr: "fe80::1%eth0", User: "me", Port: 2222}}, MapBy: &MapBy{PPR: 2},
		Oversubscribe: &on, RM: RMNone, SSHConfig: "cfg", AcceptNewHostKeys: &on, ConnectTimeout: time.Minute, Ports: PortRange{40000, 40100}, Stage: []string{"data.bin", "x y"}}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
	line := "gorun -H 'a:8,ssh://me@[fe80::1%eth0]:2222' --map-by ppr:2:node --oversubscribe --rm none --ssh-config cfg --accept-new-host-keys " +
		"--connect-timeout 1m0s --port-range 40000-40100 --stage data.bin --stage 'x y' ./train"
	if got := got.CommandLine(); got != line {
		t.Errorf("command line:\n got %s\nwant %s", got, line)
	}
	got, _, err = decodeJob("job.toml", []byte("host = [{name = \"a\", slots = 2}, {name = \"b\"}]\nlaunch = {stage = \"none\", rsh = \"ssh -q\", hostfile.x = 1}\n"))
	if err == nil {
		t.Errorf("hostfile is a table: got %+v", got)
	}
	got, _, err = decodeJob("job.toml", []byte("host = [{name = \"a\", slots = 2}, {name = \"b\"}]\nlaunch = {stage = \"none\", rsh = \"ssh -q\"}\n"))
	if d := cmp.Diff(got, Job{Hosts: []Host{{Name: "a", Addr: "a", Slots: 2}, {Name: "b", Addr: "b"}}, RSH: "ssh -q", Stage: []string{StageNone}}); d != "" || err != nil {
		t.Errorf("%v, -got +want:\n%s", err, d)
	}
}

func TestDecodeJobErrors(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"unknown key", "[job]\nnp = 4\nprogamm = \"x\"\n", "job.toml:3:1: unknown key job.progamm; did you mean program?"},
		{"far key", "[launch]\nxyzzy = 1\n", "job.toml:2:1: unknown key launch.xyzzy; known there: hostfile, map_by, oversubscribe, bind_to, gpu_bind, stdin, tag_output, timeout, kill_grace, timeout_signal, on_fail, restarts, window, report, keep_launcher_env, rm, ssh_config, accept_new_host_keys, rsh, connect_timeout, port_range, stage"},
		{"what else than wait", "[launch]\non_fail = \"ignore\"\n", `job.toml:2:1: on_fail = ignore: must be kill or wait`},
		{"signal without time", "[launch]\ntimeout_signal = \"USR1\"\n", `job.toml:2:1: timeout_signal: "USR1" is no signal and time before the timeout, such as USR1@30s`},
		{"negative restarts", "[launch]\nrestarts = -1\n", "job.toml:2:1: restarts = -1: must be a number from 0 to 1048576"},
		{"unknown table", "\n[jobs]\n", "job.toml:2:2: unknown key jobs; did you mean job?"},
		{"top level", "np = 4\n", "job.toml:1:1: unknown key np; it belongs into [job]"},
		{"dotted", "job.npp = 4\n", "job.toml:1:1: unknown key job.npp; did you mean np?"},
		{"syntax", "[job]\nnp = \n", "job.toml:2:6: expected value but found '\\n' instead"},
		{"type", "[job]\nnp = \"four\"\n", "job.toml:2:1: job.np is of type string, must be of type integer"},
		{"np", "[job]\nnp = 0\n", "job.toml:2:1: np = 0: must be a number from 1 to 16384"},
		{"timeout", "[launch]\ntimeout = \"soon\"\n", "job.toml:2:1: timeout: \"soon\" is no duration such as 30s, 5m, 1h30m or a number of seconds"},
		{"grace", "[launch]\n\nkill_grace = -1\n", "job.toml:3:1: kill_grace: \"-1\" is negative"},
		{"stdin", "[launch]\nstdin = \"some\"\n", "job.toml:2:1: stdin = some: must be a rank's number, all or none"},
		{"env", "[env]\nA = [1]\n", "job.toml:2:1: variable A: must be a string, a number, true or false"},
		{"env place", "[env]\nRANK = 1\n", "job.toml:2:1: variable RANK: it tells a rank its place in the job, gorun sets it"},
		{"table as a value", "job = 3\n", "job.toml:1:1: job must be a table: [job]"},
		{"array for a string", "[job]\nprogram = [\"x\"]\n", "job.toml:2:1: job.program is of type array, must be of type string"},
		{"fraction", "[job]\nnp = 1.5\n", "job.toml:2:1: job.np is of type float, must be of type integer"},
		{"other case", "[job]\nprogram = \"x\"\nNP = 4\n", "job.toml:3:1: unknown key job.NP; did you mean np?"},
		{"other case of a table", "[Job]\nprogram = \"x\"\n", "job.toml:1:2: unknown key Job; did you mean job?"},
		{"table in env", "[env.A]\nb = 1\n", "job.toml:1:2: variable A: must be a string, a number, true or false"},
		{"empty report", "[launch]\nreport = \"\"\n", "job.toml:2:1: report is empty"},
		{"another table's", "[job]\ntimeout = 3\n", "job.toml:2:1: unknown key job.timeout; it belongs into [launch]"},
		{"array of jobs", "[[job]]\nnp = 1\n", "job.toml:1:3: job must be a table: [job]"},
		{"one host", "\n[host]\nname = \"a\"\n", "job.toml:2:2: host must be an array of tables: [[host]]"},
		{"hosts", "[launch]\nhosts = [\"a\"]\n", "job.toml:2:1: unknown key launch.hosts; a host is a table of its own: [[host]]"},
		{"key in the first host", "[[host]]\nname = \"a\"\n slotts = 1\n\n[[host]]\nname = \"b\"\nslots = 1\n", "job.toml:3:2: unknown key host.slotts; did you mean slots?"},
		{"value in the first host", "[[host]]\nname = \"a\"\nslots = 0\n[[host]]\nname = \"b\"\nslots = 1\n", "job.toml:3:1: slots = 0: must be a number from 1 to 16384"},
		{"type in the first host", "[[host]]\nname = \"a\"\nport = \"x\"\n[[host]]\nport = 22\nname = \"b\"\n", "job.toml:3:1: host.port is of type string, must be of type integer"},
		{"key in the second host", twoHosts + "  slotts = 1\n", "job.toml:7:3: unknown key host.slotts; did you mean slots?"},
		{"value in the second host", twoHosts + "  slots = 0 # none\n", "job.toml:7:3: slots = 0: must be a number from 1 to 16384"},
		{"type in the second host", twoHosts + "slots = \"8\"\n", "job.toml:7:1: host.slots is of type string, must be of type integer"},
		{"user in the second host", twoHosts + "\tuser = '-l'\n", "job.toml:7:2: host \"b\": user \"-l\" is no user's name"},
		{"address in the second host", twoHosts + "address = \"b c\"\n", "job.toml:7:1: host \"b\": address \"b c\": ' ' is in no host's name"},
		{"no name", "[[host]]\nname = \"a\"\n[[ host ]]\nslots = 1\n", "job.toml:3:4: a host without a name"},
		{"a host twice", twoHosts + "[[host]]\n\nname = \"a\"\n", "job.toml:9:1: host \"a\" is given twice, first in line 2: give the slots of both in one"},
		{"max_slots", "[[host]]\nname = \"a\"\nmax_slots = 2\nslots = 3\n", "job.toml:3:1: max_slots = 2: fewer than its slots, 3"},
		{"host name", "[[host]]\nname = \"a:4\"\n", "job.toml:2:1: host \"a:4\": ':' is in no host's name"},
		{"hosts in a line", "host = [{name = \"a\"}, {name = \"b\", port = 0}]\n", "job.toml:1:36: port = 0: must be a number from 1 to 65535"},
		{"hosts that are words", "host = [\"a\"]\n", "job.toml:1:9: an element of host is of type string, must be of type table"},
		{"hosts twice", "[[host]]\nname = \"a\"\n[launch]\n hostfile = \"h\"\n", "job.toml:4:2: hosts are given twice, by [[host]] and by hostfile: give one of them"},
		{"table below a host", "[[host]]\nname = \"a\"\n[host.gpu]\nn = 1\n", "job.toml:3:2: unknown key host.gpu; known there: name, address, user, port, slots, max_slots"},
		{"map_by", "[launch]\nmap_by = \"core\"\n", "job.toml:2:1: map_by: \"core\" must be slot, node or ppr:N:node: ranks are placed on hosts, and bound to a part of one by --bind-to core or numa"},
		{"rm", "[launch]\nrm = \"lsf\"\n", "job.toml:2:1: rm = lsf: must be none, slurm or pbs"},
		{"no time", "[launch]\nconnect_timeout = 0\n", "job.toml:2:1: connect_timeout: \"0\" is no time at all"},
		{"ports", "[launch]\nport_range = \"9-1\"\n", "job.toml:2:1: port_range: \"9-1\" is no range of ports such as 40000-40100"},
		{"element", "[job]\nargs = [\n  \"a\", # one\n  3,\n]\n", "job.toml:4:3: an element of job.args is of type integer, must be of type string"},
		{"stage", "[launch]\nstage = [\"none\", \"f\"]\n", "job.toml:2:1: stage = \"none\" and files to send contradict each other"},
		{"after a text of many lines", "[job]\nprogram = \"\"\"\nnp = 1\n[x]\n\"\"\"\nnq = 1\n", "job.toml:6:1: unknown key job.nq; did you mean np?"},
		{"one setting twice", "[output]\ntag = true\n[launch]\n\ntag_output = true\n", "job.toml:5:1: launch.tag_output is the same as output.tag: give one of them"},
		{"a key twice", "[job]\nnp = 2\nprogram = \"x\"\n  np=3\n", "job.toml:4:3: job.np is given twice, first in line 2"},
		{"a key of the second host twice", twoHosts + "name = 'é'\n", "job.toml:7:1: host.name is given twice, first in line 6"},
		{"a key twice in a line", "host = [{name = \"a\", name = \"b\", port = 1}]\n", "job.toml:1:22: host.name is given twice, first in line 1"},
		{"a table twice", "[job]\nnp = 2\n[launch]\n[job]\n", "job.toml:4:2: job is given twice, first in line 1"},
		{"text for a list", "[job]\nargs = \"-s  3\"\n", `job.toml:2:1: job.args is of type string, must be of type array: ["-s", "3"]`},
		{"no text for a list", "[job]\nargs = 3\n", "job.toml:2:1: job.args is of type integer, must be of type array"},
		{"text without quotes", "[job]\nprogram=hostname\n", `job.toml:2:9: expected value but found "hostname" instead; text stands in quotes: program = "hostname"`},
		{"a path without quotes", "[job]\nprogram = ./a b # c\n", `job.toml:2:11: floats must start with a digit, not '.'; text stands in quotes: program = "./a b"`},
		{"a time without quotes", "[launch]\ntimeout = 5m\n", `job.toml:2:12: expected a top-level item to end with a newline, comment, or EOF, but got 'm' instead; text stands in quotes: timeout = "5m"`},
		{"a switch and more", "[job]\nnp = true 3\n", "job.toml:2:10: expected a top-level item to end with a newline, comment, or EOF, but got '3' instead"},
		{"empty program", "[job]\nprogram = \"\"\n", "job.toml:2:1: program is empty"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, _, err := decodeJob("job.toml", []byte(c.text))
			if err == nil {
				t.Fatal("no error")
			}
			if _, ok := errors.AsType[*UsageError](err); !ok {
				t.Errorf("got a %T, want a *UsageError", err)
			}
			if d := cmp.Diff(err.Error(), c.want); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
		})
	}
}

func TestReadJobFileMissing(t *testing.T) {
	_, _, err := ReadJobFile("/nonexistent/job.toml")
	if want := "job file /nonexistent/job.toml: no such file or directory"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// Every example in configs is a job file.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../configs/*.toml")
	if err != nil || len(files) < 6 {
		t.Fatalf("%d examples in configs, %v", len(files), err)
	}
	root := schemaOf(t)
	for _, f := range files {
		job, _, err := ReadJobFile(f)
		if err != nil {
			t.Error(err)
			continue
		}
		if len(job.Programs()) == 0 {
			t.Errorf("%s names no program", f)
		}
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.HasPrefix(text, []byte("#:schema job.schema.json\n")) {
			t.Errorf("%s does not name its schema in the first line", f)
		}
		if err := root.checkTOML(text); err != nil {
			t.Errorf("%s: %v", f, err)
		}
		if _, err := job.Plan(testFacts); err != nil {
			t.Errorf("%s: %v", f, err)
		}
	}
	if hosts, err := ReadHostfile("../configs/hostfile"); err != nil || len(hosts) != 4 {
		t.Errorf("%d hosts, %v", len(hosts), err)
	}
}

var placed = regexp.MustCompile(`^job\.toml:[0-9]+:[0-9]+: `)

// Any file is a job, or has an error with a place.
func FuzzDecodeJob(f *testing.F) {
	f.Add([]byte("[job]\nnp = 4\nprogram = \"x\"\n[env]\nA = 1\n[launch]\ntimeout = \"1s\"\n"))
	f.Add([]byte(twoHosts + "port = 22\n[launch]\nmap_by = \"ppr:2:node\"\nstage = [\"f\"]\nport_range = 7\n"))
	f.Add([]byte("[[app]]\nnp = 2\nprogram = 'a'\nenv = {A = 1}\n[[app]]\n[nccl]\ndebug = 'INFO'\n[mccl]\nib_disable = true\n[output]\ntag = 1\n"))
	f.Add([]byte("job.np = 1\nenv = {A = \"b\"}\n[[launch]]\n"))
	files, _ := filepath.Glob("../configs/*.toml")
	for _, name := range files {
		if data, err := os.ReadFile(name); err == nil {
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		job, places, err := decodeJob("job.toml", data)
		if err != nil {
			if _, ok := errors.AsType[*UsageError](err); !ok || !placed.MatchString(err.Error()) {
				t.Fatalf("error %v (%T) does not name the place", err, err)
			}
			return
		}
		for _, o := range Origins(Source{Job: job, Places: places}) {
			if o.From == "" {
				t.Fatalf("%s = %q has no origin", o.Key, o.Value)
			}
		}
		// What was accepted can be planned, unless one setting needs another, or a host has too few slots.
		if _, err := job.Plan(testFacts); err != nil {
			if _, ok := errors.AsType[*UsageError](err); !ok {
				t.Fatalf("accepted, but no plan: %v (%T)", err, err)
			}
		}
	})
}
