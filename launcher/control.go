package launcher

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/node"
)

// control is what the launcher needs of this host's bootstrap node.
type control interface {
	Control() string
	RankExited(rank, code int, cause string)
	Joined(rank int) (joined, left bool)
	Ended() []int
	Suspicions() []node.Suspicion
	Addr() string
	AddSeeds(addrs ...string)
	Ready(ctx context.Context) error
	LoseHost(host int, name, cause string)
	Unreached(d time.Duration) []int
	Standings() []node.Standing
	Stacks(ctx context.Context) map[int][]byte
	Exchange(name string, hosts []int, data []byte, done func(all [][]byte, err error))
	Over()
	Close() error
}

func startNode(ctx context.Context, c node.Config) (control, error) { return node.Start(ctx, c) }

// meetTimeout bounds the time until the nodes of all hosts have met.
const meetTimeout = 30 * time.Second

// apart says which hosts a host's node has not met; an agent may say anything.
func (r *runner) apart(host int, missing []int) string {
	var names []string
	for _, i := range missing {
		if i >= 0 && i < len(r.plan.Hosts) {
			names = append(names, r.plan.Hosts[i].Name)
		}
	}
	if n := len(names); n > 4 {
		names = append(names[:4], fmt.Sprintf("%d more", n-4))
	}
	return fmt.Sprintf("host %s: has not met %s in %v", r.plan.Hosts[host].Name, strings.Join(names, ", "), meetTimeout)
}

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})
