package node

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

const (
	// givePiece bounds what one message carries of an exchange, in bytes: others get their turn between them.
	givePiece = 256 << 10
	// maxGive bounds what one host gives, in bytes.
	maxGive = 64 << 20
)

// errNodeClosed is the error of what waits when the node is closed.
var errNodeClosed = errors.New("the node is closed")

// exchanges are meetings of hosts, at which each gets what all have given.
type exchanges struct {
	mu   sync.Mutex // guards the rest; no call is made under it
	over error      // none is possible any more
	own  map[string]*exchange
	meet map[string]*gathering // on host 0

	failed map[string]error // on host 0: why a meeting to which hosts may still come has failed
}

// exchange is one that this host takes part in.
type exchange struct {
	hosts []int
	data  [][]byte // what has come so far, of all hosts up to the last one
	done  func([][]byte, error)
}

// gathering is an exchange as host 0 has it.
type gathering struct {
	hosts  []int
	data   [][]byte // by index in hosts
	whole  []bool
	missed int // hosts that have not given all
}

func (x *exchanges) init() {
	x.own, x.meet, x.failed = map[string]*exchange{}, map[string]*gathering{}, map[string]error{}
}

// Exchange gives data of this host to a meeting of hosts, in ascending order (nil: all of the job), and calls done once: with what each of them has given, in
// that order, when all have called Exchange with the same name and hosts; or with an error when one of them is lost, or the node is closed. A name is used once. It
// does not wait. done must not wait either, nor change what it gets; it may be called before Exchange returns.
func (n *Node) Exchange(name string, hosts []int, data []byte, done func(all [][]byte, err error)) {
	if hosts == nil {
		hosts = make([]int, n.nodes)
		for i := range hosts {
			hosts[i] = i
		}
	}
	if err := n.checkExchange(hosts, n.cfg.Node, len(data)); err != nil {
		done(nil, fmt.Errorf("exchange %s: %w", name, err))
		return
	}
	if len(hosts) == 1 {
		done([][]byte{data}, nil)
		return
	}
	x := &n.exchanges
	x.mu.Lock()
	err := x.over
	if err == nil && x.own[name] != nil {
		err = fmt.Errorf("exchange %s: is under way already", name)
	}
	if err != nil {
		x.mu.Unlock()
		done(nil, err)
		return
	}
	x.own[name] = &exchange{hosts: slices.Clone(hosts), done: done}
	x.mu.Unlock()
	n.mesh.want()
	pieces(data, func(piece []byte, last bool) {
		if n.cfg.Node == 0 {
			n.given(0, name, hosts, piece, last)
			return
		}
		n.tellHead(opGive, func(e *wire.Encoder) { e.String(name); e.Ints(hosts); e.Bool(last); e.Bytes(piece) })
	})
}

// checkExchange says why a host cannot give so many bytes to a meeting.
func (n *Node) checkExchange(hosts []int, by, size int) error {
	in := false
	for i, h := range hosts {
		if h < 0 || h >= n.nodes || i > 0 && h <= hosts[i-1] {
			return fmt.Errorf("hosts %v of %d: want them in ascending order", hosts, n.nodes)
		}
		in = in || h == by
	}
	switch {
	case !in:
		return fmt.Errorf("%s takes no part", n.named(by))
	case size > maxGive:
		return fmt.Errorf("%d bytes of %s, the most is %d", size, n.named(by), maxGive)
	}
	return nil
}

// pieces calls f with the pieces of data; with an empty one if there is none.
func pieces(data []byte, f func(piece []byte, last bool)) {
	for {
		piece := data[:min(len(data), givePiece)]
		data = data[len(piece):]
		f(piece, len(data) == 0)
		if len(data) == 0 {
			return
		}
	}
}

// given takes a piece of what a host gives, on host 0.
func (n *Node) given(from int, name string, hosts []int, piece []byte, last bool) {
	x := &n.exchanges
	x.mu.Lock()
	if err := x.failed[name]; err != nil {
		x.mu.Unlock()
		n.gathered(name, &gathering{hosts: []int{from}}, err)
		return
	}
	g := x.meet[name]
	var err error
	if g == nil {
		g = &gathering{hosts: slices.Clone(hosts), data: make([][]byte, len(hosts)), whole: make([]bool, len(hosts)), missed: len(hosts)}
		x.meet[name] = g
		for _, h := range hosts {
			if h != 0 && n.store.Lost(h) {
				err = fmt.Errorf("%s is lost", n.named(h))
			}
		}
	}
	i := slices.Index(g.hosts, from)
	switch {
	case err != nil:
	case !slices.Equal(g.hosts, hosts):
		err = fmt.Errorf("%s takes it for one of %s, others of %s", n.named(from), n.namedAll(hosts), n.namedAll(g.hosts))
		g.hosts = slices.Compact(slices.Sorted(slices.Values(slices.Concat(g.hosts, hosts)))) // all of them are told
	case g.whole[i]:
		err = fmt.Errorf("%s gives twice", n.named(from))
	case len(g.data[i])+len(piece) > maxGive:
		err = fmt.Errorf("more than %d bytes of %s", maxGive, n.named(from))
	}
	if err != nil {
		x.failed[name] = err
	} else {
		g.data[i] = append(g.data[i], piece...)
		if last {
			g.whole[i] = true
			g.missed--
		}
		if g.missed > 0 {
			x.mu.Unlock()
			return
		}
	}
	delete(x.meet, name)
	x.mu.Unlock()
	n.gathered(name, g, err)
}

// gathered ends a meeting, on host 0.
func (n *Node) gathered(name string, g *gathering, err error) {
	text := ""
	if err != nil {
		text = fmt.Sprintf("exchange %s: %v", name, err)
	}
	var msgs [][]byte // for all hosts but 0: links keep them until they have come, and there may be a thousand
	tell := func(i int, piece []byte, last bool) {
		msgs = append(msgs, encode(opGiven, func(e *wire.Encoder) { e.String(name); e.String(text); e.Int(i); e.Bool(last); e.Bytes(piece) }))
	}
	if err != nil {
		tell(0, nil, true)
	} else {
		for i, data := range g.data {
			pieces(data, func(piece []byte, last bool) { tell(i, piece, last) })
		}
	}
	for _, h := range g.hosts {
		switch {
		case h == 0 && err == nil:
			n.exchanged(name, g.data, nil)
		case h == 0:
			n.exchanged(name, nil, errors.New(text))
		default:
			for _, msg := range msgs {
				n.mesh.links[h].send(msg)
			}
		}
	}
}

// exchanged ends a meeting that this host takes part in.
func (n *Node) exchanged(name string, data [][]byte, err error) {
	x := &n.exchanges
	x.mu.Lock()
	own := x.own[name]
	delete(x.own, name)
	x.mu.Unlock()
	if own != nil {
		own.done(data, err)
	}
}

// exchangeMessage carries out what another host says of an exchange.
func (n *Node) exchangeMessage(from int, op byte, d *wire.Decoder) error {
	name := d.String()
	if op == opGive {
		hosts, last, piece := d.Ints(), d.Bool(), d.Bytes()
		if err := d.End(); err != nil {
			return err
		}
		if err := n.checkExchange(hosts, from, len(piece)); err != nil {
			return fmt.Errorf("exchange %s: %w", name, err)
		}
		n.given(from, name, hosts, piece, last)
		return nil
	}
	text, i, last, piece := d.String(), d.Int(), d.Bool(), d.Bytes()
	if err := d.End(); err != nil {
		return err
	}
	if text != "" {
		n.exchanged(name, nil, errors.New(text))
		return nil
	}
	x := &n.exchanges
	x.mu.Lock()
	own := x.own[name]
	if own == nil {
		x.mu.Unlock()
		return nil // it has failed meanwhile
	}
	if i == len(own.data) && i < len(own.hosts) {
		own.data = append(own.data, nil)
	}
	if i < 0 || i != len(own.data)-1 {
		x.mu.Unlock()
		return fmt.Errorf("exchange %s: a piece of the host at %d of %d comes out of turn", name, i, len(own.hosts))
	}
	own.data[i] = append(own.data[i], piece...)
	done := last && i == len(own.hosts)-1
	x.mu.Unlock()
	if done {
		n.exchanged(name, own.data, nil)
	}
	return nil
}

// loseExchanges ends the meetings of a host that is lost: on host 0 those that it takes part in; elsewhere all, as the host is host 0.
func (n *Node) loseExchanges(host int, cause error) {
	x := &n.exchanges
	lost := map[string]*gathering{}
	x.mu.Lock()
	if host == 0 {
		x.mu.Unlock()
		n.endExchanges(cause)
		return
	}
	for name, g := range x.meet {
		if slices.Contains(g.hosts, host) {
			lost[name] = g
			delete(x.meet, name)
		}
	}
	x.mu.Unlock()
	for name, g := range lost {
		n.gathered(name, g, cause)
	}
}

// endExchanges ends what waits: the node ends, or host 0 is lost.
func (n *Node) endExchanges(cause error) {
	x := &n.exchanges
	x.mu.Lock()
	if x.over == nil {
		x.over = cause
	}
	own := x.own
	x.own, x.meet = map[string]*exchange{}, map[string]*gathering{}
	x.mu.Unlock()
	for _, e := range own {
		e.done(nil, cause)
	}
}
