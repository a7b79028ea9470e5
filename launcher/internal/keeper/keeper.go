// Package keeper is the small second process of a launch. It holds one end of a pipe whose other end gorun
// holds; when that end closes without a word, gorun is dead (SIGKILL, out of memory) and the keeper ends every
// session of the job and whatever carries the job's id in its environment.
//
// The keeper is the launcher's own executable, started again: its init function recognises the name, so any
// program that links package launcher can be its own keeper, and it runs before heavier packages initialise.
// Initialisation follows the order of dependencies and paths, so the package imports only what the runtime needs
// anyway, no os, no fmt: less is initialised and touched before a keeper can do its work.
package keeper

import (
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

// arg0 is the keeper's argv[0] and its whole command line. A user can't start one by accident: no shell makes
// a name with this in it from gorun's path.
const arg0 = "gorun: keeper"

// keeperVar is in the environment of a keeper, and of nothing else that has its name.
const keeperVar = "GORUN_KEEPER"

// jobVar and nodeVar are the variables by which a rank and everything it starts can be recognised.
const (
	jobVar  = "GORUN_JOB_ID="
	nodeVar = "GORUN_NODE="
)

// Job is a job on one of its hosts.
type Job struct {
	ID   string
	Node int // the host's index
}

// keeperVar's values: with a session, descriptor 3 is its end.
const (
	alone       = "1"
	withSession = "2"
)

// agentBound is how long after the end of its session an agent may take to end. An agent that has not ended by then is stopped, or hangs.
const agentBound = 10 * time.Second

// killBound is how long the keeper goes on looking for processes to kill. A process in uninterruptible
// sleep does not die at once; after this it is left with the signal pending.
const killBound = 10 * time.Second

func init() {
	if v, _ := syscall.Getenv(keeperVar); (v == alone || v == withSession) && string(readFile("/proc/self/cmdline")) == arg0+"\x00" {
		session := -1
		if v == withSession {
			session = 3
		}
		serve(session)
		syscall.Exit(0) // here and not in main: nothing of the launcher may run in this process
	}
}

// Keeper is the launcher's handle of its keeper.
type Keeper struct {
	pid  int
	life int // write end: words for the keeper; closed by the kernel if we die
	lost int // read end: ends when the keeper dies
}

const runExe = "run /proc/self/exe"

// startError says why a keeper did not start.
type startError struct {
	what string
	err  error
}

func (e *startError) Error() string {
	text := "start keeper: " + e.what + ": " + e.err.Error()
	if e.what == runExe && e.err == syscall.ENOENT {
		text += ": is /proc mounted?"
	}
	return text
}
func (e *startError) Unwrap() error { return e.err }

// Start starts the keeper of a job. The caller's thread does not matter: a keeper has no parent-death signal.
func Start(job Job) (*Keeper, error) { return StartIn(job, -1) }

// StartIn starts the keeper of a job on a host where this process is the agent in a session: session is the descriptor from which the
// agent reads. When the session has ended and the agent has not within 10 s (it may be stopped), its keeper kills it; that is the agent's
// end, with all that follows from it.
func StartIn(job Job, session int) (*Keeper, error) {
	var life, lost [2]int
	if err := syscall.Pipe2(life[:], syscall.O_CLOEXEC); err != nil {
		return nil, &startError{"pipe", err}
	}
	if err := syscall.Pipe2(lost[:], syscall.O_CLOEXEC); err != nil {
		syscall.Close(life[0])
		syscall.Close(life[1])
		return nil, &startError{"pipe", err}
	}
	null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	what := "open /dev/null"
	k := &Keeper{life: life[1], lost: lost[0]}
	if err == nil {
		what = runExe
		// No environment of the user: the keeper must not carry a job's id. It never collects garbage and
		// needs one thread.
		files, kind := []uintptr{uintptr(life[0]), uintptr(lost[1]), uintptr(null)}, alone
		if session >= 0 {
			files, kind = append(files, uintptr(session)), withSession
		}
		k.pid, err = syscall.ForkExec("/proc/self/exe", []string{arg0}, &syscall.ProcAttr{
			Dir:   "/",
			Env:   []string{"GOMAXPROCS=1", "GOGC=off", keeperVar + "=" + kind},
			Files: files,
			Sys:   &syscall.SysProcAttr{Setsid: true},
		})
		syscall.Close(null)
	}
	syscall.Close(life[0])
	syscall.Close(lost[1])
	if err == nil {
		what = "tell it the job"
		err = k.send("job " + job.ID + " " + strconv.Itoa(job.Node) + "\n")
	}
	if err != nil {
		syscall.Close(life[1])
		syscall.Close(lost[0])
		return nil, &startError{what, err}
	}
	return k, nil
}

// PID is the keeper's process id.
func (k *Keeper) PID() int { return k.pid }

// Lost is a descriptor that becomes readable (end of file) when the keeper dies. The keeper owns it.
func (k *Keeper) Lost() int { return k.lost }

// Sessions tells the keeper of sessions to end.
func (k *Keeper) Sessions(pids []int) error {
	var b []byte
	for _, pid := range pids {
		b = append(b, "session "...)
		b = strconv.AppendInt(b, int64(pid), 10)
		b = append(b, '\n')
	}
	return k.send(string(b))
}

// Remove tells the keeper of a file, or of a directory with all in it, that it is to remove if this process dies. The path is absolute and
// holds no newline.
func (k *Keeper) Remove(path string) error { return k.send("remove " + path + "\n") }

// RemoveDir is Remove for a directory that is to go only if it is empty. Directories go behind all else, in the reverse order of the calls.
func (k *Keeper) RemoveDir(path string) error { return k.send("rmdir " + path + "\n") }

// Share tells the keeper of files that other hosts of the job may have put into directories of RemoveDir: see Shared.
func (k *Keeper) Share(paths []string) error {
	var b []byte
	for _, path := range paths {
		b = append(b, "share "...)
		b = append(b, path...)
		b = append(b, '\n')
	}
	return k.send(string(b))
}

func (k *Keeper) send(s string) error {
	for b := []byte(s); len(b) > 0; {
		n, err := syscall.Write(k.life, b)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// Stop ends the keeper, which then does nothing to the job, and reaps it.
func (k *Keeper) Stop() {
	if k.pid == 0 {
		return
	}
	_ = k.send("done\n")
	syscall.Kill(k.pid, syscall.SIGKILL)
	for {
		if _, err := syscall.Wait4(k.pid, nil, 0, nil); err != syscall.EINTR {
			break
		}
	}
	k.close()
}

// Leave has the keeper end what is left of the job, which is its alone from here on, and then itself. It removes nothing.
func (k *Keeper) Leave() {
	if k.pid == 0 {
		return
	}
	_ = k.send("left\n")
	go syscall.Wait4(k.pid, nil, 0, nil) // this process may end before it
	k.close()
}

func (k *Keeper) close() {
	k.pid = 0
	syscall.Close(k.life)
	syscall.Close(k.lost)
}

// serve is the keeper's whole life: descriptor 0 is the pipe from gorun, 1 the one whose end tells gorun that we died, and session the end
// of the agent's session, -1 without one.
func serve(session int) {
	// A terminal's or a batch system's signals are for gorun, which ends the job in order.
	for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM} {
		ignore(sig)
	}
	var o orders
	buf := make([]byte, 4096)
	for session < 0 || agentSpeaks(&session) {
		n, err := syscall.Read(0, buf)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			break
		}
		if o.feed(buf[:n]) {
			return
		}
	}
	if session >= 0 {
		syscall.Close(session) // else the other side would not see the agent's end before ours
	}
	if o.job.ID != "" {
		Sweep(o.job, o.sessions, killBound, true)
	}
	shared := NewShared(o.job.ID)
	for _, path := range o.shared {
		shared.Add(path)
	}
	for i := len(o.paths) - 1; i >= 0; i-- {
		if !removeAll(o.paths[i], o.job.ID) {
			shared.Stays(o.paths[i])
		}
	}
	shared.RemoveDirs(o.dirs, othersBound)
}

// agentSpeaks waits until descriptor 0 can be read: the agent said something, or has ended. Where the session ends and nothing comes for
// agentBound it kills the agent, and session is -1 from then on. It is false if that cannot be.
func agentSpeaks(session *int) bool {
	agent := syscall.Getppid()
	if _, over := poll(0, *session, -1); !over {
		return true
	}
	if said, _ := poll(0, -1, agentBound); said {
		return true
	}
	if agent <= 1 || agent != syscall.Getppid() || syscall.Kill(agent, syscall.SIGKILL) != nil {
		return false
	}
	syscall.Close(*session)
	*session = -1
	return true // descriptor 0 ends
}

// poll waits until a descriptor can be read, or the other end of a session has closed; -1 is none. A negative bound is none.
func poll(fd, session int, bound time.Duration) (said, over bool) {
	const in, hup, rdhup = 1, 0x18, 0x2000 // POLLIN, POLLERR and POLLHUP, POLLRDHUP
	fds := [2]struct {
		fd              int32
		events, revents int16
	}{{fd: int32(fd), events: in}, {fd: int32(session), events: rdhup}}
	var timeout unsafe.Pointer
	if bound >= 0 {
		ts := syscall.NsecToTimespec(int64(bound))
		timeout = unsafe.Pointer(&ts)
	}
	for {
		_, _, errno := syscall.Syscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(&fds)), uintptr(len(fds)), uintptr(timeout), 0, 0, 0)
		if errno != syscall.EINTR {
			return fds[0].revents != 0, fds[0].revents == 0 && fds[1].revents&(hup|rdhup) != 0
		}
	}
}

// ignore makes the process ignore a signal. The runtime's handler is replaced behind its back, as os/signal is not here.
func ignore(sig syscall.Signal) {
	const sigIgn = 1
	action := struct {
		handler, flags, restorer uintptr
		mask                     uint64
	}{handler: sigIgn}
	syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&action)), 0, unsafe.Sizeof(action.mask), 0, 0)
}

// cut is bytes.Cut at one byte.
func cut(s []byte, at byte) (before, after []byte, found bool) {
	for i, c := range s {
		if c == at {
			return s[:i], s[i+1:], true
		}
	}
	return s, nil, false
}

// orders is what the keeper has been told, a line each: "job ID NODE", "session PID", "remove PATH", "rmdir PATH", "share PATH",
// "left" (only processes are), "done".
type orders struct {
	job      Job
	sessions map[int]bool
	paths    []string // to be removed
	dirs     []string // to be removed if they are empty
	shared   []string // places of other hosts' files in these
	part     []byte   // of a line
}

// feed takes the next bytes from the pipe and reports whether the job is over.
func (o *orders) feed(data []byte) (done bool) {
	o.part = append(o.part, data...)
	for {
		line, rest, found := cut(o.part, '\n')
		if !found {
			return false
		}
		o.part = rest
		switch verb, arg, _ := cut(line, ' '); string(verb) {
		case "job":
			id, node, _ := cut(arg, ' ')
			o.job.ID = string(id)
			o.job.Node, _ = strconv.Atoi(string(node))
		case "session":
			// Never 0, 1 or negative numbers: kill gives those another meaning.
			if pid, err := strconv.Atoi(string(arg)); err == nil && pid > 1 {
				if o.sessions == nil {
					o.sessions = map[int]bool{}
				}
				o.sessions[pid] = true
			}
		case "remove":
			o.paths = addPath(o.paths, arg)
		case "rmdir":
			o.dirs = addPath(o.dirs, arg)
		case "share":
			o.shared = addPath(o.shared, arg)
		case "left":
			o.paths, o.dirs, o.shared = nil, nil, nil
		case "done":
			return true
		}
	}
}

// addPath adds a path that is absolute.
func addPath(list []string, path []byte) []string {
	if len(path) > 1 && path[0] == '/' {
		list = append(list, string(path))
	}
	return list
}
