package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/gorun-dev/gorun/launcher"
	"github.com/gorun-dev/gorun/rankenv"
)

const shortHelp = `gorun starts the ranks of an SPMD program.

  gorun -np 4 ./prog arg ...     start 4 ranks of a program
  gorun -np 4 ./examples/train   build a Go package and start 4 ranks of it
  gorun train.toml               start what a job file says

gorun help shows all flags and commands.
`

const synopsis = `gorun [flags] PROGRAM [ARGUMENT ...]
gorun [flags] PROGRAM [ARGUMENT ...] : [flags] PROGRAM [ARGUMENT ...] [: ...]
gorun [flags] JOB.toml [ARGUMENT ...]
gorun COMMAND
`

const description = `PROGRAM is a name that is looked up in PATH, a path, or the directory of a Go main
package, which is built first. Flags end at the program: what follows is its own.
A job file's program gets the arguments that follow the file after its own.

Several programs are separated by a colon; ranks are numbered through them, and
GORUN_APP tells a rank which it is. Flags before the first are the whole job's, but
for its -np; behind a colon stand -np, which each needs, -x, --wdir, --device and --mpi.
Behind -- a colon is an argument.
`

const precedence = "A flag wins over the variable in brackets, that over the job file."

// launchHelp is the help of gorun itself and of gorun run.
func launchHelp() string {
	var b strings.Builder
	b.WriteString("gorun starts the ranks of an SPMD program.\n\nUsage:\n")
	for line := range strings.Lines(synopsis) {
		b.WriteString("  " + line)
	}
	b.WriteString("\n" + description + "\nFlags:\n")
	width := 0
	left := make([]string, len(flagDefs))
	for i, d := range flagDefs {
		left[i] = strings.Join(d.names[:min(len(d.names), 2)], ", ") // --np is there for the habit, not to be learnt
		if d.arg != "" {
			left[i] += " " + d.arg
		}
		width = max(width, len(left[i]))
	}
	for i, d := range flagDefs {
		fmt.Fprintf(&b, "  %-*s  %s\n", width, left[i], d.helpAndEnv())
	}
	b.WriteString("\n" + precedence + "\n\nCommands:\n" + commandsHelp())
	return b.String()
}

// helpAndEnv is what a flag does, and the variable that does the same.
func (d *flagDef) helpAndEnv() string {
	if d.env == "" {
		return d.help
	}
	return d.help + " [" + d.env + "]"
}

// commandsHelp lists the commands and topics.
func commandsHelp() string {
	const head = `  run         the same as gorun without a command, where a program has a command's name
  bench       measure collectives
  check       look at this machine, or at the hosts of a job: what would stop it
  config      check a job file, or show what it asks for
  version     print the version
  completion  write a completion script for a shell
`
	line := "  help        this help, and the topics "
	var b strings.Builder
	b.WriteString(head)
	topics := helpTopics()
	for i, t := range topics {
		word := t.name
		if i < len(topics)-1 {
			word += ","
		}
		if len(line)+len(word) > 84 {
			b.WriteString(strings.TrimRight(line, " ") + "\n")
			line = strings.Repeat(" ", 14)
		}
		line += word + " "
	}
	b.WriteString(strings.TrimRight(line, " ") + "\n")
	return b.String()
}

// helpTopic is a text that gorun help NAME shows.
type helpTopic struct {
	name, short string
	text        func() string
}

func helpTopics() []helpTopic {
	return []helpTopic{
		{"exit-codes", "exit codes of gorun", exitCodesHelp},
		{"failures", "what happens when a rank fails, and restarts", func() string { return failuresHelp }},
		{"hosts", "how hosts are given, reached and filled", func() string { return hostsHelp }},
		{"environment", "variables that gorun sets and reads", environmentHelp},
		{"job-file", "the form of a job file", jobFileHelp},
		{"mpi", "programs with MPI: MPICH, Intel MPI, MVAPICH2, Open MPI", func() string { return mpiHelp }},
		{"output", "what becomes of the ranks' output, and who reads stdin", func() string { return outputHelp }},
		{"placement", "which CPUs and GPUs ranks get", func() string { return placementHelp }},
		{"python", "programs with PyTorch, JAX, Lightning, accelerate", func() string { return pythonHelp }},
		{"report", "what --report writes", func() string { return reportHelp }},
		{"signals", "what gorun does on a signal", func() string { return signalsHelp }},
		{"man", "the manual page gorun(1), for man -l", manPage},
	}
}

// exitCodes is the table behind help exit-codes.
var exitCodes = []struct {
	code string
	text string
}{
	{"0", "every rank exited with code 0"},
	{"1", "gorun check: something would stop a job"},
	{"N", "the exit code of the rank that failed first"},
	{"128+N", "the rank that failed first was killed by signal N (137: SIGKILL, 139: SIGSEGV)"},
	{fmt.Sprint(launcher.ExitUsage), "wrong command line or job file (a rank may exit with 2, too: then a line names it)"},
	{fmt.Sprint(launcher.ExitNotStarted), "a host could not be reached, or gorun not be started there"},
	{fmt.Sprint(launcher.ExitHostLost), "a host was lost"},
	{fmt.Sprint(launcher.ExitTimeout), "--timeout was over"},
	{fmt.Sprint(launcher.ExitInternal), "gorun itself failed"},
	{fmt.Sprint(launcher.ExitCannotRun), "the program can't be run, or not be built"},
	{fmt.Sprint(launcher.ExitNotFound), "the program is missing"},
	{"129", "gorun was ended by SIGHUP"},
	{"130", "gorun was ended by Ctrl-C (SIGINT)"},
	{"141", "nobody reads gorun's output any more"},
	{"143", "gorun was ended by SIGTERM"},
}

const exitCodesEnd = `When a rank fails, the others get 0.15 s to end by themselves; then they are asked to
end (SIGTERM) and killed after --kill-grace. See help failures.`

func exitCodesHelp() string {
	var b strings.Builder
	b.WriteString("Exit codes of gorun:\n\n")
	for _, c := range exitCodes {
		fmt.Fprintf(&b, "  %-6s %s\n", c.code, c.text)
	}
	b.WriteString("\n" + exitCodesEnd + "\n")
	return b.String()
}

func environmentHelp() string {
	var b strings.Builder
	write := func(by rankenv.SetBy) {
		width := 0
		for _, v := range rankenv.Vars {
			if v.By == by {
				width = max(width, len(v.Name))
			}
		}
		for _, v := range rankenv.Vars {
			if v.By == by {
				fmt.Fprintf(&b, "  %-*s  %s\n", width, v.Name, v.Doc)
			}
		}
	}
	b.WriteString("Variables that gorun sets for each rank:\n\n")
	write(rankenv.ByGorun)
	b.WriteString(`
Of these MASTER_ADDR, MASTER_PORT, JAX_COORDINATOR_ADDRESS, JAX_LOCAL_DEVICE_IDS, ROLE_NAME
and TORCHELASTIC_RUN_ID may be chosen: -x MASTER_PORT=29500, or -x MASTER_PORT for the
value of here. JAX_COORDINATOR_ADDRESS then follows. A port that is chosen must be free on
rank 0's host: gorun keeps its own alone.

A MASTER_PORT that is not chosen is kept for rank 0, who must bind it with SO_REUSEADDR, as
PyTorch, gRPC and Go do. Without it a server is told "address already in use": then choose
the port (-x MASTER_PORT=29500), of which gorun keeps nothing.
`)
	b.WriteString(`
Variables that gorun sets for the ranks of a job on several hosts, unless the user or the
host has (NCCL's files count), and the interface is known:

`)
	write(rankenv.ByDefault)
	b.WriteString(`
Before the ranks start the hosts reach each other, by TCP and UDP, at the addresses by
which ssh reached them, and where that does not do at all of their addresses. -v says
which one each host has got and why. An address behind translation has no interface.
NCCL uses one interface then; to use several, name them in NCCL_SOCKET_IFNAME.
`)
	b.WriteString("\nVariables that a user sets and ranks read:\n\n")
	write(rankenv.ByUser)
	b.WriteString("\nVariables that a user sets and gorun reads:\n\n")
	for _, d := range flagDefs {
		if d.env != "" {
			fmt.Fprintf(&b, "  %-21s  as %s\n", d.env, d.names[0])
		}
	}
	b.WriteString(`
Ranks on this host inherit gorun's environment, without what another launcher left
over (--keep-launcher-env keeps it, -x NAME keeps one; OMPI_MCA_* stay where no mpirun
has set them):

`)
	line := " "
	for _, p := range rankenv.Foreign {
		if p.Launcher == "gorun" || isSet(p.Name) {
			continue
		}
		if len(line)+1+len(p.Name) > 80 {
			b.WriteString(line + "\n")
			line = " "
		}
		line += " " + p.Name
	}
	b.WriteString(line + `

What ranks of MPI programs get beside these: help mpi.
`)
	return b.String()
}

// isSet reports whether gorun sets the variable for each rank.
func isSet(name string) bool {
	return slices.ContainsFunc(rankenv.Vars, func(v rankenv.Var) bool { return v.Name == name && v.By != rankenv.ByUser })
}

const hostsHelp = `Ranks run on this host, or on the hosts that are given in one of these ways:

  -H a:8,me@b:8            a list: [user@]host[:slots]; several -H add up
  -H [fe80::1%eth0]:2      an IPv6 address stands in brackets
  -H ssh://me@b:2222:8     ssh://[user@]host[:port[:slots]]
  --hostfile FILE          a host a line, as in a list, then slots=8 max_slots=16
                           user=me port=2222 as wanted; # begins a comment
  [[host]]                 tables of a job file: see help job-file
  an allocation            of Slurm (SLURM_JOB_NODELIST) or PBS (PBS_NODEFILE), where no
                           hosts are given; -v says so, --rm none turns it off

A host has one slot if no number is given, and the slots of all its mentions together.
localhost and this host's own name are this host: it needs no ssh, unless a user, a
port or --rsh is given. Other hosts need nothing but sshd and a login without password.

Ranks fill the slots of one host after the other (--map-by slot), go to each host in
turn (node), or N to each host (ppr:N:node). Rank numbers follow the order of the hosts.
More ranks than slots are an error, unless --oversubscribe is given or this host is
the only one; max_slots holds even then. Without -np every slot gets a rank.

--rsh CMD takes another way there. CMD runs with two more arguments, [user@]host and one
line for a shell there, and passes on stdin, stdout and stderr, without a terminal; where
a word of CMD has %h it stands for the host (%r user, %p port), and only the line is added:
  --rsh ssh
  --rsh 'docker exec -i %h /bin/sh -c'
  --rsh 'kubectl exec -i %h -- /bin/sh -c'
The hosts must still reach each other by IP, unless there is one alone.

Ranks on other hosts have the environment of a login there and NCCL_*, MCCL_*, OMPI_MCA_*,
GLOO_SOCKET_IFNAME, GORUN_*_LIB, -x NAME, -x NAME=VALUE and [env] of here; not PATH,
LD_LIBRARY_PATH or HOME.

A program that is given by its path, or as a Go package, is sent to each host that lacks
the same file at that path; a name is looked up in the host's PATH. --stage FILE sends a
file or a directory, too, where it is not the same. A relative FILE has its place in the
ranks' directory, as here: with --wdir DIR that is DIR, else the directory of here if the
host has it with the same FILE, else one of the job's own. An absolute FILE has the same
place as here. No file of a host is replaced: another one in that place is an error.
--stage none sends nothing; the program must be there then.

What was sent goes at the end, also when gorun or its agent there is killed, and so does
the job's own directory, with what ranks left in it. A file that several jobs have sent
to one place goes with the last of them, where its file system knows extended attributes,
else with the first. After a loss of power the next job that sends something removes that
directory; a file in another place stays.
`

// version is set at build time (-ldflags -X main.version=...); without it the module's version counts.
var version string

func versionLine() string {
	v, rev := version, ""
	if info, ok := debug.ReadBuildInfo(); ok {
		if v == "" {
			v = info.Main.Version
		}
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				rev = " " + s.Value[:12]
			}
		}
	}
	if v == "" || v == "(devel)" {
		v = "devel"
	}
	return "gorun " + v + rev + " " + runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH
}
