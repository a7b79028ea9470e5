package launcher

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
)

func TestDialled(t *testing.T) {
	for _, n := range []int{1, 2, 3, fullMesh, fullMesh + 1, 64, 1000} {
		reached := make([]bool, n) // from host 0 along the dials
		dials := 0
		queue := []int{0}
		for reached[0] = true; len(queue) > 0; queue = queue[1:] {
			seen := map[int]bool{queue[0]: true}
			for _, k := range dialled(n, queue[0], fullMesh) {
				if seen[k] {
					t.Errorf("%d hosts: host %d dials host %d twice, or itself", n, queue[0], k)
				}
				seen[k] = true
				dials++
				if !reached[k] {
					reached[k] = true
					queue = append(queue, k)
				}
			}
			if queue[0] != 0 && !seen[0] {
				t.Errorf("%d hosts: host %d does not dial the first", n, queue[0])
			}
		}
		want := n * (n - 1)
		if n > fullMesh {
			want = 2*n - 2
		}
		if dials != want { // as many as all hosts have: all were come to
			t.Errorf("%d hosts: %d dials, want %d", n, dials, want)
		}
	}
}

// testNet is a chooser whose hosts have addresses; a dial fails as failing says, "" answers and "-" never does.
func testNet(addrs [][]agentwire.Address, failing func(by, host int, ip string) string) *chooser {
	var ids []int
	var names []string
	var first []agentwire.Address
	for i := range addrs {
		ids, names, first = append(ids, i), append(names, string(rune('a'+i))), append(first, addrs[i][0])
	}
	c := newChooser(ids, names, first, fullMesh)
	c.addrs = addrs
	for i := range c.all {
		c.all[i] = true
	}
	for by, peers := range c.dials() {
		for _, p := range peers {
			ip, _, _ := strings.Cut(p.Addr, ":")
			r := agentwire.ReachedHost{Host: p.Host, Addr: p.Addr, Took: time.Microsecond}
			if took, err := time.ParseDuration(failing(by, p.Host, ip)); err == nil {
				r.Took = took
			} else {
				r.Err = failing(by, p.Host, ip)
			}
			if r.Err != "-" {
				if err := c.note(by, r); err != nil {
					panic(err)
				}
			}
		}
	}
	return c
}

func TestChoose(t *testing.T) {
	ssh := func(ip, name string) agentwire.Address {
		return agentwire.Address{IP: ip, Interface: name, Bits: 24, Port: 1, SSH: true}
	}
	nic := func(ip, name string) agentwire.Address {
		return agentwire.Address{IP: ip, Interface: name, Bits: 24, Port: 1}
	}
	bridge := func(ip string) agentwire.Address {
		return agentwire.Address{IP: ip, Interface: "docker0", Bits: 24, Port: 1, Bridge: true}
	}
	nat := func(ip, bind string) agentwire.Address {
		return agentwire.Address{IP: ip, Bind: bind, Port: 1, SSH: true}
	}
	// Two hosts, of which the first has the addresses of the case; the second has 10.0.0.2 and 10.1.0.2.
	for _, tt := range []struct {
		name    string
		addrs   []agentwire.Address
		failing map[string]string
		want    string
		open    bool // it is not final
	}{
		{"ssh's", []agentwire.Address{ssh("10.0.0.1", "eth0"), nic("10.1.0.1", "eth1")}, nil, "10.0.0.1 (eth0)", false},
		{"ssh's, also where it is slower", []agentwire.Address{ssh("10.0.0.1", "eth0"), nic("10.1.0.1", "eth1")}, map[string]string{"10.0.0.1": "1s"}, "10.0.0.1 (eth0)", false},
		{"another", []agentwire.Address{ssh("10.0.0.1", "eth0"), nic("10.1.0.1", "eth1")}, map[string]string{"10.0.0.1": "tcp: connection refused"},
			"10.1.0.1 (eth1): ssh's 10.0.0.1 was not reached by b: tcp: connection refused", false},
		{"one in a network of others", []agentwire.Address{ssh("10.9.0.1", "eth0"), nic("10.8.0.1", "eth1"), nic("10.1.0.1", "eth2")}, map[string]string{"10.9.0.1": "x"},
			"10.1.0.1 (eth2): ssh's 10.9.0.1 was not reached by b: x", false},
		{"the near one", []agentwire.Address{ssh("10.9.0.1", "eth0"), nic("10.8.0.1", "eth1"), nic("10.7.0.1", "eth2")}, map[string]string{"10.9.0.1": "x", "10.8.0.1": "40ms", "10.7.0.1": "1ms"},
			"10.7.0.1 (eth2): ssh's 10.9.0.1 was not reached by b: x", false},
		{"the first of those that are alike", []agentwire.Address{ssh("10.9.0.1", "eth0"), nic("10.8.0.1", "eth1"), nic("10.7.0.1", "eth2")}, map[string]string{"10.9.0.1": "x", "10.8.0.1": "300us", "10.7.0.1": "20us"},
			"10.8.0.1 (eth1): ssh's 10.9.0.1 was not reached by b: x", false},
		{"no bridge", []agentwire.Address{ssh("10.9.0.1", "eth0"), bridge("10.8.0.1"), nic("10.7.0.1", "eth2")}, map[string]string{"10.9.0.1": "x"},
			"10.7.0.1 (eth2): ssh's 10.9.0.1 was not reached by b: x", false},
		{"translated last", []agentwire.Address{ssh("10.9.0.1", "eth0"), nic("10.8.0.1", "eth1"), nat("1.2.3.4", "10.9.0.1")}, map[string]string{"10.9.0.1": "x"},
			"10.8.0.1 (eth1): ssh's 10.9.0.1 was not reached by b: x", false},
		{"translated", []agentwire.Address{ssh("10.9.0.1", "eth0"), nat("1.2.3.4", "10.9.0.1")}, map[string]string{"10.9.0.1": "x"},
			"1.2.3.4 (translated to 10.9.0.1): ssh's 10.9.0.1 was not reached by b: x", false},
		{"a better one may still be", []agentwire.Address{ssh("10.9.0.1", "eth0"), nic("10.8.0.1", "eth1")}, map[string]string{"10.9.0.1": "-"},
			"10.8.0.1 (eth1): ssh's 10.9.0.1 was not reached by b: no answer", true},
		{"a worse one may still be", []agentwire.Address{ssh("10.0.0.1", "eth0"), nic("10.8.0.1", "eth1")}, map[string]string{"10.8.0.1": "-"}, "10.0.0.1 (eth0)", false},
		{"none", []agentwire.Address{ssh("10.9.0.1", "eth0"), {IP: "10.8.0.1", Interface: "eth1", Err: "no port is free"}}, map[string]string{"10.9.0.1": "udp: no answer within 3s"},
			"the other hosts do not all reach it at any of its addresses: 10.9.0.1 (eth0): not reached by b: udp: no answer within 3s; 10.8.0.1 (eth1): no port is free", false},
		{"none of one", []agentwire.Address{ssh("10.9.0.1", "eth0")}, map[string]string{"10.9.0.1": "x"}, "the other hosts do not reach it: 10.9.0.1 (eth0): not reached by b: x", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := testNet([][]agentwire.Address{tt.addrs, {ssh("10.0.0.2", "eth0"), nic("10.1.0.2", "eth1")}}, func(_, host int, ip string) string {
				if text, ok := tt.failing[ip]; ok && host == 0 {
					return text
				}
				return "10us"
			})
			k, final := c.best(0)
			got := ""
			if k < 0 {
				got = c.none(0).Error()
			} else {
				got = c.chosen(0, k)
			}
			if got != tt.want || final == tt.open {
				t.Errorf("got %q, final %v\nwant %q, final %v", got, final, tt.want, !tt.open)
			}
		})
	}

	// The reasons of several hosts stand together.
	three := [][]agentwire.Address{{ssh("10.0.0.1", "eth0")}, {ssh("10.0.0.2", "eth0")}, {ssh("10.0.0.3", "eth0")}}
	c := testNet(three, func(by, host int, _ string) string {
		if host == 1 {
			return fmt.Sprint("e", by/2)
		}
		return "10us"
	})
	if got, want := c.none(1).Error(), "the other hosts do not reach it: 10.0.0.2 (eth0): not reached by a: e0; not reached by c: e1"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if err := c.note(0, agentwire.ReachedHost{Host: 5, Addr: "10.0.0.1:1"}); err == nil {
		t.Error("a host that is not there was reached")
	}
	if err := c.take(0, &agentwire.Message{Listening: &agentwire.Listening{Addrs: []agentwire.Address{{IP: "10.0.0.9", Port: 1}}}}); err == nil {
		t.Error("the first address has changed")
	}
	more := []agentwire.Address{ssh("10.0.0.1", "eth0"), {IP: "rubbish", Port: 1}}
	if err := c.take(0, &agentwire.Message{Listening: &agentwire.Listening{Addrs: more}}); err == nil {
		t.Error("an address that is none")
	}
}

// findAddrs asks for more only where that is needed, and does not wait for addresses that lead nowhere.
func TestFindAddrs(t *testing.T) {
	for _, tt := range []struct {
		name  string
		mute  map[string]bool // addresses that give no answer
		wrong map[string]bool // and those that give a wrong one
		want  []int
		asked []string // what hosts were asked, sorted
	}{
		{"the first do", nil, nil, []int{0, 0}, []string{"0 reaches 10.0.0.1:1", "1 reaches 10.0.0.0:1"}},
		{"one refuses", nil, map[string]bool{"10.0.0.1:1": true}, []int{0, 1},
			[]string{"0 listens", "0 reaches 10.0.0.1:1", "0 reaches 10.1.0.1:1", "1 listens", "1 reaches 10.0.0.0:1"}},
		{"one is mute", map[string]bool{"10.0.0.1:1": true}, nil, []int{0, 1},
			[]string{"0 listens", "0 reaches 10.0.0.1:1", "0 reaches 10.1.0.1:1", "1 listens", "1 reaches 10.0.0.0:1"}},
		{"none does", nil, map[string]bool{"10.0.0.1:1": true, "10.1.0.1:1": true}, []int{0, -1},
			[]string{"0 listens", "0 reaches 10.0.0.1:1", "0 reaches 10.1.0.1:1", "1 listens", "1 reaches 10.0.0.0:1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			answers := make(chan addrAnswer, 100)
			asked := make(chan string, 100)
			var hosts []addrHost
			for i := range 2 {
				at := func(k int) agentwire.Address { return agentwire.Address{IP: fmt.Sprintf("10.%d.0.%d", k, i), Port: 1} }
				hosts = append(hosts, addrHost{id: i, name: fmt.Sprint("h", i), first: at(0), send: func(m *agentwire.Message) {
					if m.Listen != nil {
						asked <- fmt.Sprintf("%d listens", i)
						answers <- addrAnswer{host: i, m: &agentwire.Message{Listening: &agentwire.Listening{Addrs: []agentwire.Address{at(0), at(1)}}}}
						return
					}
					for _, p := range m.Reach.Hosts {
						asked <- fmt.Sprintf("%d reaches %s", i, p.Addr)
						r := agentwire.ReachedHost{Host: p.Host, Addr: p.Addr}
						if tt.wrong[p.Addr] {
							r.Err = "refused"
						}
						if !tt.mute[p.Addr] {
							answers <- addrAnswer{host: i, m: &agentwire.Message{Reached: &agentwire.Reached{Hosts: []agentwire.ReachedHost{r}}}}
						}
					}
				}})
			}
			c, err := findAddrs(t.Context(), hosts, answers, fullMesh, false)
			if err != nil {
				t.Fatal(err)
			}
			var got []int
			for i := range hosts {
				k, _ := c.best(i)
				got = append(got, k)
			}
			if d := cmp.Diff(got, tt.want); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
			close(asked)
			if d := cmp.Diff(sorted(asked), tt.asked); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
		})
	}
}
