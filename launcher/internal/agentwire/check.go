package agentwire

import (
	"encoding/json"
	"time"
)

// Check asks an agent what its host is like, for a job of which nothing is started.
type Check struct {
	Key      []byte // by which hosts prove to each other who they are
	Host     int    // its index
	Bind     string // as in Prepare
	Reached  string // as in Prepare
	PortFrom int
	PortTo   int
	Device   string
	Dir      []byte // the ranks' directory; empty: none is asked about
	Programs []CheckProgram
}

// CheckProgram is a program that an agent is asked about.
type CheckProgram struct {
	Name []byte // as the user wrote it
	Path []byte // on gorun's host
	Sum  []byte // its SHA-256; empty: it is not compared
}

// Checked is the answer.
type Checked struct {
	Machine  string          // as in Prepared
	At       Address         // where it answers probes, as in Prepared; Err says why it does not
	Facts    json.RawMessage // hostfacts.Facts
	Programs []Verdict       // as Check.Programs
}

// Verdict is what an agent says of a program's file on its host.
type Verdict struct {
	Path  string `json:",omitempty"` // where it is
	Same  bool   `json:",omitempty"` // it is the one of Sum
	Other bool   `json:",omitempty"` // there is another one
	Err   string `json:",omitempty"` // why there is none
}

// Clock is a wall clock's time.
type Clock struct{ Now time.Time }
