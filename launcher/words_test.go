package launcher

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap/node"
)

const (
	ownTraceback = `[W] an older line: Connection reset by peer
Traceback (most recent call last):
  File "train.py", line 7, in <module>
ValueError: bad shard 7
`
	peerTraceback = `Traceback (most recent call last):
  File "train.py", line 8, in <module>
RuntimeError: [pair.cc:598] Connection closed by peer [127.0.0.1]:1410
`
)

func TestBlamesPeer(t *testing.T) {
	for text, want := range map[string]bool{
		"":                               false,
		"cannot read shard 2\n":          false,
		ownTraceback:                     false,
		peerTraceback:                    true,
		ownTraceback + peerTraceback:     true,
		"recv: Connection reset by peer": true,
		"[cli_0]: expecting cmd=barrier_out, got barrier_failed:_rank_3_has_ended\nMPIR_pmi_barrier(327): PMI_Barrier returned -1\n":                                       true,
		"MPIDI_UCX_init_world(288)\ninitial_address_exchange(145).:  ucx function returned with failed status(ucx_init.c 145 initial_address_exchange Endpoint timeout)\n": true,
		"a\nrecv: Broken pipe\n" + strings.Repeat("later\n", 9):       true,
		"a\nrecv: Broken pipe\n" + strings.Repeat("much later\n", 10): false,
	} {
		if got := blamesPeer([]byte(text)); got != want {
			t.Errorf("%q: got %t, want %t", text, got, want)
		}
	}
}

// What ranks wrote tells the cause where one that closes its connections first is gone last.
func TestWordsOrigin(t *testing.T) {
	said := func(r RankAccount, text string) RankAccount { r.tail = []byte(text); return r }
	one, two := exitStatus{Code: 1}, exitStatus{Code: 2}
	for _, c := range []struct {
		name        string
		ranks       []RankAccount
		code, cause int
	}{
		{"the first blames a peer", []RankAccount{said(ended(0, 1, one, ""), peerTraceback), said(ended(1, 2, two, ""), ownTraceback), said(ended(2, 3, one, ""), peerTraceback)}, 2, 1},
		{"two have reasons", []RankAccount{said(ended(0, 1, one, ""), peerTraceback), said(ended(1, 3, one, ""), ownTraceback), said(ended(2, 2, two, ""), ownTraceback)}, 2, 2},
		{"the other says nothing", []RankAccount{said(ended(0, 1, one, ""), peerTraceback), ended(1, 2, two, "")}, 2, 1},
		{"all blame a peer", []RankAccount{said(ended(0, 1, one, ""), peerTraceback), said(ended(1, 2, two, ""), peerTraceback)}, 1, 0},
		{"the first has a reason", []RankAccount{said(ended(0, 1, one, ""), ownTraceback), ended(1, 2, two, "")}, 1, 0},
		{"much later", []RankAccount{said(ended(0, 1, one, ""), peerTraceback), said(ended(1, 20000, two, ""), ownTraceback)}, 1, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := &Account{Reason: ReasonFailed, Ranks: c.ranks}
			a.settle(0, 0)
			if a.Code != c.code || a.Cause != c.cause {
				t.Errorf("got code %d, cause %d, want %d, %d", a.Code, a.Cause, c.code, c.cause)
			}
		})
	}
}

// A rank that has written why it fails is left alone until it ends, as an interpreter takes its time, where the one that is gone first blames another.
func TestRaiserIsLeftAlone(t *testing.T) {
	script := `case $GORUN_RANK in
0) echo 'Traceback (most recent call last):
RuntimeError: Connection closed by peer' >&2; exit 1;;
1) trap 'exit 3' TERM; echo 'Traceback (most recent call last):
ValueError: bad shard 7' >&2; touch raised; until grep -q '^State:.Z' /proc/$(cat pid0)/status; do sleep 0.01; done; sleep 0.6; exit 7;;
2) exec sleep 1000;;
esac`
	script = startedTogether + strings.Replace(script, "0) ", "0) until [ -f raised ]; do sleep 0.01; done; ", 1)
	p := planOf(t, Job{NP: 3}, script)
	acct := Run(t.Context(), p, Options{start: func(context.Context, node.Config) (control, error) { return &fakeNode{}, nil }})
	if want := "then: rank 0 exited with code 1; rank 2 ended by gorun (SIGTERM)\n"; acct.Code != 7 || acct.Cause != 1 || !strings.Contains(acct.Summary(), want) {
		t.Errorf("code %d, cause %d, %q; want 7, 1, %q", acct.Code, acct.Cause, acct.Summary(), want)
	}
	nothingLeft(t, acct.Job)
}

func TestAdvice(t *testing.T) {
	r := ended(1, 1, exitStatus{Code: 1}, "")
	r.tail = []byte("Traceback (most recent call last):\nValueError: Number of processes must be defined.\n")
	a := &Account{Reason: ReasonFailed, Ranks: []RankAccount{ended(0, 2, exitStatus{Code: 1}, ""), r}}
	a.settle(0, 0)
	if want := "\n  jax.distributed.initialize() finds its arguments with --env-like ompi (gorun help python)\n  then: "; !strings.Contains(a.Summary(), want) {
		t.Errorf("%q has no %q", a.Summary(), want)
	}
}

func TestLastLinesOfExceptions(t *testing.T) {
	frames := strings.Repeat("frame #0: c10::Error (0x7f in libc10.so)\n", 9)
	where := "  File \"train.py\", line 8, in <module>\n    dist.all_reduce(t)\n"
	tail := []string{"RuntimeError: [pair.cc:598] Connection closed", "Exception raised from wait:", "frame #0: c10::Error (0x7f in libc10.so)"}
	for name, c := range map[string]struct {
		text string
		want []string
	}{
		"marks are left out":       {"Traceback (most recent call last):\n" + where + "    ~~~^^^\nValueError: x\n", []string{"Traceback (most recent call last):", `  File "train.py", line 8, in <module>`, "    dist.all_reduce(t)", "ValueError: x"}},
		"a C++ stack is below":     {"Traceback (most recent call last):\n" + strings.Repeat(where, 3) + strings.Join(tail[:2], "\n") + "\n" + frames, append([]string{`  File "train.py", line 8, in <module>`, "    dist.all_reduce(t)"}, tail...)},
		"a C++ program throws":     {"a\nterminate called after throwing an instance of 'E'\n  what():  x\n" + frames, append([]string{"terminate called after throwing an instance of 'E'", "  what():  x"}, slices.Repeat(tail[2:], 3)...)},
		"a traceback that is over": {"Traceback (most recent call last):\n" + where + "ValueError: x\n1\n2\n3\n4\n5\n", []string{"1", "2", "3", "4", "5"}},
		"a prefix of PyTorch":      {"[rank3]: Traceback (most recent call last):\n[rank3]:   File \"train.py\", line 8, in <module>\n[rank3]:     x\n[rank3]:     ^\n[rank3]: ValueError: x\n", []string{"[rank3]: Traceback (most recent call last):", `[rank3]:   File "train.py", line 8, in <module>`, "[rank3]:     x", "[rank3]: ValueError: x"}},
		"no traceback":             {"1\n2\n3\n4\n5\n6\n", []string{"2", "3", "4", "5", "6"}},
	} {
		if d := cmp.Diff(lastLines([]byte(c.text), 5), c.want); d != "" {
			t.Errorf("%s: -got +want:\n%s", name, d)
		}
	}
}

// A look names the ranks that have failed but run on in their exit.
func TestRaisedTexts(t *testing.T) {
	prefixed := "[rank2]: " + strings.ReplaceAll(strings.TrimRight(ownTraceback, "\n"), "\n", "\n[rank2]: ")
	r := &runner{output: &outputs{tails: []*stream{{tail: []byte("fine\n")}, {tail: []byte(ownTraceback + "later\n")}, {tail: []byte(prefixed)}, {tail: []byte(peerTraceback)}, nil}}}
	got := r.raisedTexts([]RankStacks{{Rank: 0}, {Rank: 1}, {Rank: 2}, {Rank: 3}, {Rank: 4}})
	want := []string{"rank 1 has written a traceback (ValueError: bad shard 7) and has not ended since", "rank 2 has written a traceback (ValueError: bad shard 7) and has not ended since"}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
}
