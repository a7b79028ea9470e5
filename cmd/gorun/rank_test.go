package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// rankMain is a rank program for tests. Its first argument says what to do; where two are given as "N:verb", only
// rank N does it, when the others have been started, and those sleep.
func rankMain() {
	rank, _ := strconv.Atoi(os.Getenv("GORUN_RANK"))
	args := os.Args[1:]
	dir := os.Getenv("RANKDIR")
	if n, verb, ok := strings.Cut(args[0], ":"); ok {
		args[0] = verb
		if n != strconv.Itoa(rank) {
			args = []string{"sleep"}
		} else {
			for i := range envNumber("GORUN_SIZE") {
				for i != rank && !exists(filepath.Join(dir, "up"+strconv.Itoa(i))) {
					time.Sleep(time.Millisecond)
				}
			}
		}
	}
	mark := func(name string) {
		// Written whole or not at all.
		tmp := filepath.Join(dir, "tmp-"+name)
		if os.WriteFile(tmp, []byte(strconv.Itoa(os.Getpid())), 0o600) == nil {
			os.Rename(tmp, filepath.Join(dir, name))
		}
	}
	me := strconv.Itoa(rank)
	switch args[0] {
	case "exit":
		code, _ := strconv.Atoi(args[1])
		os.Exit(code)
	case "kill":
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case "sleep":
		mark("up" + me)
		time.Sleep(time.Hour)
	case "memory":
		// All there is.
		for all := [][]byte{}; ; {
			block := make([]byte, 1<<20)
			for i := 0; i < len(block); i += 4096 {
				block[i] = 1
			}
			all = append(all, block)
			if len(all) == 4096 {
				os.Exit(98) // there is too much
			}
		}
	case "cpus":
		// What the kernel and the Go runtime say of this process's CPUs.
		status, _ := os.ReadFile("/proc/self/status")
		_, list, _ := strings.Cut(string(status), "Cpus_allowed_list:")
		list, _, _ = strings.Cut(list, "\n")
		fmt.Printf("%d %s %d %s\n", rank, strings.TrimSpace(list), runtime.NumCPU(), os.Getenv("GORUN_CPU_SHARE"))
	case "args":
		// Everything as it came, quoted.
		for _, a := range args[1:] {
			fmt.Printf("%q\n", a)
		}
		for _, kv := range os.Environ() {
			if strings.HasPrefix(kv, "ODD") {
				fmt.Printf("%q\n", kv)
			}
		}
	case "sum":
		// The hash of stdin, read slowly at first. With args[1] = "N:BYTES" rank N closes it after so many, and stays until all
		// others have read theirs.
		h := sha256.New()
		mark("up" + me)
		time.Sleep(20 * time.Millisecond)
		if len(args) > 1 {
			if who, bytes, _ := strings.Cut(args[1], ":"); who == me {
				n, _ := strconv.ParseInt(bytes, 10, 64)
				io.CopyN(h, os.Stdin, n)
				os.Stdin.Close()
				for i := range envNumber("GORUN_SIZE") {
					for i != rank && !exists(filepath.Join(dir, "summed"+strconv.Itoa(i))) {
						time.Sleep(time.Millisecond)
					}
				}
				fmt.Printf("%d %d %s\n", rank, n, hex.EncodeToString(h.Sum(nil)))
				return
			}
		}
		n, err := io.Copy(h, os.Stdin)
		if err != nil {
			fmt.Println("read stdin:", err)
			os.Exit(1)
		}
		fmt.Printf("%d %d %s\n", rank, n, hex.EncodeToString(h.Sum(nil)))
		mark("summed" + me)
	case "chunks":
		// Lines of this rank in chunks of any size.
		size, _ := strconv.Atoi(args[1])
		text := rankText(rank, size)
		rnd := rand.New(rand.NewPCG(3, uint64(rank)))
		for len(text) > 0 {
			n := min(len(text), 1+rnd.IntN(20000))
			os.Stdout.Write(text[:n])
			text = text[n:]
		}
	case "spew":
		// Lines of 100 bytes in blocks of 64 KiB, args[1] bytes.
		left, _ := strconv.Atoi(args[1])
		line := append(bytes.Repeat([]byte{'a' + byte(rank)}, 99), '\n')
		text := bytes.Repeat(line, 2<<10) // the blocks begin at different places of a line
		for at := 0; left > 0; at = (at + 64<<10) % len(line) {
			n := min(left, 64<<10)
			if _, err := os.Stdout.Write(text[at : at+n]); err != nil {
				os.Exit(1)
			}
			left -= n
		}
	case "flood":
		mark("up" + me)
		for block := bytes.Repeat([]byte("all work and no play makes a dull rank\n"), 1000); ; {
			if _, err := os.Stdout.Write(block); err != nil {
				os.Exit(1)
			}
		}
	case "last":
		// Much output, then a sudden end: by a signal, or with an exit code.
		os.Stdout.Write(bytes.Repeat([]byte("0123456789abcde\n"), 1<<16))
		os.Stderr.Write([]byte("last words"))
		if len(args) > 1 {
			code, _ := strconv.Atoi(args[1])
			syscall.Exit(code)
		}
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case "long":
		// Rank 0 writes one line of args[1] bytes, without an end; the others write a short one.
		if rank != 0 {
			fmt.Println("other")
			return
		}
		size, _ := strconv.Atoi(args[1])
		for block := bytes.Repeat([]byte("x"), 100_000); size > 0; size -= len(block) {
			block = block[:min(len(block), size)]
			os.Stdout.Write(block)
		}
	case "signals":
		// Note which signals come, in order; end on what args[1] names, else never.
		c := make(chan os.Signal, 16)
		signal.Notify(c, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGQUIT)
		mark("up" + me)
		for s := range c {
			mark(fmt.Sprintf("sig%s-%d", me, s.(syscall.Signal)))
			if len(args) > 1 && args[1] == strconv.Itoa(int(s.(syscall.Signal))) {
				os.Exit(0)
			}
		}
	case "allsignals":
		// Note each signal that can be caught, with a line; end on SIGUSR2.
		c := make(chan os.Signal, 64)
		for sig := syscall.Signal(1); sig <= 64; sig++ {
			if sig != syscall.SIGURG && sig != syscall.SIGCHLD { // the runtime's own
				signal.Notify(c, sig)
			}
		}
		mark("up" + me)
		for s := range c {
			fmt.Printf("%d\n", s)
			mark(fmt.Sprintf("sig%s-%d", me, s))
			if s == syscall.SIGUSR2 {
				os.Exit(0)
			}
		}
	case "family":
		// A child in the group, and a grandchild in a session of its own whose parent has ended; then args[1:].
		start := func(sys *syscall.SysProcAttr, verb string) int {
			pid, err := syscall.ForkExec("/proc/self/exe", []string{"rank", verb}, &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: sys})
			if err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
			return pid
		}
		start(&syscall.SysProcAttr{}, "child")
		syscall.Wait4(start(&syscall.SysProcAttr{Setsid: true}, "between"), nil, 0, nil)
		for !exists(filepath.Join(dir, "child"+me)) || !exists(filepath.Join(dir, "grandchild"+me)) {
			time.Sleep(time.Millisecond)
		}
		mark("up" + me)
		if len(args) > 1 {
			code, _ := strconv.Atoi(args[1])
			os.Exit(code)
		}
		time.Sleep(time.Hour)
	case "between":
		// The grandchild carries no job id: only its ancestry, or its session, gives it away.
		env := os.Environ()
		if os.Getenv("HIDE") != "" {
			env = []string{"RANKDIR=" + dir, "GORUN_RANK=" + me}
		}
		syscall.ForkExec("/proc/self/exe", []string{"rank", "grandchild"}, &syscall.ProcAttr{Env: env, Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true}})
	case "child", "grandchild":
		signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
		mark(args[0] + me)
		time.Sleep(time.Hour)
	case "far":
		// A way to hosts, of which b is so far away: far TIME HOST COMMAND.
		d, _ := time.ParseDuration(args[1])
		if args[2] != "b" {
			d = 0
		}
		os.Exit(farAway(d, args[3]))
	case "stderr":
		fmt.Fprintln(os.Stderr, "something is wrong on", rank)
		os.Exit(5)
	case "hang":
		hang(args[1:])
	case "listen":
		listenOnMasterPort()
	case "join":
		joinJob(args[1:])
	case "fail":
		failTogether(args[1])
	default:
		fmt.Fprintln(os.Stderr, "rank: unknown verb", args[0])
		os.Exit(99)
	}
}

func envNumber(name string) int {
	n, _ := strconv.Atoi(os.Getenv(name))
	return n
}

// farAway runs a shell command whose input and output take some time.
func farAway(d time.Duration, command string) int {
	cmd := exec.Command("/bin/sh", "-c", command)
	in, err := cmd.StdinPipe()
	if err != nil {
		return 99
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 99
	}
	cmd.Stderr = os.Stderr
	if cmd.Start() != nil {
		return 99
	}
	type piece struct {
		data []byte
		due  time.Time
	}
	carry := func(w io.WriteCloser, r io.Reader) {
		pieces := make(chan piece, 1<<16)
		go func() {
			defer close(pieces)
			for {
				buf := make([]byte, 64<<10)
				n, err := r.Read(buf)
				if n > 0 {
					pieces <- piece{buf[:n], time.Now().Add(d)}
				}
				if err != nil {
					return
				}
			}
		}()
		for p := range pieces {
			time.Sleep(time.Until(p.due))
			if _, err := w.Write(p.data); err != nil {
				break
			}
		}
		w.Close()
	}
	go carry(in, os.Stdin)
	carry(os.Stdout, out)
	cmd.Wait()
	return 0
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// rankText is what rank "chunks" writes: lines that name their rank and number, some of them long.
func rankText(rank, size int) []byte {
	rnd := rand.New(rand.NewPCG(2, uint64(rank)))
	var b bytes.Buffer
	for i := 0; b.Len() < size; i++ {
		n := rnd.IntN(120)
		if rnd.IntN(2000) == 0 {
			n = rnd.IntN(200 << 10)
		}
		fmt.Fprintf(&b, "%d %d %s\n", rank, i, strings.Repeat(string(rune('a'+i%26)), n))
	}
	return b.Bytes()
}
