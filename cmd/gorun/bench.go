package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gorun-dev/gorun/launcher"
	"github.com/gorun-dev/gorun/rankenv"
)

const (
	benchProgram = "gorun-bench"
	benchInstall = "go install github.com/gorun-dev/gorun/cmd/gorun-bench@latest"
	benchNP      = 2 // one rank has nobody to talk to
)

const benchHelp = `gorun bench starts gorun-bench, which measures collectives.

Usage:
  gorun bench [flags]

Flags of a launch that it knows: -np (default 2; every slot of the hosts if there are any), -H,
--hostfile, --map-by, --oversubscribe, --bind-to, --gpu-bind, --rm, --rsh, --ssh-config,
--accept-new-host-keys, --connect-timeout, --port-range, --stage, -x, --wdir, --device,
--tag-output, --timeout, --kill-grace, --report, --keep-launcher-env. All others are
gorun-bench's:

`

// benchFlags are the flags of a launch that gorun bench takes, by their first names. Others are the program's: -n and -f mean something else there.
var benchFlags = []string{"-np", "-H", "--hostfile", "--map-by", "--oversubscribe", "--bind-to", "--gpu-bind", "--rm", "--rsh", "--ssh-config", "--accept-new-host-keys",
	"--connect-timeout", "--port-range", "--stage", "-x", "--wdir", "--device", "--tag-output", "--timeout", "--kill-grace", "--report", "--keep-launcher-env"}

func newBenchCmd(io stdio) *cobra.Command {
	c := &cobra.Command{
		Use:                "bench [flags]",
		Short:              "measure collectives",
		DisableFlagParsing: true, // most are gorun-bench's
		ValidArgsFunction:  completeBench,
		RunE: func(_ *cobra.Command, args []string) error {
			mine, rest, err := splitBench(args)
			if err != nil {
				return err
			}
			if len(rest) == 1 && rest[0] == "help" || slices.ContainsFunc(rest, func(a string) bool { return a == "-h" || a == "-help" || a == "--help" }) {
				writeBenchHelp(io)
				return nil
			}
			prog, err := findBench()
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(mine, func(a string) bool { return a == "-np" || a == "-H" || a == "--hostfile" }) {
				mine = append(mine, "-np", fmt.Sprint(benchNP))
			}
			refuse := func(p *launcher.Plan) error { return refusedBench(prog, len(p.Ranks), rest) }
			if code := launchIf(slices.Concat(mine, []string{"--", prog}, rest), io, refuse); code != launcher.ExitOK {
				return exitCode(code)
			}
			return nil
		},
	}
	c.SetHelpFunc(func(*cobra.Command, []string) { writeBenchHelp(io) })
	return c
}

// splitBench takes the flags of the launch out of the command line, in the form name, value.
func splitBench(args []string) (launch, rest []string, err error) {
	for i := 0; i < len(args); i++ {
		a := args[i]
		if a == "--" {
			return launch, append(rest, args[i+1:]...), nil
		}
		name, value, has := strings.Cut(a, "=")
		d := findFlag(name)
		if n, ok := strings.CutPrefix(strings.TrimLeft(a, "-"), "np"); ok && n != "" && strings.Trim(n, "0123456789") == "" && a[0] == '-' {
			name, value, has, d = "-np", n, true, findFlag("-np")
		}
		isName := d != nil && a[0] == '-' && slices.Contains(benchFlags, d.names[0]) && strings.TrimLeft(name, "-") == strings.TrimLeft(d.names[0], "-")
		switch {
		case !isName:
			rest = append(rest, a)
		case has && d.arg != "":
			launch = append(launch, d.names[0], value)
		case d.arg == "":
			launch = append(launch, a)
		case i+1 == len(args):
			return nil, nil, usagef("%s needs a value: %s %s", name, name, d.arg)
		default:
			i++
			launch = append(launch, d.names[0], args[i])
		}
	}
	return launch, rest, nil
}

// findBench finds gorun-bench beside gorun, else in PATH. It is a program of its own because it opens GPU libraries, which needs
// the system's C library: gorun runs without.
func findBench() (string, error) {
	exe, err := os.Executable()
	if err == nil {
		dirs := []string{filepath.Dir(exe)}
		if real, err := filepath.EvalSymlinks(exe); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
		for _, dir := range dirs {
			// An absolute path is looked for in no other place.
			if p, err := exec.LookPath(filepath.Join(dir, benchProgram)); err == nil {
				return p, nil
			}
		}
	}
	p, err := exec.LookPath(benchProgram)
	if err != nil && !errors.Is(err, exec.ErrDot) {
		return "", &launcher.StartError{Code: launcher.ExitNotFound, Msg: benchProgram + " is neither beside gorun nor in PATH; this installs it:\n  " + benchInstall}
	}
	return filepath.Abs(p)
}

// benchRefuses is the exit code of gorun-bench where it is asked about flags that it refuses; others say nothing of them.
const benchRefuses = 4

// refusedBench is the error for what gorun-bench would not take as the flags of so many ranks: each of them would say so.
func refusedBench(prog string, ranks int, flags []string) error {
	cmd := exec.CommandContext(context.Background(), prog, append([]string{"flags", strconv.Itoa(ranks)}, flags...)...)
	cmd.Env, _ = rankenv.Scrub(os.Environ())
	why, err := cmd.Output()
	if e, ok := errors.AsType[*exec.ExitError](err); ok && e.ExitCode() == benchRefuses {
		return usagef("bench: %s", strings.TrimSpace(string(why)))
	}
	return nil
}

// writeBenchHelp prints what gorun bench takes; gorun-bench itself tells its flags.
func writeBenchHelp(io stdio) {
	fmt.Fprint(io.out, benchHelp)
	prog, err := findBench()
	if err != nil {
		fmt.Fprintf(io.out, "%v\n", err)
		return
	}
	cmd := exec.CommandContext(context.Background(), prog, "-h")
	cmd.Env, _ = rankenv.Scrub(os.Environ()) // it need not be a rank of what gorun itself is part of
	out, err := cmd.Output()
	if err != nil {
		fmt.Fprintf(io.out, "%s -h: %v\n", prog, err)
		return
	}
	fmt.Fprint(io.out, string(out))
}
