package launcher

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/files"
	"github.com/gorun-dev/gorun/launcher/internal/procgroup"
)

// Program is what the ranks run.
type Program struct {
	Name  string `json:"name"`             // as the user wrote it; argv[0]
	Path  string `json:"path"`             // the file to execute; "" with GoDir until it is built, and where only other hosts may have it
	GoDir string `json:"go_dir,omitempty"` // the directory of a Go main package, to be built first
	MPI   string `json:"mpi,omitempty"`    // the first MPI library that it is linked with: libmpich.so.12

	scratch string // a directory made for the build, to be removed after the run
}

// StartError says that the program can't be started; Code is the exit code for it.
type StartError struct {
	Code int // ExitCannotRun or ExitNotFound
	Msg  string
	Err  error
}

func (e *StartError) Error() string {
	if e.Err == nil {
		return e.Msg
	}
	return e.Msg + ": " + files.Reason(e.Err)
}
func (e *StartError) Unwrap() error { return e.Err }

// FindProgram finds the program of a job; an error is a *StartError. A name without a slash is looked up in the directories of path (the
// value of PATH); a directory is a Go main package.
func FindProgram(name, path string) (Program, error) {
	p := Program{Name: name}
	quoted := ShellQuote(name)
	if !strings.Contains(name, "/") && name != "." && name != ".." {
		var denied error
		for _, dir := range filepath.SplitList(path) {
			file := filepath.Join(cmp.Or(dir, "."), name)
			err := executable(file)
			if err == nil {
				if p.Path, err = filepath.Abs(file); err != nil {
					return p, &StartError{Code: ExitNotFound, Msg: "run " + ShellQuote(file), Err: err}
				}
				p.MPI = mpiLibrary(p.Path)
				return p, nil
			}
			if errors.Is(err, fs.ErrPermission) && denied == nil {
				denied = &StartError{Code: ExitCannotRun, Msg: "run " + ShellQuote(file), Err: err}
			}
		}
		if denied != nil {
			return p, denied
		}
		msg := "run " + quoted + ": not found in PATH"
		if info, err := os.Stat(name); err == nil && lacksX(info, os.Geteuid()) {
			msg += "; " + ShellQuote("./"+name) + " is in this directory, but " + notExecutable("./"+name)
		} else if err == nil {
			msg += "; for the one in this directory say " + ShellQuote("./"+name)
		} else {
			msg += inOneWord(name)
		}
		return p, &StartError{Code: ExitNotFound, Msg: msg}
	}
	full, err := filepath.Abs(name)
	if err != nil {
		return p, &StartError{Code: ExitNotFound, Msg: "run " + quoted, Err: err}
	}
	info, err := os.Stat(full)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		if hint := inOneWord(name); hint != "" {
			return p, &StartError{Code: ExitNotFound, Msg: "run " + quoted + ": " + files.Reason(err) + hint}
		}
		return p, &StartError{Code: ExitNotFound, Msg: "run " + quoted, Err: err}
	case err != nil:
		return p, &StartError{Code: ExitCannotRun, Msg: "run " + quoted, Err: err}
	case info.IsDir():
		if files, _ := filepath.Glob(filepath.Join(files.GlobQuote(full), "*.go")); len(files) == 0 {
			return p, &StartError{Code: ExitCannotRun, Msg: "run " + quoted + ": is a directory without Go files"}
		}
		p.GoDir = full
		return p, nil
	}
	if err := executable(full); err != nil {
		e := &StartError{Code: ExitCannotRun, Msg: "run " + quoted, Err: err}
		if lacksX(info, os.Geteuid()) {
			e.Msg, e.Err = e.Msg+": "+notExecutable(name), nil
		}
		return p, e
	}
	p.Path, p.MPI = full, mpiLibrary(full)
	return p, nil
}

// inOneWord is what to add where the name of a program that is not there looks like a command line; "" for another.
func inOneWord(name string) string {
	if len(strings.Fields(name)) < 2 {
		return ""
	}
	return "; arguments stand apart from the program (in a job file: args = [...]), and a command for a shell is given to sh -c"
}

// lacksX reports whether it is a file that nobody may execute, and a user may mend that: its owner or root.
func lacksX(info fs.FileInfo, uid int) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && info.Mode().IsRegular() && info.Mode()&0o111 == 0 && (uid == 0 || uid == int(st.Uid))
}

// notExecutable says how a file that nobody may execute can be run.
func notExecutable(name string) string {
	const is = "the file is not executable; "
	hint, source := insteadOf(name)
	switch {
	case source:
		return is + hint
	case hint != "":
		hint = ", or " + hint
	}
	return is + "chmod +x " + ShellQuote(name) + hint
}

// insteadOf says how a file that is no program itself is run, by the end of its name; "" for a name that does not tell. source: it is the text of a program, which
// helps nobody to make executable.
func insteadOf(name string) (hint string, source bool) {
	tool := ""
	switch strings.ToLower(filepath.Ext(name)) {
	case ".py":
		tool = "python3"
	case ".sh":
		tool = "sh"
	case ".jl":
		tool = "julia"
	case ".rb":
		tool = "ruby"
	case ".pl":
		tool = "perl"
	case ".go":
		return "a Go program is given by its directory: " + ShellQuote(filepath.Dir(name)+"/"), true
	case ".c", ".cc", ".cpp", ".cxx", ".cu", ".f", ".f90", ".rs":
		return "it is the text of a program: compile it, and give what the compiler makes", true
	default:
		return "", false
	}
	return "gorun ... " + tool + " " + ShellQuote(name), false
}

// executable is nil for a file that this process may execute.
func executable(file string) error {
	info, err := os.Stat(file)
	if err != nil {
		return err
	}
	if info.IsDir() {
		return syscall.EISDIR
	}
	if err := syscall.Access(file, 1); err != nil {
		return err
	}
	if info.Mode()&0o111 == 0 {
		return fs.ErrPermission // to root, access says yes to a file that nobody may execute only for some file systems
	}
	return nil
}

// Build makes the executable of a Go package with the go command and sets Path; an error is a *StartError. Its output goes to w. The result is
// kept in a directory of the user's cache, so that an unchanged package is not linked again. Cancelling ctx kills
// the go command.
func (p *Program) Build(ctx context.Context, w io.Writer) error {
	if p.GoDir == "" || p.Path != "" {
		return nil
	}
	file, err := p.build(ctx, w, "")
	p.Path = file
	return err
}

// buildFor is the file of a Go package's executable for an architecture, as Go names it, after Build.
func (p *Program) buildFor(ctx context.Context, w io.Writer, arch string) (string, error) {
	if arch == runtime.GOARCH {
		return p.Path, nil
	}
	return p.build(ctx, w, arch)
}

// build makes the executable for an architecture, "" for that of the surroundings.
func (p *Program) build(ctx context.Context, w io.Writer, arch string) (string, error) {
	fail := func(err error) (string, error) {
		return "", &StartError{Code: ExitCannotRun, Msg: "build " + p.Name, Err: err}
	}
	tool, err := exec.LookPath("go")
	if err != nil {
		return "", &StartError{Code: ExitNotFound, Msg: "build " + p.Name + ": the go command is not in PATH; install Go, or give an executable instead of a package directory"}
	}
	dir := p.scratch
	if dir == "" {
		var scratch bool
		if dir, scratch, err = buildDir(p.GoDir); err != nil {
			return fail(err)
		}
		if scratch {
			p.scratch = dir
		}
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fail(err)
	}
	defer lock.Close() // and gives the lock back
	if err := flock(ctx, lock); err != nil {
		return fail(err)
	}
	if arch != "" {
		dir = filepath.Join(dir, arch)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fail(err)
		}
	}
	out := filepath.Join(dir, filepath.Base(p.GoDir))
	cmd := exec.CommandContext(ctx, tool, "build", "-o", out, ".")
	cmd.Dir = p.GoDir
	cmd.Env = append(os.Environ(), "PWD="+p.GoDir)
	if _, set := os.LookupEnv("CGO_ENABLED"); !set {
		cmd.Env = append(cmd.Env, "CGO_ENABLED=0")
	}
	if arch != "" {
		cmd.Env = append(cmd.Env, "GOOS=linux", "GOARCH="+arch)
	}
	from, err := os.Getwd()
	if err != nil {
		from = p.GoDir
	}
	places := &placeWriter{w: w, dir: p.GoDir, from: from}
	cmd.Stdout, cmd.Stderr = places, places
	err = procgroup.Run(cmd)
	places.flush()
	if err != nil {
		if _, ok := errors.AsType[*exec.ExitError](err); ok {
			return "", &StartError{Code: ExitCannotRun, Msg: "build " + p.Name + ": go build failed, see above"}
		}
		return fail(err)
	}
	if !bytes.HasPrefix(beginning(out), []byte(elf.ELFMAG)) { // the archive that go build makes of a package that is not main
		return "", &StartError{Code: ExitCannotRun, Msg: "build " + p.Name + ": not a main package"}
	}
	return out, nil
}

// lockPoll is how often it is tried to lock what another launch has locked: there is no wait for a lock that a context can end.
const lockPoll = 20 * time.Millisecond

// flock locks a file until it is closed. Another launch may hold it, for as long as a build takes.
func flock(ctx context.Context, f *os.File) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err != unix.EWOULDBLOCK && err != unix.EINTR {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(lockPoll):
		}
	}
}

// archOf is the architecture of an executable, as Go names it if it is one of the usual ones; "" if the file is no executable.
func archOf(file string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	var head [20]byte
	if _, err := io.ReadFull(f, head[:]); err != nil || string(head[:4]) != "\x7fELF" {
		return ""
	}
	machine := binary.LittleEndian.Uint16(head[18:])
	if head[5] == 2 {
		machine = binary.BigEndian.Uint16(head[18:])
	}
	if name := map[uint16]string{3: "386", 21: "ppc64", 22: "s390x", 40: "arm", 62: "amd64", 183: "arm64", 243: "riscv64", 258: "loong64"}[machine]; name != "" {
		return name
	}
	return fmt.Sprintf("machine %d", machine)
}

// buildDir is the private directory for the executable of a package: one that belongs to this user and that nobody
// else may write, in the user's cache if there is one, else a fresh one for this launch.
func buildDir(pkg string) (dir string, scratch bool, err error) {
	sum := sha256.Sum256([]byte(pkg))
	if cache, err := os.UserCacheDir(); err == nil {
		root := filepath.Join(cache, "gorun", "build")
		dir = filepath.Join(root, hex.EncodeToString(sum[:8]))
		if err := os.MkdirAll(dir, 0o700); err == nil && private(root) && private(dir) {
			return dir, false, nil
		}
	}
	dir, err = os.MkdirTemp("", "gorun-build-")
	return dir, true, err
}

func private(dir string) bool {
	var st syscall.Stat_t
	if syscall.Lstat(dir, &st) != nil {
		return false
	}
	return st.Mode&syscall.S_IFMT == syscall.S_IFDIR && int(st.Uid) == os.Geteuid() && st.Mode&0o022 == 0
}

// execError explains why exec failed for a program that was found.
func execError(p Program, rank int, err error) error {
	e := &StartError{Code: ExitCannotRun, Msg: "run " + ShellQuote(p.Name), Err: err}
	switch {
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return fmt.Errorf("start rank %d: %w", rank, err) // the machine's limits, not the program
	case errors.Is(err, syscall.ENOEXEC):
		e.Err = nil
		if arch := archOf(p.Path); arch != "" && arch != runtime.GOARCH {
			e.Msg += fmt.Sprintf(": it is a program for %s, and this host is %s", arch, runtime.GOARCH)
		} else {
			e.Msg += ": neither a program for this machine nor a script that begins with #!"
			if hint, _ := insteadOf(p.Name); hint != "" {
				e.Msg += "; " + hint
			}
		}
	case errors.Is(err, syscall.ENOENT):
		e.Code = ExitNotFound
		if _, serr := os.Stat(p.Path); serr == nil {
			e.Msg += ": " + missingInterpreter(p.Path)
			e.Err = nil
		}
	}
	return e
}

// missingInterpreter says which interpreter of a file is missing.
func missingInterpreter(file string) string {
	head := make([]byte, 256) // as much as the kernel reads
	f, err := os.Open(file)
	if err == nil {
		n, _ := io.ReadFull(f, head)
		head = head[:n]
		f.Close()
	}
	line, _, _ := bytes.Cut(head, []byte{'\n'})
	script, ok := bytes.CutPrefix(line, []byte("#!"))
	if err != nil || !ok {
		return "its interpreter is missing (the loader of a dynamic program, for another C library?)"
	}
	name := string(bytes.TrimLeft(script, " \t"))
	if cut := strings.IndexAny(name, " \t"); cut >= 0 {
		name = name[:cut]
	}
	if strings.HasSuffix(name, "\r") {
		return fmt.Sprintf("its interpreter %q is missing: the file has Windows line ends", name)
	}
	return fmt.Sprintf("its interpreter %s is missing (the first line of the file)", name)
}

// limitHint adds to an error what limit of the machine is behind it, and how to raise it.
func limitHint(err error) error {
	switch {
	case errors.Is(err, syscall.EMFILE):
		var l syscall.Rlimit
		if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l) != nil {
			return err
		}
		return fmt.Errorf("%w: the limit is %d, and each rank needs 3; raise it with ulimit -n", err, l.Max)
	case errors.Is(err, syscall.EAGAIN):
		return fmt.Errorf("%w: too many processes; see ulimit -u, and pids.max of the control group", err)
	case errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.ENFILE):
		return fmt.Errorf("%w; see ulimit -a", err)
	}
	return err
}

// checkDir reports why dir can't be the ranks' working directory.
func checkDir(dir string) error {
	info, err := os.Stat(dir)
	if err == nil && !info.IsDir() {
		err = syscall.ENOTDIR
	}
	if err == nil {
		err = syscall.Access(dir, 1)
	}
	if err != nil {
		return &StartError{Code: ExitCannotRun, Msg: fmt.Sprintf("change to working directory %s", dir), Err: err}
	}
	return nil
}
