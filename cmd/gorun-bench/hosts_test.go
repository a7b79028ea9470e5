package main

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
)

// TestHosts: between hosts no captured message is direct. A mode that only some of the ranks find missing is told once, and the rest is measured.
func TestHosts(t *testing.T) {
	const args = "-op gather,sendrecv -root 1 -mode plain,local,graph -calls captured -b 4K -e 4K -n 2 -g 2 -G 2 -w 1 -r 2 -c -json"
	got := map[string]int{}
	for _, r := range ranktest.RunHosts(t, []int{0, 0, 0, 1}, func(ctx context.Context, job *bootstrap.Job) error {
		c, err := parse(strings.Fields(args))
		if err != nil {
			return err
		}
		return runJob(ctx, job, c, os.Stdout, io.Discard)
	}, "GORUN_DEVICE=host") {
		if r.Code != 0 || r.Signal != "" {
			t.Fatal(r)
		}
		for text := range strings.Lines(r.Output) {
			var l struct {
				Op, Mode, Skipped string
				Wrong             *int
			}
			if err := json.Unmarshal([]byte(text), &l); err != nil {
				t.Fatalf("%v: %s", err, text)
			}
			what := l.Op + " " + l.Mode
			if l.Skipped != "" {
				what += " skipped"
				if !strings.Contains(l.Skipped, "a call does not reach the required mode: ") || !strings.Contains(l.Skipped, "the members are on several hosts") {
					t.Errorf("%s: %s", what, l.Skipped)
				}
			} else if l.Wrong == nil || *l.Wrong != 0 {
				t.Error(text)
			}
			got[what]++
		}
	}
	want := map[string]int{"gather plain": 1, "gather local skipped": 1, "gather graph skipped": 1, "sendrecv plain": 1, "sendrecv local skipped": 1, "sendrecv graph skipped": 1}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("got - want +:\n%s", d)
	}
}
