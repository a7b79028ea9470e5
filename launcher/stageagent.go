package launcher

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/keeper"
)

// stage sees to the ranks' directory and to the files that they need, as far as the host lacks them. Meanwhile gorun hears of this agent,
// and its end ends the work.
func (s *agentServer) stage() error {
	s.dir = string(s.job.Dir)
	for i := range s.job.Ranks {
		r := &s.job.Ranks[i]
		if i > 0 && bytes.Equal(r.Dir, s.job.Ranks[i-1].Dir) {
			continue
		}
		if err := checkDir(s.dirOf(r)); err != nil {
			if len(r.Dir) > 0 || s.job.DirGiven {
				return err
			}
			s.ownDir, s.noDir = true, true
		}
	}
	if len(s.job.Items) == 0 && !s.ownDir {
		return nil
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	done := make(chan error, 1)
	go func() { done <- s.provide(ctx) }()
	s.mux.Send(&agentwire.Message{Ping: &agentwire.Empty{}}) // this may take its time
	tick := time.NewTicker(beat)
	defer tick.Stop()
	stop := func(why error) {
		cancel(why)
		s.mux.Close() // ends waits for what gorun sends
	}
	messages := s.messages
	pulse := newHeartbeat(s.mux)
	for {
		select {
		case err := <-done:
			return err
		case m, ok := <-messages:
			if !ok || m.Bye != nil {
				messages = nil
				stop(errors.New("the session has ended"))
			} else {
				s.heard(m)
			}
		case sig := <-s.signals:
			if sig == syscall.SIGTERM {
				s.mux.Send(&agentwire.Message{Failed: &agentwire.Failed{Text: "the agent was terminated (SIGTERM)"}})
				s.mux.Flush(farewell)
				stop(errors.New("terminated"))
			}
		case <-tick.C:
			if silent := s.silence(pulse, time.Now()); silent > silentAgent {
				stop(fmt.Errorf("gorun has been silent for %v", silent.Round(time.Second)))
			}
		}
	}
}

// provide does what stage says.
func (s *agentServer) provide(ctx context.Context) error {
	l := newLacking(s.job)
	if err := s.survey(ctx, l); err != nil {
		return err
	}
	want, need, inDir, programInDir := l.sum(s.job.Items)
	if inDir = inDir || s.ownDir; !inDir && len(want) == 0 {
		return nil
	}
	if err := s.begin(); err != nil {
		return err
	}
	if inDir {
		if err := s.files.makeDir(need, programInDir); err != nil {
			return err
		}
		if s.ownDir {
			s.dir = s.files.dir
		}
	}
	return s.fill(ctx, l, want)
}

// lacking is what a host has of the job's items.
type lacking struct {
	program []bool         // ranks run it
	there   []bool         // it is where it may be
	first   map[string]int // of those that are not, the first of each content
}

func newLacking(job *agentwire.Prepare) *lacking {
	n := len(job.Items)
	l := &lacking{program: make([]bool, n), there: make([]bool, n), first: map[string]int{}}
	for _, p := range job.Programs {
		if p.Item > 0 && p.Item <= n {
			l.program[p.Item-1] = true
		}
	}
	return l
}

// survey looks what is there, and whether the ranks need the job's own directory for what is not.
func (s *agentServer) survey(ctx context.Context, l *lacking) error {
	items := s.job.Items
	for i, it := range items {
		at := string(it.At)
		err := s.have(ctx, it, l.program[i])
		l.there[i] = err == nil
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case l.there[i]:
		case l.program[i]:
			if err == errOther {
				s.log("there is another %s; the one from gorun's host is used", at)
			}
		case len(it.To) > 0:
			s.ownDir = true
			if err == errOther {
				s.log("there is another %s; the ranks run in the job's own directory, with the one from gorun's host", at)
			}
		case err == errOther:
			return fmt.Errorf("--stage %s: there is another file of that name, and it is not replaced", at)
		case !errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("--stage: %w", err)
		}
	}
	for i, p := range s.job.Programs {
		if n := p.Item - 1; n >= 0 && n < len(items) && l.there[n] {
			s.job.Programs[i].Path = items[n].At // of a Go package each architecture has a file of its own, also where hosts share them
		}
	}
	return nil
}

// sum is which items are to be sent, each content once, how many bytes the job's own directory needs, and whether it needs one, and for a program.
func (l *lacking) sum(items []agentwire.Item) (want []int, need int64, inDir, programInDir bool) {
	for i, it := range items {
		if l.there[i] {
			continue
		}
		if len(it.To) > 0 {
			inDir = true
			need += it.Size
			programInDir = programInDir || l.program[i]
		}
		if _, ok := l.first[string(it.Sum)]; !ok {
			l.first[string(it.Sum)] = i
			want = append(want, i)
		}
	}
	return want, need, inDir, programInDir
}

// fill has gorun send what is wanted, and puts everything in its place.
func (s *agentServer) fill(ctx context.Context, l *lacking, want []int) error {
	items := s.job.Items
	if len(want) > 0 {
		s.mux.Send(&agentwire.Message{Want: &agentwire.Want{Items: want}})
	}
	var err error
	files := make([]string, len(items))
	for _, i := range want {
		if files[i], err = s.receive(ctx, i); err != nil {
			return err
		}
	}
	for i, it := range items {
		switch {
		case files[i] != "":
		case !l.there[i]:
			from := files[l.first[string(it.Sum)]]
			files[i], err = s.put(it, func(w io.Writer) error { return copyFile(ctx, w, from) })
		case s.ownDir && len(it.To) > 0:
			var link string
			if link, err = s.files.path(string(it.To)); err == nil {
				err = os.Symlink(string(it.At), link)
			}
		}
		if err != nil {
			return err
		}
	}
	for i := range s.job.Programs {
		if p := &s.job.Programs[i]; p.Item > 0 && p.Item <= len(items) && !l.there[p.Item-1] {
			p.Path = []byte(files[p.Item-1])
		}
	}
	return nil
}

// begin starts the keeper of what is put.
func (s *agentServer) begin() (err error) {
	if s.files.keeper != nil {
		return nil
	}
	if s.files.keeper, err = keeper.StartIn(keeper.Job{ID: s.job.Job, Node: s.job.Node}, s.session); err != nil {
		return err
	}
	s.files.job = s.job.Job
	var places []string
	for _, it := range s.job.Items {
		if len(it.To) == 0 {
			places = append(places, filepath.Clean(string(it.At)))
		}
	}
	s.files.share(places)
	return nil
}

// have is same, and sees to it that the file stays: it may be another job's, which ends before.
func (s *agentServer) have(ctx context.Context, it agentwire.Item, program bool) error {
	at := string(it.At)
	if err := s.same(ctx, it, program); err != nil {
		return err
	}
	if info, err := os.Lstat(at); err != nil || !info.Mode().IsRegular() {
		return err // a link is the user's
	}
	if own, other := keeper.Marked(at, s.job.Job); own || !other {
		return nil
	}
	err := s.begin()
	if err == nil {
		err = s.makeDirs(filepath.Dir(at))
	}
	if err == nil && s.files.adopt(at) {
		err = s.files.elsewhere(at)
	}
	if err == nil {
		_, err = os.Lstat(at)
	}
	return err
}

// log sends a line for --verbose.
func (s *agentServer) log(format string, args ...any) {
	s.mux.Send(&agentwire.Message{Log: &agentwire.Text{Text: fmt.Sprintf(format, args...)}})
}

// errOther is a file that is not the one that is needed.
var errOther = errors.New("another file")

// same is nil if the very file is where it may be.
func (s *agentServer) same(ctx context.Context, it agentwire.Item, program bool) error {
	at := string(it.At)
	if _, err := os.Lstat(at); err != nil {
		return err
	}
	_, _, sum, err := fileSum(ctx, at, it.Size)
	if err != nil || string(sum) != string(it.Sum) {
		if _, err := os.Lstat(at); errors.Is(err, fs.ErrNotExist) {
			return err // another job has removed it meanwhile
		}
		return errOther
	}
	if program && (executable(at) != nil || fits(filepath.Dir(at), 0, true) != nil) {
		return errOther
	}
	return nil
}

// receive puts the next file that gorun sends in its place.
func (s *agentServer) receive(ctx context.Context, i int) (string, error) {
	head, conn, err := s.mux.Accept()
	if err != nil {
		return "", cause(ctx, err)
	}
	defer conn.Close()
	if head.Kind != agentwire.File || head.Rank != i {
		return "", errors.New("gorun sends what was not asked for")
	}
	it := s.job.Items[i]
	return s.put(it, func(w io.Writer) error {
		sum := sha256.New()
		n, err := io.CopyBuffer(struct{ io.Writer }{io.MultiWriter(w, sum)}, struct{ io.Reader }{&ctxReader{ctx, io.LimitReader(conn, it.Size)}}, make([]byte, sendPiece))
		if err != nil {
			return cause(ctx, err)
		}
		if n != it.Size || string(sum.Sum(nil)) != string(it.Sum) {
			return fmt.Errorf("what came of %s is not what was read before: the file was changed meanwhile", it.At)
		}
		return nil
	})
}

// cause is the reason of ctx's end, or err.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func copyFile(ctx context.Context, w io.Writer, from string) error {
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = io.CopyBuffer(struct{ io.Writer }{w}, &ctxReader{ctx, r}, make([]byte, sendPiece))
	return err
}

// put makes a file in the place of an item, and returns the place.
func (s *agentServer) put(it agentwire.Item, write func(io.Writer) error) (string, error) {
	mode := fs.FileMode(it.Mode)&0o777 | 0o600
	if len(it.To) > 0 {
		if !filepath.IsLocal(string(it.To)) {
			return "", fmt.Errorf("gorun sends %q, which is no place in the job's directory", it.To)
		}
		file, err := s.files.path(string(it.To))
		if err != nil {
			return "", err
		}
		f, err := create(file, mode)
		if err != nil {
			return "", err
		}
		err = write(f)
		return file, errors.Join(err, f.Close())
	}
	at := string(it.At)
	if !filepath.IsAbs(at) || strings.Contains(at, "\n") {
		return "", fmt.Errorf("--stage %q: not an absolute path without line ends", at)
	}
	// Complete, or not at all; and nothing is replaced that came meanwhile.
	tmp := filepath.Join(filepath.Dir(at), fmt.Sprintf("%s%s-%d-%d", keeper.TempName, s.job.Job, s.job.Node, os.Getpid()))
	if err := s.files.elsewhere(tmp); err != nil {
		return "", err
	}
	f, err := createIn(func() error { return s.makeDirs(filepath.Dir(at)) }, tmp, mode)
	if err != nil {
		return "", fmt.Errorf("--stage %s: %w", at, err)
	}
	err = write(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return "", err
	}
	keeper.Mark(tmp, s.job.Job)
	ours, err := publish(tmp, at, func() error { return s.have(context.Background(), it, false) })
	switch {
	case err == errOther:
		return "", fmt.Errorf("--stage %s: there is another file of that name, and it is not replaced", at)
	case err != nil:
		return "", fmt.Errorf("--stage %s: %w", at, err)
	case ours:
		if err := s.files.elsewhere(at); err != nil {
			return "", err
		}
	}
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	return at, nil
}

// makeDirs makes the directories of a path that are missing, to be removed at the end.
func (s *agentServer) makeDirs(dir string) error {
	if _, err := os.Stat(dir); err == nil {
		return s.files.adoptDirs(dir)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := s.makeDirs(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return nil
		}
		return err
	}
	keeper.Mark(dir, s.job.Job) // not every file system can
	return s.files.madeDir(dir)
}

// maxTries bounds how often something is tried again that the end of another job has undone.
const maxTries = 100

// createIn makes a file in a directory that dirs makes, with those above it. The end of another job that had made one of them removes it if it
// is empty at that moment; then dirs is called again.
func createIn(dirs func() error, file string, mode fs.FileMode) (*os.File, error) {
	for try := 1; ; try++ {
		err := dirs()
		if err == nil {
			var f *os.File
			if f, err = create(file, mode); err == nil {
				return f, nil
			}
		}
		if !errors.Is(err, fs.ErrNotExist) || try == maxTries {
			return nil, err
		}
	}
}

// create makes a file; what is there is an error.
func create(file string, mode fs.FileMode) (*os.File, error) {
	return os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY|unix.O_NOFOLLOW, mode)
}

// publish gives a complete file its name, at. It is not ours if it is there: same says whether it is the very file, for another host with this file
// system may have put it; a removed one is put again.
func publish(tmp, at string, same func() error) (ours bool, err error) {
	for try := 1; ; try++ {
		err := os.Link(tmp, at)
		if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOTSUP) { // no hard links on this file system
			err = unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, at, unix.RENAME_NOREPLACE)
		}
		if err == nil || !errors.Is(err, fs.ErrExist) {
			return err == nil, err
		}
		if oneFile(tmp, at) { // NFS did it, and was asked again as the answer was lost
			return true, nil
		}
		if err = same(); !errors.Is(err, fs.ErrNotExist) || try == maxTries {
			return false, err
		}
	}
}

// oneFile reports whether two names are of one file.
func oneFile(a, b string) bool {
	x, err := os.Lstat(a)
	if err != nil {
		return false
	}
	y, err := os.Lstat(b)
	return err == nil && os.SameFile(x, y)
}

// unstage removes the job's files, behind the last of its processes. Behind them its keeper has nothing left to do: the same places may soon be
// another job's.
func (s *agentServer) unstage() {
	if err := s.files.remove(); err != nil {
		s.log("remove the job's files: %v", err)
	}
	if s.host != nil && s.host.agent != nil {
		s.host.agent.stopKeeper()
	}
}
