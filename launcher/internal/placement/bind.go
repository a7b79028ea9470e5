package placement

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Bind says what ranks are bound to. The zero value leaves it to the host: see Machine.Place.
type Bind struct {
	To    string `json:"to"`              // None, ToCore, ToNUMA; "": by default
	Cores int    `json:"cores,omitempty"` // with ToCore: how many for each rank; 0: an equal share
}

// Values of Bind.To.
const (
	None   = "none" // a rank runs wherever the host lets it
	ToCore = "core" // each rank has cores of its own, with all their hardware threads
	ToNUMA = "numa" // a rank has the CPUs of one NUMA node: that of its GPU, where it is known
)

// maxCores bounds what a rank may ask for.
const maxCores = maxCPU

// ParseBind reads none, core, core:N or numa.
func ParseBind(s string) (Bind, error) {
	switch s {
	case None, ToCore, ToNUMA:
		return Bind{To: s}, nil
	}
	if n, ok := strings.CutPrefix(s, ToCore+":"); ok {
		if c, err := strconv.Atoi(n); err == nil && c >= 1 && c <= maxCores && n[0] != '+' {
			return Bind{ToCore, c}, nil
		}
		return Bind{}, fmt.Errorf("%q must be core:N, N cores for each rank", s)
	}
	switch strings.ToLower(s) {
	case "socket", "package", "node":
		return Bind{}, fmt.Errorf("%q must be none, core, core:N or numa: a NUMA node is a package or a part of one", s)
	case "hwthread", "pu":
		return Bind{}, fmt.Errorf("%q must be none, core, core:N or numa: the hardware threads of a core stay together", s)
	}
	return Bind{}, fmt.Errorf("%q must be none, core, core:N or numa", s)
}

func (b Bind) String() string {
	if b.Cores > 0 {
		return b.To + ":" + strconv.Itoa(b.Cores)
	}
	return b.To
}

// Ask is what a job wants of a host.
type Ask struct {
	Bind  Bind
	Hide  bool      // show each rank its own GPU alone
	Share bool      // ranks take the GPUs in turn, so that there may be more ranks than GPUs
	Ranks []RankAsk // in the order of their local ranks
}

// RankAsk is what concerns one rank.
type RankAsk struct {
	Device string // that it is told to use: a number, a UUID, "host"; "": its own choice, which is the GPU of its local rank
	Env    Lookup // its environment, of which the variables count that hide GPUs
}

// Placement is what a host does.
type Placement struct {
	Why     string // why the ranks are bound as they are, or are not
	Crowded string // that there are more ranks than CPUs; "": there are not
	Refused string // why what was asked for is not done; "": it is
	Shared  string // that ranks share GPUs; "": they do not
	Ranks   []Rank // as in Ask
}

// Rank is what one rank gets.
type Rank struct {
	CPUs  Set      // what it is bound to; nil: it is not
	Share int      // how many ranks have those CPUs
	Where string   // what they are: "NUMA node 1, near GPU 5"
	GPU   string   // the token of its GPU, "" where it has none or that isn't known
	Vars  []string // NAME=VALUE: what hides the other GPUs, or has ranks share them
	Shown string   // the tokens that it sees, "" for none; with Alone before the others are hidden
	Alone bool     // it sees its GPU alone
	Turn  Turn     // the place that programs of other launchers are to choose their GPU by, instead of that on the host
	Local string   // its GPU counted among those that it sees, "0,1,..." where it has the host alone and may take all; "" where it has none or that isn't known
}

// Turn is a place among the ranks that take a host's GPUs in the same turn. The zero value is none.
type Turn struct{ Rank, Size int }

// Place works out what each rank gets. Without a wish (Bind{}) ranks are bound to NUMA nodes where each has a GPU whose node is known and where the nodes
// that they get are all that the host lets them use; else they are not bound. For a rank has threads of its own (Go's, PyTorch's loaders, OpenMP's), and
// a default must not take CPUs from it that nobody else would use. Ranks that would have to share cores are never bound to any: the scheduler does better.
func (m *Machine) Place(a Ask) (Placement, error) {
	p := Placement{Ranks: make([]Rank, len(a.Ranks))}
	near := make([]int, len(a.Ranks)) // index in m.Nodes, -1: not known
	gpus := 0                         // ranks that have one
	own := 0                          // ranks so far that chose none themselves
	var turns []turn
	for i, r := range a.Ranks {
		near[i] = -1
		if m.GPUs.Count == 0 || r.Device == "host" {
			continue
		}
		v := m.GPUs.Visible(r.Env)
		p.Ranks[i].Shown = strings.Join(v.Tokens, ",")
		g := i
		if r.Device != "" {
			p.Ranks[i].GPU = r.Device
			if g = v.find(r.Device); g < 0 {
				continue // the rank will say so itself
			}
		}
		if (a.Hide || a.Share) && r.Device == "" { // ranks of another program that was given a device take none
			g = own
			own++
		}
		if a.Share && r.Device == "" && len(v.Tokens) > 0 {
			t := turn{i, g / len(v.Tokens), g % len(v.Tokens)}
			turns, g = append(turns, t), t.gpu
		}
		if g < len(v.Tokens) {
			gpus++
			p.Ranks[i].GPU = v.Tokens[g]
			near[i] = slices.IndexFunc(m.Nodes, func(n Node) bool { return n.ID == v.node(g) })
		}
		if a.Hide && r.Device == "" && len(v.Tokens) > 0 {
			if g >= len(v.Tokens) {
				from := ""
				if v.From != "" {
					from = " (" + v.From + ")"
				}
				return p, fmt.Errorf("%d ranks, but %s visible%s: --gpu-bind hide needs a GPU for each rank", len(a.Ranks), are(len(v.Tokens), "GPU"), from)
			}
			p.Ranks[i].Vars, p.Ranks[i].Alone = v.only(g, r.Env), true
			p.Ranks[i].Local = "0"
		} else if len(a.Ranks) == 1 && r.Device == "" {
			p.Ranks[i].Local = counted(len(v.Tokens))
		} else if g < len(v.Tokens) {
			p.Ranks[i].Local = strconv.Itoa(g)
		}
	}
	p.share(turns, m.GPUs, a)
	m.bind(&p, a.Bind, near, gpus)
	return p, nil
}

// counted is "0,1,2" for 3.
func counted(n int) string {
	var list []string
	for i := range n {
		list = append(list, strconv.Itoa(i))
	}
	return strings.Join(list, ",")
}

// count is a number with its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}

// are is count with "is" or "are" behind it.
func are(n int, noun string) string {
	if n == 1 {
		return "1 " + noun + " is"
	}
	return count(n, noun) + " are"
}

// find is the place of a device among the visible ones, as cuda.Open understands it; -1 if it is not there or not certain.
func (v *Visible) find(device string) int {
	if n, err := strconv.Atoi(device); err == nil {
		if n < 0 || n >= len(v.Tokens) {
			return -1
		}
		return n
	}
	if i := slices.Index(v.Tokens, device); i >= 0 {
		return i
	}
	at := v.gpus.index(device, func(string) (string, bool) { return "", false })
	if at < 0 {
		return -1
	}
	return slices.Index(v.index, at)
}

func (m *Machine) bind(p *Placement, b Bind, near []int, gpus int) {
	n := len(p.Ranks)
	crowded := float64(n) > m.usable()
	if crowded {
		cpus, quota := count(len(m.Allowed), "CPU"), ""
		if m.Quota > 0 && m.Quota < float64(len(m.Allowed)) {
			cpus, quota = strconv.FormatFloat(m.Quota, 'g', 4, 64)+" CPUs", " (quota of the control group)"
		}
		p.Crowded = fmt.Sprintf("%d ranks share %s%s", n, cpus, quota)
	}
	switch b.To {
	case None:
		p.Why = "--bind-to none"
	case ToCore:
		m.bindCores(p, b, near, crowded)
	case ToNUMA:
		if len(m.Nodes) < 2 {
			p.Why = "one NUMA node"
			return
		}
		m.bindNUMA(p, near)
	default:
		p.Why = "default"
		switch {
		case crowded:
			p.Why += ": more ranks than CPUs"
		case gpus == 0:
			p.Why += " without GPUs"
		case gpus < n:
			p.Why += ": not each rank has a GPU"
		case len(m.Nodes) < 2:
			p.Why += ": one NUMA node"
		case slices.Contains(near, -1):
			p.Why += ": it is not known which of the CPUs are near each GPU"
		case distinct(near) < len(m.Nodes):
			p.Why += ": CPUs of a NUMA node without a rank would idle"
		default:
			m.bindNUMA(p, near)
			p.Why = "default: each rank near its GPU"
		}
	}
}

func distinct(list []int) int {
	list = slices.Clone(list)
	slices.Sort(list)
	return len(slices.Compact(list))
}

// nearOr is the node of a rank: its GPU's, else neighbours get the same one, each node as many as it has CPUs for.
func (m *Machine) nearOr(near []int, rank int) int {
	if near[rank] >= 0 {
		return near[rank]
	}
	cpu := rank * len(m.Allowed) / len(near)
	for i, n := range m.Nodes {
		if cpu < len(n.CPUs) {
			return i
		}
		cpu -= len(n.CPUs)
	}
	return len(m.Nodes) - 1
}

func (m *Machine) bindNUMA(p *Placement, near []int) {
	share := make([]int, len(m.Nodes))
	for i := range p.Ranks {
		share[m.nearOr(near, i)]++
	}
	for i := range p.Ranks {
		at := m.nearOr(near, i)
		r := &p.Ranks[i]
		r.CPUs, r.Share, r.Where = m.Nodes[at].CPUs, share[at], m.whereNode(at, near[i], r.GPU)
	}
	p.Why = "--bind-to numa"
}

func (m *Machine) whereNode(at, near int, gpu string) string {
	s := "NUMA node " + strconv.Itoa(m.Nodes[at].ID)
	if near == at {
		if _, err := strconv.Atoi(gpu); err == nil {
			gpu = "GPU " + gpu
		}
		s += ", near " + gpu
	}
	return s
}

func (m *Machine) bindCores(p *Placement, b Bind, near []int, crowded bool) {
	n := len(p.Ranks)
	each := b.Cores
	if each == 0 {
		each = len(m.Cores) / n
	}
	p.Why = "--bind-to " + b.String()
	if crowded || each == 0 || each > len(m.Cores)/n {
		what := "a core"
		if b.Cores > 1 {
			what = count(b.Cores, "core")
		}
		p.Why += " needs " + what + " for each rank"
		if !crowded {
			p.Why += fmt.Sprintf(", and %s here for %d", are(len(m.Cores), "core"), n)
		}
		p.Refused = p.Why
		return
	}
	if differ(m.Cores) {
		// Dealt like cards, the fastest first: all ranks get the same hand.
		cores := slices.Clone(m.Cores)
		slices.SortStableFunc(cores, func(a, b Core) int { return b.Speed - a.Speed })
		for i := range p.Ranks {
			for k := range each {
				p.Ranks[i].take(cores[k*n+i])
			}
			p.Ranks[i].Where = count(each, "core")
		}
		return
	}
	free := make([][]Core, len(m.Nodes))
	for _, c := range m.Cores {
		free[c.Node] = append(free[c.Node], c)
	}
	for i := range p.Ranks {
		r := &p.Ranks[i]
		at := m.nearOr(near, i)
		if len(free[at]) < each {
			for k := range free {
				if len(free[k]) > len(free[at]) {
					at = k
				}
			}
		}
		if len(free[at]) >= each {
			r.Where = count(each, "core")
			if len(m.Nodes) > 1 {
				r.Where += " of " + m.whereNode(at, near[i], r.GPU)
			}
			for _, c := range free[at][:each] {
				r.take(c)
			}
			free[at] = free[at][each:]
			continue
		}
		r.Where = count(each, "core") + " of several NUMA nodes" // no node has as many left
		for k, left := 0, each; left > 0; k++ {
			some := min(left, len(free[k]))
			for _, c := range free[k][:some] {
				r.take(c)
			}
			free[k] = free[k][some:]
			left -= some
		}
	}
}

// take gives a core to a rank.
func (r *Rank) take(c Core) {
	r.CPUs = append(r.CPUs, c.CPUs...)
	slices.Sort(r.CPUs)
	r.Share = 1
}

// HostPlace is a Placement for people and programs: what concerns the host.
type HostPlace struct {
	CPUs    string  `json:"cpus"`            // that its ranks may use: "0-3,8"
	Quota   float64 `json:"quota,omitempty"` // how many CPUs' time the control groups grant; 0: no quota
	Why     string  `json:"why"`             // why its ranks are bound as they are, or are not
	Crowded string  `json:"crowded,omitempty"`
	Refused string  `json:"refused,omitempty"`
	Shared  string  `json:"shared,omitempty"` // that ranks share GPUs
}

// RankPlace is what concerns a rank.
type RankPlace struct {
	CPUs    string `json:"cpus"`                   // that it may use: "0-3,8"
	Bound   bool   `json:"bound"`                  // gorun bound it to them
	Why     string `json:"why"`                    // what they are ("NUMA node 1, near GPU 5"), or why it is not bound
	GPU     string `json:"gpu,omitempty"`          // the token of its GPU, if it chooses by its local rank; "": none, or not known
	Visible string `json:"visible_gpus,omitempty"` // the tokens of those that it sees
}

// Tell describes a placement.
func (m *Machine) Tell(p Placement) (HostPlace, []RankPlace) {
	h := HostPlace{CPUs: m.Allowed.String(), Quota: m.Quota, Why: p.Why, Crowded: p.Crowded, Refused: p.Refused, Shared: p.Shared}
	ranks := make([]RankPlace, len(p.Ranks))
	for i, r := range p.Ranks {
		ranks[i] = RankPlace{CPUs: h.CPUs, Why: p.Why, GPU: r.GPU, Visible: r.Shown}
		if r.Alone {
			ranks[i].Visible = r.GPU
		}
		if r.CPUs != nil {
			ranks[i].CPUs, ranks[i].Bound, ranks[i].Why = r.CPUs.String(), true, r.Where
		}
	}
	return h, ranks
}
