package main

import (
	"fmt"
	"io"
	"time"
)

// progress says how far a run is that takes long.
type progress struct {
	w           io.Writer
	now         func() time.Time
	start, next time.Time
	done, total int // lines of output
}

const (
	progressAfter = 2 * time.Second
	progressEvery = 10 * time.Second
)

func newProgress(w io.Writer, now func() time.Time) *progress {
	t := now()
	return &progress{w: w, now: now, start: t, next: t.Add(progressAfter)}
}

// at is called before each measurement.
func (p *progress) at(s series, size uint64) {
	t := p.now()
	if t.Before(p.next) {
		return
	}
	hint := ""
	if p.next.Equal(p.start.Add(progressAfter)) {
		hint = " (-op, -mode and -e make it shorter)"
	}
	fmt.Fprintf(p.w, "gorun-bench: %d of %d lines in %.0f s, now %s, %s, %s, %d bytes%s\n", p.done, p.total, t.Sub(p.start).Seconds(), s.op, s.mode, s.calls(), size, hint)
	p.next = t.Add(progressEvery)
}
