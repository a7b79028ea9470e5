package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// What gorun reads before it begins a job may come from a program that takes its time: Ctrl-C ends gorun all the same.
func TestInterruptBeforeTheJob(t *testing.T) {
	for _, c := range []struct {
		sig  syscall.Signal
		code int
		args []string
	}{
		{syscall.SIGINT, 130, []string{"--hostfile", "FIFO", "true"}},
		{syscall.SIGTERM, 143, []string{"check", "--hostfile", "FIFO"}},
		{syscall.SIGHUP, 129, []string{"config", "show", "-f", "FIFO"}},
	} {
		t.Run(c.args[0], func(t *testing.T) {
			fifo := filepath.Join(t.TempDir(), "fifo")
			if err := syscall.Mkfifo(fifo, 0o600); err != nil {
				t.Fatal(err)
			}
			args := strings.Split(strings.ReplaceAll(strings.Join(c.args, "\n"), "FIFO", fifo), "\n")
			j := newJob(t, args...).start()
			var w *os.File
			j.eventually("a reader of the fifo", 30*time.Second, func() (there bool) {
				var err error
				w, err = os.OpenFile(fifo, os.O_WRONLY|syscall.O_NONBLOCK, 0)
				return err == nil
			})
			defer w.Close()
			j.cmd.Process.Signal(c.sig)
			ended := make(chan struct{})
			go func() {
				select {
				case <-ended:
				case <-time.After(20 * time.Second):
					t.Error("gorun goes on reading")
					w.Close()
				}
			}()
			got := j.wait()
			close(ended)
			if got != c.code {
				t.Errorf("exit code %d, want %d", got, c.code)
			}
		})
	}
}

// A job file that can be read but once is read once.
func TestJobFileFromAPipe(t *testing.T) {
	for _, c := range []struct {
		args, text, out, err string
		code                 int
	}{
		{"config show -f /dev/fd/3", "[job]\nprogram = \"true\"\nnp = 3\n", " --oversubscribe true\n", "", 0},
		{"-np 1 -f /dev/fd/3", "[job]\nprogram = \"echo\"\nargs = [\"it\"]\n", "it\n", "", 0},
		{"config show -f /dev/fd/3", "a:4\n", "", "gorun: /dev/fd/3:1:", 2},
	} {
		j := newJob(t, strings.Fields(c.args)...)
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if _, err := w.WriteString(c.text); err != nil {
			t.Fatal(err)
		}
		w.Close()
		j.cmd.ExtraFiles = []*os.File{r}
		if got := j.run(); got != c.code || !strings.HasSuffix(j.out.String(), c.out) || !strings.HasPrefix(j.err.String(), c.err) {
			t.Errorf("%s: exit code %d, stdout %q, stderr %q, want %d, ...%q, %q...", c.args, got, j.out.String(), j.err.String(), c.code, c.out, c.err)
		}
	}
}
