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
	// Pending is how many connections to one server may be unauthenticated at a time; 0 means DefaultPending. Others
	// wait. It matters for a jump host, and for many names of one server.
	Pending int
}

// DefaultPending is less than the ten from which on sshd drops connections by default (MaxStartups 10:30:100): there
// each counts a little longer than here.
const DefaultPending = 8

// Client opens sessions on hosts. It reads the configuration and keys when the first is opened, once.
type Client struct {
	conf  Config
	load  func() (*environment, error)
	known knownKeys
	files keyFiles

	mu      sync.Mutex // guards pending
	pending map[string]chan struct{}
}

// enter waits until one connection more to the server may be pending; leave ends that.
func (c *Client) enter(ctx context.Context, address string) (leave func(), err error) {
	c.mu.Lock()
	slots := c.pending[address]
	if slots == nil {
		if c.pending == nil {
			c.pending = map[string]chan struct{}{}
		}
		n := c.conf.Pending
		if n <= 0 {
			n = DefaultPending
		}
		slots = make(chan struct{}, n)
		c.pending[address] = slots
	}
	c.mu.Unlock()
	select {
	case slots <- struct{}{}:
		return func() { <-slots }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
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

// nameTries is how often in a row a name may be unknown, with patience: 2 s or so. A name service that does not answer is waited for as a
// host is, but a name that it does not know is mistyped more often than it is new.
const nameTries = 7

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
	unknown := 0 // times in a row
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
		if _, ok := errors.AsType[*unknownName](err); !ok {
			unknown = 0
		} else if unknown++; unknown == nameTries {
			again = false
		}
		if !again || ctx.Err() != nil {
			return nil, givenUp(ctx, e, n, begin)
		}
		if c.conf.OnRetry != nil {
			c.conf.OnRetry(t, err)
		}
		timer := time.NewTimer(pause/2 + rand.N(pause))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, givenUp(ctx, e, n, begin)
		}
		pause = min(pause*3/2, lastPause)
	}
}

// givenUp adds how often it was tried, or says that it is the caller who gave up.
func givenUp(ctx context.Context, e *way.Error, n int, begin time.Time) error {
	cp := *e
	if ctx.Err() != nil && !timedOut(ctx) && !errors.Is(e, context.Cause(ctx)) {
		cp.Cause, cp.Advice, cp.Temporary = fmt.Errorf("%w (last: %w)", context.Cause(ctx), e.Cause), "", false
		return &cp
	}
	if n == 1 {
		return e
	}
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
