package launcher

import (
	"bytes"
	"io"
	"sync"
)

// outputs carries what the ranks of all hosts write to gorun's stdout and stderr.
type outputs struct {
	cfg      outputConfig
	out, err *collector // the same one when both sinks are the same file
	fileErr  func(error)

	mu    sync.Mutex    // guards the rest
	tails []*stream     // by rank
	done  chan struct{} // not nil: finish was called
}

// outputConfig is what becomes of the ranks' output.
type outputConfig struct {
	stdout, stderr io.Writer
	tags           bool
	stamps         bool         // of what is not stamped yet
	merged         bool         // stderr comes in the stream of stdout
	files          *outputFiles // nil: none
	filesOnly      bool
	midLine        bool // stdout stands in the middle of a line of a rank that is gone
}

// newOutputs starts the collectors. sinkErr is called once if stdout can't be written, and once if a file can't.
func newOutputs(cfg outputConfig, ranks int, sinkErr func(error)) (*outputs, error) {
	var once sync.Once
	o := &outputs{cfg: cfg, tails: make([]*stream, ranks), fileErr: func(err error) { once.Do(func() { sinkErr(err) }) }}
	var err error
	if o.out, err = newCollector(cfg.stderr, sinkErr); err != nil {
		return nil, err
	}
	if cfg.midLine {
		o.out.mid = &stream{}
	}
	o.err = o.out
	if !sameFile(cfg.stdout, cfg.stderr) {
		// A stderr that nobody reads any more is no reason to end a job.
		if o.err, err = newCollector(cfg.stderr, nil); err != nil {
			o.out.finish()
			<-o.out.done
			return nil, err
		}
	}
	return o, nil
}

// add gives the read end of a rank's stdout or stderr to its collector, which closes it at its end. After an error it stays the caller's.
func (o *outputs) add(rank int, stderr bool, fd int) error {
	return o.addStream(rank, stderr, fd, o.cfg.stamps)
}

// addStream is add. What agents on other hosts send they have stamped, if it is to be.
func (o *outputs) addStream(rank int, stderr bool, fd int, stamp bool) error {
	s, to := &stream{rank: rank, fd: fd, sink: o.cfg.stdout, fileErr: o.fileErr}, o.out
	if stderr {
		s.sink, to = o.cfg.stderr, o.err
	}
	if o.cfg.files != nil {
		s.file = o.cfg.files.of(rank, stderr)
	}
	if o.cfg.filesOnly {
		s.sink = nil
	}
	if o.cfg.tags {
		s.tag = tagOf(rank)
	}
	if stamp {
		s.stamp = &stamper{}
	}
	if s.keepTail = stderr || o.cfg.merged; s.keepTail {
		o.mu.Lock()
		o.tails[rank] = s
		o.mu.Unlock()
	}
	return to.add(s)
}

// notice shows a line of gorun's own between the lines of the ranks.
func (o *outputs) notice(line string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.done != nil {
		io.WriteString(o.cfg.stderr, line)
		return
	}
	o.err.notice(line)
}

// finish lets the collectors carry what is left in the pipes. The channel is closed when they have.
func (o *outputs) finish() <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.done != nil {
		return o.done
	}
	done := make(chan struct{})
	o.done = done
	o.out.finish()
	if o.err != o.out {
		o.err.finish()
	}
	go func() {
		<-o.out.done
		<-o.err.done
		close(done)
	}()
	return done
}

// said is the last text that a rank has written to stderr so far.
func (o *outputs) said(rank int) []byte {
	if o == nil {
		return nil
	}
	o.mu.Lock()
	s := o.tails[rank]
	o.mu.Unlock()
	if s == nil {
		return nil
	}
	s.tailMu.Lock()
	defer s.tailMu.Unlock()
	return bytes.Clone(s.tail)
}

// tail is the last text that a rank wrote to stderr, and whether it is also the last that stderr shows.
// To be called after the collectors have ended.
func (o *outputs) tail(rank int) (text []byte, shown bool) {
	s := o.tails[rank]
	if s == nil {
		return nil, true
	}
	t := s.tail
	if len(t) > tailSize {
		t = t[len(t)-tailSize:]
	}
	switch {
	case o.cfg.filesOnly, o.cfg.merged && o.out != o.err:
		return t, false
	case len(o.tails) == 1:
		return t, true // nothing but gorun's own lines can be behind it
	}
	return t, o.err.last == s
}
