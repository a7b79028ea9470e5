// Package testhosts makes hosts for tests: on Linux, as root, a host is a set of namespaces (network, UTS, mount, process) with an address, a
// hostname, home and temporary directories of its own, and a real sshd. A further network namespace, which reaches all of them, is the launcher's.
// Nothing reaches the outside, and nothing is left: when the process that made the hosts ends, however it ends, the kernel ends all that runs on them.
package testhosts

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// Port is where each host's sshd listens.
const Port = 22022

// User is an account on each host beside root, with the same key and no rights.
const User = "worker"

// Options are what differs from plain hosts.
type Options struct {
	User        string // in the ssh configuration; "": root
	Shell       string // login shell of root and User; "": /bin/sh
	RC          string // text of .profile, .bashrc and .bash_profile in each home directory
	MaxStartups string // sshd's; "": no limit that matters
	// HomeReadOnly is for the home directories, TmpNoExec for all that is made to write to beside them.
	HomeReadOnly, TmpNoExec bool
	HomeSize                string // size of the home directories' file system; "": 256m
	NoIPv4                  bool   // addresses of IPv6 only; a host's name is known to itself alone, as 127.0.1.1
	// Bridge adds an interface docker0 with the same address, 172.17.0.1, on each host.
	Bridge bool
	// Isolated hosts do not reach each other on the network that the launcher is in. Second gives them another one, in which the launcher is not:
	// 10.78.0.0/16 on eth1.
	Isolated, Second bool
	Config           []string // further lines for sshd_config
}

// Hosts is what New made.
type Hosts struct {
	Dir       string // of the files beside the hosts: keys, configuration
	Hosts     []Host
	SSHConfig string // for ssh -F: all hosts by name
	KeyFile   string // the private key that every host accepts

	launcher *holder
	holders  []*holder
	restore  func() // the kernel's limits; nil: as they were
}

// Host is one of them.
type Host struct {
	Name   string // "h1"; its hostname
	Addr   netip.Addr
	Addr6  netip.Addr
	Second netip.Addr // in the second network
	Port   int
}

// holder is the first process of a set of namespaces.
type holder struct {
	cmd   *exec.Cmd
	stdin io.Closer
	log   *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Why says what keeps this machine from making hosts, "" if nothing does.
func Why() string {
	if os.Getuid() != 0 {
		return "hosts in namespaces need root"
	}
	for _, name := range []string{"sshd", "ip", "nsenter", "unshare"} {
		if _, err := look(name); err != nil {
			return name + " is not there (packages openssh-server, iproute2, util-linux)"
		}
	}
	out, err := exec.Command("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--propagation", "private", "/bin/sh", "-ec",
		"mount -t proc proc /proc; mount -t tmpfs tmpfs /run; ip link add br0 type bridge; ip link add v0 type veth peer name v1").CombinedOutput()
	if err != nil {
		return fmt.Sprintf("this kernel or container gives no namespaces, bridge or veth: %v: %s", err, bytes.TrimSpace(out))
	}
	return ""
}

// look finds a program also where root's PATH may lack it.
func look(name string) (string, error) {
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/bin", "/bin"} {
		file := filepath.Join(dir, name)
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() {
			return file, nil
		}
	}
	return exec.LookPath(name)
}

var why = sync.OnceValue(Why)

// New makes n hosts for a test and removes them at its end. Where they cannot be made the test is skipped, or fails in continuous integration.
func New(tb testing.TB, n int, o Options) *Hosts {
	tb.Helper()
	if why := why(); why != "" {
		citest.Lacking(tb, "test hosts: %s", why)
	}
	h, err := Make(tb.TempDir(), n, o)
	if err != nil {
		tb.Fatalf("test hosts: %v", err)
	}
	tb.Cleanup(func() {
		if tb.Failed() {
			for i, host := range h.Hosts {
				if text := h.Log(i); text != "" {
					tb.Logf("%s, sshd:\n%s", host.Name, text)
				}
			}
		}
		if err := h.Close(); err != nil {
			tb.Errorf("test hosts: %v", err)
		}
	})
	return h
}

// Make makes n hosts, with their files in dir; the caller closes them.
func Make(dir string, n int, o Options) (h *Hosts, err error) {
	if n < 1 || n > 1000 {
		return nil, fmt.Errorf("%d hosts", n)
	}
	h = &Hosts{Dir: dir, SSHConfig: filepath.Join(dir, "ssh_config"), KeyFile: filepath.Join(dir, "id")}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.Close())
		}
	}()
	for i := range n {
		a, b := byte((i+1)>>8), byte(i+1)
		h.Hosts = append(h.Hosts, Host{Name: "h" + strconv.Itoa(i+1), Port: Port, Addr: netip.AddrFrom4([4]byte{10, 77, a, b}), Second: netip.AddrFrom4([4]byte{10, 78, a, b}),
			Addr6: netip.AddrFrom16([16]byte{0xfd, 0x77, 14: a, 15: b})})
	}
	if err := h.files(o); err != nil {
		return nil, err
	}
	if n >= manyHosts {
		h.restore = raiseNeighbours()
	}
	if h.launcher, err = hold(syscall.CLONE_NEWNET, "ip link set lo up; ip link add br0 type bridge; ip link set br0 up; ip link add br1 type bridge; ip link set br1 up; ip addr add 10.77.255.254/16 dev br0; "+
		"ip -6 addr add fd77::ff:fffe/64 dev br0 nodad; echo ready; cat >/dev/null; :"); err != nil {
		return nil, fmt.Errorf("launcher's namespace: %w", err)
	}
	h.holders = make([]*holder, n)
	errs := make([]error, n)
	var wait sync.WaitGroup
	turns := make(chan struct{}, 8)
	for i := range n {
		wait.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			errs[i] = h.start(i, o)
		})
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return h, nil
}

// files writes keys and configuration.
func (h *Hosts) files(o Options) error {
	hostKey, hostPublic, err := newKey()
	if err != nil {
		return err
	}
	key, public, err := newKey()
	if err != nil {
		return err
	}
	user := o.User
	if user == "" {
		user = "root"
	}
	maxStartups := o.MaxStartups
	if maxStartups == "" {
		maxStartups = "1000:30:2000"
	}
	shell := o.Shell
	if shell == "" {
		shell = "/bin/sh"
	}
	passwd, err := os.ReadFile("/etc/passwd")
	if err != nil {
		return err
	}
	var accounts []string
	for _, line := range strings.Split(strings.TrimSpace(string(passwd)), "\n") {
		if f := strings.Split(line, ":"); len(f) == 7 && f[0] == "root" {
			f[5], f[6] = "/root", shell
			line = strings.Join(f, ":")
		}
		accounts = append(accounts, line)
	}
	accounts = append(accounts, User+":x:7077:7077::/home/"+User+":"+shell)
	var known, config strings.Builder
	fmt.Fprintf(&config, "Host *\n  Port %d\n  User %s\n  IdentityFile %s\n  IdentitiesOnly yes\n  UserKnownHostsFile %s\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n  BatchMode yes\n",
		Port, user, h.KeyFile, filepath.Join(h.Dir, "known_hosts"))
	for _, host := range h.Hosts {
		addr := host.Addr
		if o.NoIPv4 {
			addr = host.Addr6
		}
		fmt.Fprintf(&config, "Host %s\n  HostName %v\n", host.Name, addr)
		fmt.Fprintf(&known, "[%v]:%d %s", addr, Port, hostPublic)
		fmt.Fprintf(&known, "[%s]:%d %s", host.Name, Port, hostPublic)
	}
	files := map[string]string{
		"ssh_config": config.String(), "known_hosts": known.String(), "id": key, "id.pub": public,
	}
	for i, host := range h.Hosts {
		names := "127.0.0.1 localhost\n127.0.1.1 " + host.Name + "\n::1 localhost\n"
		own := host.Name + "/"
		files[own+"hostkey"], files[own+"authorized_keys"], files[own+"passwd"], files[own+"hosts"], files[own+"rc"] =
			hostKey, public, strings.Join(accounts, "\n")+"\n", names, o.RC
		files[own+"sshd_config"] = fmt.Sprintf("Port %d\nHostKey /run/host/hostkey\nAuthorizedKeysFile /run/host/authorized_keys\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"+
			"KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups %s\nMaxSessions 100\nUseDNS no\nPrintMotd no\nPidFile none\nLogLevel INFO\n%s\n",
			Port, maxStartups, strings.Join(o.Config, "\n"))
		if err := os.MkdirAll(filepath.Join(h.Dir, host.Name), 0o755); err != nil {
			return err
		}
		files[own+"setup"] = h.setup(i, o)
	}
	for name, text := range files {
		mode := os.FileMode(0o644)
		if name == "id" || strings.HasSuffix(name, "hostkey") {
			mode = 0o600
		}
		if err := os.WriteFile(filepath.Join(h.Dir, name), []byte(text), mode); err != nil {
			return err
		}
	}
	return nil
}

// setup is what the first process of a host does.
func (h *Hosts) setup(i int, o Options) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	dir := filepath.Join(h.Dir, h.Hosts[i].Name)
	size := o.HomeSize
	if size == "" {
		size = "256m"
	}
	line("mount -t proc proc /proc")
	line("hostname %s", h.Hosts[i].Name)
	noexec := ""
	if o.TmpNoExec {
		noexec = ",noexec"
	}
	line("mount -t tmpfs -o mode=755%s tmpfs /run", noexec)
	line("mkdir -p /run/sshd /run/host")
	line("mount --bind '%s' /run/host", dir)
	line("mount --bind /run/host/passwd /etc/passwd")
	line("mount --bind /run/host/hosts /etc/hosts")
	for _, home := range []string{"/root", "/home"} {
		line("mount -t tmpfs -o mode=755,size=%s tmpfs %s", size, home)
	}
	line("mkdir -p /home/%s", User)
	for _, home := range []string{"/root", "/home/" + User} {
		line("for f in .profile .bashrc .bash_profile; do cp /run/host/rc %s/$f; done", home)
	}
	line("chown -R 7077:7077 /home/%s", User)
	if o.HomeReadOnly {
		line("mount -o remount,ro /root; mount -o remount,ro /home")
	}
	for _, tmp := range []string{"/tmp", "/var/tmp", "/dev/shm"} {
		line("[ ! -d %[1]s ] || mount -t tmpfs -o mode=1777%[2]s tmpfs %[1]s", tmp, noexec)
	}
	line("ip link set lo up")
	if o.Bridge {
		line("ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up")
	}
	line("cd /")
	sshd, _ := look("sshd")
	line("env -i PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin %s -D -f /run/host/sshd_config -E /run/host/sshd.log </dev/null >/dev/null 2>&1 &", sshd)
	line("echo ready")
	line("cat >/dev/null") // until our end of the pipe closes; a shell, as it also waits for orphans
	line("exit 0")
	return b.String()
}

// hold starts the first process of new namespaces, which says "ready".
func hold(flags uintptr, script string) (*holder, error) {
	log := &lockedBuffer{}
	cmd := exec.Command("/bin/sh", "-ec", script)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: flags &^ syscall.CLONE_NEWPID, Cloneflags: flags & syscall.CLONE_NEWPID, Setsid: true}
	cmd.Stderr = log
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	h := &holder{cmd: cmd, stdin: stdin, log: log}
	limit := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
	defer limit.Stop()
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
		h.close()
		return nil, fmt.Errorf("%q, %v: %s", line, err, log)
	}
	return h, nil
}

func (h *holder) close() {
	h.stdin.Close()
	h.cmd.Process.Kill() // with it goes everything in its process namespace
	h.cmd.Wait()
}

func (h *holder) ns(kind string) string {
	return fmt.Sprintf("/proc/%d/ns/%s", h.cmd.Process.Pid, kind)
}

// start brings one host up.
func (h *Hosts) start(i int, o Options) error {
	host := h.Hosts[i]
	setup, err := os.ReadFile(filepath.Join(h.Dir, host.Name, "setup"))
	if err != nil {
		return err
	}
	k, err := hold(syscall.CLONE_NEWNET|syscall.CLONE_NEWUTS|syscall.CLONE_NEWNS|syscall.CLONE_NEWPID, string(setup))
	if err != nil {
		return fmt.Errorf("host %s: %w", host.Name, err)
	}
	h.holders[i] = k
	script := fmt.Sprintf("ip link add v%[1]d type veth peer name eth0 netns %[2]d; ip link set v%[1]d master br0 up; ", i+1, k.cmd.Process.Pid)
	if o.Isolated {
		script += fmt.Sprintf("ip link set v%d type bridge_slave isolated on; ", i+1)
	}
	if o.Second {
		script += fmt.Sprintf("ip link add w%[1]d type veth peer name eth1 netns %[2]d; ip link set w%[1]d master br1 up; ", i+1, k.cmd.Process.Pid)
	}
	script += fmt.Sprintf("nsenter --net=%s ", k.ns("net"))
	script += "sh -ec '"
	if !o.NoIPv4 {
		script += fmt.Sprintf("ip addr add %v/16 dev eth0; ", host.Addr)
	}
	if o.Second {
		script += fmt.Sprintf("ip addr add %v/16 dev eth1; ip link set eth1 up; ", host.Second)
	}
	script += fmt.Sprintf("ip -6 addr add %v/64 dev eth0 nodad; ip link set eth0 up'", host.Addr6)
	if out, err := h.Launcher(context.Background(), "/bin/sh", "-ec", script).CombinedOutput(); err != nil {
		return fmt.Errorf("host %s: link: %w: %s", host.Name, err, out)
	}
	// Listening is seen in the kernel's table.
	mark := fmt.Sprintf(":%04X ", Port)
	for end := time.Now().Add(30 * time.Second); ; {
		table, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", k.cmd.Process.Pid))
		if err != nil {
			return fmt.Errorf("host %s: %w: %s", host.Name, err, k.log)
		}
		if strings.Contains(string(table), mark) {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("host %s: sshd does not listen: %s%s", host.Name, k.log, h.Log(i))
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// Close ends all that runs on the hosts.
func (h *Hosts) Close() error {
	for _, k := range append(h.holders, h.launcher) {
		if k != nil {
			k.close()
		}
	}
	h.holders, h.launcher = nil, nil
	if h.restore != nil {
		h.restore()
		h.restore = nil
	}
	return nil
}

// Log is what a host's sshd has said.
func (h *Hosts) Log(i int) string {
	text, _ := os.ReadFile(filepath.Join(h.Dir, h.Hosts[i].Name, "sshd.log"))
	return string(text)
}

// Command prepares a command on a host, as root, without ssh. Its own process is killed when ctx ends.
func (h *Hosts) Command(ctx context.Context, i int, name string, args ...string) *exec.Cmd {
	k := h.holders[i]
	enter := []string{"--net=" + k.ns("net"), "--uts=" + k.ns("uts"), "--mount=" + k.ns("mnt"), "--pid=" + k.ns("pid_for_children"), "--wd=/", "--", name}
	return exec.CommandContext(ctx, "nsenter", append(enter, args...)...)
}

// Launcher prepares a command in the launcher's network namespace. It sees this machine's files and processes, and its process is the command's own.
func (h *Hosts) Launcher(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + h.launcher.ns("net"), "--", name}, args...)...)
}

// Cut takes a host's link down.
func (h *Hosts) Cut(i int) error { return h.ip("link", "set", fmt.Sprintf("v%d", i+1), "down") }

// Join takes it up again.
func (h *Hosts) Join(i int) error { return h.ip("link", "set", fmt.Sprintf("v%d", i+1), "up") }

func (h *Hosts) ip(args ...string) error { return run(h.Launcher(context.Background(), "ip", args...)) }

// Blackhole makes host i drop what it sends to host j; what j sends arrives. Undone with on false.
func (h *Hosts) Blackhole(i, j int, on bool) error {
	verb := "add"
	if !on {
		verb = "del"
	}
	to := h.Hosts[j]
	return errors.Join(run(h.Command(context.Background(), i, "ip", "route", verb, "blackhole", to.Addr.String()+"/32")),
		run(h.Command(context.Background(), i, "ip", "-6", "route", verb, "blackhole", to.Addr6.String()+"/128")))
}

func run(cmd *exec.Cmd) error {
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// Process is one on a host, by its number on this machine.
type Process struct {
	PID  int
	Args []string
}

// Processes lists what runs on a host, without its sshd's and its first process.
func (h *Hosts) Processes(i int) ([]Process, error) {
	k := h.holders[i]
	own, err := os.Readlink(k.ns("pid_for_children"))
	if err != nil {
		return nil, err
	}
	dir, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var all []Process
	for _, e := range dir {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)); err != nil || ns != own {
			continue // another's, or it has ended
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if at := bytes.LastIndexByte(stat, ')'); err != nil || at < 0 || at+2 >= len(stat) || stat[at+2] == 'Z' {
			continue
		}
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || len(text) == 0 {
			continue
		}
		args := strings.Split(strings.TrimSuffix(string(text), "\x00"), "\x00")
		if first := h.first(i, pid); first || strings.HasPrefix(args[0], "sshd") || strings.HasSuffix(args[0], "/sshd") || strings.Contains(args[0], "sshd-") {
			continue
		}
		all = append(all, Process{pid, args})
	}
	return all, nil
}

// first reports whether a process is what holds the host: its shell, or the shell's cat.
func (h *Hosts) first(i, pid int) bool {
	holder := h.holders[i].cmd.Process.Pid
	if pid == holder {
		return true
	}
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return string(comm) == "cat\n" && strings.Contains(string(status), fmt.Sprintf("\nPPid:\t%d\n", holder))
}

// Files lists the files below a directory of a host, without directories, sorted.
func (h *Hosts) Files(i int, dir string) ([]string, error) {
	root := fmt.Sprintf("/proc/%d/root", h.holders[i].cmd.Process.Pid)
	var all []string
	err := filepath.WalkDir(root+dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		all = append(all, strings.TrimPrefix(path, root))
		return nil
	})
	slices.Sort(all)
	return all, err
}

// Path is the path by which this machine reaches a file of a host while the host lives.
func (h *Hosts) Path(i int, file string) string {
	return fmt.Sprintf("/proc/%d/root%s", h.holders[i].cmd.Process.Pid, file)
}

// newKey makes an ed25519 key: the private part as OpenSSH keeps it, the public one as a line.
func newKey() (private, public string, err error) {
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return "", "", err
	}
	block, err := ssh.MarshalPrivateKey(key, "test host")
	if err != nil {
		return "", "", err
	}
	line, err := ssh.NewPublicKey(pub)
	if err != nil {
		return "", "", err
	}
	return string(pem.EncodeToMemory(block)), string(ssh.MarshalAuthorizedKey(line)), nil
}
