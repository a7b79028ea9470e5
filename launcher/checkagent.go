package launcher

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
)

// check is the life of an agent that looks at its host and starts nothing.
func (s *agentServer) check(c *agentwire.Check) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	facts, err := json.Marshal(CheckHost(Job{Dir: string(c.Dir), Device: c.Device}, os.Environ()))
	if err != nil {
		return err
	}
	answer := &agentwire.Checked{Machine: machine(), Facts: facts, Programs: verdicts(ctx, c.Programs)}
	addrs := hostAddrs(c.Bind, c.Reached)
	answer.At = addrs[0]
	first := answerAt(c.Key, c.Host, &answer.At, c.PortFrom, c.PortTo)
	defer first.close()
	reach := &reacher{key: c.Key, host: c.Host, addrs: addrs, at: answer.At, from: c.PortFrom, to: c.PortTo, say: s.mux.Send}
	defer reach.close()
	s.mux.Send(&agentwire.Message{Checked: answer})
	timeout := time.NewTimer(prepareWait)
	defer timeout.Stop()
	for {
		select {
		case m, ok := <-s.messages:
			switch {
			case !ok || m.Bye != nil:
				return nil
			case m.Clock != nil:
				s.mux.Send(&agentwire.Message{Clock: &agentwire.Clock{Now: time.Now()}})
			case m.Ping != nil, reach.handle(m):
			default:
				return errors.New("an order that is none of a check")
			}
			timeout.Reset(prepareWait)
		case <-timeout.C:
			return errors.New("gorun is silent")
		case sig := <-s.signals:
			if sig == syscall.SIGTERM { // the others are not for it, as in a job
				return errors.New("terminated")
			}
		}
	}
}

// verdicts says of each program whether it is on this host.
func verdicts(ctx context.Context, programs []agentwire.CheckProgram) []agentwire.Verdict {
	var all []agentwire.Verdict
	for _, c := range programs {
		p, err := findHere(agentwire.Program{Name: c.Name, Path: c.Path})
		v := agentwire.Verdict{Path: p.Path}
		if err != nil {
			v = agentwire.Verdict{Err: err.Error()}
		} else if len(c.Sum) > 0 && strings.Contains(string(c.Name), "/") {
			_, _, sum, err := fileSum(ctx, p.Path, -1)
			v.Same = err == nil && bytes.Equal(sum, c.Sum)
			v.Other = !v.Same
		}
		all = append(all, v)
	}
	return all
}
