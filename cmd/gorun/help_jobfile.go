package main

import (
	"fmt"
	"strings"

	"github.com/gorun-dev/gorun/launcher"
)

const jobFileTop = `A job file says in TOML what flags say. gorun JOB.toml starts it; flags and the
variables of help environment win over it. Paths are relative to the directory in
which gorun is started.
`

const jobFileApps = `
  [[app]]                         # instead of np, program and args in [job]: a table for each of
  np = 1                          # several programs, as PROGRAM : PROGRAM; it must have these two
  program = "./server"
  args = ["-v"]
  wdir = "/data"                  # over that of [job]
  device = "host"                 # as well
  env = {NAME = "VALUE"}          # beside [env]
`

const jobFileHosts = `
  [[host]]                        # -H; a table for each host
  name = "a"                      # the only key that a host must have
  slots = 8                       # default 1
  [[host]]
  name = "b"
  address = "10.0.0.7"            # where ssh finds it; the name without it
  user = "me"
  port = 2222
  slots = 8
  max_slots = 16                  # with --oversubscribe; any number without it
`

const jobFileEnv = `
  [env]                           # -x NAME=VALUE
  OMP_NUM_THREADS = 4
`

const jobFileNCCL = `
  [nccl]                          # NCCL's settings for the ranks: debug is NCCL_DEBUG;
  debug = "INFO"                  # names and values are checked, and what would break
  socket_ifname = "eth0"          # a job is refused; other variables go into [env]
  [mccl]                          # as well, for MCCL: debug is MCCL_DEBUG
  debug = "WARN"
`

const jobFileEnd = `
A key that is not listed here is an error. gorun config validate FILE checks a file:
a setting that needs another, as window needs restarts, more ranks than slots, and a job
without a program are errors, as for gorun FILE; what else does nothing in it is told, and
of a good file nothing. Whether program and directory are there gorun check FILE says.
gorun config show FILE tells each setting and where it comes from. gorun config schema
prints a JSON Schema:
#:schema FILE in the first line lets editors complete and check.
`

// jobFileHelp shows each key of a job file with an example.
func jobFileHelp() string {
	return jobFileTop + jobFileTable("job") + jobFileApps + jobFileHosts + jobFileEnv + jobFileTable("output") + jobFileTable("launch") + jobFileNCCL + jobFileEnd
}

// jobFileTable shows the options of one table of a job file.
func jobFileTable(table string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n  [%s]\n", table)
	for _, o := range launcher.JobOptions {
		t, key, _ := strings.Cut(o.Key, ".")
		if t != table {
			continue
		}
		var notes []string
		if len(o.Flags) > 0 {
			notes = append(notes, o.Flags[0])
		}
		if o.Note != "" {
			notes = append(notes, o.Note)
		}
		line := "  " + key + " = " + o.Example
		if len(notes) > 0 {
			line = fmt.Sprintf("%-33s # %s", line, strings.Join(notes, ", "))
		}
		b.WriteString(line + "\n")
	}
	return b.String()
}
