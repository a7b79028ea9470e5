package launcher

import (
	"fmt"
	"strconv"
	"strings"
)

// MapBy says how ranks are placed on hosts. The zero value fills the slots of one host after the other.
type MapBy struct {
	Node bool // one rank on each host in turn
	PPR  int  // this many on each host; 0: as many as it has slots
}

// ParseMapBy reads slot, node or ppr:N:node.
func ParseMapBy(s string) (MapBy, error) {
	switch s {
	case "slot":
		return MapBy{}, nil
	case "node":
		return MapBy{Node: true}, nil
	}
	if rest, ok := strings.CutPrefix(s, "ppr:"); ok {
		n, what, _ := strings.Cut(rest, ":")
		if ppr, err := parseSlots(n); err == nil && what == "node" {
			return MapBy{PPR: ppr}, nil
		}
		return MapBy{}, fmt.Errorf("%q must be ppr:N:node, N ranks on each host", s)
	}
	first, rest, _ := strings.Cut(strings.ToLower(s), ":")
	switch {
	case rest == "oversubscribe":
		return MapBy{}, fmt.Errorf("%q must be %s, and --oversubscribe", s, first)
	case first == "core", first == "numa", first == "socket", first == "package", first == "hwthread", first == "l3cache":
		return MapBy{}, fmt.Errorf("%q must be slot, node or ppr:N:node: ranks are placed on hosts, and bound to a part of one by --bind-to core or numa", s)
	}
	return MapBy{}, fmt.Errorf("%q must be slot, node or ppr:N:node", s)
}

func (m MapBy) String() string {
	switch {
	case m.PPR > 0:
		return "ppr:" + strconv.Itoa(m.PPR) + ":node"
	case m.Node:
		return "node"
	}
	return "slot"
}

// place finds the host of each rank, an index in hosts. np 0 asks for as many ranks as the hosts have slots, or as m says.
func place(np int, hosts []Host, m MapBy, oversubscribe bool) ([]int, error) {
	room := make([]int, len(hosts)) // without oversubscription
	total := 0
	for i, h := range hosts {
		room[i] = h.slots()
		if m.PPR > 0 {
			if h.Slots > 0 && m.PPR > h.Slots && !oversubscribe {
				return nil, &UsageError{Msg: fmt.Sprintf("%d ranks on each host, but host %s has %s", m.PPR, h.Name, count(h.Slots, "slot")),
					Hint: "give it more slots, or --oversubscribe"}
			}
			if h.MaxSlots > 0 && m.PPR > h.MaxSlots {
				return nil, usagef("%d ranks on each host, but host %s takes %d at most (max_slots)", m.PPR, h.Name, h.MaxSlots)
			}
			room[i] = m.PPR
		}
		total += room[i]
	}
	if np == 0 {
		np = total
	}
	if np > MaxNP {
		return nil, usagef("number of ranks %d: must be from 1 to %d", np, MaxNP)
	}
	if np > total && m.PPR > 0 {
		return nil, &UsageError{Msg: fmt.Sprintf("%d ranks, but %s with %d each take %d", np, count(len(hosts), "host"), m.PPR, total),
			Hint: "leave -np away, or give another ppr"}
	}
	if np > total && !oversubscribe {
		return nil, tooFewSlots(np, total, hosts)
	}
	ranks, err := spread(np, room, hosts, m)
	if err != nil {
		return nil, err
	}
	on := make([]int, 0, np)
	if !m.Node {
		for i, n := range ranks {
			for range n {
				on = append(on, i)
			}
		}
		return on, nil
	}
	for round := 0; len(on) < np; round++ {
		for i, n := range ranks {
			if round < n {
				on = append(on, i)
			}
		}
	}
	return on, nil
}

// spread finds how many ranks each host gets. Those that find no slot are spread evenly.
func spread(np int, room []int, hosts []Host, m MapBy) ([]int, error) {
	ranks := make([]int, len(hosts))
	fill := func(limit func(i int) int) { // one on each host in turn
		for again := true; again && np > 0; {
			again = false
			for i := range hosts {
				if np > 0 && ranks[i] < limit(i) {
					ranks[i]++
					np--
					again = true
				}
			}
		}
	}
	if m.Node {
		fill(func(i int) int { return room[i] })
	} else {
		for i := range hosts {
			ranks[i] = min(np, room[i])
			np -= ranks[i]
		}
	}
	fill(func(i int) int {
		if hosts[i].MaxSlots > 0 {
			return hosts[i].MaxSlots
		}
		return MaxNP
	})
	if np > 0 {
		most := 0
		for _, n := range ranks {
			most += n
		}
		return nil, usagef("%d ranks, but the hosts take %d at most (max_slots)", most+np, most)
	}
	return ranks, nil
}

func tooFewSlots(np, total int, hosts []Host) error {
	const shown = 8
	var list, more []string
	for i, h := range hosts {
		if i == shown {
			list = append(list, fmt.Sprintf("%d more", len(hosts)-shown))
			break
		}
		list = append(list, fmt.Sprintf("%s %d", h.Name, h.slots()))
	}
	e := &UsageError{}
	if len(hosts) == 1 {
		e.Msg = fmt.Sprintf("%d ranks, but host %s has %s", np, hosts[0].Name, count(total, "slot"))
	} else {
		e.Msg = fmt.Sprintf("%d ranks, but the %d hosts have %s (%s)", np, len(hosts), count(total, "slot"), strings.Join(list, ", "))
	}
	// The list that would do, where it is short.
	if len(hosts) <= shown/2 {
		for i, h := range hosts {
			h.Slots = np / len(hosts)
			if i < np%len(hosts) {
				h.Slots++
			}
			more = append(more, h.String())
		}
		e.Hint = "give their slots (-H " + strings.Join(more, ",") + "), or --oversubscribe"
	} else {
		e.Hint = "give their slots (-H host:slots, slots= in a hostfile), or --oversubscribe"
	}
	return e
}

// count is a number with its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}
