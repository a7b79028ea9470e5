package launcher

import (
	"io"
	"sync"
)

// outputs carries what the ranks of all hosts write to gorun's stdout and stderr.
type outputs struct {
	stdout, stderr io.Writer
	tags           bool
	out, err       *collector // the same one when both sinks are the same file

	mu    sync.Mutex    // guards the rest
	tails []*stream     // by rank
	done  chan struct{} // not nil: finish was called
}

// newOutputs starts the collectors. sinkErr is called once if stdout can't be written.
func newOutputs(stdout, stderr io.Writer, tags bool, ranks int, sinkErr func(error)) (*outputs, error) {
	o := &outputs{stdout: stdout, stderr: stderr, tags: tags, tails: make([]*stream, ranks)}
	var err error
	if o.out, err = newCollector(stderr, sinkErr); err != nil {
		return nil, err
	}
	o.err = o.out
	if !sameFile(stdout, stderr) {
		// A stderr that nobody reads any more is no reason to end a job.
		if o.err, err = newCollector(stderr, nil); err != nil {
			o.out.finish()
			<-o.out.done
			return nil, err
		}
	}
	return o, nil
}

// addOut gives the read end of a rank's stdout to the collector, which closes it at its end. After an error it stays the caller's.
func (o *outputs) addOut(rank, fd int) error { return o.out.add(o.stream(rank, fd, o.stdout)) }

// addErr is addOut for stderr.
func (o *outputs) addErr(rank, fd int) error {
	s := o.stream(rank, fd, o.stderr)
	s.keepTail = true
	o.mu.Lock()
	o.tails[rank] = s
	o.mu.Unlock()
	return o.err.add(s)
}

func (o *outputs) stream(rank, fd int, sink io.Writer) *stream {
	s := &stream{rank: rank, fd: fd, sink: sink}
	if o.tags {
		s.tag = tagOf(rank)
	}
	return s
}

// notice shows a line of gorun's own between the lines of the ranks.
func (o *outputs) notice(line string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.done != nil {
		io.WriteString(o.stderr, line)
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
	return t, o.err.last == s
}
