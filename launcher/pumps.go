package launcher

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
)

// pumps carries the output of an agent's ranks to gorun, each pipe in a stream of its own that is opened with the first bytes. A
// gorun that does not read holds the rank up: the stream has room for 256 KiB.
type pumps struct {
	mux    *agentwire.Mux
	stamps bool // the time goes before each line
	wait   sync.WaitGroup

	mu    sync.Mutex // guards the rest
	files []*os.File
}

func newPumps(m *agentwire.Mux, stamps bool) *pumps { return &pumps{mux: m, stamps: stamps} }

func (p *pumps) add(rank int, stderr bool, fd int) error {
	h := agentwire.Header{Kind: agentwire.Stdout, Rank: rank}
	if stderr {
		h.Kind = agentwire.Stderr
	}
	if err := unix.SetNonblock(fd, true); err != nil { // our end alone
		return err
	}
	f := os.NewFile(uintptr(fd), "pipe")
	p.mu.Lock()
	p.files = append(p.files, f)
	p.mu.Unlock()
	p.wait.Go(func() { p.pump(h, f) })
	return nil
}

func (p *pumps) pump(h agentwire.Header, f *os.File) {
	defer f.Close()
	var to net.Conn
	buf := make([]byte, flood) // grows for a rank that writes much
	var stamp stamper
	var stamped []byte
	for read := true; ; {
		n, err := f.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) && read {
			// Somebody outside the job holds the pipe open: it is done when nothing comes for a while.
			read = false
			f.SetReadDeadline(time.Now().Add(quiet))
			continue
		}
		if err != nil || n <= 0 {
			break
		}
		read = true
		if to == nil {
			if to, err = p.mux.Open(h); err != nil {
				break
			}
		}
		data := buf[:n]
		if p.stamps {
			stamped = stamp.append(stamped[:0], data, time.Now())
			data = stamped
		}
		if _, err := to.Write(data); err != nil {
			break
		}
		if n == len(buf) && n < pipeSize {
			buf = make([]byte, pipeSize)
		}
	}
	if to != nil {
		to.Close()
	}
}

// finish says that no rank is left, and waits until all that they wrote is on its way.
func (p *pumps) finish() {
	p.mu.Lock()
	for _, f := range p.files {
		f.SetReadDeadline(time.Now().Add(quiet))
	}
	p.mu.Unlock()
	p.wait.Wait()
}

// stop ends all. The session has ended.
func (p *pumps) stop() {
	p.mu.Lock()
	for _, f := range p.files {
		f.Close()
	}
	p.mu.Unlock()
	p.wait.Wait()
}
