package launcher

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
)

// ranksSay runs a shell's line as the ranks of a list of hosts, and returns the lines sorted, and what gorun said.
func ranksSay(t *testing.T, h *testhosts.Hosts, line string, flags ...string) ([]string, string) {
	t.Helper()
	j := newHostsJob(t, h, 1, "sh", "-c", line)
	j.cmd.Args = slices.Insert(j.cmd.Args, len(j.cmd.Args)-3, flags...)
	if got := j.run(); got != 0 {
		t.Fatalf("%q: exit code %d, stderr %s", flags, got, j.err.String())
	}
	lines := strings.Split(strings.TrimSpace(j.out.String()), "\n")
	slices.Sort(lines)
	return lines, j.err.String()
}

const sayPlace = "echo $GORUN_RANK $MASTER_ADDR ${JAX_COORDINATOR_ADDRESS%:*} $NCCL_SOCKET_IFNAME $MCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"

// instead replaces the hosts of a job.
func (j *hostsJob) instead(config, hosts string) *hostsJob {
	for i, a := range j.cmd.Args {
		switch {
		case a == "-H":
			j.cmd.Args[i+1] = hosts
		case a == "--ssh-config" && config != "":
			j.cmd.Args[i+1] = config
		}
	}
	return j
}

// Names of hosts that nobody resolves, that lead astray, or that are alike in their first part; literals of IPv6; and a machine of gorun's
// that nobody but ssh's answers reaches.
func TestHostsNames(t *testing.T) {
	beside(t)
	h := newHosts(t, 2, testhosts.Options{})
	haveAgent(t, h)
	addr := func(i int) string { return h.Hosts[i].Addr.String() }
	// run runs sayPlace on hosts that are given otherwise.
	run := func(t *testing.T, config, hosts string, flags ...string) []string {
		t.Helper()
		j := newHostsJob(t, h, 1, slices.Concat(flags, []string{"sh", "-c", sayPlace})...).instead(config, hosts)
		if got := j.run(); got != 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		lines := strings.Split(strings.TrimSpace(j.out.String()), "\n")
		slices.Sort(lines)
		return lines
	}
	want := func(addr string) []string {
		jax := addr
		if strings.Contains(addr, ":") {
			jax = "[" + addr + "]"
		}
		return []string{"0 " + addr + " " + jax + " =eth0 =eth0 eth0", "1 " + addr + " " + jax + " =eth0 =eth0 eth0"}
	}

	t.Run("own names that only they resolve, to 127.0.1.1", func(t *testing.T) { // launchers.md row 26
		if d := cmp.Diff(run(t, "", "h1:1,h2:1"), want(addr(0))); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
	})
	t.Run("addresses with bogus names", func(t *testing.T) { // row 27
		for i := range h.Hosts {
			f, err := os.OpenFile(filepath.Join(h.Dir, h.Hosts[i].Name, "hosts"), os.O_APPEND|os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(f, "%s bogus1.invalid\n%s bogus2.invalid\n", addr(0), addr(1))
			f.Close()
		}
		if d := cmp.Diff(run(t, "", addr(0)+":1,"+addr(1)+":1"), want(addr(0))); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
	})
	t.Run("names alike in their first part", func(t *testing.T) { // row 29
		config := filepath.Join(t.TempDir(), "config")
		text, err := os.ReadFile(h.SSHConfig)
		if err != nil {
			t.Fatal(err)
		}
		write(t, config, fmt.Sprintf("%sHost w.1.foo\n  HostName %s\nHost w.2.foo\n  HostName %s\n", text, addr(0), addr(1)), 0o644)
		if d := cmp.Diff(run(t, config, "w.1.foo:1,w.2.foo:1"), want(addr(0))); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
	})
	t.Run("literals of IPv6", func(t *testing.T) { // row 31
		config := filepath.Join(t.TempDir(), "config")
		write(t, config, fmt.Sprintf("Host *\n  Port %d\n  User root\n  IdentityFile %s\n  IdentitiesOnly yes\n  UserKnownHostsFile %s\n", testhosts.Port, h.KeyFile, filepath.Join(t.TempDir(), "known")), 0o644)
		six := func(i int) string { return h.Hosts[i].Addr6.String() }
		got := run(t, config, fmt.Sprintf("[%s]:1,root@[%s]:1", six(0), six(1)), "--accept-new-host-keys")
		if d := cmp.Diff(got, want(six(0))); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		// Of a link: gorun reaches them there, but it is no address that all of the job's programs could use.
		var list []string
		for i := range h.Hosts {
			list = append(list, fmt.Sprintf("ssh://root@[%s%%br0]:%d:1", linkLocal(t, h, i), testhosts.Port))
		}
		got = run(t, config, strings.Join(list, ","), "--accept-new-host-keys")
		if d := cmp.Diff(got, want(addr(0))); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
	})
	t.Run("nothing but ssh's answers reaches gorun's machine", func(t *testing.T) { // row 46
		const launcher = "10.77.255.254"
		for i := range h.Hosts {
			for _, rule := range []string{fmt.Sprintf("ip rule add pref 10 to %s ipproto tcp sport %d lookup main", launcher, testhosts.Port),
				"ip rule add pref 11 to " + launcher + " unreachable", "ip -6 rule add pref 11 to fd77::ff:fffe unreachable"} {
				args := strings.Fields(rule)
				if out, err := h.Command(t.Context(), i, args[0], args[1:]...).CombinedOutput(); err != nil {
					t.Fatalf("%v: %v: %s", args, err, out)
				}
			}
		}
		if d := cmp.Diff(run(t, "", "h1:1,h2:1"), want(addr(0))); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		for _, list := range []string{"localhost:1,h1:1,h2:1", "h1:1,localhost:1"} {
			j := newHostsJob(t, h, 1, "true").instead("", list)
			got := j.run()
			text := j.err.String()
			if got != 122 || !regexp.MustCompile(`(?m)host localhost: the other hosts do not (all )?reach it.*: 10\.77\.255\.254 \(br0\): not reached by h1.*: tcp: `).MatchString(text) ||
				!strings.Contains(text, "or leave it out: gorun itself needs no way back from the hosts, its ranks here do") {
				t.Errorf("%s: exit code %d, stderr %s", list, got, text)
			}
		}
	})
	clean(t, h)
}

// linkLocal is a host's address on its link, when the kernel has confirmed it.
func linkLocal(t *testing.T, h *testhosts.Hosts, i int) netip.Addr {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		out, err := h.Command(t.Context(), i, "ip", "-6", "-o", "addr", "show", "dev", "eth0", "scope", "link", "-tentative").Output()
		f := strings.Fields(string(out))
		if k := slices.Index(f, "inet6"); err == nil && k >= 0 && k+1 < len(f) {
			if p, err := netip.ParsePrefix(f[k+1]); err == nil {
				return p.Addr()
			}
		}
	}
	t.Fatalf("%s has no address on its link", h.Hosts[i].Name)
	return netip.Addr{}
}

// ssh goes through a network in which the hosts do not reach each other, each has a bridge with the same address, and there is another network
// between them (launchers.md row 32).
func TestHostsManagementNetwork(t *testing.T) {
	beside(t)
	h := newHosts(t, 3, testhosts.Options{Isolated: true, Second: true, Bridge: true})
	haveAgent(t, h)
	for i := range h.Hosts {
		if err := copyProgram("/proc/self/exe", h.Path(i, "/root/rank")); err != nil {
			t.Fatal(err)
		}
	}
	second := h.Hosts[0].Second.String()
	t.Run("the other network", func(t *testing.T) {
		report := filepath.Join(t.TempDir(), "report")
		got, said := ranksSay(t, h, sayPlace, "-v", "--port-range", "7000-7001", "--report", report)
		place := " " + second + " " + second + " =eth1 =eth1 eth1"
		if d := cmp.Diff(got, []string{"0" + place, "1" + place, "2" + place}); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		for i, others := range []string{"h2 h3", "h1 h3", "h1 h2"} {
			line := fmt.Sprintf(`gorun: host h%d: 10\.78\.0\.%d \(eth1\): ssh's 10\.77\.0\.%[2]d was not reached by %s: (tcp: )?no `, i+1, i+1, others)
			if !regexp.MustCompile(line).MatchString(said) {
				t.Errorf("-v does not say %s:\n%s", line, said)
			}
		}
		text, err := os.ReadFile(report)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{`"addr": "10\.78\.0\.2:700[01]"`, `"interface": "eth1"`, `"chosen": "10\.78\.0\.2 \(eth1\): ssh's 10\.77\.0\.2 was not reached by h1 h3: `} {
			if !regexp.MustCompile(want).Match(text) {
				t.Errorf("the report does not say %s: %s", want, text)
			}
		}
	})
	t.Run("ranks join over it", func(t *testing.T) {
		j := newHostsJob(t, h, 2, "/root/rank", "rank", "join")
		if got := j.run(); got != 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		if got := strings.Count(j.out.String(), " of 6 joined\n"); got != 6 {
			t.Errorf("%d ranks joined, want 6: %s", got, j.out.String())
		}
	})
	t.Run("the user's interface", func(t *testing.T) {
		got, said := ranksSay(t, h, "echo $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME", "-x", "NCCL_SOCKET_IFNAME=ib0")
		if d := cmp.Diff(got, []string{"ib0 eth1", "ib0 eth1", "ib0 eth1"}); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		if !regexp.MustCompile(`^gorun: hosts? h1 h2 h3: NCCL_SOCKET_IFNAME=ib0 names none of its interfaces: .*eth1.*\n$`).MatchString(said) {
			t.Errorf("gorun says %q", said)
		}
	})
	t.Run("check", func(t *testing.T) {
		c, code := check(t, h, "-H", "h1,h2,h3")
		// On a busy machine they may have different reasons.
		chosen := regexp.MustCompile(`^10\.78\.0\.2 \(eth1\): ssh's 10\.77\.0\.2 was not reached by h1( h3: |: .*; not reached by h3: )`)
		if code != 0 || c.Hosts[1].Addr[:9] != "10.78.0.2" || !chosen.MatchString(c.Hosts[1].Chosen) {
			t.Errorf("exit code %d: %+v", code, c.Hosts[1])
		}
	})
	t.Run("an interrupt while addresses are sought", func(t *testing.T) {
		j := newHostsJob(t, h, 1, "sh", "-c", "exit 3").start()
		stop := time.AfterFunc(90*time.Second, func() { j.cmd.Process.Kill() })
		defer stop.Stop()
		for end := time.Now().Add(60 * time.Second); !seeking(h, 0) && time.Now().Before(end); {
			time.Sleep(5 * time.Millisecond)
		}
		j.cmd.Process.Signal(os.Interrupt)
		if got := j.wait(); got != 130 && got != 3 { // it may have been too late
			t.Errorf("exit code %d, stderr %s", got, j.err.String())
		}
	})
	t.Run("a host that is not in it", func(t *testing.T) {
		if out, err := h.Command(t.Context(), 2, "ip", "link", "set", "eth1", "down").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		defer h.Command(context.Background(), 2, "ip", "link", "set", "eth1", "up").Run()
		j := newHostsJob(t, h, 1, "true")
		got := j.run()
		text := j.err.String()
		const both = `(h1 h2: [^;\n]*|h1: [^;\n]*; not reached by h2: [^;\n]*)` // for one reason, or each for its own
		if got != 122 || !regexp.MustCompile(`host h3: the other hosts do not all reach it at any of its addresses: 10\.77\.0\.3 \(eth0\): not reached by `+both+`; fd77::3 \(eth0\): not reached by `+both+`; 172\.17\.0\.1 \(docker0\): not reached by `+both+`(\n|$)`).MatchString(text) {
			t.Errorf("exit code %d, stderr %s", got, text)
		}
		if n := strings.Count(text, "let the other hosts connect to it"); n != 1 {
			t.Errorf("the advice stands %d times: %s", n, text)
		}
	})
	clean(t, h)
}

// seeking reports whether a host answers probes at its bridge's address, as it does while addresses are sought.
func seeking(h *testhosts.Hosts, i int) bool {
	table, err := h.Command(context.Background(), i, "cat", "/proc/net/tcp").Output()
	return err == nil && strings.Contains(string(table), " 010011AC:")
}
