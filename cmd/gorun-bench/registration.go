package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

const registrationHelp = `gorun-bench registration shows whether buffers are really registered. gorun check --registration starts it:

  gorun check --registration [-np N] [--json]

  -json   a JSON object instead of the table
  -v      also the library's own log lines about registration, on stderr

Exit code 0: as expected; 1: a rank failed; 2: wrong command line; 3: something is not as expected.
`

// exitFaults is the exit code of every rank where a check has found something to tell.
const exitFaults = 3

// Sizes in bytes. The library registers nothing in small calls.
const (
	libraryPart = 8 << 20   // one rank's part
	hostWhole   = 512 << 10 // all ranks' parts, which each rank has several times
	leastPart   = 4 << 10
)

// trialTime bounds one case.
const trialTime = 30 * time.Second

// faultsError says that a check has found something; rank 0 has told what.
type faultsError struct{ n int }

func (e *faultsError) Error() string { return fmt.Sprintf("%d faults found", e.n) }

// registrationMain is the program "gorun-bench registration".
func registrationMain(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("gorun-bench registration", flag.ContinueOnError)
	asJSON := fs.Bool("json", false, "")
	verbose := fs.Bool("v", false, "")
	if err := parseFlags(fs, args); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "gorun-registration-")
	if err != nil {
		return fmt.Errorf("make a directory for the library's log: %w", err)
	}
	defer os.RemoveAll(dir)
	log, err := newLibraryLog(dir)
	if err != nil {
		return err
	}
	job, err := bootstrap.Join(ctx)
	if err != nil {
		return err
	}
	defer job.Close()
	dev, err := cuda.Open(job.Device())
	if err != nil {
		return err
	}
	rep, err := checkRegistration(ctx, job, dev, log)
	if err = errors.Join(err, dev.Close()); err != nil {
		return err
	}
	if *verbose {
		for _, l := range log.told {
			fmt.Fprintf(stderr, "rank %d: %s\n", job.Rank(), l)
		}
	}
	if job.Rank() == 0 {
		if err := rep.write(stdout, *asJSON); err != nil {
			return err
		}
	}
	return told(ctx, job, len(rep.Problems))
}

// libraryLog is the file to which this process's library writes.
type libraryLog struct {
	path string
	read int64
	told []string // the lines about registration
}

// newLibraryLog makes the library of this process write its log into dir. It must come before the library's first call.
func newLibraryLog(dir string) (*libraryLog, error) {
	l := &libraryLog{path: filepath.Join(dir, "log")}
	for _, prefix := range []string{"NCCL_", "MCCL_"} {
		for name, value := range map[string]string{
			"DEBUG": "INFO", "DEBUG_SUBSYS": "REG,NVLS,TUNING", "DEBUG_FILE": strings.ReplaceAll(l.path, "%", "%%"),
		} {
			if err := os.Setenv(prefix+name, value); err != nil {
				return nil, err
			}
		}
	}
	return l, nil
}

// next are the events since the last call. No file: the library has not begun to write.
func (l *libraryLog) next(v version) ([]logEvent, error) {
	f, err := os.Open(l.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, err := f.Seek(l.read, io.SeekStart); err != nil {
		return nil, err
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	b = b[:bytes.LastIndexByte(b, '\n')+1] // a line that is being written is for the next call
	l.read += int64(len(b))
	var events []logEvent
	for line := range strings.Lines(string(b)) {
		if e, ok := parseLine(v, line); ok {
			events = append(events, e)
			l.told = append(l.told, e.Text)
		}
	}
	return events, nil
}

// checker goes through the cases on one rank.
type checker struct {
	job     *bootstrap.Job
	dev     *cuda.Device
	stream  *cuda.Stream
	comm    *nccl.Comm
	log     *libraryLog
	version version
	library bool
	part    int // elements of a rank's part
	tiny    *cuda.Buffer[float32]
	trials  []*trial
	later   []func() error // memory stays until the end, so that no address comes twice
}

// checkRegistration is the whole check. All ranks get the same report.
func checkRegistration(ctx context.Context, job *bootstrap.Job, dev *cuda.Device, log *libraryLog) (*registrationReport, error) {
	if job.Size() < 2 {
		return nil, errors.New("one rank registers nothing: the check needs two (-np 2, with a GPU for each; GORUN_DEVICE=host checks the host platform)")
	}
	k := &checker{job: job, dev: dev, log: log, part: max(leastPart, hostWhole/job.Size()) / 4}
	err := k.open(ctx)
	if err == nil {
		err = k.all(ctx)
	}
	// In order: a registration that is still there can only go with the communicator.
	if k.comm != nil {
		err = errors.Join(err, k.comm.Close())
		if err == nil {
			err = k.finish()
		}
	}
	for _, f := range slices.Backward(k.later) {
		err = errors.Join(err, f())
	}
	if k.stream != nil {
		err = errors.Join(err, k.stream.Close())
	}
	if err != nil {
		return nil, err
	}
	return k.report(ctx)
}

func (k *checker) open(ctx context.Context) (err error) {
	if k.stream, err = k.dev.NewStream(); err != nil {
		return err
	}
	if k.comm, err = nccl.InitConfig(ctx, k.job, k.dev, &nccl.Config{NoPeer: true}); err != nil {
		return err
	}
	if info, ok := k.comm.Library(); ok {
		k.library, k.part = true, libraryPart/4
		if k.version, err = parseVersion(info.Version); err != nil {
			return err
		}
	}
	if k.tiny, err = cuda.Malloc[float32](k.dev, 2); err != nil {
		return err
	}
	k.later = append(k.later, k.tiny.Free)
	_, err = k.log.next(k.version) // what Init has written
	return err
}

// all runs the cases, in an order that NCCL's known faults allow: what is used point to point comes last.
func (k *checker) all(ctx context.Context) error {
	for _, f := range []func(context.Context) error{
		k.private, k.privateRegistered, k.allocated, k.allocatedRegistered, k.arena, k.window, k.small, k.allocatedPair,
	} {
		err := func() error {
			ctx, cancel := context.WithTimeout(ctx, trialTime)
			defer cancel()
			return f(ctx)
		}()
		if err != nil {
			t := k.trials[len(k.trials)-1]
			return fmt.Errorf("%s, %s: %w", t.memory, t.call, err)
		}
	}
	return nil
}

func (k *checker) begin(memory, call string) *trial {
	t := &trial{memory: memory, call: call, version: k.version, host: !k.library, released: notReleased, before: k.counters()}
	k.trials = append(k.trials, t)
	return t
}

func (k *checker) counters() counters {
	s := k.comm.Stats()
	return counters{s.BytesDirect, s.BytesStaged, s.Registrations + s.PendingRelease + s.PeerMappings}
}

// look reads what the library has written since the last time, as seen at a stage.
func (k *checker) look(t *trial, at stage) error {
	events, err := k.log.next(k.version)
	if err != nil {
		return fmt.Errorf("the library's log: %w", err)
	}
	for _, e := range events {
		t.events = append(t.events, seen{e, at})
	}
	if t.host && at > atCall && t.released == notReleased && k.counters().held <= t.before.held {
		t.released = at
	}
	return nil
}

func spanOf(s cuda.Slice[float32]) span {
	r := s.Range()
	return span{uint64(r.Pointer()), r.Len, uint64(r.Pointer()) - r.Off, r.Mem.Size()}
}

// pair makes a send and a receive buffer for an all-gather.
func (k *checker) pair(t *trial, alloc func(*cuda.Device, int) (*cuda.Buffer[float32], error), shift int) (send, recv cuda.Slice[float32], err error) {
	n := k.comm.Size()
	s, err := alloc(k.dev, k.part+shift)
	if err != nil {
		return send, recv, err
	}
	k.later = append(k.later, s.Free)
	r, err := alloc(k.dev, n*k.part+shift)
	if err != nil {
		return send, recv, err
	}
	k.later = append(k.later, r.Free)
	send, recv = s.Slice(shift, shift+k.part), r.Slice(shift, shift+n*k.part)
	t.sends, t.recvs = spanOf(send), spanOf(recv)
	return send, recv, nil
}

// shift puts buffers at other offsets on each rank of the host platform: else its captures use windows.
func (k *checker) shift() int {
	if k.library {
		return 0
	}
	return 64 * k.comm.Rank()
}

func (k *checker) gather(send, recv cuda.Slice[float32]) func(*cuda.Stream) error {
	return func(s *cuda.Stream) error { return nccl.AllGather(k.comm, send, recv, s) }
}

// captured runs the call in a graph, once, and closes it.
func (k *checker) captured(ctx context.Context, t *trial, call func(*cuda.Stream) error) error {
	holds := k.comm.Stats().GraphHolds // of windows, too
	g, err := graphs.Capture(ctx, k.stream, call, graphs.Comms(k.comm), graphs.Name(t.memory))
	if err != nil {
		return err
	}
	info := g.Calls()[0]
	t.mode, t.reason = info.Mode, info.Reason
	err = errors.Join(g.Launch(k.stream), k.stream.Synchronize(ctx))
	t.after = k.counters()
	if err = errors.Join(err, k.look(t, atCall)); err != nil {
		return errors.Join(err, g.Close())
	}
	if err := g.Close(); err != nil {
		return err
	}
	k.settle(ctx, holds)
	return k.look(t, atGraphClose)
}

// settleTime bounds the wait for a closed graph's registrations. The driver tells on a thread of its own that the graph is gone, and the runtime
// then makes the library let go.
const settleTime = 2 * time.Second

func (k *checker) settle(ctx context.Context, holds int) {
	for end := time.Now().Add(settleTime); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(time.Millisecond) {
		if s := k.comm.Stats(); s.GraphHolds <= holds && s.PendingRelease == 0 {
			return
		}
	}
}

// eager makes the call once, uncaptured.
func (k *checker) eager(ctx context.Context, t *trial, call func(*cuda.Stream) error) error {
	if err := errors.Join(call(k.stream), k.stream.Synchronize(ctx)); err != nil {
		return err
	}
	t.after = k.counters()
	return k.look(t, atCall)
}

// release goes on until the registrations are gone on all ranks, by what a program would do: more operations, then Comm.Drain.
func (k *checker) release(ctx context.Context, t *trial) error {
	const most = 11 // the library looks at what closed graphs have left at every 11th launch
	for t.operations = 0; t.operations < most; {
		waits, err := k.any(ctx, t.pending())
		if err != nil || !waits {
			return err
		}
		t.operations++
		err = errors.Join(nccl.AllReduce(k.comm, k.tiny.Slice(0, 1), k.tiny.Slice(1, 2), nccl.Sum, k.stream), k.stream.Synchronize(ctx))
		if err = errors.Join(err, k.look(t, atOperations)); err != nil {
			return err
		}
	}
	return errors.Join(k.comm.Drain(ctx), k.look(t, atDrain))
}

// any reports whether a condition holds on any rank.
func (k *checker) any(ctx context.Context, mine bool) (bool, error) {
	msg := []byte{0}
	if mine {
		msg[0] = 1
	}
	all, err := k.job.AllGather(ctx, msg)
	return slices.ContainsFunc(all, func(b []byte) bool { return len(b) > 0 && b[0] == 1 }), err
}

const (
	capturedGather = "all-gather, captured"
	eagerGather    = "all-gather, registered"
)

func (k *checker) private(ctx context.Context) error {
	t := k.begin("private", capturedGather)
	t.released = atCall
	send, recv, err := k.pair(t, cuda.Malloc[float32], 0)
	if err != nil {
		return err
	}
	return k.captured(ctx, t, k.gather(send, recv))
}

func (k *checker) privateRegistered(context.Context) error {
	t := k.begin("private", eagerGather)
	t.released = atCall
	send, _, err := k.pair(t, cuda.Malloc[float32], 0)
	if err != nil {
		return err
	}
	reg, err := k.comm.Register(send.Range().Mem)
	if err == nil {
		return errors.Join(errors.New("Comm.Register takes private memory, which it must refuse"), reg.Close())
	}
	t.err = err
	return nil
}

func (k *checker) allocated(ctx context.Context) error {
	t := k.begin("nccl.Alloc", capturedGather)
	send, recv, err := k.pair(t, nccl.Alloc[float32], k.shift())
	if err != nil {
		return err
	}
	if err := k.captured(ctx, t, k.gather(send, recv)); err != nil {
		return err
	}
	return k.release(ctx, t)
}

func (k *checker) allocatedRegistered(ctx context.Context) error {
	t := k.begin("nccl.Alloc", eagerGather)
	t.mode, t.reason, t.closing = nccl.Local, "by Comm.Register", "Registration.Close"
	send, recv, err := k.pair(t, nccl.Alloc[float32], k.shift())
	if err != nil {
		return err
	}
	var regs []*nccl.Registration
	for _, m := range []*cuda.Memory{send.Range().Mem, recv.Range().Mem} {
		reg, err := k.comm.Register(m)
		if err != nil {
			return err
		}
		regs = append(regs, reg)
	}
	err = k.eager(ctx, t, k.gather(send, recv))
	for _, reg := range regs {
		err = errors.Join(err, reg.Close())
	}
	if err = errors.Join(err, k.look(t, atClose)); err != nil {
		return err
	}
	return k.release(ctx, t)
}

func (k *checker) arena(ctx context.Context) error {
	t := k.begin("arena", capturedGather)
	t.closing = "Arena.Close"
	n := k.comm.Size()
	a, err := nccl.NewArena(k.dev, uint64(4*(k.part*(n+1)+4*64*n)), k.comm)
	if err != nil {
		return err
	}
	k.later = append(k.later, a.Close)
	if _, err := nccl.Carve[float32](a, k.shift()); err != nil {
		return err
	}
	send, err := nccl.Carve[float32](a, k.part)
	if err != nil {
		return err
	}
	recv, err := nccl.Carve[float32](a, k.part*n)
	if err != nil {
		return err
	}
	t.sends, t.recvs = spanOf(send), spanOf(recv)
	if err := k.captured(ctx, t, k.gather(send, recv)); err != nil {
		return err
	}
	if err := errors.Join(a.Close(), k.look(t, atClose)); err != nil {
		return err
	}
	return k.release(ctx, t)
}

func (k *checker) window(ctx context.Context) error {
	t := k.begin("window", capturedGather)
	t.closing = "Window.Close"
	send, recv, err := k.pair(t, nccl.Alloc[float32], 0)
	if err != nil {
		return err
	}
	var wins []*nccl.SymmetricWindow
	for _, r := range []cuda.Range{send.Range(), recv.Range()} {
		w, err := k.comm.Window(ctx, r)
		if err != nil {
			return err
		}
		wins = append(wins, w)
	}
	if wins[0] == nil {
		_, why := k.comm.WindowSupport()
		t.reason = "no windows: " + why
	}
	err = k.captured(ctx, t, k.gather(send, recv))
	if err == nil {
		// Only rank 0's library tells it.
		t.windows, err = k.any(ctx, t.tellsWindow())
	}
	for _, w := range slices.Backward(wins) {
		err = errors.Join(err, w.Close(ctx))
	}
	if err = errors.Join(err, k.look(t, atClose)); err != nil {
		return err
	}
	return k.release(ctx, t)
}

// small is memory for which the runtime takes windows by itself.
func (k *checker) small(ctx context.Context) error {
	const part = 1024
	t := k.begin("small nccl.Alloc", capturedGather)
	t.small, t.closing = true, "at a later capture"
	large := k.part
	k.part = part
	send, recv, err := k.pair(t, nccl.Alloc[float32], 0)
	k.part = large
	if err != nil {
		return err
	}
	if err = k.captured(ctx, t, k.gather(send, recv)); err != nil {
		return err
	}
	if t.windows, err = k.any(ctx, t.tellsWindow()); err != nil {
		return err
	}
	return k.release(ctx, t)
}

func (k *checker) allocatedPair(ctx context.Context) error {
	t := k.begin("nccl.Alloc", "send and recv, captured")
	n, rank := k.comm.Size(), k.comm.Rank()
	send, recv, err := k.pair(t, nccl.Alloc[float32], k.shift())
	if err != nil {
		return err
	}
	recv = recv.Slice(0, k.part)
	t.recvs = spanOf(recv)
	err = k.captured(ctx, t, func(s *cuda.Stream) error {
		return nccl.Group(func() error {
			return errors.Join(nccl.Send(k.comm, send, (rank+1)%n, s), nccl.Recv(k.comm, recv, (rank+n-1)%n, s))
		}, k.comm)
	})
	if err != nil {
		return err
	}
	return k.release(ctx, t)
}

// finish looks for what has gone with the communicator only.
func (k *checker) finish() error {
	events, err := k.log.next(k.version)
	if err != nil {
		return err
	}
	for _, t := range k.trials {
		if !t.pending() {
			continue
		}
		for _, e := range events {
			t.events = append(t.events, seen{e, atFinalize})
		}
		if t.host && k.comm.Stats().PeerMappings == 0 {
			t.released = atFinalize
		}
	}
	return nil
}

// report puts all ranks' rows together.
func (k *checker) report(ctx context.Context) (*registrationReport, error) {
	var mine []row
	for _, t := range k.trials {
		mine = append(mine, t.judge(k.comm.Rank())...)
	}
	msg, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	all, err := k.job.AllGather(ctx, msg)
	if err != nil {
		return nil, err
	}
	rep := &registrationReport{Ranks: k.comm.Size(), Device: k.dev.String(), Known: true}
	if info, ok := k.comm.Library(); ok {
		rep.Library, rep.Version, rep.Path = info.Name, info.Version, info.Path
		rep.Known = info.Name == "NCCL" && k.version.known()
	}
	for r, b := range all {
		var rows []row
		if err := json.Unmarshal(b, &rows); err != nil {
			return nil, fmt.Errorf("what rank %d has found: %w", r, err)
		}
		rep.Rows = append(rep.Rows, rows...)
	}
	rep.tellProblems()
	return rep, nil
}
