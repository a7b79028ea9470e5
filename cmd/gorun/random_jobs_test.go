package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// randomJob is a job and what must come of it.
type randomJob struct {
	np     int
	flags  []string
	apps   []int // ranks of each program
	script string
	data   [][]byte // what each rank writes in each attempt; its first byte is found nowhere else
	input  []byte   // of gorun
	inputs [][]byte // what each rank reads of it
	merge  bool

	code, cause, restarts int
	reason                string
}

// newRandomJob draws a job. Its ranks read stdin, write lines in odd chunks, perhaps leave a child behind, and end in some way, one after
// the other, from the first moment on: while others are still being started, too. What a rank has done is told by files: wrote.R.K after its output in attempt K, in.R when its input was read.
func newRandomJob(rnd *rand.Rand) *randomJob {
	j := &randomJob{np: 1 + rnd.IntN(6), cause: -1, reason: "done"}
	one := func(n int) bool { return rnd.IntN(n) == 0 }
	restarts, until := 0, 0
	if one(6) {
		restarts, until = 1+rnd.IntN(2), 1+rnd.IntN(3)
		j.flags = append(j.flags, "--restarts", strconv.Itoa(restarts))
	}
	hangs := restarts == 0 && one(12)
	if hangs {
		j.flags = append(j.flags, "--timeout", "400ms")
	}
	if one(3) {
		j.flags = append(j.flags, "--on-fail", "wait")
	}
	if one(2) {
		j.flags = append(j.flags, "--tag-output")
	}
	if j.merge = one(4); j.merge {
		j.flags = append(j.flags, "--merge")
	}
	if one(4) {
		j.flags = append(j.flags, "--output-dir", "out")
	}
	j.apps = []int{j.np}
	if j.np > 1 && one(4) {
		n := 1 + rnd.IntN(j.np-1)
		j.apps = []int{n, j.np - n}
	}

	// What there is to read, and who reads it. After a restart the rest would follow.
	j.inputs = make([][]byte, j.np)
	read := make([]string, j.np)
	if restarts == 0 && one(2) {
		j.input = make([]byte, rnd.IntN(1<<uint(rnd.IntN(18))))
		for i := range j.input {
			j.input[i] = byte(rnd.Uint32())
		}
		who := []string{"0", strconv.Itoa(rnd.IntN(j.np)), "all", "none"}[rnd.IntN(4)]
		if who != "0" {
			j.flags = append(j.flags, "--stdin", who)
		}
		early := rnd.IntN(2 * j.np)
		for r := range read {
			j.inputs[r] = []byte{}
			if who == "all" || who == strconv.Itoa(r) {
				j.inputs[r] = j.input
			}
			read[r] = fmt.Sprintf("cat >tmp.in.%d && mv tmp.in.%[1]d in.%[1]d\n", r)
			if r == early {
				n := rnd.IntN(1000)
				j.inputs[r] = j.inputs[r][:min(n, len(j.inputs[r]))]
				read[r] = fmt.Sprintf("dd bs=1 count=%d of=tmp.in.%d status=none && mv tmp.in.%[2]d in.%[2]d; exec <&-\n", n, r)
			}
		}
	}

	var b strings.Builder
	// The order of ends is certain, whatever the load, for ranks that are watched: after some 0.3 s they are. A rank that has not waited for so long may end
	// before gorun watches it: then the end before must be 0.1 s older, for gorun to have seen it by then.
	b.WriteString(`GORUN=$PPID K=$GORUN_RESTART
echo $$ >tmp.$RANK; mv tmp.$RANK pid.$RANK.$K
echo $1 $GORUN_APP >app.$RANK
` + ended + `after() { n=0; until [ -e pid.$1.$K ]; do sleep 0.01; n=$((n+1)); done; read -r pid <pid.$1.$K; until ended $pid; do sleep 0.01; n=$((n+1)); done; [ $n -ge 30 ] || sleep 0.1; }
`)
	for _, deaf := range []int{rnd.IntN(2 * j.np), rnd.IntN(2 * j.np)} {
		fmt.Fprintf(&b, "[ $RANK = %d ] && trap '' TERM INT\n", deaf)
	}
	fmt.Fprintf(&b, "[ $RANK = %d ] && trap 'exit 77' TERM INT\ncase $RANK in\n", rnd.IntN(2*j.np))
	order := rnd.Perm(j.np)
	sleeper := order[rnd.IntN(j.np)]
	over := false // nobody after the sleeper has a turn
	for i, rank := range order {
		chunk := 1 + rnd.IntN(1<<uint(1+rnd.IntN(13)))
		j.data = append(j.data, nil)
		fmt.Fprintf(&b, "%d)\n", rank)
		write := fmt.Sprintf("dd if=data.%d bs=%d status=none && ", rank, chunk)
		if !j.merge {
			write += "echo err $RANK $K >&2 && "
		}
		write += fmt.Sprintf(": >wrote.%d.$K\n", rank)
		phases := []string{read[rank], write}
		if one(2) {
			slices.Reverse(phases)
		}
		b.WriteString(strings.Join(phases, ""))
		if i > 0 {
			fmt.Fprintf(&b, "after %d\n", order[i-1])
		}
		if one(5) {
			b.WriteString([]string{"sleep 1000 &\n", "setsid sleep 1000 &\n", "(trap '' TERM INT; sleep 1000) &\n", "(setsid sh -c 'sleep 1000 & sleep 1000' >/dev/null 2>&1 &)\n"}[rnd.IntN(4)])
		}
		e := randomEnds(rnd)
		if _, end, ok := strings.Cut(e.do, "; "); j.merge && ok && strings.HasPrefix(e.do, "echo") {
			e.do = end // nothing but lines of the rank
		}
		switch {
		case hangs && rank == sleeper:
			e, over = randomEnd{"sleep 1000", 124, "timeout"}, true
		case hangs && !over || restarts > 0 && e.reason == "signal":
			e = randomEnd{"exit 0", 0, ""}
		}
		// Traps are for the waiting only: the end is as it was drawn.
		b.WriteString("trap - TERM INT\n")
		if restarts > 0 {
			fmt.Fprintf(&b, "[ $K -ge %d ] && exit 0\n", until)
		}
		b.WriteString(e.do + ";;\n")
		if j.reason == "done" && e.reason != "" {
			j.code, j.reason = e.code, e.reason
			if e.reason == "failed" {
				j.cause = rank
			}
		}
	}
	b.WriteString("esac\n")
	j.script = b.String()
	for r := range j.data {
		j.data[r] = randomLines(rnd, r)
	}
	if j.reason == "failed" {
		j.restarts = min(restarts, until)
		if restarts > 0 && until <= restarts {
			j.code, j.reason, j.cause = 0, "done", -1
		}
	}
	return j
}

// alphabet is what a rank writes beside line ends. No two ranks have a sign in common, nor one with what a shell says of a child's end.
// Each attempt begins with the first, which comes nowhere else.
func alphabet(rank int) string { return "!#$%&*()=<>?@^_`{|}~,;/'"[4*rank : 4*rank+4] }

// randomLines are some lines of a rank.
func randomLines(rnd *rand.Rand, rank int) []byte {
	b := []byte(alphabet(rank)[:1])
	for range rnd.IntN(1 << uint(rnd.IntN(7))) {
		for range rnd.IntN(1 << uint(rnd.IntN(11))) {
			b = append(b, alphabet(rank)[1+rnd.IntN(3)])
		}
		b = append(b, '\n')
	}
	if len(b) == 1 {
		b = append(b, '\n')
	}
	return b
}

// untag takes the tags from lines and returns those of each rank.
func untag(text string, np int) ([]string, error) {
	out := make([]string, np)
	for line := range strings.Lines(text) {
		head, rest, ok := strings.Cut(line, " ")
		number, on := strings.CutSuffix(head, "+")
		r, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(number, "["), "]"))
		if !ok || err != nil || r < 0 || r >= np || number != fmt.Sprintf("[%d]", r) {
			return nil, fmt.Errorf("line %.80q has no tag", line)
		}
		if on {
			out[r] = strings.TrimSuffix(out[r], "\n")
		}
		out[r] += rest
	}
	return out, nil
}

// only is what of a text is in the alphabet of a rank.
func only(text string, rank int) string {
	return strings.Map(func(c rune) rune {
		if strings.ContainsRune(alphabet(rank), c) {
			return c
		}
		return -1
	}, text)
}

// wrote holds what came of a rank's output against what it wrote: in each attempt all of it where it has said so, else the beginning.
func (r *randomJob) wrote(rank int, got string, want []byte, said func(attempt int) bool) error {
	parts := strings.Split(got, alphabet(rank)[:1])
	all := string(want[1:])
	var fits func(k int, parts []string) bool
	fits = func(k int, parts []string) bool {
		switch {
		case k > r.restarts:
			return len(parts) == 0
		case said(k):
			return len(parts) > 0 && parts[0] == all && fits(k+1, parts[1:])
		case len(parts) > 0 && strings.HasPrefix(all, strings.TrimSuffix(parts[0], "\n")) && fits(k+1, parts[1:]):
			return true
		}
		return fits(k+1, parts) // nothing came of it
	}
	if strings.Trim(parts[0], "\n") == "" && fits(0, parts[1:]) {
		return nil
	}
	var sizes []int
	for _, p := range parts[1:] {
		sizes = append(sizes, 1+len(p))
	}
	return fmt.Errorf("%d attempts wrote %d bytes each; %d bytes came, or they differ, and %.40q before", r.restarts+1, len(want), sizes, parts[0])
}

// cut counts the lines in which two ranks have written.
func (r *randomJob) cut(text string) (lines int) {
	for line := range strings.Lines(text) {
		ranks := 0
		for rank := range r.np {
			if strings.ContainsAny(line, alphabet(rank)) {
				ranks++
			}
		}
		if ranks > 1 {
			lines++
		}
	}
	return lines
}

// TestRandomJobs holds jobs of all kinds against what must come of them: exit code, cause, every byte of output and input, nothing left
// running. -run TestRandomJobs/seed=17 repeats one; -long runs 10,000.
func TestRandomJobs(t *testing.T) {
	t.Parallel()
	jobs := 120
	switch {
	case *long:
		jobs = 10_000
	case testing.Short():
		jobs = 20
	}
	for seed := range jobs {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			newRandomJob(rand.New(rand.NewPCG(12, uint64(seed)))).test(t)
		})
	}
}

func (r *randomJob) test(t *testing.T) {
	args := append(slices.Clone(r.flags), "--kill-grace", "50ms", "--report", "r.json")
	for i, n := range r.apps {
		if i > 0 {
			args = append(args, ":")
		}
		args = append(args, "-np", strconv.Itoa(n), "sh", "script", fmt.Sprintf("app%d", i))
	}
	j := newJob(t, args...)
	j.cmd.Dir = j.dir
	files := map[string][]byte{"script": []byte(r.script)}
	for rank, data := range r.data {
		files[fmt.Sprintf("data.%d", rank)] = data
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(j.dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if r.input != nil {
		j.cmd.Stdin = bytes.NewReader(r.input)
	}
	got := j.run()
	j.gone()

	var acct struct {
		Code, Cause, Restarts int
		Reason                string
		Cut                   bool `json:"output_cut"`
	}
	text, err := os.ReadFile(filepath.Join(j.dir, "r.json"))
	if err == nil {
		err = json.Unmarshal(text, &acct)
	}
	if err != nil {
		t.Errorf("report: %v", err)
	}
	if got != r.code || acct.Code != r.code || acct.Reason != r.reason || acct.Cause != r.cause || acct.Restarts != r.restarts {
		t.Errorf("exit code %d, report %+v; want code %d, reason %s, cause %d, %d restarts", got, acct, r.code, r.reason, r.cause, r.restarts)
	}
	if want := fmt.Sprintf("gorun: rank %d ", r.cause); r.cause >= 0 && !strings.Contains(j.err.String(), want) {
		t.Errorf("stderr does not say %q", want)
	}
	if acct.Cut && r.reason != "signal" && r.reason != "timeout" {
		t.Error("output was cut")
	}

	out := j.out.String()
	shown := make([]string, r.np)
	tags := slices.Contains(r.flags, "--tag-output")
	if tags {
		if shown, err = untag(out, r.np); err != nil {
			t.Error(err)
			shown = make([]string, r.np)
		}
	}
	whole := 0 // ranks and attempts whose output is whole
	for rank := range r.np {
		want := r.data[rank]
		said := func(k int) bool {
			return exists(filepath.Join(j.dir, fmt.Sprintf("wrote.%d.%d", rank, k))) && !acct.Cut
		}
		for k := range r.restarts + 1 {
			if !said(k) {
				continue
			}
			whole++
			if line := fmt.Sprintf("err %d %d\n", rank, k); !r.merge && strings.Count("\n"+j.err.String(), "\n"+r.tag(rank)+line) != 1 {
				t.Errorf("stderr has not once %q", line)
			}
		}
		if !tags {
			shown[rank] = out
		}
		if !tags || r.merge { // no line ends: those of others are there as well, or of a shell
			shown[rank], want = only(shown[rank], rank), []byte(only(string(want), rank))
		}
		if err := r.wrote(rank, shown[rank], want, said); err != nil {
			t.Errorf("output of rank %d: %v", rank, err)
		}
		if slices.Contains(r.flags, "--output-dir") {
			file, err := os.ReadFile(filepath.Join(j.dir, "out", fmt.Sprintf("rank.%d", rank), "stdout"))
			if err != nil && whole > 0 {
				t.Error(err)
			}
			text, want := string(file), r.data[rank]
			if r.merge {
				text, want = only(text, rank), []byte(only(string(want), rank))
			}
			if err := r.wrote(rank, text, want, said); err != nil {
				t.Errorf("file of rank %d: %v", rank, err)
			}
		}
		r.checkRead(t, j, rank)
	}
	// Those that were killed may have left the beginning of a line.
	if n := r.cut(out); n > r.np*(r.restarts+1)-whole {
		t.Errorf("%d lines are cut by others", n)
	}
	if t.Failed() {
		t.Logf("gorun %q\nscript:\n%s\nstderr:\n%s", j.cmd.Args[1:], r.script, j.err.String())
	}
}

func (r *randomJob) tag(rank int) string {
	if slices.Contains(r.flags, "--tag-output") {
		return fmt.Sprintf("[%d] ", rank)
	}
	return ""
}

// checkRead holds what a rank read against what it should.
func (r *randomJob) checkRead(t *testing.T, j *job, rank int) {
	app := 0
	if rank >= r.apps[0] {
		app = 1
	}
	if text, err := os.ReadFile(filepath.Join(j.dir, fmt.Sprintf("app.%d", rank))); err == nil && len(text) > 0 && string(text) != fmt.Sprintf("app%d %[1]d\n", app) {
		t.Errorf("rank %d is of program %q, want %d", rank, text, app)
	}
	if r.input == nil {
		return
	}
	if text, err := os.ReadFile(filepath.Join(j.dir, fmt.Sprintf("in.%d", rank))); err == nil && !bytes.Equal(text, r.inputs[rank]) {
		t.Errorf("rank %d read %d bytes, want %d, or they differ", rank, len(text), len(r.inputs[rank]))
	}
}
