package node

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap/internal/store"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
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
		{"not among them", []int{1}, nil, "exchange x: host h0 takes no part"},
		{"no such host", []int{0, 2}, nil, "exchange x: hosts [0 2] of 2: want them in ascending order"},
		{"out of order", []int{1, 0}, nil, "exchange x: hosts [1 0] of 2: want them in ascending order"},
		{"too much", nil, make([]byte, maxGive+1), fmt.Sprintf("exchange x: %d bytes of host h0, the most is %d", maxGive+1, maxGive)},
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

// Hosts that do not agree who takes part get an error, each of them, that names them.
func TestExchangeDisagrees(t *testing.T) {
	c := newCluster(t, true, 3, 1)
	c.startAll()
	c.ready()
	one, two := c.exchange(1, "x", nil, nil), c.exchange(2, "x", []int{0, 2}, nil)
	want := []string{
		"exchange x: host h2 takes it for one of host h0, host h2, others of host h0, host h1, host h2",
		"exchange x: host h1 takes it for one of host h0, host h1, host h2, others of host h0, host h2",
	}
	for _, got := range []exchanged{c.wait(one), c.wait(two)} {
		if got.err == nil || !slices.Contains(want, got.err.Error()) {
			t.Errorf("got error %v, want one of %q", got.err, want)
		}
	}
	if late := c.wait(c.exchange(0, "x", nil, nil)); late.err == nil || !slices.Contains(want, late.err.Error()) {
		t.Errorf("the host that comes late: got error %v, want one of %q", late.err, want)
	}
}

// What other hosts say of meetings, and is wrong, is told with the name of who says it.
func TestExchangeMessages(t *testing.T) {
	n := &Node{cfg: Config{NodeOf: []int{0, 1, 2}, Logf: t.Logf}, nodes: 3, store: store.New([]int{0, 1, 2})}
	defer n.store.Close()
	n.store.NameHost(1, "b")
	n.exchanges.init()
	n.mesh = &mesh{node: n, links: []*link{nil, newLink(&mesh{node: n}, 1), newLink(&mesh{node: n}, 2)}}
	give := func(hosts []int, last bool, piece []byte) []byte {
		return encode(opGive, func(e *wire.Encoder) { e.String("x"); e.Ints(hosts); e.Bool(last); e.Bytes(piece) })
	}
	given := func(i int) []byte {
		return encode(opGiven, func(e *wire.Encoder) { e.String("x"); e.String(""); e.Int(i); e.Bool(false); e.Bytes(nil) })
	}
	for _, test := range []struct {
		from, to int
		messages [][]byte
		want     string // of the last message's error, or of what host 0 is told
	}{
		{1, 0, [][]byte{give([]int{0, 2}, true, nil)}, "exchange x: host b takes no part"},
		{2, 0, [][]byte{give([]int{0, 1}, true, nil)}, "exchange x: host 2 takes no part"},
		{1, 0, [][]byte{give([]int{0, 1}, true, nil), give([]int{0, 1}, true, nil)}, "exchange x: host b gives twice"},
		{2, 0, [][]byte{give([]int{0, 2}, false, make([]byte, maxGive)), give([]int{0, 2}, true, []byte{1})}, fmt.Sprintf("exchange x: more than %d bytes of host 2", maxGive)},
		{1, 0, [][]byte{encode(opSuspect, func(e *wire.Encoder) { e.Int(2); e.Int(0) })}, "host b speaks for rank 2"},
		{1, 0, [][]byte{given(0)}, fmt.Sprintf("message of kind %d from host b to host 0", opGiven)},
		{0, 1, [][]byte{given(-1)}, "exchange x: a piece of the host at -1 of 2 comes out of turn"},
		{0, 1, [][]byte{given(1)}, "exchange x: a piece of the host at 1 of 2 comes out of turn"},
	} {
		n.cfg.Node = test.to
		var got error
		n.exchanges.own["x"] = &exchange{hosts: []int{0, 1}, done: func(_ [][]byte, err error) { got = err }}
		for _, m := range test.messages {
			if err := n.carryOut(test.from, m); err != nil {
				got = err
			}
		}
		if got == nil || got.Error() != test.want {
			t.Errorf("messages of host %d to host %d: got error %v, want %s", test.from, test.to, got, test.want)
		}
		n.exchanges.init()
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
			if e := c.wait(c.exchange(survivor, "later", nil, nil)); e.err == nil || !strings.Contains(e.err.Error(), fmt.Sprintf("host h%d", lost)) {
				t.Errorf("an exchange with a host that is lost: got error %v, want one that names host h%d", e.err, lost)
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
