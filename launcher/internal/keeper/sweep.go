package keeper

import (
	"strconv"
	"syscall"
	"time"
)

// emptyLooks is how many looks in a row must find nothing where there may be something: a process has no environment for a moment while it starts a
// program, and those that fork and end are elsewhere when they are looked for. The time between looks doubles, from lookAgain on.
const (
	emptyLooks = 6
	lookAgain  = 2 * time.Millisecond
)

// Sweep kills (SIGKILL) every process of the sessions and every process that carries the job's id in its
// environment, again and again until it finds none, or for as long as the bound none that it had not killed before. It returns how many are left.
// Where its first look finds none it is content with that if it is not sure that there is something.
// It sees what the caller may see: processes of other users are out of its reach. Ranks of other hosts of the job, which
// may be this same machine, are theirs.
func Sweep(job Job, sessions map[int]bool, bound time.Duration, sure bool) int {
	for sid := range sessions {
		syscall.Kill(-sid, syscall.SIGKILL)
	}
	self := syscall.Getpid()
	dead := map[int]bool{}
	begin := time.Now()
	pause := lookAgain
	for last, empty := begin, 0; ; {
		found := 0
		eachProcess(func(p Process) {
			if p.PID == self || p.State == 'Z' || p.State == 'X' {
				return
			}
			if sessions[p.Session] || sessions[p.Group] || job.marks(readFile("/proc/"+strconv.Itoa(p.PID)+"/environ")) {
				found++
				if syscall.Kill(p.PID, syscall.SIGKILL); !dead[p.PID] {
					dead[p.PID] = true
					last = time.Now()
				}
			}
		})
		if found > 0 {
			sure, empty, pause = true, 0, lookAgain
		} else if empty++; !sure || empty == emptyLooks {
			return 0
		}
		if time.Since(last) > bound && found > 0 || time.Since(begin) > 10*bound {
			return found
		}
		time.Sleep(pause)
		if found == 0 {
			pause *= 2
		}
	}
}

// marks reports whether the environment that a process was started with is that of the job on this host.
func (j *Job) marks(env []byte) bool {
	id, elsewhere := false, false
	for len(env) > 0 {
		one, rest, _ := cut(env, 0)
		if node, is := after(one, nodeVar); is {
			elsewhere = elsewhere || string(node) != strconv.Itoa(j.Node)
		}
		if v, is := after(one, jobVar); is && string(v) == j.ID {
			id = true
		}
		env = rest
	}
	return id && !elsewhere
}

// after is what follows a prefix.
func after(s []byte, prefix string) ([]byte, bool) {
	if len(s) < len(prefix) || string(s[:len(prefix)]) != prefix {
		return nil, false
	}
	return s[len(prefix):], true
}

// Process is a line of the process table.
type Process struct {
	PID, Parent, Group, Session int
	State                       byte
}

// Processes reads the process table. It is empty where /proc is missing or shows another process namespace than this
// process is in: its numbers would name others here.
func Processes() (all []Process) {
	eachProcess(func(p Process) { all = append(all, p) })
	return all
}

// eachProcess reads the process table for Processes, and hands each process on at once: one that forks and ends soon is no more when all names have
// been read first.
func eachProcess(f func(Process)) {
	self := make([]byte, 16)
	n, err := syscall.Readlink("/proc/self", self)
	if err != nil || string(self[:n]) != strconv.Itoa(syscall.Getpid()) {
		return
	}
	eachEntry("/proc", 512, func(name string) {
		if name[0] < '0' || name[0] > '9' {
			return
		}
		// An empty one has ended.
		if p, ok := parseStat(readFile("/proc/" + name + "/stat")); ok {
			f(p)
		}
	})
}

// OnlyChildren reports whether the kernel tells that this process has no children but some of these, without a look at all processes. It has one of
// them at least: a kernel without such lists tells nothing.
func OnlyChildren(of map[int]bool) bool {
	const tasks = "/proc/self/task"
	some := false
	for _, task := range entries(tasks) {
		for list := readFile(tasks + "/" + task + "/children"); len(list) > 0; {
			var word []byte
			word, list, _ = cut(list, ' ')
			pid, err := strconv.Atoi(string(word))
			if err != nil || !of[pid] {
				return false
			}
			some = true
		}
	}
	return some
}

func open(file string, flags int) (fd int, err error) {
	for {
		fd, err = syscall.Open(file, syscall.O_RDONLY|syscall.O_CLOEXEC|flags, 0)
		if err != syscall.EINTR {
			return fd, err
		}
	}
}

// readFile is what can be read of a file, nil if that is nothing.
func readFile(file string) []byte {
	fd, err := open(file, 0)
	if err != nil {
		return nil
	}
	defer syscall.Close(fd)
	var text []byte
	for buf := make([]byte, 4096); ; {
		n, err := syscall.Read(fd, buf)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return text
		}
		text = append(text, buf[:n]...)
	}
}

// parseStat reads "pid (comm) state ppid pgrp session ..."; comm may hold anything, also parentheses and spaces.
func parseStat(stat []byte) (p Process, ok bool) {
	open, end := -1, -1
	for i, c := range stat {
		if c == '(' && open < 0 {
			open = i
		}
		if c == ')' {
			end = i
		}
	}
	if open < 2 || end < open || stat[open-1] != ' ' {
		return p, false
	}
	var f [4][]byte
	rest := stat[end+1:]
	for i := range f {
		for len(rest) > 0 && rest[0] == ' ' {
			rest = rest[1:]
		}
		f[i], rest, _ = cut(rest, ' ')
	}
	if len(f[0]) != 1 {
		return p, false
	}
	p.State = f[0][0]
	for _, v := range []struct {
		to   *int
		text []byte
	}{{&p.PID, stat[:open-1]}, {&p.Parent, f[1]}, {&p.Group, f[2]}, {&p.Session, f[3]}} {
		n, err := strconv.Atoi(string(v.text))
		if err != nil {
			return p, false
		}
		*v.to = n
	}
	return p, true
}
