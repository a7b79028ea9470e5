package wire

import (
	"encoding/binary"
	"math"

	"github.com/gorun-dev/gorun/bootstrap/internal/store"
)

// Encoder appends values to B.
type Encoder struct{ B []byte }

func (e *Encoder) Uint(v uint64)  { e.B = binary.AppendUvarint(e.B, v) }
func (e *Encoder) Int(v int)      { e.B = binary.AppendVarint(e.B, int64(v)) }
func (e *Encoder) Bytes(v []byte) { e.Uint(uint64(len(v))); e.B = append(e.B, v...) }
func (e *Encoder) String(v string) {
	e.Uint(uint64(len(v)))
	e.B = append(e.B, v...)
}

func (e *Encoder) Bool(v bool) {
	if v {
		e.B = append(e.B, 1)
	} else {
		e.B = append(e.B, 0)
	}
}

// Decoder takes values from B. After the first fault all are zero and Err says what was wrong.
type Decoder struct {
	B   []byte
	Err error
}

func (d *Decoder) fail(what string) {
	if d.Err == nil {
		d.Err = malformed("%s", what)
	}
	d.B = nil
}

// Fail enters a fault that the caller has found in what was taken.
func (d *Decoder) Fail(what string) { d.fail(what) }

func (d *Decoder) Uint() uint64 {
	v, n := binary.Uvarint(d.B)
	if n <= 0 {
		d.fail("number is cut off or too large")
		return 0
	}
	d.B = d.B[n:]
	return v
}

func (d *Decoder) Int() int {
	v, n := binary.Varint(d.B)
	if n <= 0 || v > math.MaxInt32 || v < math.MinInt32 {
		d.fail("number is cut off or too large")
		return 0
	}
	d.B = d.B[n:]
	return int(v)
}

// Bytes returns a part of B.
func (d *Decoder) Bytes() []byte {
	n := d.Uint()
	if n > uint64(len(d.B)) {
		d.fail("value is cut off")
		return nil
	}
	v := d.B[:n:n]
	d.B = d.B[n:]
	return v
}

func (d *Decoder) String() string { return string(d.Bytes()) }

func (d *Decoder) Bool() bool {
	if len(d.B) == 0 || d.B[0] > 1 {
		d.fail("flag is cut off or unknown")
		return false
	}
	v := d.B[0] == 1
	d.B = d.B[1:]
	return v
}

// Count reads the length of a list whose elements take at least one byte each.
func (d *Decoder) Count() int {
	n := d.Uint()
	if n > uint64(len(d.B)) {
		d.fail("list is cut off")
		return 0
	}
	return int(n)
}

// End is the error of the whole, which also must be used up.
func (d *Decoder) End() error {
	if d.Err == nil && len(d.B) > 0 {
		d.fail("bytes are left over")
	}
	return d.Err
}

func (e *Encoder) Ints(v []int) {
	e.Uint(uint64(len(v)))
	for _, n := range v {
		e.Int(n)
	}
}

func (d *Decoder) Ints() []int {
	n := d.Count()
	v := make([]int, 0, n)
	for range n {
		v = append(v, d.Int())
	}
	return v
}

func (e *Encoder) Request(q *store.Request) {
	e.Uint(uint64(q.Kind))
	e.String(q.Name)
	e.Bytes(q.Value)
	e.Bool(q.Quiet)
	if q.Kind != store.Gather && q.Kind != store.CloseGroup {
		return
	}
	e.Uint(uint64(q.Opening))
	e.Uint(q.Gen)
	e.Bool(q.Barrier)
	e.String(q.What)
	e.Bool(q.Ranks != nil)
	if q.Ranks != nil {
		e.Ints(q.Ranks)
	}
}

func (d *Decoder) Request() *store.Request {
	q := &store.Request{}
	kind := d.Uint()
	if kind < uint64(store.Put) || kind > uint64(store.CloseGroup) {
		d.fail("unknown kind of request")
		return q
	}
	q.Kind = store.Kind(kind)
	q.Name, q.Value, q.Quiet = d.String(), d.Bytes(), d.Bool()
	if q.Kind != store.Gather && q.Kind != store.CloseGroup {
		return q
	}
	opening := d.Uint()
	if opening > math.MaxUint32 {
		d.fail("opening is too large")
	}
	q.Opening, q.Gen, q.Barrier, q.What = uint32(opening), d.Uint(), d.Bool(), d.String()
	if d.Bool() {
		q.Ranks = d.Ints()
	}
	return q
}

func (e *Encoder) end(end store.End) {
	e.Int(end.Rank)
	e.String(end.Host)
	e.String(end.Cause)
	e.Bool(end.Left)
}

func (d *Decoder) end() store.End {
	return store.End{Rank: d.Int(), Host: d.String(), Cause: d.String(), Left: d.Bool()}
}

func (e *Encoder) Reply(r store.Reply) {
	e.Bool(r.Err != nil)
	if r.Err == nil {
		e.Bool(r.Values != nil)
		if r.Values != nil {
			e.Uint(uint64(len(r.Values)))
			for _, v := range r.Values {
				e.Bytes(v)
			}
		}
		return
	}
	e.Uint(uint64(r.Err.Kind))
	switch r.Err.Kind {
	case store.Ended:
		e.end(r.Err.End)
	case store.Cancelled:
		e.Ints(r.Err.Missing)
		// Ranks of a host mostly follow each other: a name is said where it changes.
		e.Bool(r.Err.Hosts != nil)
		for i, host := range r.Err.Hosts {
			same := i > 0 && host == r.Err.Hosts[i-1]
			e.Bool(same)
			if !same {
				e.String(host)
			}
		}
		e.String(r.Err.Text)
	case store.Cycle:
		e.Uint(uint64(len(r.Err.Waits)))
		for _, w := range r.Err.Waits {
			e.Int(w.Rank)
			e.String(w.What)
		}
	default:
		e.String(r.Err.Text)
	}
}

// Reply decodes an answer; its values are copies.
func (d *Decoder) Reply() store.Reply {
	var r store.Reply
	if !d.Bool() {
		if d.Bool() {
			n := d.Count()
			r.Values = make([][]byte, 0, n)
			for range n {
				r.Values = append(r.Values, append([]byte{}, d.Bytes()...))
			}
		}
		return r
	}
	e := &store.Error{Kind: store.ErrorKind(d.Uint())}
	r.Err = e
	switch e.Kind {
	case store.Ended:
		e.End = d.end()
	case store.Cancelled:
		e.Missing = d.Ints()
		if d.Bool() {
			e.Hosts = make([]string, len(e.Missing))
			for i := range e.Hosts {
				if d.Bool() && i > 0 {
					e.Hosts[i] = e.Hosts[i-1]
				} else {
					e.Hosts[i] = d.String()
				}
			}
		}
		e.Text = d.String()
	case store.Cycle:
		for range d.Count() {
			e.Waits = append(e.Waits, store.CycleWait{Rank: d.Int(), What: d.String()})
		}
	case store.Refused, store.Lost, store.GaveUp:
		e.Text = d.String()
	default:
		d.fail("unknown kind of error")
	}
	return r
}

func (e *Encoder) Events(events []store.Event) {
	e.Uint(uint64(len(events)))
	for _, ev := range events {
		e.Uint(uint64(ev.Kind))
		e.Int(ev.Node)
		e.end(ev.End)
	}
}

func (d *Decoder) Events() []store.Event {
	n := d.Count()
	events := make([]store.Event, 0, n)
	for range n {
		kind := d.Uint()
		if kind < uint64(store.Joined) || kind > uint64(store.HostLost) {
			d.fail("unknown kind of event")
			return nil
		}
		events = append(events, store.Event{Kind: store.EventKind(kind), Node: d.Int(), End: d.end()})
	}
	return events
}

// HelloBody is what a rank says of itself.
type HelloBody struct {
	Version    uint64
	Job        string
	Rank, Size int
}

func (e *Encoder) Hello(h HelloBody) {
	e.Uint(h.Version)
	e.String(h.Job)
	e.Int(h.Rank)
	e.Int(h.Size)
}

func (d *Decoder) Hello() HelloBody {
	h := HelloBody{Version: d.Uint()}
	if h.Version != Version {
		return h // the rest may look different
	}
	h.Job, h.Rank, h.Size = d.String(), d.Int(), d.Int()
	return h
}

// WelcomeBody is the answer to a hello.
type WelcomeBody struct {
	Refused string // why; empty: welcome
	Node    int
	Addr    string // of this host, for data between hosts; "" in a job of one host
	DataKey []byte // what every connection between hosts proves; empty in a job of one host
	Ports   [2]int // those on which ranks listen for other hosts, first and last; zero: any
	NodeOf  []int  // host of each rank
}

func (e *Encoder) Welcome(w WelcomeBody) {
	e.String(w.Refused)
	e.Int(w.Node)
	e.String(w.Addr)
	e.Bytes(w.DataKey)
	e.Int(w.Ports[0])
	e.Int(w.Ports[1])
	// Ranks of a host mostly follow each other.
	for i := 0; i < len(w.NodeOf); {
		j := i
		for j < len(w.NodeOf) && w.NodeOf[j] == w.NodeOf[i] {
			j++
		}
		e.Int(w.NodeOf[i])
		e.Uint(uint64(j - i))
		i = j
	}
}

// maxRanks bounds what a welcome can make us allocate.
const maxRanks = 1 << 24

func (d *Decoder) Welcome() WelcomeBody {
	w := WelcomeBody{Refused: d.String(), Node: d.Int(), Addr: d.String(), DataKey: d.Bytes(), Ports: [2]int{d.Int(), d.Int()}}
	for d.Err == nil && len(d.B) > 0 {
		node, n := d.Int(), d.Uint()
		if n > maxRanks-uint64(len(w.NodeOf)) {
			d.fail("placement of too many ranks")
			break
		}
		for range n {
			w.NodeOf = append(w.NodeOf, node)
		}
	}
	return w
}
