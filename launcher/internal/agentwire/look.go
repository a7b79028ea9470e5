package agentwire

import (
	"encoding/json"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/stacks"
)

// Look asks an agent what its ranks do. Nothing of them is stopped.
type Look struct {
	ID     uint64
	Within time.Duration // when the answer is to be on its way
	Size   int           // bytes of it for each rank, about
}

// Looked is the answer, with all that was found out in time.
type Looked struct {
	ID        uint64
	Standings json.RawMessage // []node.Standing
	Ranks     []stacks.Rank   // those that run
}
