package bootstrap

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/internal/server"
	"github.com/gorun-dev/gorun/bootstrap/internal/store"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
	"github.com/gorun-dev/gorun/rankenv"
)

// hostGrace is how long rank 0 of a job of another launcher goes on serving it after its own goodbye.
const hostGrace = 30 * time.Second

// joinForeign joins a job that another launcher started, all on one host: rank 0 serves it on a socket
// that all can name, by the job's id and the user's.
func joinForeign(ctx context.Context, env rankenv.Env, parent int) (*Job, error) {
	switch {
	case env.LocalSize == 0:
		return nil, fmt.Errorf("%s does not say how many ranks run on this host: if it is all of them, set LOCAL_RANK and LOCAL_WORLD_SIZE", env.Launcher)
	case env.LocalSize != env.Size:
		return nil, fmt.Errorf("%s started %d of %d ranks on this host: ranks of several hosts meet where gorun has started them (in an allocation, too: gorun PROGRAM)",
			env.Launcher, env.LocalSize, env.Size)
	}
	id := env.Job
	if id == "" {
		// All ranks are children of one process of the launcher.
		var err error
		if id, err = processID(parent); err != nil {
			return nil, fmt.Errorf("%s gives no job id, and its process cannot be named: %w", env.Launcher, err)
		}
		id = env.Launcher + "-" + id
	}
	socket := fmt.Sprintf("gorun-%d-%.16x", os.Getuid(), sha256.Sum256([]byte(id)))
	nodeOf := make([]int, env.Size)

	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	var h *hosted
	if env.Rank == 0 {
		st := store.New(nodeOf)
		srv, err := server.Start(server.Config{Name: socket, Job: id, NodeOf: nodeOf, State: st})
		if err != nil {
			return nil, fmt.Errorf("serve the job %s: %w", id, err)
		}
		h = &hosted{server: srv, store: st, size: env.Size}
	}
	ctl, welcome, err := dialUntil(ctx, socket, id, env.Rank, env.Size)
	if err != nil {
		if h != nil {
			h.stop()
		}
		return nil, err
	}
	if h == nil {
		return newJob(id, env.Rank, 0, welcome.NodeOf, env.Device, ctl), nil
	}
	h.remote = ctl
	return newJob(id, env.Rank, 0, welcome.NodeOf, env.Device, h), nil
}

// dialUntil dials until rank 0 serves the job.
func dialUntil(ctx context.Context, socket, id string, rank, size int) (*remote, wire.WelcomeBody, error) {
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		ctl, welcome, err := dial(ctx, socket, id, rank, size)
		if err == nil || ended(ctx) == nil && !errors.Is(err, syscall.ECONNREFUSED) {
			return ctl, welcome, err
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
		if err := ended(ctx); err != nil {
			return nil, welcome, fmt.Errorf("wait for rank 0 to serve the job: %w", err)
		}
	}
}

// hosted is the control of rank 0 where it serves the job itself.
type hosted struct {
	*remote
	server *server.Server
	store  *store.Store
	size   int
}

// close says goodbye and serves the others until all have ended.
func (h *hosted) close() error {
	err := h.remote.close()
	grace := time.NewTimer(hostGrace)
	defer grace.Stop()
	for from, ended := 0, 0; ended < h.size; {
		events, more := h.store.Events(from)
		from += len(events)
		for _, e := range events {
			if e.Kind == store.Left || e.Kind == store.Died {
				ended++
			}
		}
		if len(events) > 0 {
			continue
		}
		select {
		case <-more:
		case <-grace.C:
			ended = h.size
		}
	}
	h.stop()
	return err
}

func (h *hosted) die(cause string) {
	h.remote.die(cause)
	h.stop()
}

func (h *hosted) stop() {
	h.store.Close()
	h.server.Close()
}

// processID names a process by its number and its start, which together are not used again.
func processID(pid int) (string, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// pid (name) state ppid ...: the name may contain anything, the start is field 22.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 20 {
		return "", fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields)+2)
	}
	return fmt.Sprintf("%d-%s", pid, fields[19]), nil
}
