package nccl

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

func TestChooseMixing(t *testing.T) {
	none := func(int) string { return "" }
	hosts := func(n int) string { return fmt.Sprintf("%d hosts", n) }
	cases := []struct {
		name      string
		v         *ncclsys.Vendor
		version   ncclsys.Version
		user      userSetting
		job, comm int
		proxies   func(int) string
		want      mixing
		text      string
	}{
		{"one host", ncclsys.NCCL, 22803, userSetting{}, 1, 1, none, mixing{off: true}, "off: the library adds no events to captured calls, this package orders them"},
		{"as old as was read", ncclsys.NCCL, 22703, userSetting{}, 1, 1, none, mixing{off: true}, ""},
		{"too old", ncclsys.NCCL, 22602, userSetting{}, 1, 1, none, mixing{why: "whether NCCL 2.26.2 can do without was not looked into"}, "on: whether"},
		{"another vendor", ncclsys.RCCL, 22803, userSetting{}, 1, 1, none, mixing{why: "whether RCCL 2.28.3 can do without was not looked into"}, ""},
		{"the process's, so the job's hosts", ncclsys.NCCL, 22803, userSetting{}, 2, 1, hosts, mixing{why: "2 hosts"}, "on: 2 hosts"},
		{"the communicator's, so its hosts", ncclsys.NCCL, 22902, userSetting{}, 2, 1, none, mixing{off: true, config: true}, ""},
		{"the communicator's hosts", ncclsys.NCCL, 22902, userSetting{}, 3, 2, hosts, mixing{config: true, why: "2 hosts"}, ""},
		{"the user wants it", ncclsys.NCCL, 22803, userSetting{"NCCL_GRAPH_MIXING_SUPPORT", "1", "environment"}, 1, 1, none, mixing{why: "NCCL_GRAPH_MIXING_SUPPORT=1 (environment)"}, "on: NCCL_GRAPH_MIXING_SUPPORT=1 (environment)"},
		{"the user has it off", ncclsys.NCCL, 22902, userSetting{"NCCL_GRAPH_MIXING_SUPPORT", "0", "/etc/nccl.conf"}, 2, 2, hosts, mixing{off: true, why: "NCCL_GRAPH_MIXING_SUPPORT=0 (/etc/nccl.conf); between hosts an eager call behind a replay that has not ended can hang"}, "off: NCCL_GRAPH_MIXING_SUPPORT=0 (/etc/nccl.conf)"},
		{"the user has it off in hexadecimal", ncclsys.NCCL, 22803, userSetting{"NCCL_GRAPH_MIXING_SUPPORT", "0x0", "environment"}, 1, 1, none, mixing{off: true, why: "NCCL_GRAPH_MIXING_SUPPORT=0x0 (environment)"}, ""},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			got := chooseMixing(tc.v, tc.version, tc.user, tc.job, tc.comm, tc.proxies)
			if d := cmp.Diff(got, tc.want, cmp.AllowUnexported(mixing{})); d != "" {
				t.Errorf("got(-) want(+):\n%s", d)
			}
			if !strings.HasPrefix(got.String(), tc.text) {
				t.Errorf("text %q, want %q", got, tc.text)
			}
		})
	}
}

func TestProxies(t *testing.T) {
	dir := t.TempDir()
	file := func(path, text string) {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	file("slow/net/eth0/speed", "10000\n")
	file("slow/net/eth0/device/vendor", "0x8086\n")
	file("slow/net/veth0/speed", "100000\n") // no hardware
	file("slow/net/eth1/speed", "-1\n")
	file("slow/net/eth1/device/vendor", "0x8086\n")
	file("fast/net/eth2/speed", "100000\n")
	file("fast/net/eth2/device/vendor", "0x15b3\n")
	file("rdma/infiniband/mlx5_0/node_type", "1: CA\n")
	const nic = "not all devices of this host are joined by NVLink: the library may connect them by a network device that is as fast (%s) unless NCCL_NET_DISABLE_INTRA=1"
	cases := []struct {
		name, class, setting, value string
		hosts                       int
		linked                      bool
		want                        string
	}{
		{"nothing there", "none", "", "", 1, false, ""},
		{"slow network", "slow", "", "", 1, false, ""},
		{"fast network", "fast", "", "", 1, false, fmt.Sprintf(nic, "eth2")},
		{"RDMA", "rdma", "", "", 1, false, fmt.Sprintf(nic, "mlx5_0")},
		{"RDMA, NVLink", "rdma", "", "", 1, true, ""},
		{"RDMA, not within a host", "rdma", "NCCL_NET_DISABLE_INTRA", "1", 1, false, ""},
		{"two hosts", "none", "", "", 2, false, "there are 2 hosts, and the network's proxies want it"},
		{"no shared memory", "none", "NCCL_SHM_DISABLE", "1", 1, false, "NCCL_SHM_DISABLE=1 (test) wants it"},
		{"shared memory", "none", "NCCL_SHM_DISABLE", "0", 1, false, ""},
		{"a profiler", "none", "NCCL_PROFILER_PLUGIN", "nsys", 1, false, "NCCL_PROFILER_PLUGIN=nsys (test) wants it"},
		{"hosts of the library's", "none", "NCCL_HOSTID", "rack-1", 1, false, "NCCL_HOSTID=rack-1 (test) wants it"},
		{"launch order", "none", "NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1, false, "NCCL_LAUNCH_ORDER_IMPLICIT=1 (test) wants it"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			look := func(name string) (string, string) {
				if name == tc.setting {
					return tc.value, "test"
				}
				return "", ""
			}
			if got := proxies(tc.hosts, "NCCL_", look, filepath.Join(dir, tc.class), func() string { return apartText(2, tc.linked, 2) }); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
	// A rank that sees its own device alone knows nothing of links.
	if got, want := apartText(1, false, 2), "whether the devices of this host are joined by NVLink is not known, since this rank sees 1 of them and there are 2 ranks"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
