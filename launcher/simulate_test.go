package launcher

import (
	"container/heap"
	"math/bits"
	"math/rand/v2"
	"testing"
	"time"
)

// What one host costs, measured on two cores of 2026 with OpenSSH 9.2 and hosts in namespaces: the launcher's from runs with 1, 16 and 64
// hosts, the rest from their profiles. Only their ratios matter here.
const (
	simClient   = 2100 * time.Microsecond // CPU of who opens a session: handshake, messages, end
	simServer   = 20 * time.Millisecond   // CPU of sshd and its shell on the host
	simAgent    = 8 * time.Millisecond    // CPU of the agent, its keeper and a rank
	simTrip     = 60 * time.Millisecond   // what opening a session waits beside: round trips, and the kernel's pauses
	simMemory   = 210 << 10               // bytes of the launcher for a session
	simExchange = time.Millisecond / 2    // an exchange of state between nodes, whatever its size
	simState    = 8 * time.Microsecond    // for each host that it tells of, on either side
)

// sim is a way to launch: each opens sessions to as many as its fan-out.
type sim struct {
	fanOut int // 0: the launcher opens all
	cores  int // of the launcher, and of each host
}

// launch is when the last host is prepared, and the CPU of the launcher. Who opens sessions has a bound on those that are being opened and as
// many cores as it has; hosts are machines of their own.
func (s sim) launch(n int) (last, client time.Duration) {
	fan := s.fanOut
	if fan == 0 {
		fan = n
	}
	client = time.Duration(min(fan, n)) * simClient
	ready := make([]time.Duration, n+1) // when a host can open sessions itself; 0 is the launcher
	next := 1
	for from := 0; from <= n && next <= n; from++ {
		slots := make(times, min(maxHandshakes, fan)) // when each is free
		cores := make(times, s.cores)
		for i := range slots {
			slots[i] = ready[from]
		}
		for i := range cores {
			cores[i] = ready[from]
		}
		for range fan {
			if next > n {
				break
			}
			begin := max(slots[0], cores[0])
			cores.set(begin + simClient)
			done := begin + simClient + simTrip + simServer + simAgent
			slots.set(done)
			ready[next] = done
			last = max(last, done)
			next++
		}
	}
	return last, client
}

// times is a heap of times.
type times []time.Duration

func (t times) Len() int           { return len(t) }
func (t times) Less(i, j int) bool { return t[i] < t[j] }
func (t times) Swap(i, j int)      { t[i], t[j] = t[j], t[i] }
func (t *times) Push(x any)        { *t = append(*t, x.(time.Duration)) }
func (t *times) Pop() any          { panic("never") }

// set replaces the first.
func (t *times) set(d time.Duration) {
	(*t)[0] = d
	heap.Fix(t, 0)
}

// meet is how long the nodes take to know of each other by exchanges of state alone, as package node does them (waves of 64 hosts each 50 ms,
// then again until all are known); gossip, which it leaves out, only helps. It is also the CPU of the busiest node.
func meet(n int, rnd *rand.Rand) (all, busiest time.Duration) {
	words := (n + 63) / 64
	known := make([][]uint64, n)
	count := make([]int, n)
	free := make([]time.Duration, n) // when a node has time for an exchange
	cpu := make([]time.Duration, n)
	tries := make([]int, n)
	var order events
	for i := range n {
		known[i] = make([]uint64, words)
		known[i][i/64] |= 1 << (i % 64)
		count[i] = 1
		order = append(order, event{time.Duration(i/64) * 50 * time.Millisecond, i})
	}
	heap.Init(&order)
	for order.Len() > 0 {
		e := order[0]
		a := e.node
		if count[a] == n {
			heap.Pop(&order)
			all = max(all, e.at)
			continue
		}
		b := rnd.IntN(min(n, allSeeds)) * n / min(n, allSeeds) // a seed
		if count[a] > allSeeds || a == b {
			for b = rnd.IntN(n); known[a][b/64]&(1<<(b%64)) == 0 || a == b && count[a] > 1; {
				b = rnd.IntN(n)
			}
		}
		begin := max(e.at, free[a], free[b])
		took := simExchange + time.Duration(count[a]+count[b])*simState
		union := 0
		for w := range words {
			u := known[a][w] | known[b][w]
			known[a][w], known[b][w] = u, u
			union += bits.OnesCount64(u)
		}
		count[a], count[b] = union, union
		free[a], free[b] = begin+took, begin+took
		cpu[a] += took
		cpu[b] += took
		tries[a]++
		pause := min(50*time.Millisecond<<min(tries[a], 6), 2*time.Second)
		order[0].at = begin + took + max(pause, 2*(begin+took-e.at))
		heap.Fix(&order, 0)
	}
	for _, c := range cpu {
		busiest = max(busiest, c)
	}
	return all, busiest
}

type event struct {
	at   time.Duration
	node int
}

type events []event

func (e events) Len() int           { return len(e) }
func (e events) Less(i, j int) bool { return e[i].at < e[j].at }
func (e events) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)        { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// A launch on many hosts, simulated: gorun opens all sessions itself, which needs no keys between hosts, as long as that fits into the default
// --connect-timeout. A tree would be faster from some hundred hosts on, in a launch of seconds.
func TestSimulateLaunch(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	t.Logf("%7s %6s %12s %12s %12s %14s %12s %12s %12s", "hosts", "cores", "flat", "tree of 32", "tree of 128", "launcher CPU", "memory MiB", "nodes meet", "busiest node")
	var before time.Duration
	hosts := []int{1, 64, 1000, 10000}
	if testing.Short() { // one goroutine computes all
		hosts = hosts[:3]
	}
	for _, n := range hosts {
		for _, cores := range []int{2, 16} {
			flat, client := sim{0, cores}.launch(n)
			var trees []time.Duration
			for _, fan := range []int{32, 128} {
				last, of := sim{fan, cores}.launch(n)
				trees = append(trees, last)
				if want := time.Duration(min(n, fan)) * simClient; of != want {
					t.Errorf("%d hosts, a tree of %d: %v of CPU at the launcher, want %v", n, fan, of, want)
				}
				if n > 10*fan && last >= flat {
					t.Errorf("%d hosts: a tree of %d takes %v, flat %v: the simulation is wrong", n, fan, last, flat)
				}
			}
			all, busiest := meet(n, rnd)
			t.Logf("%7d %6d %12v %12v %12v %14v %12d %12v %12v", n, cores, flat.Round(time.Millisecond), trees[0].Round(time.Millisecond), trees[1].Round(time.Millisecond),
				client.Round(time.Millisecond), n*simMemory>>20, all.Round(time.Millisecond), busiest.Round(time.Millisecond))
			if flat > DefaultConnectTimeout {
				t.Errorf("%d hosts from %d cores: %v, which is beyond the default --connect-timeout of %v", n, cores, flat, DefaultConnectTimeout)
			}
			if cores == 2 && flat < before {
				t.Errorf("%d hosts take less time than fewer: %v after %v", n, flat, before)
			}
			if all > meetTimeout && n <= 1000 {
				t.Errorf("the nodes of %d hosts meet after %v, and have %v", n, all, meetTimeout)
			}
			if cores == 2 {
				before = flat
			}
		}
	}
	if one, _ := (sim{0, 2}).launch(1); one != simClient+simTrip+simServer+simAgent {
		t.Errorf("one host takes %v", one)
	}
}
