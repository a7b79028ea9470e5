package sshway

import (
	"context"

	"github.com/gorun-dev/gorun/launcher/internal/way"
)

// Route is the way to a host as the configuration has it, with no step taken on it.
type Route struct {
	User    string
	Host    string // the name or address to connect to
	Port    int
	Jumps   []string // jump hosts in order: "me@gate:22"
	Command string   // what connects to the first of all hosts on the way; "": gorun does
}

// Route tells the way to a host. It connects to nothing; where the configuration needs OpenSSH's client to be understood (Match exec), that is asked.
func (c *Client) Route(ctx context.Context, t way.Target) (Route, error) {
	o, err := c.resolve(ctx, t)
	if err != nil {
		return Route{}, err
	}
	return c.route(ctx, hop{t, o}, 0)
}

func (c *Client) route(ctx context.Context, h hop, depth int) (Route, error) {
	r := Route{User: h.o.user, Host: h.o.hostName, Port: h.o.port}
	if h.o.jumps == "" {
		r.Command = h.o.proxyCommand
		return r, nil
	}
	jumps, err := c.jumpHops(ctx, h, depth)
	if err != nil {
		return r, err
	}
	for i, j := range jumps {
		if i == 0 {
			first, err := c.route(ctx, j, depth+1)
			if err != nil {
				return r, err
			}
			r.Jumps, r.Command = first.Jumps, first.Command
		}
		r.Jumps = append(r.Jumps, j.o.user+"@"+j.address())
	}
	return r, nil
}
