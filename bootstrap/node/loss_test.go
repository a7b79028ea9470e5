package node

import (
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/gorun-dev/gorun/bootstrap/internal/store"
)

// gossips runs the members of a job's hosts, and nothing else, for a time that the test's clock makes short. It returns the hosts that gossip
// held for dead. What happens on the way is up to the test.
func gossips(t *testing.T, hosts int, loss int64, run func(w *network, addrs []string)) (dead []int) {
	synctest.Test(t, func(t *testing.T) {
		w := newNetwork(true)
		w.loss.Store(loss)
		var mu sync.Mutex
		var nodes []*Node
		var addrs []string
		place := make([]int, hosts)
		for i := range place {
			place[i] = i
		}
		var transports []*faulty // all before any is used: the mock network makes them without a lock
		for i := range hosts {
			tr := w.transport(t, strconv.Itoa(i))
			transports, addrs = append(transports, tr), append(addrs, tr.addr)
		}
		for i, tr := range transports {
			n := &Node{
				cfg: Config{Job: "job", Node: i, NodeOf: place, Key: []byte(testKey), Seeds: addrs[:1:1], Logf: func(string, ...any) {},
					Confirm: func(host int) bool {
						mu.Lock()
						defer mu.Unlock()
						if !slices.Contains(dead, host) {
							dead = append(dead, host)
						}
						return false
					}},
				quit: make(chan struct{}), meshed: make(chan struct{}), doubted: map[int]bool{}, store: store.New(place), nodes: hosts,
			}
			if err := n.startMesh(func(c *memberlist.Config) { memberSettings(c); c.Transport = tr }); err != nil {
				t.Fatal(err)
			}
			nodes = append(nodes, n)
		}
		for i, n := range nodes {
			if err := n.Ready(t.Context()); err != nil {
				t.Fatalf("host %d: %v", i, err)
			}
		}
		run(w, addrs)
		mu.Lock()
		dead = slices.Clone(dead)
		mu.Unlock()
		for _, n := range nodes {
			n.Over()
			n.stop()
		}
		time.Sleep(time.Minute) // memberlist does not wait for its last probes
		w.close()
	})
	return dead
}

// A network that loses a tenth of all that the members say takes no host for dead: here for ten minutes of the members' time.
func TestLossIsNoDeath(t *testing.T) {
	if dead := gossips(t, 8, 100, func(*network, []string) { time.Sleep(10 * time.Minute) }); dead != nil {
		t.Errorf("hosts %v were held for dead", dead)
	}
}

// The same members with the same loss do see one that is gone.
func TestDeathIsSeenThroughLoss(t *testing.T) {
	dead := gossips(t, 8, 100, func(w *network, addrs []string) {
		w.setCut(true, addrs[5])
		time.Sleep(30 * time.Second)
	})
	// The one that is cut off takes the others for dead.
	if !slices.Contains(dead, 5) {
		t.Errorf("hosts %v were held for dead, want 5 among them", dead)
	}
}
