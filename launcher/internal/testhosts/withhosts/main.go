// Command withhosts runs a command beside hosts that it makes for it (package testhosts): in a network namespace that reaches them all. It needs root.
//
//	withhosts [-n 4] COMMAND [ARG...]
//
// In the arguments %c is the ssh configuration file that names the hosts, %h their names, separated by commas. Behind the command it looks what is left
// on the hosts, and says so: processes, and files in their home and temporary directories.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
)

func main() {
	n := flag.Int("n", 4, "number of hosts")
	quiet := flag.Bool("quiet", false, "say nothing of what is left")
	user := flag.String("user", "root", "account on the hosts: root or "+testhosts.User)
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "withhosts: no command")
		os.Exit(2)
	}
	code, err := run(*n, *user, *quiet, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "withhosts:", err)
		os.Exit(1)
	}
	os.Exit(code)
}

func run(n int, user string, quiet bool, args []string) (code int, err error) {
	if why := testhosts.Why(); why != "" {
		return 0, errors.New(why)
	}
	dir, err := os.MkdirTemp("", "withhosts-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	h, err := testhosts.Make(dir, n, testhosts.Options{User: user})
	if err != nil {
		return 0, err
	}
	defer h.Close()
	var names []string
	for _, host := range h.Hosts {
		names = append(names, host.Name)
	}
	for i, a := range args {
		args[i] = strings.NewReplacer("%c", h.SSHConfig, "%h", strings.Join(names, ",")).Replace(a)
	}
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP) // the command gets them too, and its end is ours
	cmd := h.Launcher(context.Background(), args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = cmd.Run()
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		return 0, err
	}
	code = cmd.ProcessState.ExitCode()
	if quiet {
		return code, nil
	}
	left := 0
	for i, host := range h.Hosts {
		processes, err := h.Processes(i)
		if err != nil {
			return code, err
		}
		for _, p := range processes {
			fmt.Printf("%s: process %s is left\n", host.Name, strings.Join(p.Args, " "))
			left++
		}
		for _, dir := range []string{"/tmp", "/var/tmp", "/dev/shm", "/root", "/home"} {
			files, err := h.Files(i, dir)
			if err != nil {
				return code, err
			}
			for _, f := range files {
				if base := f[strings.LastIndexByte(f, '/')+1:]; base == ".profile" || base == ".bashrc" || base == ".bash_profile" {
					continue
				}
				if !strings.Contains(f, "/.cache/gorun/gorun-") {
					fmt.Printf("%s: file %s is left\n", host.Name, f)
					left++
				}
			}
		}
	}
	if left == 0 {
		fmt.Printf("left on the hosts: no process, no file but gorun's cache\n")
	}
	return code, nil
}
