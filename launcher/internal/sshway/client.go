// Package sshway is the built-in ssh client as a way to hosts. It follows OpenSSH's configuration and
// known_hosts, checks every host key, authenticates by keys and never asks anything.
package sshway

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/way"
)

// Config is how a Client works.
type Config struct {
	// File is read instead of ~/.ssh/config and /etc/ssh/ssh_config, if it is not "" ("none" for no file at all).
	File string
	// AcceptNewHostKeys lets the key of a host that has none in known_hosts be added there. A key that differs is never
	// accepted.
	AcceptNewHostKeys bool
	// Patient tries a host that refuses or does not answer again until the context of Open ends; for hosts that are
	// still being started. Connections that a server drops before authentication are tried again in any case.
	Patient bool
	// OnRetry, if not nil, is told of each attempt that failed and will be repeated. It may be called concurrently.
	OnRetry func(t way.Target, err error)
}

// Client opens sessions on hosts. It reads the configuration and keys when the first is opened, once.
type Client struct {
	conf  Config
	load  func() (*environment, error)
	known knownKeys
	files keyFiles
}

// environment is what all hosts share.
type environment struct {
	who        account
	statements []statement
}

// New makes a client. It does nothing yet.
func New(conf Config) *Client {
	c := &Client{conf: conf}
	c.load = sync.OnceValues(func() (*environment, error) {
		who, err := currentAccount()
		if err != nil {
			return nil, err
		}
		return readEnvironment(who, conf.File)
	})
	return c
}

func readEnvironment(who account, file string) (*environment, error) {
	sts, err := load(file, who)
	if err != nil {
		return nil, err
	}
	return &environment{who, sts}, nil
}

var _ way.Way = (*Client)(nil)

func (c *Client) resolve(ctx context.Context, t way.Target) (*options, error) {
	env, err := c.load()
	if err != nil {
		return nil, err
	}
	return resolve(ctx, env.statements, c.conf.File, env.who, t)
}

// Pauses between attempts grow to the second and are drawn from half to one and a half times their length, so that
// many clients that one server dropped do not come back together.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 2 * time.Second
)

// Open connects, authenticates and starts the line. A server that drops the connection before authentication is
// tried again until ctx ends.
func (c *Client) Open(ctx context.Context, t way.Target, line string) (way.Session, error) {
	o, err := c.resolve(ctx, t)
	if err != nil {
		return nil, &way.Error{Host: t.Name, Phase: way.PhaseConfigure, Cause: err}
	}
	h := hop{t, o}
	begin := time.Now()
	pause := firstPause
	for n := 1; ; n++ {
		s, err := c.attempt(ctx, h, line)
		if err == nil {
			return s, nil
		}
		e, ok := errors.AsType[*way.Error](err)
		if !ok {
			return nil, err
		}
		again := errors.Is(err, errDropped) || c.conf.Patient && e.Temporary
		if !again || ctx.Err() != nil {
			return nil, givenUp(e, n, begin)
		}
		if c.conf.OnRetry != nil {
			c.conf.OnRetry(t, err)
		}
		timer := time.NewTimer(pause/2 + rand.N(pause))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, givenUp(e, n, begin)
		}
		pause = min(pause*3/2, lastPause)
	}
}

// givenUp adds how often it was tried.
func givenUp(e *way.Error, n int, begin time.Time) error {
	if n == 1 {
		return e
	}
	cp := *e
	cp.Cause = fmt.Errorf("%w (tried %d times in %v)", e.Cause, n, time.Since(begin).Round(100*time.Millisecond))
	return &cp
}

func (c *Client) attempt(ctx context.Context, h hop, line string) (*session, error) {
	l, err := c.connect(ctx, h, 0)
	if err != nil {
		return nil, err
	}
	s, err := startSession(ctx, h, l, line)
	if err != nil {
		l.close()
		return nil, err
	}
	return s, nil
}
