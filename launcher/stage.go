package launcher

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/files"
)

const (
	// maxStaged bounds the files of a job.
	maxStaged = 16384
	// maxSending bounds the hosts to which files are sent at once: each takes a piece of memory.
	maxSending = 64
	// sendPiece is that piece.
	sendPiece = 64 << 10
	// tellFirst and tellNext are when a person is told how far the sending is.
	tellFirst = time.Second
	tellNext  = 3 * time.Second
	// programDir holds the program in the job's own directory on a host, if its name says no place there; further programs are in
	// directories of that name and a number.
	programDir = ".program"
)

// StageFile is a file or directory that is sent to the hosts.
type StageFile struct {
	Name string `json:"name"` // as the user wrote it
	Path string `json:"path"` // absolute, on this host
}

// stageFile finds a file to send, as seen from a directory.
func stageFile(dir, name string) (StageFile, error) {
	f := StageFile{Name: name, Path: filepath.Clean(absolute(dir, name))}
	if !filepath.IsAbs(name) && !filepath.IsLocal(name) {
		return f, flagf("--stage", "%s: it lies outside of the current directory, so it has no place in the ranks' directory elsewhere: give its absolute path", name)
	}
	return f, nil
}

// item is one file to send.
type item struct {
	name string // for messages
	file string // on this host
	at   string // agentwire.Item
	to   string

	once sync.Once
	done chan struct{} // closed when the rest is known
	size int64
	mode fs.FileMode
	sum  []byte
	err  error
}

func newItem(name, file, at, to string) *item {
	return &item{name: name, file: file, at: at, to: to, done: make(chan struct{})}
}

// place tells an item from others: no two of a host have the same.
func (it *item) place() string {
	if it.to != "" {
		return it.to
	}
	return it.at
}

// read reads the file once, for its hash.
func (it *item) read(ctx context.Context) {
	it.once.Do(func() {
		defer close(it.done)
		it.size, it.mode, it.sum, it.err = fileSum(ctx, it.file, -1)
		if it.err != nil {
			it.err = &sendError{it.name, errors.New(files.Reason(it.err))}
		}
	})
}

// wait waits until the hash is known, or ctx ends.
func (it *item) wait(ctx context.Context) error {
	select {
	case <-it.done:
		return it.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ready reports whether the hash is known.
func (it *item) ready() bool {
	select {
	case <-it.done:
		return true
	default:
		return false
	}
}

// errOtherSize is a file whose size tells already that it is another one.
var errOtherSize = errors.New("another size")

// fileSum is a regular file's size, permissions and SHA-256. A size of 0 or more is the expected one.
func fileSum(ctx context.Context, file string, size int64) (int64, fs.FileMode, []byte, error) {
	f, info, err := openRegular(file)
	if err != nil {
		return 0, 0, nil, err
	}
	defer f.Close()
	if size >= 0 && info.Size() != size {
		return 0, 0, nil, errOtherSize
	}
	h := sha256.New()
	n, err := io.CopyBuffer(h, &ctxReader{ctx, f}, make([]byte, 256<<10))
	return n, info.Mode().Perm(), h.Sum(nil), err
}

// openRegular opens a file to read. One that is not regular is an error: a named pipe would wait for its writer.
func openRegular(file string) (*os.File, fs.FileInfo, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &fs.PathError{Op: "read", Path: file, Err: errors.New("not a regular file")}
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// ctxReader ends with its context.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (r *ctxReader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	return r.r.Read(p)
}

// staging sends to the hosts what they lack of the job's files.
type staging struct {
	ctx   context.Context // for builds and the reading of files
	plan  *Plan
	out   io.Writer // for the go command
	files []*item

	turns   chan struct{}
	threads sync.WaitGroup
	sent    atomic.Int64 // bytes
	total   atomic.Int64 // that are to be sent, as far as hosts have asked

	placed map[string]bool // the places of files

	building sync.Mutex // held for a build: there is one at a time

	mu       sync.Mutex         // guards the rest
	programs []map[string]*item // as Plan.Programs, by architecture; "": of all
	busy     map[int]bool       // hosts that files are sent to
	begun    time.Time          // the first was to be sent
}

// newStaging finds the files to send. Reading them begins at once, and ends early with ctx; end waits for its end.
func newStaging(ctx context.Context, p *Plan, out io.Writer) (*staging, error) {
	s := &staging{ctx: ctx, plan: p, out: out, turns: make(chan struct{}, maxSending), placed: map[string]bool{}, busy: map[int]bool{}}
	for range p.Programs {
		s.programs = append(s.programs, map[string]*item{})
	}
	if p.Remote.NoStage {
		return s, nil
	}
	for _, f := range p.Remote.Stage {
		if err := s.add(f); err != nil {
			return nil, err
		}
	}
	var files []*item
	for k, prog := range p.Programs {
		if it := s.ofProgram(k, prog.Path); it != nil && prog.GoDir == "" {
			s.programs[k][""] = it
			files = append(files, it)
		}
	}
	s.threads.Go(func() {
		for _, it := range files {
			it.read(ctx)
		}
		for _, it := range s.files {
			it.read(ctx)
		}
	})
	return s, nil
}

func (s *staging) end() { s.threads.Wait() }

// ofProgram is a program's file as an item, nil if it is looked for on each host.
func (s *staging) ofProgram(k int, file string) *item {
	p := &s.plan.Programs[k]
	if p.GoDir == "" && (!strings.Contains(p.Name, "/") || file == "") {
		return nil
	}
	to := programDir
	if k > 0 {
		to += strconv.Itoa(k) // there may be several of one name
	}
	to = filepath.Join(to, filepath.Base(file))
	if p.GoDir == "" && !s.plan.DirGiven && filepath.IsLocal(p.Name) {
		to = filepath.Clean(p.Name) // it may start itself by its name
	}
	return newItem(p.Name, file, file, to)
}

// add adds a file, or all files of a directory.
func (s *staging) add(f StageFile) error {
	at, to := f.Path, ""
	if !filepath.IsAbs(f.Name) {
		at = filepath.Join(s.plan.Dir, f.Name)
		if !s.plan.DirGiven {
			to = filepath.Clean(f.Name)
		}
	}
	one := func(rel, file string) error {
		if len(s.files) == maxStaged {
			return flagf("--stage", "%s: more than %d files; pack them into one", f.Name, maxStaged)
		}
		it := newItem(filepath.Join(f.Name, rel), file, filepath.Join(at, rel), "")
		if to != "" {
			it.to = filepath.Join(to, rel)
		}
		if !s.placed[it.place()] { // else it was named before, by itself or with its directory
			s.placed[it.place()] = true
			s.files = append(s.files, it)
		}
		return nil
	}
	info, err := os.Stat(f.Path)
	if err != nil {
		return flagf("--stage", "%s: %v", f.Name, files.Reason(err))
	}
	if !info.IsDir() {
		return one("", f.Path)
	}
	real, err := filepath.EvalSymlinks(f.Path)
	if err != nil {
		return flagf("--stage", "%s: %v", f.Name, files.Reason(err))
	}
	return filepath.WalkDir(real, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return flagf("--stage", "%s: %v", f.Name, err)
		}
		if e.IsDir() {
			return nil
		}
		rel, _ := filepath.Rel(real, path)
		if e.Type()&fs.ModeSymlink != 0 {
			if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
				return flagf("--stage", "%s: %s is a symbolic link, and not to a file", f.Name, path)
			}
		}
		return one(rel, path)
	})
}

// programFor is a program for a host's architecture, nil if nothing is sent. If nobody has asked for it before it is built, which all that ask wait for.
func (s *staging) programFor(k int, arch string) *item {
	if p := &s.plan.Programs[k]; p.GoDir == "" || s.plan.Remote.NoStage {
		arch = ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	it := s.programs[k][arch]
	if it == nil && arch != "" {
		it = newItem("", "", "", "")
		s.programs[k][arch] = it
		s.threads.Go(func() { s.build(it, k, arch) })
	}
	return it
}

// build makes a program for an architecture.
func (s *staging) build(it *item, k int, arch string) {
	s.building.Lock()
	file, err := s.plan.Programs[k].buildFor(s.ctx, s.out, arch)
	s.building.Unlock()
	if err != nil {
		it.err = err
		close(it.done)
		return
	}
	built := s.ofProgram(k, file)
	it.name, it.file, it.at, it.to = built.name, built.file, built.at, built.to
	it.read(s.ctx)
}

// offer is what a host of an architecture must have that runs some programs, by index of agentwire.Prepare.Items. The second result has
// for each of the programs which of the items it is, from 1; 0: none. It may wait for a build, and for files to be read, until ctx ends.
func (s *staging) offer(ctx context.Context, arch string, programs []int) (items []*item, at []int, err error) {
	own := make([]*item, len(programs))
	sent := map[string]bool{} // as a program
	for i, k := range programs {
		if own[i] = s.programFor(k, arch); own[i] == nil {
			continue
		}
		if err := own[i].wait(ctx); err != nil {
			return nil, nil, err
		}
		sent[own[i].place()] = true
	}
	for _, it := range s.files {
		if sent[it.place()] {
			continue
		}
		if err := it.wait(ctx); err != nil {
			return nil, nil, err
		}
		items = append(items, it)
	}
	at = make([]int, len(programs))
	for i, it := range own {
		if it != nil {
			items = append(items, it)
			at[i] = len(items)
		}
	}
	return items, at, nil
}

// quick reports whether offer will not wait.
func (s *staging) quick(arch string, programs []int) bool {
	for _, k := range programs {
		if it := s.programFor(k, arch); it != nil && !it.ready() {
			return false
		}
	}
	return len(s.files) == 0 || s.files[len(s.files)-1].ready()
}

// wireItems is what an agent is told.
func wireItems(items []*item) []agentwire.Item {
	var w []agentwire.Item
	for _, it := range items {
		w = append(w, agentwire.Item{At: []byte(it.at), To: []byte(it.to), Size: it.size, Sum: it.sum, Mode: uint32(it.mode)})
	}
	return w
}

// send sends what a host wants.
func (s *staging) send(ctx context.Context, mux *agentwire.Mux, items []*item, want []int) (int64, error) {
	var sum int64
	for _, i := range want {
		if i < 0 || i >= len(items) {
			return 0, fmt.Errorf("the agent wants file %d of %d", i, len(items))
		}
		sum += items[i].size
	}
	s.total.Add(sum)
	select {
	case s.turns <- struct{}{}:
		defer func() { <-s.turns }()
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	buf := make([]byte, sendPiece)
	for _, i := range want {
		if err := s.sendOne(mux, items[i], i, buf); err != nil {
			return 0, err
		}
	}
	return sum, nil
}

// sendError is an error of a file on this host.
type sendError struct {
	name string
	err  error
}

func (e *sendError) Error() string { return "send " + e.name + ": " + e.err.Error() }
func (e *sendError) Unwrap() error { return e.err }

// errChanged is a file that is shorter than when its hash was made.
var errChanged = errors.New("the file was changed meanwhile")

func (s *staging) sendOne(mux *agentwire.Mux, it *item, index int, buf []byte) error {
	f, _, err := openRegular(it.file)
	if err != nil {
		return &sendError{it.name, errors.New(files.Reason(err))}
	}
	defer f.Close()
	conn, err := mux.Open(agentwire.Header{Kind: agentwire.File, Rank: index})
	if err != nil {
		return err
	}
	defer conn.Close()
	for left := it.size; left > 0; {
		n, err := f.Read(buf[:min(int64(len(buf)), left)])
		if err == io.EOF {
			return &sendError{it.name, errChanged}
		} else if err != nil {
			return &sendError{it.name, errors.New(files.Reason(err))}
		}
		if _, err := conn.Write(buf[:n]); err != nil {
			return err
		}
		left -= int64(n)
		s.sent.Add(int64(n))
	}
	return nil // the agent knows the hash
}

// mark takes note that files are sent to a host, or no longer.
func (s *staging) mark(host int, on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if on {
		s.begun = cmp.Or(s.begun, time.Now())
		s.busy[host] = true
	} else {
		delete(s.busy, host)
	}
}

// others are those of some hosts to which no files are sent.
func (s *staging) others(hosts map[int]bool) map[int]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[int]bool{}
	for i := range hosts {
		if !s.busy[i] {
			all[i] = true
		}
	}
	return all
}

// progress says how far the sending is, "" if there is nothing to say.
func (s *staging) progress() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.busy) == 0 || time.Since(s.begun) < tellFirst || s.total.Load() < 1<<20 {
		return ""
	}
	return fmt.Sprintf("sending files to %s: %d of %d MiB", count(len(s.busy), "host"), s.sent.Load()>>20, s.total.Load()>>20)
}

// sayRemoved tells of files that ranks left in directories of the job's own, which are gone now.
func (r *runner) sayRemoved() {
	var hosts, names []string
	n := 0
	for _, h := range r.hosts {
		h, ok := h.(*remoteHost)
		if !ok {
			continue
		}
		h.mu.Lock()
		if h.nMade > 0 {
			hosts, n = append(hosts, h.name), n+h.nMade
			for _, name := range h.made {
				if !slices.Contains(names, name) {
					names = append(names, name)
				}
			}
		}
		h.mu.Unlock()
	}
	if n == 0 {
		return
	}
	some := func(all []string) string {
		if len(all) > 3 {
			all = append(all[:3:3], "...")
		}
		return strings.Join(all, ", ")
	}
	if n > len(names) && len(names) <= 3 && len(hosts) == 1 {
		names = append(names, "...")
	}
	r.say("removed with the job's own directory on %s: %s of the ranks (%s); --wdir DIR keeps them", some(hosts), count(n, "file"), some(names))
}
