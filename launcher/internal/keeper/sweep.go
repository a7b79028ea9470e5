package keeper

import (
	"bytes"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

func ignore(sig syscall.Signal) { signal.Ignore(sig) }

// Sweep kills (SIGKILL) every process of the sessions and every process that carries the job's id in its
// environment, again and again until it finds none or the bound is over. It returns how many are left.
// It sees what the caller may see: processes of other users are out of its reach.
func Sweep(job string, sessions map[int]bool, bound time.Duration) int {
	for sid := range sessions {
		syscall.Kill(-sid, syscall.SIGKILL)
	}
	self := os.Getpid()
	mark := []byte(jobVar + job)
	end := time.Now().Add(bound)
	for {
		found := 0
		for _, p := range Processes() {
			if p.PID == self || p.State == 'Z' || p.State == 'X' {
				continue
			}
			if sessions[p.Session] || sessions[p.Group] || carries(p.PID, mark) {
				found++
				syscall.Kill(p.PID, syscall.SIGKILL)
			}
		}
		if found == 0 || time.Now().After(end) {
			return found
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// carries reports whether "K=V" is one of the strings of the environment a process was started with.
func carries(pid int, kv []byte) bool {
	env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return false
	}
	for len(env) > 0 {
		one, rest, _ := bytes.Cut(env, []byte{0})
		if bytes.Equal(one, kv) {
			return true
		}
		env = rest
	}
	return false
}

// Process is a line of the process table.
type Process struct {
	PID, Parent, Group, Session int
	State                       byte
}

// Processes reads the process table.
func Processes() []Process {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	names, _ := dir.Readdirnames(-1)
	dir.Close()
	var all []Process
	for _, name := range names {
		if name[0] < '0' || name[0] > '9' {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue // it has ended
		}
		if p, ok := parseStat(stat); ok {
			all = append(all, p)
		}
	}
	return all
}

// parseStat reads "pid (comm) state ppid pgrp session ..."; comm may hold anything, also parentheses and spaces.
func parseStat(stat []byte) (p Process, ok bool) {
	open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if open < 1 || end < open {
		return p, false
	}
	f := bytes.Fields(stat[end+1:])
	if len(f) < 4 || len(f[0]) != 1 {
		return p, false
	}
	p.State = f[0][0]
	for _, v := range []struct {
		to   *int
		text []byte
	}{{&p.PID, bytes.TrimSpace(stat[:open])}, {&p.Parent, f[1]}, {&p.Group, f[2]}, {&p.Session, f[3]}} {
		n, err := strconv.Atoi(string(v.text))
		if err != nil {
			return p, false
		}
		*v.to = n
	}
	return p, true
}
