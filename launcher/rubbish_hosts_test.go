package launcher

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
)

// The test binary is the way to hosts of which b has an agent that is none: "rubbish KIND GORUN HOST LINE".
func init() {
	if len(os.Args) != 6 || os.Args[1] != "rubbish" {
		return
	}
	kind, gorun, host, line := os.Args[2], os.Args[3], os.Args[4], os.Args[5]
	if host != "b" {
		syscall.Exec("/bin/sh", []string{"sh", "-c", line}, os.Environ())
		os.Exit(1)
	}
	preface, err := exec.Command(gorun, "agent").Output() // its stdin has ended: it says who it is, and ends
	first, _, ok := bytes.Cut(preface, []byte("\n"))
	if !ok {
		fmt.Fprintln(os.Stderr, "no preface:", err)
		os.Exit(1)
	}
	fmt.Printf("\n%s start /gorun\n%s\n", regexp.MustCompile(`gorun-[0-9a-f]{16}`).FindString(line), first)
	rubbish(kind)
	os.Exit(0)
}

// frame is a frame of yamux: kind 0 is data, 1 a window; the control stream is number 1.
func frame(kind byte, flags uint16, stream, length uint32, data []byte) []byte {
	b := []byte{0, kind}
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint32(b, stream)
	b = binary.BigEndian.AppendUint32(b, length)
	return append(b, data...)
}

// message is a frame with what could be a message.
func message(size uint32, text string) []byte {
	data := append(binary.BigEndian.AppendUint32(nil, size), text...)
	return frame(0, 0, 1, uint32(len(data)), data)
}

func rubbish(kind string) {
	hang := func() { io.Copy(io.Discard, os.Stdin) }
	rnd := rand.New(rand.NewPCG(3, 4))
	junk := make([]byte, 64<<10)
	for i := range junk {
		junk[i] = byte(rnd.Uint32())
	}
	ack := frame(1, 2, 1, 0, nil) // the stream that gorun opens is there
	say := func(parts ...[]byte) { os.Stdout.Write(bytes.Join(parts, nil)) }
	switch kind {
	case "nothing":
		hang()
	case "end":
	case "noise":
		for {
			if _, err := os.Stdout.Write(junk); err != nil {
				return
			}
		}
	case "half a frame":
		say(ack, frame(0, 0, 1, 100, junk[:10]))
		hang()
	case "half a frame, then the end":
		say(ack, frame(0, 0, 1, 100, junk[:10]))
	case "a huge frame":
		say(ack, frame(0, 0, 1, 1<<32-1, junk))
		hang()
	case "a huge message":
		say(ack, message(1<<31, "{"))
		hang()
	case "a message without end":
		say(ack, message(agentwire.MaxMessage, "{"))
		for { // no window is asked for
			if _, err := os.Stdout.Write(frame(0, 0, 1, uint32(len(junk)), junk)); err != nil {
				return
			}
		}
	case "no message":
		say(ack, message(2, "{}"))
		hang()
	case "a gorun's message":
		say(ack, message(10, `{"Bye":{}}`))
		hang()
	case "two agents' messages":
		const prepared = `{"Prepared":{},"Ping":{}}`
		say(ack, message(uint32(len(prepared)), prepared))
		hang()
	case "streams without end":
		say(ack)
		for id := uint32(2); ; id += 2 {
			if _, err := os.Stdout.Write(frame(1, 1, id, 0, nil)); err != nil {
				return
			}
		}
	case "does not read":
		for {
			time.Sleep(time.Hour)
		}
	case "prepared, then noise", "prepared, then silence", "prepared, then the end of a rank that is not there", "prepared elsewhere",
		"prepared, and reaches nobody", "prepared, and reaches strangers", "prepared, and listens elsewhere":
		m, err := agentwire.Accept(&stdioConn{os.Stdin, os.Stdout})
		if err != nil {
			return
		}
		first, err := m.Receive()
		if err != nil || first.Prepare == nil {
			return
		}
		at := agentwire.Address{IP: "127.0.0.1"}
		answerAt(first.Prepare.Key, first.Prepare.Node, &at, 0, 0)
		addr := hostPort(at)
		switch kind {
		case "prepared elsewhere":
			addr = "rubbish"
		case "prepared, and listens elsewhere":
			at.Port = 1
		}
		m.Send(&agentwire.Message{Prepared: &agentwire.Prepared{Node: agentwire.Node{Addr: addr, MasterPort: 1}, At: at}})
		for {
			msg, err := m.Receive()
			if err != nil {
				return
			}
			if msg.Start != nil {
				break
			}
			r := &agentwire.Reached{}
			switch {
			case msg.Listen != nil:
				m.Send(&agentwire.Message{Listening: &agentwire.Listening{Addrs: []agentwire.Address{{IP: "rubbish", Port: 1 << 40}}}})
			case msg.Reach != nil && kind == "prepared, and reaches strangers":
				r.Hosts = []agentwire.ReachedHost{{Host: -1, Addr: "127.0.0.1:1"}}
			case msg.Reach != nil && kind != "prepared, and reaches nobody":
				for _, h := range msg.Reach.Hosts {
					r.Hosts = append(r.Hosts, agentwire.ReachedHost{Host: h.Host, Addr: h.Addr})
				}
			}
			if len(r.Hosts) > 0 {
				m.Send(&agentwire.Message{Reached: r})
			}
		}
		switch kind {
		case "prepared, then noise":
			m.Flush(time.Second)
			say(junk)
		case "prepared, then the end of a rank that is not there":
			m.Send(&agentwire.Message{Exited: &agentwire.Exited{Rank: 1 << 40}})
		}
		for {
			if _, err := m.Receive(); err != nil {
				return
			}
		}
	}
}

// An agent may be anything. gorun ends in time, names the host, stays small, and the other host's part has ended, too.
func TestRubbishAgents(t *testing.T) {
	beside(t)
	gorun, err := gorunFile()
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	home := t.TempDir()
	for _, c := range []struct {
		kind  string
		code  int    // 0: 122 or 123
		limit string // --connect-timeout
		slow  bool
	}{
		{"nothing", 122, "2s", false}, {"half a frame", 122, "2s", false}, {"a gorun's message", 122, "2s", false}, {"streams without end", 122, "2s", false},
		{"does not read", 122, "2s", false}, {"end", 122, "20s", false}, {"noise", 122, "20s", false}, {"half a frame, then the end", 122, "20s", false},
		{"a huge frame", 122, "20s", false}, {"a huge message", 122, "20s", false}, {"a message without end", 122, "20s", false}, {"no message", 122, "20s", false},
		{"two agents' messages", 122, "20s", false}, {"prepared, then noise", 123, "20s", false},
		{"prepared, then the end of a rank that is not there", 123, "20s", false}, {"prepared, then silence", 123, "20s", true}, {"prepared elsewhere", 0, "20s", true},
		{"prepared, and reaches nobody", 122, "20s", true}, {"prepared, and reaches strangers", 122, "20s", false}, {"prepared, and listens elsewhere", 122, "20s", false},
	} {
		t.Run(c.kind, func(t *testing.T) {
			if c.slow && testing.Short() {
				t.Skip("-short: waits for a host to be missed")
			}
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			var out bytes.Buffer
			cmd := exec.CommandContext(ctx, gorun, "--rsh", fmt.Sprintf("%s rubbish '%s' %s", self, strings.ReplaceAll(c.kind, "'", `'\''`), gorun), "-H", "a,b", "--connect-timeout", c.limit, "--stage", "none",
				"sh", "-c", "sleep 1000", strings.Repeat("x", 100_000))
			cmd.Env = append(os.Environ(), "HOME="+home, "XDG_CACHE_HOME=")
			cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, 5*time.Second
			begin := time.Now()
			err := cmd.Run()
			if ctx.Err() != nil {
				t.Fatalf("gorun did not end: %s", out.String())
			}
			if got := cmd.ProcessState.ExitCode(); c.code != 0 && got != c.code || c.code == 0 && got != 122 && got != 123 || !strings.Contains(out.String(), "host b") || strings.Contains(out.String(), "goroutine") {
				t.Errorf("exit code %d (%v), want %d and host b named: %.2000s", got, err, c.code, out.String())
			}
			var own syscall.Rusage // gorun begins as a copy of this process, which other tests, and the race detector, make large
			if err := syscall.Getrusage(syscall.RUSAGE_SELF, &own); err != nil {
				t.Fatal(err)
			}
			kb := cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss
			if kb > max(400<<10, own.Maxrss) {
				t.Errorf("gorun took %d kB of memory", kb)
			}
			t.Logf("%d after %v, %d MiB: %.300s", cmd.ProcessState.ExitCode(), time.Since(begin).Round(time.Millisecond), kb>>10, out.String())
		})
	}
}

// Hosts whose start-up files are loud or slow, jobs that share hosts, and many jobs, after which there is no more on the hosts than before.
// GORUN_TEST_JOBS=30 runs more of them.
func TestHostsOddAndMany(t *testing.T) {
	beside(t)
	t.Run("loud", func(t *testing.T) {
		t.Parallel()
		h := newHosts(t, 2, testhosts.Options{Shell: "/bin/bash", RC: "head -c 10000000 /dev/zero | tr '\\000' x; echo; echo told >&2\n"})
		j := newHostsJob(t, h, 1, "hostname")
		if got := j.run(); got != 0 || len(j.lines()) != 2 || j.lines()[0] != "h1" {
			t.Errorf("exit code %d, %.200q, %.2000s", got, j.out.String(), j.err.String())
		}
	})
	t.Run("slow", func(t *testing.T) {
		if testing.Short() {
			t.Skip("-short: takes 7 s")
		}
		t.Parallel()
		h := newHosts(t, 2, testhosts.Options{Shell: "/bin/bash", RC: "[ $(hostname) = h1 ] || sleep 6\n"})
		j := newHostsJob(t, h, 1, "hostname")
		begin := time.Now()
		if got := j.run(); got != 0 || len(j.lines()) != 2 || !regexp.MustCompile(`(?m)^gorun: waiting for \d of 2 hosts: (h1, )?h2$`).MatchString(strings.Join(j.slow, "")) {
			t.Errorf("exit code %d, %s%s%s", got, j.out.String(), j.err.String(), j.slow)
		}
		t.Logf("%v: %s", time.Since(begin), j.err.String())
	})
	t.Run("many", func(t *testing.T) {
		t.Parallel()
		h := onHosts(t, 3)
		state := func() string {
			text := ""
			for i := range h.Hosts {
				var all []string
				for _, dir := range []string{"/root", "/tmp", "/var/tmp", "/dev/shm", "/run"} {
					files, err := h.Files(i, dir)
					if err != nil {
						t.Fatal(err)
					}
					for _, f := range files {
						if !strings.HasPrefix(f, "/run/host/") { // sshd's log
							all = append(all, f)
						}
					}
				}
				segments, _ := os.ReadFile(strings.TrimSuffix(h.Path(i, ""), "/root") + "/net/unix")
				text += fmt.Sprintln(h.Hosts[i].Name, all, bytes.Count(segments, []byte("@gorun")))
			}
			return text
		}
		jobs := 8
		if testing.Short() {
			jobs = 3
		}
		if s := os.Getenv("GORUN_TEST_JOBS"); s != "" {
			var err error
			if jobs, err = strconv.Atoi(s); err != nil {
				t.Fatal(err)
			}
		}
		before := state()
		begin := time.Now()
		for k := range jobs {
			a := newHostsJob(t, h, 2, "--report", filepath.Join(t.TempDir(), "r"), "/root/rank", "rank", "join").start()
			b := newHostsJob(t, h, 1, "sh", "-c", "exit "+strconv.Itoa(k%2)).start() // at once, and every second one fails
			if got := b.wait(); got != k%2 {
				t.Errorf("job %d: exit code %d: %s", k, got, b.err.String())
			}
			if got := a.wait(); got != 0 || strings.Count(a.out.String(), "of 6 joined") != 6 {
				t.Fatalf("job %d: exit code %d: %s%s", k, got, a.out.String(), a.err.String())
			}
		}
		t.Logf("%d pairs of jobs in %v", jobs, time.Since(begin))
		clean(t, h)
		if after := state(); after != before {
			t.Errorf("after %d jobs:\n%sbefore:\n%s", jobs, after, before)
		}
	})
}
