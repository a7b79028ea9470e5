// Package push starts gorun's agent on a host that may have nothing of gorun: if the host lacks this very build, by hash, it is sent over the
// session that then becomes the agent's. No install, no PATH, no shell beyond one /bin/sh line.
package push

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/way"
)

// Options of Open.
type Options struct {
	Builds *Builds
	// Progress is told how many bytes of how many have been sent to a host; nil: nobody. It may be called from several goroutines for several hosts.
	Progress func(host string, sent, size int)
}

// Started is a session with an agent: what is read from it is the agent's from the first byte.
type Started struct {
	way.Session
	r *bufio.Reader

	File   string // the agent's, on the host
	Arch   string // the host's, as Go names it
	Pushed bool   // it was sent now
	Noise  string // what the login shell's start-up files wrote before, at most maxNoise bytes
}

func (s *Started) Read(p []byte) (int, error) { return s.r.Read(p) }

const (
	maxNoise = 4 << 10
	maxLine  = 4 << 10
)

// Error says why the agent did not start on a host.
type Error struct {
	Host   string // way.Target.Name
	Reason string
	Said   string // what was read and what stderr holds, for the user
	Err    error  // the session's end, or ctx's cause; nil for the script's own verdict
}

func (e *Error) Error() string {
	text := e.Host + ": start the agent: " + e.Reason
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	if e.Said != "" {
		text += "; it said: " + e.Said
	}
	return text
}

func (e *Error) Unwrap() error { return e.Err }

// Open opens a session on a host and starts the agent in it. ctx bounds all of it; afterwards the session lives until it is closed. An error of the
// way is a *way.Error, any other an *Error.
func Open(ctx context.Context, w way.Way, t way.Target, o Options) (*Started, error) {
	var nonce [8]byte
	rand.Read(nonce[:])
	mark := "gorun-" + hex.EncodeToString(nonce[:])
	own := o.Builds.own
	line := "exec /bin/sh -c '" + script + "' gorun " + mark + " " + own.arch + ":" + own.hash
	s, err := w.Open(ctx, t, line)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	d := &dialogue{s: s, r: bufio.NewReaderSize(s, 16<<10), mark: mark, host: t.Name, o: o}
	st, err := d.run(ctx)
	if !stop() || err != nil {
		ended := make(chan error, 1)
		go func() { ended <- s.Wait() }()
		select {
		case exit := <-ended: // its words on stderr are there now
			if e, ok := errors.AsType[*Error](err); ok && e.Err == io.EOF {
				e.Err = exit
			}
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
		s.Close()
		if err == nil {
			err = &Error{Host: t.Name, Reason: "not in time"}
		}
		if e, ok := errors.AsType[*Error](err); ok {
			if ctx.Err() != nil {
				e.Err = context.Cause(ctx)
			}
			e.Said = said(d.noise.Bytes(), s.Stderr())
		}
		return nil, err
	}
	return st, nil
}

// said joins what a host wrote to one line of bounded length.
func said(out, errs []byte) string {
	words := strings.Fields(string(out) + "\n" + string(errs))
	text := strings.ToValidUTF8(strings.Join(words, " "), "?")
	if most := 600; len(text) > most {
		text = "... " + strings.ToValidUTF8(text[len(text)-most:], "")
	}
	return text
}

// dialogue is the talk with the script.
type dialogue struct {
	s     way.Session
	r     *bufio.Reader
	mark  string
	host  string
	o     Options
	noise bytes.Buffer
	bad   []string
}

func (d *dialogue) error(reason string, err error) error {
	return &Error{Host: d.host, Reason: reason, Err: err}
}

func (d *dialogue) run(ctx context.Context) (*Started, error) {
	b := d.o.Builds.own
	pushed := false
	for {
		line, err := d.line()
		if err != nil {
			reason := "the session ended before it"
			if err == errLine {
				reason, err = "the answer is not gorun's", nil
			}
			return nil, d.error(reason, err)
		}
		verb, rest, _ := strings.Cut(line, " ")
		switch verb {
		case "arch":
			if b, err = d.o.Builds.For(ctx, rest); err != nil {
				return nil, d.error("its architecture is "+rest, err)
			}
			if _, err := io.WriteString(d.s, b.hash+"\n"); err != nil {
				return nil, d.error("answer its shell", err)
			}
		case "send":
			form, _, _ := strings.Cut(rest, " ")
			if err := d.send(b, form == "gz"); err != nil {
				return nil, d.error("send gorun", err)
			}
			pushed = true
		case "bad":
			d.bad = append(d.bad, rest)
		case "none":
			return nil, d.error("no directory on it takes the program and lets it run: "+rest, nil)
		case "start":
			return &Started{Session: d.s, r: d.r, File: rest, Arch: b.arch, Pushed: pushed, Noise: d.noise.String()}, nil
		default:
			return nil, d.error(fmt.Sprintf("its shell said %q", line), nil)
		}
	}
}

var errLine = errors.New("line too long")

// line is the next line that begins with the mark, without it. Other text is noise.
func (d *dialogue) line() (string, error) {
	for skipped := 0; ; {
		text, err := d.r.ReadSlice('\n')
		if rest, ok := strings.CutPrefix(string(text), d.mark+" "); ok {
			if err != nil {
				if err == bufio.ErrBufferFull {
					err = errLine
				}
				return "", err
			}
			return strings.TrimSpace(rest), nil
		}
		if room := maxNoise - d.noise.Len(); room > 0 {
			d.noise.Write(text[:min(room, len(text))])
		}
		if err != nil && err != bufio.ErrBufferFull {
			return "", err
		}
		if skipped += len(text); skipped > 64<<20 {
			return "", errLine
		}
	}
}

// send sends a build.
func (d *dialogue) send(b *build, zip bool) error {
	data, form := b.data, "raw"
	if zip {
		data, form = b.zipped(), "gz"
	}
	size := len(data)
	if _, err := io.WriteString(d.s, strconv.Itoa(size)+" "+form+"\n"); err != nil {
		return err
	}
	for sent := 0; sent < size; {
		n, err := d.s.Write(data[sent:min(size, sent+256<<10)])
		sent += n
		if err != nil {
			return err
		}
		if d.o.Progress != nil {
			d.o.Progress(d.host, sent, size)
		}
	}
	return nil
}
