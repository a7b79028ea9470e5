package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/internal/server"
	"github.com/gorun-dev/gorun/rankenv"
)

// Standing is what a rank is in, as far as its host knows: plain data, to be sent to where those of all hosts are merged (Report).
type (
	Standing = server.Standing
	Wait     = server.Wait
	Seen     = server.Seen
)

// Standings tells of each rank of this host what it waits in: the operations of its job that have no answer, and the collectives that it has
// waited for longer than a moment. It asks no rank, so that it works whatever they hang in.
func (n *Node) Standings() []Standing { return n.server.Standings() }

// Stacks asks the ranks of this host for the stacks of their goroutines, as runtime.Stack writes them, and returns what has come when all have answered or ctx
// is done, by rank. Only ranks that have joined can answer, and none whose process is stopped.
func (n *Node) Stacks(ctx context.Context) map[int][]byte { return n.server.Stacks(ctx) }

// maxTold is how many ranks of a kind a line of a Report describes one by one, and maxLines how many lines it has.
const (
	maxTold  = 4
	maxLines = 20
)

// Report says, for people, which ranks keep others waiting. all are the Standings of all hosts, as far as they have come; nodeOf is the host of each
// rank, hosts are their names (nil: on one machine, whose name says nothing). One line for each operation that ranks wait in, the longest wait first; none if no rank waits. Ranks
// that wait in messages for each other, all around, have one line together.
func Report(all []Standing, nodeOf []int, hosts []string) []string {
	r := &report{size: len(nodeOf), nodeOf: nodeOf, hosts: hosts, of: map[int]*Standing{}}
	joints := map[string]*joint{}
	for i := range all {
		if st := &all[i]; st.Rank >= 0 && st.Rank < r.size {
			r.of[st.Rank] = st
		}
	}
	circles := r.circles()
	for i := range all {
		st := &all[i]
		if st.Rank < 0 || st.Rank >= r.size {
			continue
		}
		for i, w := range st.Waits {
			if c := circles[st.Rank]; c != nil && i == messageOf(st) {
				joints[fmt.Sprint("circle of ", c.ranks[0])] = c
				continue
			}
			key := w.Group
			switch {
			case w.Comm != 0:
				key = fmt.Sprintf("communicator %x %d", w.Comm, w.Seq)
			case key == "":
				key = w.What
			}
			j := joints[key]
			if j == nil {
				j = &joint{Wait: w}
				joints[key] = j
			}
			j.ranks = append(j.ranks, st.Rank)
			j.For = max(j.For, w.For)
		}
	}
	order := make([]*joint, 0, len(joints))
	for _, j := range joints {
		if !j.circle {
			slices.Sort(j.ranks)
		}
		order = append(order, j)
	}
	slices.SortFunc(order, func(a, b *joint) int {
		if d := int(b.For - a.For); d != 0 {
			return d
		}
		return strings.Compare(a.What, b.What)
	})
	var lines []string
	for i, j := range order {
		if i == maxLines-1 && len(order) > maxLines {
			lines = append(lines, fmt.Sprintf("and %d more operations that ranks wait in", len(order)-i))
			break
		}
		lines = append(lines, r.line(j))
	}
	return lines
}

// joint is an operation with all that wait in it.
type joint struct {
	Wait
	ranks  []int
	circle bool // each waits for the next one
}

type report struct {
	size   int
	nodeOf []int
	hosts  []string
	of     map[int]*Standing
}

func (r *report) line(j *joint) string {
	if j.circle {
		return r.circleLine(j)
	}
	if j.Group == "" && j.Comm == 0 {
		return fmt.Sprintf("%s of %d: in %s since %s", r.named(j.ranks), r.size, j.What, age(j.For))
	}
	absent := r.absent(j)
	if len(absent) == 0 {
		return fmt.Sprintf("%s of %d: in %s since %s, as all that take part", r.named(j.ranks), r.size, j.What, age(j.For))
	}
	if len(absent) == 1 {
		return fmt.Sprintf("%s of %d%s has not entered %s: it %s; %s for it since %s",
			rankenv.RankText(absent), r.size, r.host(absent[0]), j.What, r.where(absent[0], j), waiters(j.ranks), age(j.For))
	}
	var each []string
	for i, rank := range absent {
		if i == maxTold && len(absent) > maxTold+1 {
			each = append(each, fmt.Sprintf("and %d more", len(absent)-i))
			break
		}
		each = append(each, fmt.Sprintf("rank %d%s %s", rank, r.host(rank), r.where(rank, j)))
	}
	return fmt.Sprintf("%s of %d have not entered %s: %s; %s for them since %s",
		rankenv.RankText(absent), r.size, j.What, strings.Join(each, ", "), waiters(j.ranks), age(j.For))
}

// absent are the ranks that take part in an operation and have not entered it, as far as is known.
func (r *report) absent(j *joint) []int {
	var absent []int
	if j.Comm != 0 {
		for rank, st := range r.of {
			for _, c := range st.Seen {
				if c.Comm == j.Comm && c.Last < j.Seq {
					absent = append(absent, rank)
				}
			}
		}
		slices.Sort(absent)
		return absent
	}
	members := j.Members
	if members == nil {
		members = []server.Run{{0, r.size}}
	}
	for _, run := range members {
		for rank := run[0]; rank < run[0]+run[1] && rank < r.size; rank++ {
			if _, in := slices.BinarySearch(j.ranks, rank); !in {
				absent = append(absent, rank)
			}
		}
	}
	slices.Sort(absent)
	return absent
}

// where says what is known of a rank that others wait for in j.
func (r *report) where(rank int, j *joint) string {
	st := r.of[rank]
	switch {
	case st == nil:
		return "has sent no word"
	case st.State == "ended":
		return "has ended"
	case st.State == "left the job":
		return "has left the job"
	case st.State != "":
		return st.State
	case len(st.Waits) > 0:
		return fmt.Sprintf("waits in %s since %s", st.Waits[0].What, age(st.Waits[0].For))
	}
	var last *Seen
	for i := range st.Seen {
		c := &st.Seen[i]
		if c.Busy != "" {
			return "is in " + c.Busy
		}
		if c.Comm == j.Comm || j.Comm == 0 && (last == nil || c.Last > last.Last) {
			last = c
		}
	}
	switch {
	case last == nil:
		return "waits in nothing of gorun"
	case last.Op == "":
		return "has entered no collective of communicator " + last.Name
	case last.Comm != j.Comm:
		return fmt.Sprintf("was last seen in %s on communicator %s", last.Op, last.Name)
	}
	return "was last seen in " + last.Op
}

// words says where a rank is that others wait for, in an operation that is no matter.
func words(st Standing) string {
	r := &report{of: map[int]*Standing{st.Rank: &st}}
	return r.where(st.Rank, &joint{})
}

// named is "ranks 0-2"; of one rank with its host.
func (r *report) named(ranks []int) string {
	if len(ranks) == 1 {
		return rankenv.RankText(ranks) + r.host(ranks[0])
	}
	return rankenv.RankText(ranks)
}

func (r *report) host(rank int) string {
	if node := r.nodeOf[rank]; node >= 0 && node < len(r.hosts) && r.hosts[node] != "" {
		return fmt.Sprintf(" (host %s)", r.hosts[node])
	}
	return ""
}

func waiters(ranks []int) string {
	if len(ranks) == 1 {
		return rankenv.RankText(ranks) + " waits"
	}
	return rankenv.RankText(ranks) + " wait"
}

func age(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return fmt.Sprintf("%.0f s", d.Seconds())
}

// Runs are ranks, in ascending order, as Wait.Members has them.
func Runs(ranks []int) []server.Run { return server.RunsOf(ranks) }
