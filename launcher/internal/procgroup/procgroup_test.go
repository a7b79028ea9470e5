package procgroup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// What a command has started ends with the context, too.
func TestGroupEndsWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, w := io.Pipe()
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", "sleep 1000 & echo $!; wait")
	cmd.Stdout = w
	done := make(chan error, 1)
	go func() { done <- Run(cmd) }()
	var child int
	if _, err := fmt.Fscan(r, &child); err != nil {
		t.Fatal(err)
	}
	cancel()
	select {
	case err := <-done:
		if err == nil {
			t.Error("the command that was ended reports no error")
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the command goes on")
	}
	for end := time.Now().Add(20 * time.Second); !errors.Is(syscall.Kill(child, 0), syscall.ESRCH); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			syscall.Kill(child, syscall.SIGKILL)
			t.Fatalf("process %d of the command goes on", child)
		}
	}
}
