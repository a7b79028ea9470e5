package stacks

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/gorun-dev/gorun/launcher/internal/syscalls"
)

// Process is what Linux says of one.
type Process struct {
	PID     int      `json:"pid"`
	Command string   `json:"command"` // the name of its program's file, else what the kernel calls it
	Threads []Thread `json:"threads"` // the first thread first

	CatchesABRT bool `json:"catches_abrt,omitempty"` // it has a handler for SIGABRT
	CatchesTERM bool `json:"catches_term,omitempty"`
}

// Thread is one of a process.
type Thread struct {
	Name    string `json:"name"`
	State   string `json:"state"`             // "running", "sleeping", "stopped", ...
	Syscall string `json:"syscall,omitempty"` // the system call that it is in, with the file if it is about one: "read 3 (pipe)"
	Where   string `json:"where,omitempty"`   // the kernel's function that it sleeps in, where the system call is not known
}

// maxThreads is how many threads of a process are looked at.
const maxThreads = 512

// Look tells what a process does. A process that has ended is an error. root is "/proc", but in tests.
func Look(root string, pid int) (Process, error) {
	dir := filepath.Join(root, strconv.Itoa(pid))
	entries, err := os.ReadDir(filepath.Join(dir, "task"))
	if err != nil {
		return Process{}, fmt.Errorf("look at process %d: %w", pid, err)
	}
	p := Process{PID: pid, Command: read(filepath.Join(dir, "comm"))}
	if exe, err := os.Readlink(filepath.Join(dir, "exe")); err == nil {
		p.Command = clip(filepath.Base(strings.TrimSuffix(exe, " (deleted)")))
	}
	if status, err := os.ReadFile(filepath.Join(dir, "status")); err == nil {
		p.CatchesABRT, p.CatchesTERM = catches(status, syscall.SIGABRT), catches(status, syscall.SIGTERM)
	}
	var tids []int
	for _, e := range entries {
		if tid, err := strconv.Atoi(e.Name()); err == nil {
			tids = append(tids, tid)
		}
	}
	slices.Sort(tids)
	if i := slices.Index(tids, pid); i > 0 {
		tids = slices.Insert(slices.Delete(tids, i, i+1), 0, pid)
	}
	for i, tid := range tids {
		if i == maxThreads {
			break
		}
		if t, ok := lookThread(dir, tid); ok {
			p.Threads = append(p.Threads, t)
		}
	}
	if len(p.Threads) == 0 {
		return Process{}, fmt.Errorf("look at process %d: %w", pid, os.ErrProcessDone)
	}
	return p, nil
}

// CatchesABRT reports whether a process has a handler for SIGABRT, and is less work than Look.
func CatchesABRT(pid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	return err == nil && catches(status, syscall.SIGABRT)
}

// catches reports whether a process, of which status is the file in /proc, has a handler for a signal.
func catches(status []byte, sig syscall.Signal) bool {
	_, mask, _ := bytes.Cut(status, []byte("\nSigCgt:\t"))
	mask, _, _ = bytes.Cut(mask, []byte("\n"))
	set, err := strconv.ParseUint(string(mask), 16, 64)
	return err == nil && set&(1<<(sig-1)) != 0
}

func lookThread(dir string, tid int) (Thread, bool) {
	task := filepath.Join(dir, "task", strconv.Itoa(tid))
	stat := read(filepath.Join(task, "stat"))
	i := strings.LastIndexByte(stat, ')') // the name may have parentheses
	if i < 0 || len(stat) < i+3 {
		return Thread{}, false
	}
	t := Thread{Name: read(filepath.Join(task, "comm")), State: states[stat[i+2]]}
	if t.State == "" {
		t.State = "state " + clip(stat[i+2:i+3])
	}
	t.Syscall = systemCall(read(filepath.Join(task, "syscall")), dir)
	if t.Syscall == "" {
		if w := read(filepath.Join(task, "wchan")); w != "0" {
			t.Where = w
		}
	}
	return t, true
}

// states are proc(5)'s.
var states = map[byte]string{'R': "running", 'S': "sleeping", 'D': "waiting for a device", 'Z': "zombie", 'T': "stopped", 't': "stopped by a debugger", 'X': "dead", 'I': "idle"}

// systemCall says which system call a thread of the process in dir is in, by a line of /proc; "" if it is in none.
func systemCall(line, dir string) string {
	c, in, err := syscalls.Parse(line)
	if err != nil || !in {
		return ""
	}
	name := c.Name()
	fd, ok := c.FD()
	if !ok {
		return name
	}
	name = fmt.Sprintf("%s %d", name, fd)
	if to, err := os.Readlink(filepath.Join(dir, "fd", strconv.Itoa(fd))); err == nil {
		// The numbers of pipes and sockets would keep ranks apart that do the same.
		if kind, _, ok := strings.Cut(to, ":["); ok {
			to = kind
		}
		name += " (" + clip(to) + ")"
	}
	return name
}

// read is the first line of a file of /proc, "" if it cannot be read.
func read(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return clip(line)
}
