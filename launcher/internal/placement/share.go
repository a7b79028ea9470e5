package placement

import (
	"fmt"
	"strconv"
)

// turn is the place of a rank that shares the host's GPUs with others: ranks take them in order, and then again from the first.
type turn struct {
	rank int // index in Ask.Ranks
	n    int // which time the GPUs are gone through, from 0
	gpu  int // index among the visible ones
}

// share tells ranks which GPU they take. NCCL refuses two ranks of one host on one GPU. Where there are such, those of each turn are told that they
// are alone on a host of their own: by the variable that NCCL takes for the host's name, and by the place that programs choose a device by. Ranks
// of a turn then reach each other as on any host, those of different turns by sockets.
func (p *Placement) share(turns []turn, gpus GPUs, a Ask) {
	size := map[int]int{} // of each turn
	on := map[int]int{}   // ranks of each GPU
	most := 0
	for _, t := range turns {
		size[t.n]++
		on[t.gpu]++
		most = max(most, on[t.gpu])
	}
	for _, t := range turns {
		r := &p.Ranks[t.rank]
		r.Vars = append(r.Vars, "GORUN_DEVICE="+strconv.Itoa(t.gpu))
		if len(size) < 2 {
			continue
		}
		r.Turn = Turn{t.gpu, size[t.n]}
		env := a.Ranks[t.rank].Env
		if _, set := env(gpus.hostVar); !set { // who sets it knows of other hosts than we do
			node, _ := env("GORUN_NODE")
			r.Vars = append(r.Vars, gpus.hostVar+"=gorun-"+node+"-"+strconv.Itoa(t.n))
		}
	}
	if len(size) > 1 {
		what := "1 GPU"
		if len(on) > 1 {
			what = fmt.Sprintf("%d GPUs, up to %d on one", len(on), most)
		}
		p.Shared = fmt.Sprintf("%d ranks share %s: slow, for trying out; they reach each other by sockets", len(turns), what)
	}
}
