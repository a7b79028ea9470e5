package program

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/rankenv"
)

// TestMain is also the program that TestSignals and TestMainEnds start.
func TestMain(m *testing.M) {
	switch os.Getenv("PROGRAM_TEST") {
	case "wait": // until the context ends
		Main("x", func(ctx context.Context, _ []string, stdout io.Writer) error {
			fmt.Fprintln(stdout, "ready")
			<-ctx.Done()
			return ctx.Err()
		})
	case "stuck": // although the context ends
		Main("x", func(ctx context.Context, _ []string, stdout io.Writer) error {
			fmt.Fprintln(stdout, "ready")
			<-ctx.Done()
			for syscall.Getppid() != 1 { // should the test be gone, so is this
				fmt.Fprintln(stdout, "stuck")
				time.Sleep(10 * time.Millisecond)
			}
			return nil
		})
	case "fine":
		Main("x", func(context.Context, []string, io.Writer) error { return nil })
	}
	if signal.Ignored(syscall.SIGINT) { // in the background of a script; the program would ignore it as well
		signal.Notify(make(chan os.Signal, 1), syscall.SIGINT)
	}
	os.Exit(m.Run())
}

func program(t *testing.T, what string) (cmd *exec.Cmd, stderr *bytes.Buffer) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	cmd = exec.CommandContext(ctx, exe)
	kept, _ := rankenv.Scrub(os.Environ())
	env := rankenv.Env{Launcher: "gorun", Job: "test", Rank: 2, Size: 4, LocalRank: 2, LocalSize: 4, Nodes: 1}
	cmd.Env = append(append(kept, env.Environ()...), "PROGRAM_TEST="+what)
	stderr = &bytes.Buffer{}
	cmd.Stderr = stderr
	return cmd, stderr
}

func TestSignals(t *testing.T) {
	for _, tt := range []struct {
		name, what string
		signals    []syscall.Signal
		code       int            // -1: ended by a signal,
		signal     syscall.Signal // this one
		stderr     string
	}{
		{"INT", "wait", []syscall.Signal{syscall.SIGINT}, 1, 0, "x: rank 2: context canceled\n"},
		{"TERM", "wait", []syscall.Signal{syscall.SIGTERM}, 1, 0, "x: rank 2: context canceled\n"},
		{"INT twice", "stuck", []syscall.Signal{syscall.SIGINT, syscall.SIGINT}, -1, syscall.SIGINT, ""},
		{"INT, then TERM", "stuck", []syscall.Signal{syscall.SIGINT, syscall.SIGTERM}, -1, syscall.SIGTERM, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cmd, stderr := program(t, tt.what)
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(out)
			for _, s := range tt.signals { // each after a line: "ready", then "stuck"
				if !lines.Scan() {
					t.Fatalf("no line before %v: %v", s, lines.Err())
				}
				if err := cmd.Process.Signal(s); err != nil {
					t.Fatal(err)
				}
			}
			for lines.Scan() {
				// The handler may have taken the second signal, too, if it came fast.
				cmd.Process.Signal(tt.signals[len(tt.signals)-1])
			}
			cmd.Wait()
			st := cmd.ProcessState.Sys().(syscall.WaitStatus)
			if cmd.ProcessState.ExitCode() != tt.code || tt.signal != 0 && st.Signal() != tt.signal {
				t.Errorf("ended with %v, want code %d, signal %v", cmd.ProcessState, tt.code, tt.signal)
			}
			if stderr.String() != tt.stderr {
				t.Errorf("stderr %q, want %q", stderr.String(), tt.stderr)
			}
		})
	}
}

func TestMainEnds(t *testing.T) {
	cmd, stderr := program(t, "fine")
	if out, err := cmd.Output(); err != nil || strings.TrimSpace(string(out)) != "" || stderr.Len() > 0 {
		t.Errorf("error %v, stdout %q, stderr %q, want none", err, out, stderr)
	}
}
