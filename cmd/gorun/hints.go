package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gorun-dev/gorun/launcher"
)

// elsewhere are flags of other launchers, without dashes and with - for _, and what to say instead.
var elsewhere = []struct {
	names string
	hint  string
}{
	{"machinefile hosts-file default-hostfile", "a file with hosts is given with --hostfile FILE"},
	{"hosts host-list hostlist nodelist include", "hosts are given with -H a:4,b:4, or in a file with --hostfile FILE"},
	{"ppn perhost npernode N ntasks-per-node tasks-per-node nproc-per-node slots-per-host num-gpus num-processes", "N ranks are -np N, on each of several hosts --map-by ppr:N:node; N slots of a host are -H host:N"},
	{"nnodes num-nodes nodes num-machines", "gorun starts all hosts itself, once: name them with -H a:8,b:8 or --hostfile FILE; inside an allocation it finds them; no host comes or goes later"},
	{"node-rank machine-rank rdzv-backend rdzv-endpoint rdzv-id rdzv-conf master-addr main-process-ip standalone",
		"gorun is started once, on one host, and gives MASTER_ADDR and MASTER_PORT to the ranks itself: gorun -H a:8,b:8 PROGRAM"},
	{"max-restarts", "the job is started again, on the same hosts, with --restarts N"},
	{"m module no-python", "the program is named as in a shell: gorun -np 4 python train.py, or gorun -np 4 python -m MODULE"},
	{"monitor-interval", "gorun hears at once that a rank has ended"},
	{"master-port main-process-port", "gorun gives MASTER_PORT to the ranks itself, a free one; another is chosen with -x MASTER_PORT=N"},
	{"cpu-bind bind-cores-to-rank binding cpu-affinity numa-binding", "ranks are bound with --bind-to core, core:N (N cores each) or numa"},
	{"cpus-per-proc cpus-per-rank cpus-per-task cores-per-rank", "N cores for each rank are --bind-to core:N"},
	{"membind mem-bind", "memory is where the rank first touches it: near its CPUs with --bind-to numa"},
	{"rank-by", "ranks are numbered in the order of their hosts: see --map-by"},
	{"report-bindings", "-v says where each rank runs, and --dry-run why"},
	{"gpus-per-proc gpus-per-task gpus-per-rank", "a rank takes the GPU of its local rank; --gpu-bind hide shows it that one alone, and with --gpu-bind share there may be more ranks than GPUs"},
	{"nolocal", "leave this host out of -H or the hostfile"},
	{"env genv export E", "a variable for the ranks is given with -x NAME=VALUE"},
	{"envall genvall envlist genvlist envnone genvnone", "ranks on this host inherit all variables, those on other hosts get NCCL_* and what -x NAME names"},
	{"mca pmixmca prtemca gmca", "gorun has no such parameters; gorun help lists its flags"},
	{"allow-run-as-root", "gorun needs no leave to run as root"},
	{"timestamp-output", "each line gets its time with --timestamp"},
	{"merge-stderr-to-stdout stderr-to-stdout", "stderr goes where stdout goes with --merge"},
	{"l prepend-rank prefix-output label tag", "each line gets its rank with --tag-output"},
	{"output-filename output log-dir logdir redirects tee outfile-pattern errfile-pattern", "files with the output of each rank are written with --output-dir DIR"},
	{"wd cwd chdir D", "the working directory is given with --wdir DIR"},
	{"launcher bootstrap plm-rsh-agent launcher-exec ssh", "another way to the hosts is given with --rsh CMD"},
	{"rmk", "the allocation to use is given with --rm slurm, pbs or none"},
	{"preload-files preload-binary bcast", "the program is sent where it is missing; files are sent with --stage FILE"},
	{"c ntasks", "the number of ranks is given with -np N"},
	{"p ssh-port port", "a port is given with the host: -H ssh://host:port"},
	{"s", "who reads stdin is said with --stdin: a rank's number, all or none"},
	{"V", "the version is printed by gorun --version"},
	{"configfile app appfile", "a job is described in TOML: see gorun help job-file"},
}

// hintFor says what to use instead of a flag of another launcher, "" if it is none of those.
func hintFor(name string) string {
	bare := strings.ReplaceAll(strings.TrimLeft(name, "-"), "_", "-")
	for _, e := range elsewhere {
		for word := range strings.FieldsSeq(e.names) {
			if bare == word {
				return e.hint
			}
		}
	}
	return ""
}

// hintCount says what to use instead of torchrun's words for a number of ranks.
func hintCount(err error, value string) error {
	if e, ok := errors.AsType[*launcher.UsageError](err); ok && e.Hint == "" {
		switch value {
		case "gpu", "auto":
			e.Hint = "without -np there is one rank for each GPU"
		case "cpu":
			e.Hint = "$(nproc) is the number of CPUs"
		}
	}
	return err
}

func unknownFlag(name string) error {
	var all []string
	for _, d := range flagDefs {
		all = append(all, d.names...)
	}
	e := &launcher.UsageError{Msg: "unknown flag " + name, Hint: hintFor(name)}
	if e.Hint != "" {
		return e
	}
	if near := launcher.Nearest(name, all); near != "" && len(strings.TrimLeft(name, "-")) > 1 { // one letter is as near to each other one
		e.Hint = "did you mean " + near + "?"
	} else {
		e.Hint = "see gorun help; flags of the program come after it"
	}
	return e
}

// hintJobFile is the error for a program that can't be run because it is a job file without the name of one: .toml alone is taken for one.
func hintJobFile(err error, program string) error {
	s, ok := errors.AsType[*launcher.StartError](err)
	if !ok || !hasJob(program) {
		return err
	}
	return &launcher.StartError{Code: s.Code, Msg: fmt.Sprintf("run %[1]s: it seems to be a job file; say gorun -f %[1]s", launcher.ShellQuote(program))}
}

// hintBeside adds to the error for a relative path that is not there that it is beside the job file.
func hintBeside(err error, job launcher.Job, file string) error {
	dir := filepath.Dir(file)
	if file == "" || dir == "." {
		return err
	}
	names := append(slices.Clone(job.Stage), job.Hostfile)
	for _, name := range job.Programs() {
		if strings.Contains(name, "/") { // else it is looked up in PATH
			names = append(names, name)
		}
	}
	for _, name := range names {
		told := strings.Contains(err.Error(), " "+name+": ") || strings.Contains(err.Error(), " "+launcher.ShellQuote(name)+": ")
		if name == "" || filepath.IsAbs(name) || !told {
			continue
		}
		_, here := os.Stat(name)
		_, there := os.Stat(filepath.Join(dir, name))
		if here == nil || there != nil {
			continue
		}
		hint := "paths are relative to the directory in which gorun is started: cd " + launcher.ShellQuote(dir)
		if s, ok := errors.AsType[*launcher.StartError](err); ok {
			return &launcher.StartError{Code: s.Code, Msg: s.Error() + "; " + hint}
		}
		if u, ok := errors.AsType[*launcher.UsageError](err); ok && u.Hint == "" {
			return &launcher.UsageError{Flag: u.Flag, Msg: u.Msg, Hint: hint}
		}
	}
	return err
}

// hasJob reports whether a file has a table that makes it a job file, near its beginning.
func hasJob(file string) bool {
	if info, err := os.Stat(file); err != nil || !info.Mode().IsRegular() { // to open a pipe waits for its writer
		return false
	}
	f, err := os.Open(file)
	if err != nil {
		return false
	}
	defer f.Close()
	for in := bufio.NewScanner(io.LimitReader(f, 64<<10)); in.Scan(); {
		table, _, _ := strings.Cut(in.Text(), "#")
		if table = strings.TrimSpace(table); table == "[job]" || table == "[[app]]" {
			return true
		}
	}
	return false
}
