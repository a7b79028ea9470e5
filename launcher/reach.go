package launcher

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
)

const (
	// probeWait bounds a probe by each of TCP and UDP.
	probeWait = 3 * time.Second
	// probeAgain is when a datagram that was not answered is sent again: the first may be lost while addresses are resolved.
	probeAgain = 200 * time.Millisecond
	// maxProbes bounds the hosts that are probed at once.
	maxProbes = 64
	nonceSize = node.NonceSize
)

// prober answers the probes of other hosts on one port, by TCP and UDP, so that they know that they have reached this host and no other:
// its answer to a nonce is made with a key that all hosts have, and its index. The bootstrap node answers in the same way where it listens.
type prober struct {
	key  []byte
	host int
	tcp  net.Listener
	udp  net.PacketConn
	quit context.Context
	end  context.CancelFunc
	wait sync.WaitGroup
}

// newProber answers on an address, on a port of a range; 0: any.
func newProber(key []byte, host int, on netip.Addr, from, to int) (*prober, error) {
	first := from
	if from == 0 {
		first, to = 0, 8 // TCP and UDP need the same port, which may take several tries
	}
	var why error
	for port := first; port <= to; port++ {
		at := uint16(port)
		if from == 0 {
			at = 0
		}
		l, err := net.Listen("tcp", netip.AddrPortFrom(on, at).String())
		if err != nil {
			why = err
			continue
		}
		c, err := net.ListenPacket("udp", l.Addr().String())
		if err != nil {
			why = err
			l.Close()
			continue
		}
		p := &prober{key: key, host: host, tcp: l, udp: c}
		p.quit, p.end = context.WithCancel(context.Background())
		p.wait.Go(p.serveTCP)
		p.wait.Go(p.serveUDP)
		return p, nil
	}
	if from != 0 {
		return nil, fmt.Errorf("no port from %d to %d is free on %v (--port-range): %v", from, to, on, bareNet(why))
	}
	return nil, fmt.Errorf("listen on %v: %w", on, bareNet(why))
}

// close ends it. p may be nil.
func (p *prober) close() {
	if p == nil {
		return
	}
	p.end()
	p.tcp.Close()
	p.udp.Close()
	p.wait.Wait()
}

func (p *prober) serveTCP() {
	for {
		c, err := p.tcp.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(probeAgain) // no descriptors are left
			continue
		}
		p.wait.Go(func() {
			defer c.Close()
			defer context.AfterFunc(p.quit, func() { c.Close() })()
			c.SetDeadline(time.Now().Add(probeWait))
			var q [1 + nonceSize]byte
			if _, err := io.ReadFull(c, q[:]); err == nil && q[0] == node.ProbeMark {
				c.Write(proof(p.key, p.host, q[1:]))
			}
		})
	}
}

func (p *prober) serveUDP() {
	buf := make([]byte, 1+nonceSize+1) // one more, to see what is too long
	for {
		n, from, err := p.udp.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil && n == 1+nonceSize && buf[0] == node.ProbeMark {
			p.udp.WriteTo(proof(p.key, p.host, buf[1:n]), from)
		}
	}
}

// proof is what the host with an index answers to a nonce.
func proof(key []byte, host int, nonce []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write(binary.BigEndian.AppendUint64([]byte("gorun probe "), uint64(host)))
	h.Write(nonce)
	return h.Sum(nil)
}

// errStranger is an answer of something that is not the host.
var errStranger = errors.New("something else answers there")

// probe reaches a host. The first answer took as long as it says.
func probe(ctx context.Context, key []byte, host int, addr string) (took time.Duration, err error) {
	begin := time.Now()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	udp := make(chan error, 1)
	go func() { udp <- probeBy(ctx, "udp", key, host, addr) }()
	err = probeBy(ctx, "tcp", key, host, addr)
	took = time.Since(begin)
	if err != nil {
		cancel() // one is enough
	}
	unreached := <-udp
	if err != nil {
		return 0, fmt.Errorf("tcp: %w", err)
	}
	if unreached != nil {
		return 0, fmt.Errorf("udp: %w", unreached)
	}
	return took, nil
}

func probeBy(ctx context.Context, network string, key []byte, host int, addr string) error {
	end := time.Now().Add(probeWait)
	dialer := net.Dialer{Deadline: end}
	c, err := dialer.DialContext(ctx, network, addr)
	if err != nil {
		return bareNet(err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	var q [1 + nonceSize]byte
	q[0] = node.ProbeMark
	nonce := q[1:]
	rand.Read(nonce)
	answer := make([]byte, sha256.Size)
	for n := 0; ; n++ {
		if _, err := c.Write(q[:]); err != nil {
			return bareNet(err)
		}
		until := end
		if again := time.Now().Add(probeAgain << n); network == "udp" && again.Before(end) {
			until = again
		}
		c.SetReadDeadline(until)
		_, err := io.ReadFull(c, answer)
		switch {
		case err == nil && hmac.Equal(answer, proof(key, host, nonce)):
			return nil
		case err == nil, err == io.EOF, err == io.ErrUnexpectedEOF:
			return errStranger
		case until == end || !errors.Is(err, os.ErrDeadlineExceeded):
			return bareNet(err)
		}
	}
}

// bareNet is a network's error without operation and addresses, which stand beside it.
func bareNet(err error) error {
	if no, ok := errors.AsType[syscall.Errno](err); ok {
		return no
	}
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("no answer within %v", probeWait)
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Timeout() {
		return fmt.Errorf("no answer within %v", probeWait)
	}
	return err
}

// reach probes hosts, all at once, and tells as it goes how that went for each. It returns when all is told, or ctx has ended.
func reach(ctx context.Context, key []byte, hosts []agentwire.Peer, tell func([]agentwire.ReachedHost)) {
	results := make(chan agentwire.ReachedHost, len(hosts))
	var wait sync.WaitGroup
	defer wait.Wait()
	wait.Go(func() {
		turns := make(chan struct{}, maxProbes)
		for _, h := range hosts {
			turns <- struct{}{}
			wait.Go(func() {
				defer func() { <-turns }()
				took, err := probe(ctx, key, h.Host, h.Addr)
				r := agentwire.ReachedHost{Host: h.Host, Addr: h.Addr, Took: took}
				if err != nil {
					r.Err = err.Error()
				}
				results <- r
			})
		}
	})
	tick := time.NewTicker(tellReached)
	defer tick.Stop()
	var news []agentwire.ReachedHost
	for told := 0; told < len(hosts); {
		select {
		case r := <-results:
			news = append(news, r)
			if told+len(news) < len(hosts) {
				continue
			}
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if len(news) > 0 {
			tell(news)
			told += len(news)
			news = nil
		}
	}
}
