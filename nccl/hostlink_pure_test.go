package nccl

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda"
)

// A word that a member of another host has published is told at once to those who wait for it on this one, also where what comes behind it is on its way for long.
func TestWordBeforeSlowData(t *testing.T) {
	t.Run("data", func(t *testing.T) { wordBeforeSlow(t, frameData, 1000, atTable) })
	t.Run("word", func(t *testing.T) { wordBeforeSlow(t, frameWord, 8, atPhase+8) })
}

// wordBeforeSlow has a frame of late bytes come half, behind a word.
func wordBeforeSlow(t *testing.T, kind, late uint64, at int) {
	dev, err := cuda.Open("host")
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	bell := [2]uint32{1: 1} // somebody sleeps
	c := &Comm{dev: dev, rank: 0, peers: []peer{{}, {far: true}, {bell: cuda.BellAt(unsafe.Pointer(&bell))}}}
	h := &host{c: c, seg: newSegment(len(c.peers))}
	h.seg.b = wordBytes(make([]uint64, h.seg.size()/8))
	l := &hostLinks{h: h}
	c.be = h

	head := func(kind, n, off uint64) []byte {
		return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, kind<<56|n), off)
	}
	word := uint64(h.seg.rankAt(1) + atPhase)
	first := binary.LittleEndian.AppendUint64(head(frameWord, 8, word), 7)
	first = append(first, head(kind, late, uint64(h.seg.rankAt(1)+at))...)
	first = append(first, make([]byte, late/2)...)
	in, out := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- l.read(bufio.NewReader(in), 1) }()
	if _, err := out.Write(first); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); atomic.LoadUint32(&bell[0]) == 0; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("nobody was told of the word while what is behind it was late")
		}
	}
	if got := h.seg.word(int(word)).Load(); got != 7 {
		t.Errorf("the word is %d, want 7", got)
	}
	out.Close()
	if err := <-done; !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v, want an unexpected end", err)
	}
}
