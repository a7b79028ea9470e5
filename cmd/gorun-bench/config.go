package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/nccl"
)

const helpText = `gorun-bench measures collectives. gorun bench starts it:

  gorun bench -np 2                              everything, 8 bytes to 16 MiB; a minute or two
  gorun bench -np 2 -op all-reduce -mode auto -e 1G -json
                                                 one operation up to 1 GiB, as JSON

What to measure:
  -op LIST       all-reduce, all-gather, reduce-scatter, broadcast, reduce, gather, scatter,
                 all-to-all, sendrecv (default: all)
  -mode LIST     how calls reach the buffers (default: all):
                   auto    memory of nccl.Alloc and nothing else said: what the runtime does by
                           itself; captured calls show the mode that it has chosen ("peer": by a
                           kernel of package nccl, as small eager calls then, too; the other modes
                           are always the library's)
                   plain   memory that is not registered
                   local   registered by Comm.Register
                   graph   registered by the capture; captured calls only
                   window  at the same offsets on every rank: in a window (Comm.Window), or
                           captured with graphs.Require(nccl.Window)
  -calls LIST    eager: calls one by one; captured: calls in a graph (default: both)
  -place LIST    out: another buffer for the result; in: the same (default: out)
  -t TYPE        int8, uint8, int32, uint32, int64, uint64, float16, bfloat16, float32 (default),
                 float64
  -red OP        sum (default), min, max
  -root RANK     root of broadcast, reduce, gather and scatter (default 0)

Sizes, in bytes; K, M, G are powers of 1024:
  -b SIZE        smallest (default 8)
  -e SIZE        largest (default 64M; by factors of 8 the last one is 16M)
  -f FACTOR      from one size to the next (default 8)
  -i STEP        a step instead of a factor

How to measure:
  -n N           timed calls in a round (default 20)
  -g N           calls in a graph (default 20)
  -G N           timed launches of a graph in a round (default 20)
  -w N           untimed calls or launches before, and calls of the largest size before the
                 first (default 5)
  -r N           rounds (default 5)
  -limit TIME    fewer calls in a round where it would take longer (default 30ms)
  -buffers N     calls on more than 64K take up to N buffers in turn, which together are not
                 larger than -e: they leave the cache, as those of nccl-tests do (default 1)
  -compare HOW   watch (default): the ranks' eager calls are compared while they run; strict: before
                 each; trust: not at all
  -c             check the results; a wrong one makes the exit code 1

Output:
  -json          a JSON object a line, instead of the table
                 (what takes long says on stderr where it is)
  -h             this help

A round's calls are enqueued one after the other and waited for once. Its time is the mean over
the ranks; of the rounds the median, least and greatest are shown, in microseconds a call. Size
and bandwidths are those of nccl-tests: algbw is size by time, busbw is that times 2(n-1)/n for
all-reduce, (n-1)/n for the operations on a part of each rank (all-gather, reduce-scatter, gather,
scatter, all-to-all), 1 for broadcast, reduce and sendrecv. The size of an operation on parts is
that of all parts together.

In sendrecv each rank sends to the next and receives from the one before. sendrecv, gather, scatter
and all-to-all are sends and receives, which have no windows; sendrecv and all-to-all have no
place in.
`

// config is a command line.
type config struct {
	ops      []string
	modes    []string
	calls    []string
	places   []string
	dtype    string
	red      string
	root     int
	min, max uint64
	factor   float64
	step     uint64
	n        int
	perGraph int
	launches int
	buffers  int
	warmUp   int
	rounds   int
	limit    time.Duration
	compare  nccl.CheckMode
	check    bool
	json     bool
}

var (
	opNames    = []string{"all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "gather", "scatter", "all-to-all", "sendrecv"}
	modeNames  = []string{"auto", "plain", "local", "graph", "window"}
	callsNames = []string{"eager", "captured"}
	placeNames = []string{"out", "in"}
	// compareNames are the names of nccl's check modes.
	compareNames = []string{nccl.Watch: "watch", nccl.Strict: "strict", nccl.Trust: "trust"}
	redNames     = []string{"sum", "min", "max"}
)

// list is a flag with some of a few words, separated by commas.
type list struct {
	to   *[]string
	from []string
	what string
}

func (l list) String() string { return "" }
func (l list) Set(s string) error {
	*l.to = nil
	for w := range strings.SplitSeq(s, ",") {
		switch {
		case w == "all":
			*l.to = slices.Clone(l.from)
			continue
		case !slices.Contains(l.from, w):
			return fmt.Errorf("no %s %q; there are %s", l.what, w, strings.Join(l.from, ", "))
		case !slices.Contains(*l.to, w):
			*l.to = append(*l.to, w)
		}
	}
	return nil
}

type bytesFlag struct{ to *uint64 }

func (b bytesFlag) String() string { return "" }
func (b bytesFlag) Set(s string) (err error) {
	*b.to, err = parseBytes(s)
	return err
}

// maxBytes is the largest size that a flag may ask for.
const maxBytes = 1 << 44

// parseBytes reads "8", "64K", "1G".
func parseBytes(s string) (uint64, error) {
	digits := strings.TrimRight(s, "KMGkmgiB")
	shift := 0
	switch strings.ToUpper(s[len(digits):]) {
	case "", "B":
	case "K", "KB", "KIB":
		shift = 10
	case "M", "MB", "MIB":
		shift = 20
	case "G", "GB", "GIB":
		shift = 30
	default:
		return 0, fmt.Errorf("want a size such as 8, 64K, 1M or 1G")
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || n > maxBytes>>shift {
		return 0, fmt.Errorf("want a size such as 8, 64K, 1M or 1G, up to %dG", maxBytes>>30)
	}
	return n << shift, nil
}

func parse(args []string) (*config, error) {
	c := &config{ops: opNames, modes: modeNames, calls: callsNames, places: placeNames[:1], min: 8, max: 64 << 20}
	fs := flag.NewFlagSet("gorun-bench", flag.ContinueOnError)
	fs.Usage = func() {}
	fs.Var(list{&c.ops, opNames, "operation"}, "op", "")
	fs.Var(list{&c.modes, modeNames, "mode"}, "mode", "")
	fs.Var(list{&c.calls, callsNames, "kind of calls"}, "calls", "")
	fs.Var(list{&c.places, placeNames, "place"}, "place", "")
	fs.StringVar(&c.dtype, "t", "float32", "")
	fs.StringVar(&c.red, "red", "sum", "")
	fs.IntVar(&c.root, "root", 0, "")
	fs.Var(bytesFlag{&c.min}, "b", "")
	fs.Var(bytesFlag{&c.max}, "e", "")
	fs.Float64Var(&c.factor, "f", 8, "")
	fs.Var(bytesFlag{&c.step}, "i", "")
	fs.IntVar(&c.n, "n", 20, "")
	fs.IntVar(&c.perGraph, "g", 20, "")
	fs.IntVar(&c.launches, "G", 20, "")
	fs.IntVar(&c.buffers, "buffers", 1, "")
	fs.IntVar(&c.warmUp, "w", 5, "")
	fs.IntVar(&c.rounds, "r", 5, "")
	fs.DurationVar(&c.limit, "limit", 30*time.Millisecond, "")
	fs.Func("compare", "", func(s string) error {
		i := slices.Index(compareNames, s)
		if i < 0 {
			return fmt.Errorf("there are %s", strings.Join(compareNames, ", "))
		}
		c.compare = nccl.CheckMode(i)
		return nil
	})
	fs.BoolVar(&c.check, "c", false, "")
	fs.BoolVar(&c.json, "json", false, "")
	if err := parseFlags(fs, args); err != nil {
		return nil, err
	}
	if _, ok := types[c.dtype]; !ok {
		return nil, fmt.Errorf("-t %s: there are %s", c.dtype, strings.Join(typeNames, ", "))
	}
	if !slices.Contains(redNames, c.red) {
		return nil, fmt.Errorf("-red %s: there are %s", c.red, strings.Join(redNames, ", "))
	}
	switch {
	case c.root < 0:
		return nil, fmt.Errorf("-root %d: want a rank", c.root)
	case c.min < 1 || c.max < c.min:
		return nil, fmt.Errorf("-b %d -e %d: want 1 <= b <= e", c.min, c.max)
	case c.step == 0 && !(c.factor > 1 && c.factor <= math.MaxInt32):
		return nil, fmt.Errorf("-f %v: want more than 1", c.factor)
	case c.n < 1 || c.perGraph < 1 || c.launches < 1 || c.buffers < 1 || c.rounds < 1 || c.warmUp < 0:
		return nil, fmt.Errorf("-n, -g, -G, -buffers and -r are at least 1, -w at least 0")
	case c.limit <= 0:
		return nil, fmt.Errorf("-limit %v: want more than 0", c.limit)
	}
	if len(c.series()) == 0 {
		return nil, fmt.Errorf("nothing to measure: graph is a mode of captured calls, sends and receives have no windows, and sendrecv and all-to-all no place in")
	}
	return c, nil
}

// fits is an error where so many ranks are too few for what is asked for.
func (c *config) fits(ranks int) error {
	if c.root >= ranks {
		return fmt.Errorf("-root %d: there are %d ranks", c.root, ranks)
	}
	return nil
}

// exitRefused is the exit code of flagsMain for flags that are refused.
const exitRefused = 4

// flagsMain tells gorun bench, before it starts any rank, why a number of ranks would refuse their flags: args is that number and the flags.
func flagsMain(args []string, stdout io.Writer) int {
	if len(args) == 0 {
		return 2
	}
	ranks, err := strconv.Atoi(args[0])
	if err != nil {
		return 2
	}
	if len(args) > 1 && checks[args[1]].run != nil { // it has flags of its own
		return 0
	}
	if len(args) > 1 && args[1] == "compare" {
		err = fmt.Errorf("compare needs no ranks: gorun-bench compare")
	} else {
		var c *config
		if c, err = parse(args[1:]); err == nil {
			err = c.fits(ranks)
		}
	}
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return 0
	}
	fmt.Fprintln(stdout, err)
	return exitRefused
}

// sizes are the sizes from -b to -e.
func (c *config) sizes() []uint64 {
	var all []uint64
	for b := c.min; b <= c.max; {
		all = append(all, b)
		if c.step > 0 {
			b += c.step
		} else {
			b = max(b+1, uint64(float64(b)*c.factor))
		}
	}
	return all
}

// shaped are the sizes that an operation has on so many ranks, each once: those too small to be divided come to the same.
func (c *config) shaped(op string, elem uint64, ranks int) []uint64 {
	var all []uint64
	for _, bytes := range c.sizes() {
		if _, _, size := shape(op, bytes, elem, ranks); len(all) == 0 || size != all[len(all)-1] {
			all = append(all, size)
		}
	}
	return all
}

// turns is how many buffers of a size calls take in turn.
func (c *config) turns(size uint64) int {
	if size <= 64<<10 { // many fit in any cache
		return 1
	}
	return int(max(1, min(uint64(c.buffers), c.max/size)))
}

// series is what is measured over all sizes.
type series struct {
	op       string
	mode     string
	captured bool
	inPlace  bool
}

func (s series) calls() string {
	if s.captured {
		return "captured"
	}
	return "eager"
}

func (s series) place() string {
	if s.inPlace {
		return "in"
	}
	return "out"
}

// series are all that the command line asks for and that exist.
func (c *config) series() []series {
	var all []series
	for _, op := range c.ops {
		for _, mode := range c.modes {
			for _, calls := range c.calls {
				for _, place := range c.places {
					s := series{op, mode, calls == "captured", place == "in"}
					if mode == "graph" && !s.captured || mode == "window" && ofMessages(op) || s.inPlace && !hasInPlace(op) {
						continue
					}
					all = append(all, s)
				}
			}
		}
	}
	return all
}

// ofMessages reports whether an operation is made of sends and receives.
func ofMessages(op string) bool {
	return op == "sendrecv" || op == "gather" || op == "scatter" || op == "all-to-all"
}

// hasInPlace reports whether an operation may work on one buffer.
func hasInPlace(op string) bool { return op != "sendrecv" && op != "all-to-all" }

// shape is how many elements each rank sends and receives for a size, at least one, and the size that results. Ranks that are not the root have
// buffers as large as the root's, as in nccl-tests.
func shape(op string, bytes, elem uint64, ranks int) (send, recv int, size uint64) {
	n := uint64(ranks)
	switch op {
	case "all-gather", "gather":
		part := max(1, bytes/(elem*n))
		return int(part), int(part * n), part * n * elem
	case "reduce-scatter", "scatter":
		part := max(1, bytes/(elem*n))
		return int(part * n), int(part), part * n * elem
	case "all-to-all":
		part := max(1, bytes/(elem*n))
		return int(part * n), int(part * n), part * n * elem
	}
	count := max(1, bytes/elem)
	return int(count), int(count), count * elem
}

// bandwidth is nccl-tests' algbw and busbw in GB/s (1e9).
func bandwidth(op string, size uint64, us float64, ranks int) (alg, bus float64) {
	alg = float64(size) / us / 1e3
	n := float64(ranks)
	switch op {
	case "all-reduce":
		return alg, alg * 2 * (n - 1) / n
	case "all-gather", "reduce-scatter", "gather", "scatter", "all-to-all":
		return alg, alg * (n - 1) / n
	}
	return alg, alg
}
