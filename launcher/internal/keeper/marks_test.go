package keeper

import (
	"strings"
	"testing"
)

// Ranks of other hosts, which may be on this machine, and of other jobs are left alone.
func TestMarks(t *testing.T) {
	job := Job{ID: "ab12", Node: 3}
	for _, c := range []struct {
		env  string
		want bool
	}{
		{"A=1 GORUN_JOB_ID=ab12 GORUN_NODE=3 B=2", true},
		{"GORUN_NODE=3 GORUN_JOB_ID=ab12", true},
		{"GORUN_JOB_ID=ab12", true}, // a rank that took the rest away
		{"GORUN_JOB_ID=ab12 GORUN_NODE=2", false},
		{"GORUN_NODE=31 GORUN_JOB_ID=ab12", false},
		{"GORUN_JOB_ID=ab123 GORUN_NODE=3", false},
		{"GORUN_JOB_ID= GORUN_NODE=3", false},
		{"XGORUN_JOB_ID=ab12 GORUN_NODE=3", false},
		{"A=GORUN_JOB_ID=ab12", false},
		{"", false},
	} {
		if got := job.marks([]byte(strings.ReplaceAll(c.env, " ", "\x00") + "\x00")); got != c.want {
			t.Errorf("%q: %v, want %v", c.env, got, c.want)
		}
	}
}
