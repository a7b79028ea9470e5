package node

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// exchanged is what a host gets.
type exchanged struct {
	all [][]byte
	err error
}

// exchange has a host give something.
func (c *cluster) exchange(host int, name string, hosts []int, data []byte) <-chan exchanged {
	got := make(chan exchanged, 2)
	c.nodes[host].Exchange(name, hosts, data, func(all [][]byte, err error) { got <- exchanged{all, err} })
	return got
}

// wait waits for what a host gets.
func (c *cluster) wait(got <-chan exchanged) exchanged {
	c.t.Helper()
	select {
	case e := <-got:
		return e
	case <-time.After(time.Minute):
		c.t.Fatal("the exchange has not ended in a minute")
		return exchanged{}
	}
}

// Each host gets what all have given, in the order of hosts, also where messages are lost and data needs many of them.
func TestExchange(t *testing.T) {
	big := bytes.Repeat([]byte("0123456789abcdef"), 3*givePiece/16+1)
	for _, test := range []struct {
		name  string
		loss  int64
		hosts []int
		data  [][]byte // of hosts
	}{
		{"all", 0, nil, [][]byte{[]byte("a"), []byte("b"), []byte("c")}},
		{"nothing to give", 0, nil, [][]byte{nil, []byte("b"), nil}},
		{"large", 0, nil, [][]byte{[]byte("a"), big, big[5:]}},
		{"messages are lost", 50, nil, [][]byte{big, []byte("b"), []byte("c")}},
		{"some", 0, []int{1, 2}, [][]byte{[]byte("b"), []byte("c")}},
		{"one", 0, []int{2}, [][]byte{[]byte("c")}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newCluster(t, true, 3, 1)
			c.startAll()
			c.ready()
			c.net.loss.Store(test.loss)
			hosts := test.hosts
			if hosts == nil {
				hosts = []int{0, 1, 2}
			}
			for round := range 2 {
				name := fmt.Sprint("round ", round)
				var got []<-chan exchanged
				for i, h := range hosts {
					got = append(got, c.exchange(h, name, test.hosts, test.data[i]))
				}
				for i, h := range hosts {
					e := c.wait(got[i])
					if e.err != nil {
						t.Fatalf("host %d: %v", h, e.err)
					}
					if diff := cmp.Diff(texts(e.all), texts(test.data)); diff != "" {
						t.Errorf("host %d has (-got +want):\n%s", h, diff)
					}
				}
			}
		})
	}
}

// texts is data as strings: nil and empty are the same.
func texts(data [][]byte) []string {
	var out []string
	for _, d := range data {
		out = append(out, string(d))
	}
	return out
}

// Exchanges that cannot be say why.
func TestExchangeRefused(t *testing.T) {
	c := newCluster(t, true, 2, 1)
	c.startAll()
	c.ready()
	for _, test := range []struct {
		name  string
		hosts []int
		data  []byte
		want  string
	}{
		{"not among them", []int{1}, nil, "exchange x: host 0 takes no part"},
		{"no such host", []int{0, 2}, nil, "exchange x: hosts [0 2] of 2"},
		{"out of order", []int{1, 0}, nil, "exchange x: hosts [1 0] of 2"},
		{"too much", nil, make([]byte, maxGive+1), fmt.Sprintf("exchange x: %d bytes of host 0, the most is %d", maxGive+1, maxGive)},
	} {
		if e := c.wait(c.exchange(0, "x", test.hosts, test.data)); e.err == nil || e.err.Error() != test.want {
			t.Errorf("%s: got error %v, want %s", test.name, e.err, test.want)
		}
	}
	first := c.exchange(0, "twice", nil, nil)
	if e := c.wait(c.exchange(0, "twice", nil, nil)); e.err == nil || !strings.Contains(e.err.Error(), "is under way already") {
		t.Errorf("the second of one name: got error %v", e.err)
	}
	c.wait(c.exchange(1, "twice", nil, nil))
	if e := c.wait(first); e.err != nil {
		t.Errorf("the first of one name: %v", e.err)
	}
}

// What all have given is kept once for all that wait for it, however many they are.
func TestExchangeSharesMessages(t *testing.T) {
	n := &Node{cfg: Config{NodeOf: []int{0, 1, 2}, Logf: t.Logf}, nodes: 3}
	n.exchanges.init()
	n.mesh = &mesh{node: n, links: make([]*link, 3)}
	for h := 1; h < 3; h++ {
		n.mesh.links[h] = newLink(n.mesh, h) // nothing is sent
	}
	n.gathered("x", &gathering{hosts: []int{0, 1, 2}, data: [][]byte{[]byte("a"), make([]byte, givePiece+1), nil}}, nil)
	one, other := n.mesh.links[1].unacked, n.mesh.links[2].unacked
	if len(one) != 4 || len(other) != 4 {
		t.Fatalf("%d and %d messages, want 4 each", len(one), len(other))
	}
	for i := range one {
		if &one[i][0] != &other[i][0] {
			t.Errorf("message %d is there twice", i)
		}
	}
}

// Hosts that wait for one that is lost, or whose node is closed, get an error.
func TestExchangeLost(t *testing.T) {
	for lost := range 3 {
		t.Run(fmt.Sprint("host ", lost), func(t *testing.T) {
			c := newCluster(t, true, 3, 1)
			c.startAll()
			c.ready()
			var got []<-chan exchanged
			for h := range 3 {
				if h != lost {
					got = append(got, c.exchange(h, "x", nil, []byte("data")))
				}
			}
			c.net.setCut(true, c.addrs[lost])
			for h := range 3 {
				if h != lost {
					c.nodes[h].LoseHost(lost, fmt.Sprint("h", lost), "is cut off")
				}
			}
			for _, g := range got {
				if e := c.wait(g); e.err == nil || !strings.Contains(e.err.Error(), fmt.Sprintf("host h%d", lost)) {
					t.Errorf("got error %v, want one that names host h%d", e.err, lost)
				}
			}
			survivor := (lost + 1) % 3
			if lost != 0 && survivor == 0 {
				survivor = 3 - lost
			}
			if e := c.wait(c.exchange(survivor, "later", nil, nil)); e.err == nil {
				t.Error("an exchange with a host that is lost has no error")
			}
			open := c.exchange(lost, "open", nil, nil)
			c.nodes[lost].Over()
			c.nodes[lost].Close()
			if e := c.wait(open); !errors.Is(e.err, errNodeClosed) {
				t.Errorf("the node is closed: got error %v", e.err)
			}
		})
	}
}
