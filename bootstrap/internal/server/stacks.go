package server

import (
	"context"

	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

// stackQuestion is a question for stacks that a rank has not answered.
type stackQuestion struct {
	of     *rank
	answer chan<- []byte // has room for it
}

// Stacks asks the ranks of this host that have joined for the stacks of their goroutines, and returns what came until ctx was done, by rank. A rank whose process is
// stopped, or in a call that the Go runtime cannot leave, does not answer.
func (s *Server) Stacks(ctx context.Context) map[int][]byte {
	answers := map[int]chan []byte{}
	s.mu.Lock()
	var tokens []uint64
	for number, r := range s.ranks {
		if r.conn == nil || r.conn.rank == nil || r.ended {
			continue
		}
		s.token++
		answer := make(chan []byte, 1)
		answers[number], s.stacks[s.token] = answer, &stackQuestion{r, answer}
		tokens = append(tokens, s.token)
		r.conn.Send(wire.Message{Type: wire.Stacks, ID: s.token})
	}
	s.mu.Unlock()
	all := map[int][]byte{}
	for number, answer := range answers {
		select {
		case all[number] = <-answer:
		case <-ctx.Done():
			select { // it may have come before
			case all[number] = <-answer:
			default:
			}
		}
	}
	s.mu.Lock()
	for _, token := range tokens {
		delete(s.stacks, token)
	}
	s.mu.Unlock()
	return all
}

// stacked passes a rank's answer on, if somebody waits for it.
func (s *Server) stacked(r *rank, token uint64, stacks []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if q := s.stacks[token]; q != nil && q.of == r && len(stacks) <= wire.MaxStacks {
		delete(s.stacks, token)
		q.answer <- stacks
	}
}
