// Package node is the host's side of the control plane: it serves the ranks of its host on an abstract
// unix socket and is one member of the job's memberlist. The launcher runs one a host.
package node

import (
	"context"
	"net/netip"
)

// Config describes a node.
type Config struct {
	Job    string
	Node   int                              // this host's index
	NodeOf []int                            // host index of each rank of the job; len is the job's size
	Host   string                           // this host's name, for errors
	Key    []byte                           // gossip key, 32 bytes, random per job; needed where the job has several hosts
	Bind   netip.AddrPort                   // where memberlist listens; zero: loopback, any port
	Seeds  []string                         // addresses of other members to join
	Logf   func(format string, args ...any) // nil: discard
}

// Node is a running node.
type Node struct{ todo int }

// Start opens the control socket. The memberlist member is started with the first rank that joins on a job of one host, at once else.
func Start(ctx context.Context, c Config) (*Node, error) { panic("stub") }

// Control is the name of the control socket, for rankenv.Env.Control.
func (n *Node) Control() string { panic("stub") }

// RankExited tells the job that the process of a local rank has ended ("exited with code 3", "killed by SIGSEGV").
// A rank that never joined, or said goodbye, and exited with code 0 is no death.
func (n *Node) RankExited(rank int, code int, cause string) { panic("stub") }

// Joined reports whether the local rank joined, and whether it said goodbye.
func (n *Node) Joined(rank int) (joined, left bool) { panic("stub") }

// Close ends the node; ranks that are still connected see their control connection end.
func (n *Node) Close() error { panic("stub") }
