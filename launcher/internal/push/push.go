// Package push starts gorun's agent on a host that may have nothing of gorun: if the host lacks this very build, by hash, it is sent over the
// session that then becomes the agent's. No install, no PATH, no shell beyond one /bin/sh line.
package push

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/way"
)

// Options of Open.
type Options struct {
	Builds *Builds
	// Progress is told how many bytes of how many have been sent to a host; nil: nobody. It may be called from several goroutines for several hosts.
	Progress func(host string, sent, size int)
	// Stall is how long nothing of a build that is sent may arrive; 0: 8 s, after which an agent's silence counts, too.
	Stall time.Duration
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

// block is what the host confirms, one after the other: see script.
const block = 256 << 10

const maxNoise = 4 << 10

// Error says why the agent did not start on a host.
type Error struct {
	Host   string // way.Target.Name
	Reason string
	Said   string // what was read and what stderr holds, for the user
	Err    error  // the session's end, or ctx's cause; nil for the script's own verdict
	Advice string // one line on what to do about it; "" if there is none
}

// Hint is the advice: see way.Advice.
func (e *Error) Hint() string { return e.Advice }

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

// shellStart begins the line that a host's login shell, or a command's, is given.
const shellStart = "exec /bin/sh -c "

// Open opens a session on a host and starts the agent in it. ctx bounds all of it; afterwards the session lives until it is closed. An error of the
// way is a *way.Error, any other an *Error.
func Open(ctx context.Context, w way.Way, t way.Target, o Options) (*Started, error) {
	var nonce [8]byte
	rand.Read(nonce[:])
	mark := "gorun-" + hex.EncodeToString(nonce[:])
	own := o.Builds.own
	line := shellStart + "'" + script + "' gorun " + mark + " " + own.arch + ":" + own.hash
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
		if d.writing != nil {
			<-d.writing
		}
		if err == nil {
			err = &Error{Host: t.Name, Reason: "not in time"}
		}
		if e, ok := errors.AsType[*Error](err); ok {
			if ctx.Err() != nil {
				e.Err = context.Cause(ctx)
			}
			words, quoted := withoutLine(d.noise.String()+"\n"+string(s.Stderr()), own.arch+":"+own.hash)
			e.Said = said(words)
			if _, byCommand := w.(*way.Command); byCommand && (quoted || notRun(e.Err)) {
				e.Advice = noShell
			}
		}
		return nil, err
	}
	return st, nil
}

// noShell is for a command that executes its last argument as it is, as docker exec does.
const noShell = "the command of --rsh must hand its last argument to a shell there, as ssh does (docker exec -i %h /bin/sh -c): see gorun help hosts"

// notRun reports whether an end is what a shell or a container's runtime says of a program that it can't run.
func notRun(end error) bool {
	e, ok := errors.AsType[*way.ExitError](end)
	return ok && (e.Code == 126 || e.Code == 127)
}

// withoutLine is text with "..." for the shell line of ours that who complains of it quotes in full, and whether it did. last is the line's last word.
func withoutLine(text, last string) (string, bool) {
	to := strings.LastIndex(text, last)
	from := strings.Index(text, shellStart)
	switch {
	case from < 0 && to < 0:
		return text, false
	case from < 0 || to < from: // only an end, or only a beginning of it is there
		if to >= 0 {
			return "..." + text[to+len(last):], true
		}
		return text[:from] + "...", true
	}
	return text[:from] + "..." + text[to+len(last):], true
}

// said makes what a host wrote one line of bounded length.
func said(text string) string {
	text = strings.ToValidUTF8(strings.Join(strings.Fields(text), " "), "?")
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
	// writing is told the end of a write that still goes on; nil: none does.
	writing chan error
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

// send sends a build and waits until it has arrived.
func (d *dialogue) send(b *build, zip bool) error {
	data, form := b.data, "raw"
	if zip {
		data, form = b.zip(), "gz"
	}
	size := len(data)
	if _, err := io.WriteString(d.s, strconv.Itoa(size)+" "+form+"\n"); err != nil {
		return err
	}
	w := d.watch()
	defer w.end()
	d.writing = make(chan error, 1)
	go func() {
		_, err := d.s.Write(data)
		d.writing <- err
	}()
	for arrived := 0; arrived < size; {
		line, err := d.line()
		if err == nil && line != "got" {
			err = fmt.Errorf("its shell said %q", line)
		}
		if err != nil {
			return cmp.Or(w.end(), err)
		}
		w.seen.Store(time.Now().UnixNano())
		arrived = min(size, arrived+block)
		if d.o.Progress != nil {
			d.o.Progress(d.host, arrived, size)
		}
	}
	err := <-d.writing
	d.writing = nil
	return err
}

// stall ends a session in which nothing arrives.
type stall struct {
	seen atomic.Int64 // when something did, in Unix nanoseconds
	quit chan struct{}
	over chan struct{}
	once sync.Once
	err  error // set before over is closed
}

func (d *dialogue) watch() *stall {
	w := &stall{quit: make(chan struct{}), over: make(chan struct{})}
	w.seen.Store(time.Now().UnixNano())
	bound := d.o.Stall
	if bound == 0 {
		bound = 8 * time.Second
	}
	go func() {
		defer close(w.over)
		tick := time.NewTicker(bound / 8)
		defer tick.Stop()
		for last := time.Now(); ; {
			select {
			case <-w.quit:
				return
			case <-tick.C:
			}
			now := time.Now()
			if now.Sub(last) > bound/2 { // this process was stopped: what did not come meanwhile says nothing
				w.seen.Store(now.UnixNano())
			}
			last = now
			if now.Sub(time.Unix(0, w.seen.Load())) > bound {
				w.err = fmt.Errorf("nothing has arrived for %v", bound)
				d.s.Close()
				return
			}
		}
	}()
	return w
}

// end ends the watch. It returns why it ended the session, nil if it did not.
func (w *stall) end() error {
	w.once.Do(func() { close(w.quit) })
	<-w.over
	return w.err
}
