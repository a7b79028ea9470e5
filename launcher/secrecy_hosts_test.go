package launcher

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// The test binary's other lives on hosts: a rank that takes part until SIGUSR1 comes, and two who have no business there.
func init() {
	if len(os.Args) < 2 {
		return
	}
	var err error
	switch os.Args[1] {
	case "member":
		err = memberMain()
	case "stranger":
		err = strangerMain(os.Args[2], os.Args[3])
	case "intruder":
		err = intruderMain()
	default:
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, os.Args[1]+":", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func memberMain() error {
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGUSR1)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	job, err := bootstrap.Join(ctx)
	if err == nil {
		err = job.Barrier(ctx)
	}
	if err == nil {
		err = os.WriteFile("/root/up"+os.Getenv("GORUN_RANK"), nil, 0o600)
	}
	if err != nil {
		return err
	}
	<-told
	if err := job.Barrier(ctx); err != nil {
		return err
	}
	return job.Close()
}

// strangerMain knows where a member of gossip listens, and what the job is called, but not its key. It succeeds if nothing lets it in.
func strangerMain(addr, job string) error {
	if c, err := net.DialTimeout("tcp", addr, time.Second); err != nil {
		return err // what follows would show nothing
	} else {
		c.Close()
	}
	key := make([]byte, 32)
	rand.Read(key)
	for _, c := range []struct {
		label string
		key   []byte
	}{{job, key}, {job, nil}, {"", key}, {"", nil}} {
		m := memberlist.DefaultLANConfig()
		m.Name, m.BindAddr, m.BindPort, m.Label, m.SecretKey = "1", "0.0.0.0", 0, c.label, c.key
		m.TCPTimeout = time.Second
		m.Logger = log.New(io.Discard, "", 0)
		list, err := memberlist.Create(m)
		if err != nil {
			return err
		}
		if n, err := list.Join([]string{addr}); err == nil {
			return fmt.Errorf("joined %d members with label %q and a key of %d bytes", n, c.label, len(c.key))
		}
		if n := list.NumMembers(); n != 1 {
			return fmt.Errorf("knows %d members", n)
		}
		list.Shutdown()
	}
	junk := make([]byte, 1200)
	for i := range 200 {
		rand.Read(junk)
		for _, network := range []string{"tcp", "udp"} {
			c, err := net.DialTimeout(network, addr, time.Second)
			if err != nil {
				continue // tcp: it has enough of us
			}
			c.Write(junk[:1+i*6])
			c.Close()
		}
	}
	return nil
}

// intruderMain is another user on the host of a rank whose whole environment it knows. It succeeds if nothing lets it in.
func intruderMain() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if job, err := bootstrap.Join(ctx); err == nil {
		return fmt.Errorf("joined as rank %d", job.Rank())
	} else {
		fmt.Println("join:", err)
	}
	for _, dir := range []string{"/root/.cache/gorun", os.Getenv("PWD")} {
		if _, err := os.ReadDir(dir); err == nil {
			return fmt.Errorf("%s can be read", dir)
		}
		if err := os.WriteFile(dir+"/intruder", nil, 0o600); err == nil {
			return fmt.Errorf("%s can be written", dir)
		}
	}
	if files, _ := filepath.Glob("/root/.cache/gorun/gorun-*"); len(files) > 0 {
		return fmt.Errorf("%v can be seen", files)
	}
	return nil
}

// forms are the ways to write a key.
func forms(key []byte) map[string][]byte {
	h := hex.EncodeToString(key)
	return map[string][]byte{
		"raw": key, "hex": []byte(h), "HEX": []byte(strings.ToUpper(h)),
		"base64": []byte(base64.RawStdEncoding.EncodeToString(key)), "base64url": []byte(base64.RawURLEncoding.EncodeToString(key)),
	}
}

// What a job keeps to itself, looked at from outside while it runs on two hosts. Its key is taken from what OpenSSH's client is given to carry.
func TestHostsSecrecy(t *testing.T) {
	beside(t)
	citest.Program(t, "ssh")
	h := newHosts(t, 2, testhosts.Options{})
	for i := range h.Hosts {
		for _, file := range []string{"/root/rank", "/tmp/intruder"} {
			if err := copyProgram("/proc/self/exe", h.Path(i, file)); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(h.Path(i, file), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	haveAgent(t, h)
	dir := t.TempDir()
	rsh := filepath.Join(dir, "rsh")
	write(t, rsh, "#!/bin/sh\ntee "+dir+"/said.$1 | ssh -F "+h.SSHConfig+" \"$@\"\n", 0o755)
	j := newHostsJob(t, h, 1, "--rsh", rsh, "/root/rank", "member")
	i := slices.Index(j.cmd.Args, "--ssh-config")
	j.cmd.Args = slices.Delete(j.cmd.Args, i, i+2) // ssh has it
	j.cmd.Dir = dir                                // hosts lack it: the job has a directory of its own there
	defer func() {
		if t.Failed() {
			t.Log(j.err.String())
		}
	}()
	j.start()
	up(t, j, h, 1)

	said, err := os.ReadFile(filepath.Join(dir, "said.h1"))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`"Job":"([0-9a-f]{16})","Key":"([A-Za-z0-9+/=]{44})"`).FindSubmatch(said)
	if m == nil {
		t.Fatal("no key was said")
	}
	id := string(m[1])
	key, err := base64.StdEncoding.DecodeString(string(m[2]))
	if err != nil || len(key) != 32 {
		t.Fatal(key, err)
	}

	t.Run("key", func(t *testing.T) {
		ways := forms(key)
		data := hmac.New(sha256.New, key) // as bootstrap/node makes it
		data.Write([]byte("gorun data between hosts of job " + id))
		for what, form := range forms(data.Sum(nil)) {
			ways["of data, "+what] = form
		}
		looked, ranks := 0, 0
		dirs, _ := filepath.Glob("/proc/[0-9]*")
		for _, d := range dirs {
			for _, file := range []string{"/cmdline", "/environ", "/comm"} {
				text, err := os.ReadFile(d + file)
				if err != nil {
					continue
				}
				looked++
				if bytes.Contains(text, []byte("GORUN_JOB_ID="+id)) {
					ranks++
				}
				for what, form := range ways {
					if bytes.Contains(text, form) {
						t.Errorf("the key is in %s, %s: %.80q", d+file, what, text)
					}
				}
			}
		}
		if looked < 20 || ranks < 2 {
			t.Errorf("%d files looked at, of %d ranks", looked, ranks)
		}
		for i := range h.Hosts {
			for _, dir := range []string{"/root", "/home", "/tmp", "/var/tmp", "/run", "/dev/shm"} {
				files, err := h.Files(i, dir)
				if err != nil {
					t.Error(err)
				}
				for _, f := range files {
					if text, err := os.ReadFile(h.Path(i, f)); err == nil {
						for what, form := range ways {
							if bytes.Contains(text, form) {
								t.Errorf("the key is in %s of %s, %s", f, h.Hosts[i].Name, what)
							}
						}
					}
				}
			}
		}
	})
	t.Run("modes", func(t *testing.T) {
		for i := range h.Hosts {
			seen := 0
			for _, top := range []string{"/root", "/tmp", "/var/tmp", "/dev/shm"} {
				err := filepath.WalkDir(h.Path(i, top), func(path string, e fs.DirEntry, err error) error {
					if err != nil || !strings.Contains(path, "gorun") {
						return err
					}
					seen++
					if info, err := e.Info(); err != nil || info.Mode().Perm()&0o077 != 0 {
						t.Errorf("%s: %v, %v, want it for its owner alone", path, info.Mode(), err)
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
			if seen < 2 {
				t.Errorf("%d of gorun's files on %s", seen, h.Hosts[i].Name)
			}
		}
	})
	t.Run("stranger", func(t *testing.T) {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		for i, host := range h.Hosts {
			ports := listening(t, agentOn(t, h, i))
			if len(ports) != 1 {
				t.Fatalf("the job listens on %v on %s, want gossip's port alone", ports, host.Name)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			out, err := h.Launcher(ctx, self, "stranger", net.JoinHostPort(host.Addr.String(), strconv.Itoa(ports[0])), id).CombinedOutput()
			if err != nil {
				t.Errorf("%v: %s", err, out)
			}
		}
	})
	t.Run("another user", func(t *testing.T) {
		for i := range h.Hosts {
			rank := only(t, h, i, "rank", func(p testhosts.Process) bool { return p.Args[0] == "/root/rank" })
			env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", rank))
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			cmd := h.Command(ctx, i, "setpriv", "--reuid", "7077", "--regid", "7077", "--clear-groups", "/tmp/intruder", "intruder")
			cmd.Env = strings.Split(strings.TrimSuffix(string(env), "\x00"), "\x00")
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), "uid") {
				t.Errorf("%v: %s", err, out)
			}
		}
	})
	// The job has not noticed any of it.
	j.cmd.Process.Signal(syscall.SIGUSR1)
	if got := j.wait(); got != 0 || j.err.Len() > 0 {
		t.Errorf("exit code %d, stderr %q", got, j.err.String())
	}
	for i := range h.Hosts {
		os.Remove(h.Path(i, "/tmp/intruder"))
	}
	clean(t, h)
}

// listening lists the TCP ports in the network of a process, but for sshd's.
func listening(t *testing.T, pid int) (ports []int) {
	t.Helper()
	for _, file := range []string{"tcp", "tcp6"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, file))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^ *\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:0000 0A `).FindAllSubmatch(text, -1) {
			if port, err := strconv.ParseUint(string(m[1]), 16, 16); err == nil && port != testhosts.Port && !slices.Contains(ports, int(port)) {
				ports = append(ports, int(port))
			}
		}
	}
	return ports
}
