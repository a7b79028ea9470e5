package agentwire

import "time"

// Address is one at which other hosts may reach a host.
type Address struct {
	IP        string // without a zone
	Bind      string `json:",omitempty"` // the host's own address behind address translation; "": IP
	Interface string `json:",omitempty"` // that holds it; "": none does
	Bits      int    `json:",omitempty"` // of the network's prefix; 0: not known
	Bridge    bool   `json:",omitempty"` // the interface is a bridge without a card, as container engines make it
	SSH       bool   `json:",omitempty"` // ssh reaches the host at it
	Port      int    `json:",omitempty"` // where the host answers probes; 0: Err says why it does not
	Err       string `json:",omitempty"`
}

// Listening says where a host answers probes: at the address of Prepared or Checked, which comes first, and at all others. gorun's next message
// but Reach ends it.
type Listening struct{ Addrs []Address }

// Reach asks an agent to reach other hosts, where they answer probes.
type Reach struct{ Hosts []Peer }

// Peer is a host to be reached, at an address with a port.
type Peer struct {
	Host int
	Addr string
}

// Reached is how that went, for some of those that were asked for.
type Reached struct{ Hosts []ReachedHost }

// ReachedHost is one of Reached.
type ReachedHost struct {
	Host int
	Addr string        // as asked for
	Err  string        `json:",omitempty"` // why it was not reached
	Took time.Duration // for the first answer
}

// Move asks for the node to be at another of the host's addresses.
type Move struct {
	Bind      string
	Advertise string // what the others are told; "": Bind
}

// Moved says where it is. Failed is the other answer.
type Moved struct{ Node }
