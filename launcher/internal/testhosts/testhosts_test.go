package testhosts

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

func TestHosts(t *testing.T) {
	h := New(t, 3, Options{Bridge: true, RC: "echo noise\n"})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ssh := func(host string, line ...string) (string, error) {
		out, err := h.Launcher(ctx, "ssh", append([]string{"-F", h.SSHConfig, host}, line...)...).CombinedOutput()
		return strings.TrimSpace(string(out)), err
	}
	for i, host := range h.Hosts {
		got, err := ssh(host.Name, "hostname; whoami; ls -A /tmp; cat /etc/hostname >/dev/null; ip -o -4 addr show docker0 | grep -c 172.17.0.1/")
		if want := host.Name + "\nroot\n1"; err != nil || got != want {
			t.Errorf("ssh %s: %q, %v, want %q", host.Name, got, err, want)
		}
		if got, err := ssh("-l", User, host.Name, "whoami; echo $HOME"); err != nil || got != User+"\n/home/"+User {
			t.Errorf("ssh %s@%s: %q, %v", User, host.Name, got, err)
		}
		if all, err := h.Processes(i); err != nil || len(all) != 0 {
			t.Errorf("%s: %v, %v, want no processes", host.Name, all, err)
		}
	}
	// From one host to another, cut in one direction and altogether.
	ping := func(from, to int) bool {
		return h.Command(ctx, from, "timeout", "2", "bash", "-c", "head -c 4 </dev/tcp/"+h.Hosts[to].Addr.String()+"/22022").Run() == nil
	}
	if !ping(0, 1) {
		t.Error("h1 does not reach h2")
	}
	for _, step := range []struct {
		name string
		do   func() error
		want bool
	}{
		{"blackhole", func() error { return h.Blackhole(0, 1, true) }, false},
		{"no blackhole", func() error { return h.Blackhole(0, 1, false) }, true},
		{"cut", func() error { return h.Cut(1) }, false},
		{"joined", func() error { return h.Join(1) }, true},
	} {
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		got := ping(0, 1)
		for end := time.Now().Add(10 * time.Second); got != step.want && time.Now().Before(end); got = ping(0, 1) {
		}
		if got != step.want {
			t.Errorf("%s: h1 reaches h2: %v, want %v", step.name, got, step.want)
		}
	}
	// What runs on a host is seen, and its files.
	cmd := h.Command(ctx, 2, "/bin/sh", "-c", "echo x >/tmp/a; exec sleep 60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var all []Process
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end) && (len(all) != 1 || all[0].Args[0] != "sleep"); {
		all, _ = h.Processes(2)
	}
	if len(all) != 1 || !cmp.Equal(all[0].Args, []string{"sleep", "60"}) {
		t.Errorf("processes of h3: %v", all)
	}
	if files, err := h.Files(2, "/tmp"); err != nil || !cmp.Equal(files, []string{"/tmp/a"}) {
		t.Errorf("files of h3: %v, %v", files, err)
	}
	if text, err := os.ReadFile(h.Path(2, "/tmp/a")); err != nil || string(text) != "x\n" {
		t.Errorf("/tmp/a on h3: %q, %v", text, err)
	}
	holder := h.holders[2].cmd.Process.Pid
	h.Close()
	if err := syscall.Kill(all[0].PID, 0); err != syscall.ESRCH {
		t.Errorf("pid %d of a host that is gone: %v", all[0].PID, err)
	}
	if err := syscall.Kill(holder, 0); err != syscall.ESRCH {
		t.Errorf("holder %d: %v", holder, err)
	}
	cmd.Wait()
}

// What runs on hosts ends with the process that made them, however that ends.
func TestMakerKilled(t *testing.T) {
	if os.Getenv("TESTHOSTS_MAKER") != "" {
		h, err := Make(os.Getenv("TESTHOSTS_MAKER"), 1, Options{})
		if err != nil {
			t.Fatal(err)
		}
		cmd := h.Command(context.Background(), 0, "sleep", "300")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for {
			if all, err := h.Processes(0); err != nil || len(all) == 1 && all[0].Args[0] == "sleep" {
				fmt.Printf("up %s %s\n", namespace(h.holders[0].ns("pid_for_children")), namespace(h.launcher.ns("net")))
				select {}
			}
		}
	}
	if why := why(); why != "" {
		citest.Lacking(t, "test hosts: %s", why)
	}
	dir := t.TempDir()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestMakerKilled$")
	cmd.Env = append(os.Environ(), "TESTHOSTS_MAKER="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	limit := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
	defer limit.Stop()
	var host, launcher string
	if _, err := fmt.Fscanf(out, "up %s %s\n", &host, &launcher); err != nil {
		t.Errorf("maker: %v", err)
	}
	// The holder, sshd and the command; the launcher's holder and what it waits in.
	if in, at := inside("pid", host), inside("net", launcher); !t.Failed() && (len(in) < 3 || len(at) < 1) {
		t.Errorf("while the maker lives: processes %v of the host and %v of the launcher", in, at)
	}
	cmd.Process.Kill()
	cmd.Wait()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		left := append(inside("pid", host), inside("net", launcher)...)
		if left == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("left after the maker was killed: %v", left)
		}
	}
}

// namespace is what a link below /proc/PID/ns names.
func namespace(link string) string {
	name, err := os.Readlink(link)
	if err != nil {
		panic(err)
	}
	return name
}

// inside lists the processes in a namespace, with their command lines.
func inside(kind, name string) (left []string) {
	files, _ := os.ReadDir("/proc")
	for _, f := range files {
		if ns, err := os.Readlink("/proc/" + f.Name() + "/ns/" + kind); err == nil && ns == name {
			text, _ := os.ReadFile("/proc/" + f.Name() + "/cmdline")
			left = append(left, f.Name()+" "+strings.ReplaceAll(string(text), "\x00", " "))
		}
	}
	return left
}
