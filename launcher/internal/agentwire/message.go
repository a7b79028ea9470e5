// Package agentwire is what gorun and its agent on another host say to each other over one session: a line by which they know
// each other (Preface), then streams side by side (Mux), of which the first carries messages and the others what ranks read and
// write.
package agentwire

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/placement"
	"github.com/gorun-dev/gorun/launcher/internal/procman"
)

// Protocol is the version of all that is said here. Both sides have the same, or they do not talk.
const Protocol = 1

// MaxMessage bounds a message, in bytes. The largest is a Prepare: 16384 ranks with 4 KiB of arguments and environment each.
const MaxMessage = 64 << 20

// Message is one thing that is said: exactly one field is set. All are pointers.
type Message struct {
	// From gorun.
	Prepare   *Prepare `json:",omitempty"`
	Start     *Start   `json:",omitempty"`
	StopForks *Empty   `json:",omitempty"`
	Signal    *Signal  `json:",omitempty"`
	Lose      *Lose    `json:",omitempty"`
	Query     *Empty   `json:",omitempty"` // asks for State
	Reap      *Empty   `json:",omitempty"`
	Pause     *Empty   `json:",omitempty"` // gorun is stopped (SIGTSTP) until it says more: its silence is no loss
	Bye       *Empty   `json:",omitempty"` // all has arrived; the agent may end
	Check     *Check   `json:",omitempty"` // instead of Prepare: look at the host
	Listen    *Empty   `json:",omitempty"` // after Prepared or Checked: answer probes at all of the host's addresses
	Reach     *Reach   `json:",omitempty"` // after Prepared or Checked
	Move      *Move    `json:",omitempty"` // after Prepared: the node is to be at another address
	Look      *Look    `json:",omitempty"` // after Start
	StdinAsk  *StdinAt `json:",omitempty"` // has the rank read so many bytes of its stdin, and waits for more? Replaces the question before

	// From the agent.
	Prepared    *Prepared   `json:",omitempty"`
	Failed      *Failed     `json:",omitempty"` // instead of Prepared
	Want        *Want       `json:",omitempty"` // before Prepared: files are to be sent
	Started     *Started    `json:",omitempty"`
	RankFailed  *RankFailed `json:",omitempty"`
	Exited      *Exited     `json:",omitempty"`
	Aborted     *Aborted    `json:",omitempty"`
	KeeperDied  *KeeperDied `json:",omitempty"`
	AgentFailed *Text       `json:",omitempty"`
	Met         *Met        `json:",omitempty"`
	Doubt       *Doubt      `json:",omitempty"`
	State       *State      `json:",omitempty"`
	Reaped      *Reaped     `json:",omitempty"`
	StdinWanted *StdinAt    `json:",omitempty"` // the answer to StdinAsk, when it is so
	Looked      *Looked     `json:",omitempty"`
	Log         *Text       `json:",omitempty"` // a line for --verbose
	Checked     *Checked    `json:",omitempty"`
	Listening   *Listening  `json:",omitempty"`
	Reached     *Reached    `json:",omitempty"` // as often as there is news
	Moved       *Moved      `json:",omitempty"`

	// From both.
	Ping  *Empty `json:",omitempty"`
	Clock *Clock `json:",omitempty"` // after Checked: gorun asks, the agent answers with its own
}

// Empty has nothing to say beside its kind.
type Empty struct{}

// Met says that the host's node has met those of all others, or has not in time.
type Met struct {
	Missing []int `json:",omitempty"` // hosts that it has not met
}

// Text is one.
type Text struct{ Text string }

// Strings are byte strings: arguments and environments need not be UTF-8.
type Strings [][]byte

// Pack makes Strings of strings.
func Pack(from []string) Strings {
	s := make(Strings, len(from))
	for i, v := range from {
		s[i] = []byte(v)
	}
	return s
}

// Unpack is the reverse of Pack.
func (s Strings) Unpack() []string {
	out := make([]string, len(s))
	for i, v := range s {
		out[i] = string(v)
	}
	return out
}

// Prepare is a host's part of the job.
type Prepare struct {
	Job        string
	Key        []byte // of the job's gossip
	Node       int    // the host's index
	Placement  []Span // host of each rank
	Host       string // the host's name, as the user wrote it
	Bind       string // address for the host's node; "": the agent's choice
	Reached    string // address at which gorun has reached the host; "": it does not know
	PortFrom   int    // ports for the host's node, both inclusive; 0: any
	PortTo     int
	MasterPort bool      // reserve a port for the job's meeting point
	Programs   []Program // what the host's ranks run
	Dir        []byte
	DirGiven   bool // the user named Dir: there is no other
	Forward    Strings
	Ranks      []Rank
	Stdin      []int         // ranks whose stdin is a stream
	Merge      bool          // the ranks' stderr is their stdout
	Timestamp  bool          // the time before each line of output
	KillGrace  time.Duration // for the end of a session without Reap
	BindTo     string        // what ranks are bound to; "": the host's choice
	HideGPUs   bool          // show each rank a GPU of its own
	ShareGPUs  bool          // ranks take the GPUs in turn
	Items      []Item        // files that the ranks need
}

// World is the ranks of the job that make one MPI_COMM_WORLD, and how they find each other.
type World struct {
	Dialect string
	Runs    []Run
}

// Run is ranks with consecutive numbers that run the same of the job's programs.
type Run struct{ First, Ranks, App int }

// Program is what ranks run.
type Program struct {
	Name []byte // as the user wrote it
	Path []byte // where Name has no slash the host's own PATH counts
	Item int    // which of Items it is, from 1; 0: none, it is there
}

// Item is a file that a host must have: it is sent if it is missing there.
type Item struct {
	At   []byte // where on the host the same file may be
	To   []byte // else its place below the job's own directory; empty: At
	Size int64
	Sum  []byte // SHA-256
	Mode uint32 // permission bits
}

// Want says which of Items the host lacks. gorun opens a stream of kind File for each, in this order.
type Want struct{ Items []int }

// Rank is one rank of a host.
type Rank struct {
	Rank    int
	Program int     `json:",omitempty"` // index in Prepare.Programs
	Dir     []byte  `json:",omitempty"` // the rank's directory, which was given for its program; empty: as Prepare says
	Argv    Strings `json:",omitempty"` // none: that of the rank before
	Env     Strings
}

// Span is ranks with consecutive numbers on one host.
type Span struct{ Host, Ranks int }

// Compress makes Spans of the host of each rank.
func Compress(hostOf []int) []Span {
	var spans []Span
	for _, host := range hostOf {
		if n := len(spans); n > 0 && spans[n-1].Host == host {
			spans[n-1].Ranks++
		} else {
			spans = append(spans, Span{host, 1})
		}
	}
	return spans
}

// Expand is the reverse of Compress; more ranks than most are an error.
func Expand(spans []Span, most int) ([]int, error) {
	var hostOf []int
	for _, s := range spans {
		if s.Ranks < 1 || s.Ranks > most-len(hostOf) {
			return nil, fmt.Errorf("%d more ranks on host %d, after %d: the most is %d", s.Ranks, s.Host, len(hostOf), most)
		}
		for range s.Ranks {
			hostOf = append(hostOf, s.Host)
		}
	}
	return hostOf, nil
}

// Prepared says that the host can start its ranks.
type Prepared struct {
	Machine string   // tells machines apart, and containers on one; "": not known
	Node             // where it is
	At      Address  // the same, with what is known of that address
	Notes   []string `json:",omitempty"` // for people
	Dir     []byte   // the ranks' directory
	OwnDir  bool     // it is the job's own, since Dir of Prepare, or a file of it, is missing there
	NoDir   bool     `json:",omitempty"` // Dir of Prepare is missing there
	Place   Place
	MPI     []string `json:",omitempty"` // the MPI library that each of Programs is linked with
}

// Place is what the host gives its ranks.
type Place struct {
	Host  placement.HostPlace
	Ranks []placement.RankPlace // in the order of Prepare's
}

// Node is where a host's node is.
type Node struct {
	Addr       string // with the port
	MasterPort int    // of the job's meeting point; 0: none was asked for
}

// Failed says why the host cannot take part.
type Failed struct {
	Code int // exit code, if it is the program's fault; else 0
	Text string
}

// Start starts the ranks.
type Start struct {
	Seeds      []string // nodes of other hosts
	MasterAddr string
	MasterPort int
	Interface  string // the one that holds the address at which the others reach this host; "": not known
	MPI        *MPI   `json:",omitempty"`
}

// MPI is what ranks of programs with MPI need.
type MPI struct {
	Worlds   []World
	Hosts    Strings // names of all hosts of the job
	Universe int     // how many ranks they take
}

// Signal sends a signal to the ranks.
type Signal struct {
	Signal int
	All    bool
	Ranks  []int // unless All
}

// StdinAt is a place in the stdin of a rank.
type StdinAt struct {
	Rank  int
	Bytes int64
}

// Lose gives another host up.
type Lose struct {
	Host        int
	Name, Cause string
}

// Started says that no more ranks will be started, and which were.
type Started struct {
	Ranks []StartedRank
	At    time.Duration // when this was said, since Start came
}

// StartedRank is one rank of Started: all of the host are named.
type StartedRank struct {
	Rank  int
	PID   int           // 0: not started
	After time.Duration // since Start came
}

// RankFailed says that a rank could not be started.
type RankFailed struct {
	Rank int
	Failed
}

// Exited says how a rank ended.
type Exited struct {
	Rank, PID, Code, Signal int
	Core, OOM               bool
	Sent                    int           // the last signal to end it that it had been sent before, 0: none
	After                   time.Duration // since Start came
	State                   *State        `json:",omitempty"` // on host 0

	MPI procman.Departure `json:",omitzero"`
}

// Aborted says that a rank asks for the end of the job, and that its process had not ended then.
type Aborted struct {
	Rank  int
	After time.Duration // since Start came
	MPI   procman.Departure
}

// KeeperDied is the end of the host's keeper.
type KeeperDied struct{ PID int }

// Doubt says that gossip holds a host for dead, or that this host has not reached it for a long time.
type Doubt struct {
	Host      int
	Unreached bool
}

// State is what the node of host 0 knows of the job.
type State struct {
	Ended      []int
	Suspicions []Suspicion
}

// Suspicion is what one rank says of another.
type Suspicion struct{ By, Rank int }

// Reaped says that nothing of the ranks is left.
type Reaped struct {
	Killed int
	Joined []Joined
	State  *State  `json:",omitempty"` // on host 0
	Made   Strings `json:",omitempty"` // names of files that ranks made in the job's own directory, some of them
	NMade  int     `json:",omitempty"` // how many
}

// Joined says of a rank that it joined the job, and whether it said goodbye.
type Joined struct {
	Rank int
	Left bool
}

// Decode reads one message.
func Decode(b []byte) (*Message, error) {
	m := &Message{}
	if err := json.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("message of %d bytes: %w", len(b), err)
	}
	n := 0
	for _, said := range reflect.ValueOf(m).Elem().Fields() {
		if !said.IsNil() {
			n++
		}
	}
	if n != 1 {
		return nil, fmt.Errorf("message says %d things: %.60q", n, b)
	}
	return m, nil
}

// Encode is the form of a message on the wire: its length in four bytes, then JSON.
func Encode(m *Message) ([]byte, error) {
	b, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	if len(b) > MaxMessage {
		return nil, fmt.Errorf("message of %d bytes, the most is %d", len(b), MaxMessage)
	}
	return append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(b)), uint32(len(b))), b...), nil
}

// Read reads the next message. io.EOF is an end between messages.
func Read(r io.Reader) (*Message, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > MaxMessage {
		return nil, fmt.Errorf("message of %d bytes, the most is %d", n, MaxMessage)
	}
	// Memory grows with what has come, not with what was announced.
	b, err := io.ReadAll(io.LimitReader(r, int64(n)))
	if err == nil && len(b) < int(n) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, fmt.Errorf("message of %d bytes: %w", n, err)
	}
	return Decode(b)
}

const prefaceStart = "gorun agent "

// WritePreface is the agent's first line: the protocol, and its build.
func WritePreface(w io.Writer, build string) error {
	_, err := fmt.Fprintf(w, "%s%d %s\n", prefaceStart, Protocol, build)
	return err
}

// maxPreface bounds the line.
const maxPreface = 256

// ReadPreface reads the agent's first line, and nothing behind it. It is an error if the agent is of another build.
func ReadPreface(r io.Reader, build string) error {
	var line []byte
	for one := make([]byte, 1); ; {
		n, err := r.Read(one)
		if n == 1 {
			if one[0] == '\n' {
				break
			}
			line = append(line, one[0])
		}
		if err != nil && len(line) == 0 {
			return fmt.Errorf("no agent: %w", err)
		}
		if err != nil || len(line) > maxPreface {
			return fmt.Errorf("no agent, but %q", line)
		}
	}
	var protocol int
	text, ok := strings.CutPrefix(string(line), prefaceStart)
	version, its, _ := strings.Cut(text, " ")
	if _, err := fmt.Sscan(version, &protocol); !ok || err != nil {
		return fmt.Errorf("no agent, but %q", line)
	}
	if protocol != Protocol || its != build {
		return &VersionError{protocol, its, build}
	}
	return nil
}

// VersionError is an agent of another version of gorun.
type VersionError struct {
	Protocol    int
	Build, Ours string
}

func (e *VersionError) Error() string {
	if e.Protocol != Protocol {
		return fmt.Sprintf("the agent speaks version %d of the protocol, gorun version %d", e.Protocol, Protocol)
	}
	return fmt.Sprintf("the agent is gorun %s, this is %s", e.Build, e.Ours)
}

// Header says what a stream carries.
type Header struct {
	Kind Kind
	Rank int
}

// Kind is the kind of a stream.
type Kind byte

// The kinds of streams.
const (
	Stdin  Kind = iota + 1 // from gorun
	Stdout                 // from the agent
	Stderr                 // from the agent
	End                    // from the agent: no stream comes after it
	File                   // from gorun: an Item's bytes; Rank is its index
)

func (h Header) encode() []byte {
	return binary.BigEndian.AppendUint32([]byte{byte(h.Kind)}, uint32(h.Rank))
}

func readHeader(r io.Reader) (Header, error) {
	var b [5]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return Header{}, err
	}
	h := Header{Kind: Kind(b[0]), Rank: int(binary.BigEndian.Uint32(b[1:]))}
	if h.Kind < Stdin || h.Kind > File {
		return Header{}, errors.New("stream of an unknown kind")
	}
	return h, nil
}
