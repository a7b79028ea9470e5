package launcher

import (
	"context"
	"net/netip"
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

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})
