package launcher

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/placement"
	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// taskset lets all processes of a host, sshd above all, use some CPUs only.
func taskset(t *testing.T, h *testhosts.Hosts, host int, cpus ...int) {
	t.Helper()
	out, err := h.Command(context.Background(), host, "readlink", "/proc/self/ns/pid").Output()
	if err != nil {
		t.Fatal(err)
	}
	ns := strings.TrimSpace(string(out))
	var set unix.CPUSet
	for _, cpu := range cpus {
		set.Set(cpu)
	}
	found := 0
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		if of, err := os.Readlink(d + "/ns/pid"); err != nil || of != ns {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(d))
		if err := unix.SchedSetaffinity(pid, &set); err == nil {
			found++
		}
	}
	if found < 2 { // its first process and sshd
		t.Fatalf("host %d: %d processes are bound", host, found)
	}
}

// fakeGPUs gives a host device files of its own, with those of NVIDIA's GPUs among them.
func fakeGPUs(t *testing.T, h *testhosts.Hosts, host, n int) {
	t.Helper()
	script := `mkdir /run/dev; mount -t tmpfs tmpfs /run/dev; cd /run/dev
		for f in null zero full random urandom tty ptmx; do [ -e /dev/$f ] || continue; touch $f; mount --bind /dev/$f $f; done
		for d in pts shm; do [ -d /dev/$d ] || continue; mkdir $d; mount --rbind /dev/$d $d; done
		ln -s /proc/self/fd fd; touch nvidiactl`
	for i := range n {
		script += fmt.Sprintf(" nvidia%d", i)
	}
	script += "; cd /; mount --move /run/dev /dev"
	if out, err := h.Command(context.Background(), host, "/bin/sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// Each host binds its ranks within what its sshd may use, and shows them the GPUs of its login's list.
func TestHostsPlacement(t *testing.T) {
	beside(t)
	cpus, err := placement.Allowed()
	if err != nil {
		t.Fatal(err)
	}
	if len(cpus) < 2 {
		citest.Lacking(t, "two CPUs")
	}
	h := newHosts(t, 2, testhosts.Options{Config: []string{"SetEnv CUDA_VISIBLE_DEVICES=GPU-b5,1"}})
	haveAgent(t, h)
	taskset(t, h, 0, cpus[1])
	fakeGPUs(t, h, 1, 2)
	const ask = `echo $GORUN_RANK $(grep Cpus_allowed_list /proc/self/status | cut -f 2) ${CUDA_VISIBLE_DEVICES-unset} $LOCAL_RANK share=$GORUN_CPU_SHARE`
	run := func(slots int, args ...string) (lines []string, j *hostsJob) {
		t.Helper()
		j = newHostsJob(t, h, slots, append(args, "sh", "-c", ask)...)
		if code := j.run(); code != 0 {
			t.Fatalf("exit code %d: %s", code, j.err.String())
		}
		lines = strings.Split(strings.TrimSpace(j.out.String()), "\n")
		slices.Sort(lines)
		return lines, j
	}
	all := cpus.String()
	file := filepath.Join(t.TempDir(), "report")
	lines, _ := run(2, "--gpu-bind", "hide", "--report", file)
	if want := []string{
		fmt.Sprintf("0 %d GPU-b5,1 0 share=", cpus[1]), fmt.Sprintf("1 %d GPU-b5,1 1 share=", cpus[1]), // no GPU there: nothing to hide
		"2 " + all + " GPU-b5 0 share=", "3 " + all + " 1 1 share=",
	}; !slices.Equal(lines, want) {
		t.Errorf("got\n  %s, want\n  %s", strings.Join(lines, "\n  "), strings.Join(want, "\n  "))
	}
	var report Account
	if data, err := os.ReadFile(file); err != nil || json.Unmarshal(data, &report) != nil || len(report.Ranks) != 4 {
		t.Fatalf("report: %v: %s", err, data)
	}
	if p := report.Ranks[3].Place; p == nil || p.GPU != "1" || p.Visible != "1" || p.CPUs != all || p.Bound {
		t.Errorf("report of rank 3: %+v", p)
	}
	if p := report.Ranks[0].Place; p == nil || p.GPU != "" || p.CPUs != strconv.Itoa(cpus[1]) || p.Bound {
		t.Errorf("report of rank 0: %+v", p)
	}

	// A rank of each host has a core; the list of -x wins over the login's.
	lines, j := run(1, "-v", "--bind-to", "core:1", "-x", "CUDA_VISIBLE_DEVICES=0")
	if want := fmt.Sprintf("0 %d 0 0 share=1", cpus[1]); lines[0] != want {
		t.Errorf("got %s, want %s", lines[0], want)
	}
	if f := strings.Fields(lines[1]); f[2] != "0" || f[4] != "share=1" {
		t.Errorf("got %s, want a core, and the one GPU", lines[1])
	}
	if want := fmt.Sprintf("gorun: rank 0: host h1, CPUs %d (1 core)\n", cpus[1]); !strings.Contains(j.err.String(), want) {
		t.Errorf("-v does not say\n  %s, but\n%s", want, j.err.String())
	}

	// More ranks than GPUs: the host says so, and no rank starts.
	j = newHostsJob(t, h, 3, "--gpu-bind", "hide", "true")
	if code := j.run(); code != ExitNotStarted || !strings.Contains(j.err.String(), "host h2: 3 ranks, but 2 GPUs are visible (CUDA_VISIBLE_DEVICES=GPU-b5,1): --gpu-bind hide needs a GPU for each rank") {
		t.Errorf("exit code %d, %s", code, j.err.String())
	}
}
