package launcher

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
)

// Programs with MPI find each other on several hosts, and end together there.
func TestMPIOnHosts(t *testing.T) {
	prog := mpiProgram(t, "mpicc.mpich")
	h := newHosts(t, 3, testhosts.Options{})
	for i := range h.Hosts {
		if err := copyProgram(prog.Path, h.Path(i, "/root/mpi")); err != nil {
			t.Fatal(err)
		}
	}
	haveAgent(t, h)
	// All hosts are one machine, and UCX takes them for that: neither memory nor the loopback leads from one to another.
	job := func(slots int, args ...string) *hostsJob {
		return newHostsJob(t, h, slots, append([]string{"-x", "UCX_TLS=tcp,self", "-x", "UCX_NET_DEVICES=eth0"}, args...)...)
	}
	check := func(t *testing.T, j *hostsJob, hostOf ...string) {
		t.Helper()
		if got := j.run(); got != 0 || j.err.Len() > 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		size := len(hostOf)
		var want []string
		for r, host := range hostOf {
			near := 0
			for _, other := range hostOf {
				if other == host {
					near++
				}
			}
			want = append(want, fmt.Sprintf("%d/%d app 0 sum %d right host %s near %d universe 6", r, size, size*(size-1)/2, host, near))
		}
		slices.Sort(want)
		if diff := cmp.Diff(j.lines(), want); diff != "" {
			t.Errorf("-got +want:\n%s", diff)
		}
	}
	// The program is on the hosts alone: what it is linked with is found there.
	t.Run("by slot", func(t *testing.T) {
		check(t, job(2, "/root/mpi", "quit"), "h1", "h1", "h2", "h2", "h3", "h3")
	})
	t.Run("by node", func(t *testing.T) {
		check(t, job(2, "--map-by", "node", "-np", "5", "/root/mpi", "quit"), "h1", "h2", "h3", "h1", "h2")
	})
	t.Run("some of the hosts", func(t *testing.T) {
		j := job(2, "-np", "3", "sh", "-c", "echo $PMI_RANK none", ":", "-np", "3", "/root/mpi", "quit")
		if got := j.run(); got != 0 || j.err.Len() > 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		want := []string{"0/3 app 1 sum 3 right host h2 near 1 universe 6", "1/3 app 1 sum 3 right host h3 near 2 universe 6", "2/3 app 1 sum 3 right host h3 near 2 universe 6", "none", "none", "none"}
		if diff := cmp.Diff(j.lines(), want); diff != "" {
			t.Errorf("-got +want:\n%s", diff)
		}
	})
	for _, c := range []struct {
		name string
		args []string
		code int
		want string
	}{
		{"abort", []string{"abort", "3", "7"}, 7, `gorun: rank 3 \(host h2, pid \d+\) called MPI_Abort with code 7 after `},
		{"killed", []string{"kill", "4"}, 137, `gorun: rank 4 \(host h3, pid \d+\) was killed by SIGKILL after `},
		{"exit with code 0", []string{"exit", "5", "0"}, 1, `gorun: rank 5 \(host h3, pid \d+\) exited with code 0 before MPI_Finalize after `},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := job(2, append([]string{"/root/mpi"}, c.args...)...)
			if got := j.run(); got != c.code || !regexp.MustCompile(`(?m)^`+c.want).MatchString(j.err.String()) {
				t.Errorf("exit code %d, want %d; stderr %s, want %s", got, c.code, j.err.String(), c.want)
			}
		})
	}
	// Those who wait for ranks of another host go on when these can't come any more.
	t.Run("a host's ranks never come", func(t *testing.T) {
		j := job(2, "-np", "4", "/root/mpi", "check", ":", "-np", "2", "/root/mpi", "never")
		const want = `expecting cmd=barrier_out, got barrier_failed:_rank_5_has_ended`
		if got := j.run(); got != 15 || !strings.Contains(j.err.String(), want) {
			t.Errorf("exit code %d, want 15; stderr %s, want %s", got, j.err.String(), want)
		}
	})
	t.Run("Open MPI", func(t *testing.T) {
		prog := mpiProgram(t, "mpicc.openmpi")
		for i := range h.Hosts {
			if err := copyProgram(prog.Path, h.Path(i, "/root/openmpi")); err != nil {
				t.Fatal(err)
			}
		}
		check(t, newHostsJob(t, h, 2, "--map-by", "node", "-np", "5", "/root/openmpi", "quit"), "h1", "h2", "h3", "h1", "h2")
		j := newHostsJob(t, h, 2, "/root/openmpi", "abort", "3", "7")
		const want = `(?m)^gorun: rank 3 \(host h2, pid \d+\) called MPI_Abort with code 7 after `
		if got := j.run(); got != 7 || !regexp.MustCompile(want).MatchString(j.err.String()) {
			t.Errorf("exit code %d; stderr %s, want %s", got, j.err.String(), want)
		}
		j = newHostsJob(t, h, 2, "-np", "4", "/root/openmpi", "check", ":", "-np", "2", "/root/openmpi", "never")
		const unmet = "PMIx fence (MPI_Init, MPI_Finalize): rank 5 has ended\n"
		if got := j.run(); got == 0 || !strings.Contains(j.err.String(), unmet) {
			t.Errorf("exit code %d; stderr %s, want %s", got, j.err.String(), unmet)
		}
	})
}
