package program

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
)

// TestTell has three ranks with errors of their own, and says what each prints and with which code it ends.
func TestTell(t *testing.T) {
	for _, v := range []string{"GORUN_JOB_ID", "GORUN_RANK", "GORUN_SIZE"} {
		t.Setenv(v, "")
	}
	usage := Usagef("-n 0")
	for _, tt := range []struct {
		name    string
		errs    [3]error
		printed [3]string
		codes   [3]int
	}{
		{name: "none"},
		{"all the same", [3]error{io.EOF, io.EOF, io.EOF}, [3]string{"x: EOF\n"}, [3]int{1, 1, 1}},
		{"all the same, about usage", [3]error{usage, usage, usage}, [3]string{"x: usage: -n 0\n"}, [3]int{2, 2, 2}},
		{"one", [3]error{nil, io.EOF, nil}, [3]string{1: "x: EOF\n"}, [3]int{1, 1, 1}},
		{"not the first", [3]error{nil, io.EOF, io.EOF}, [3]string{1: "x: EOF\n"}, [3]int{1, 1, 1}},
		{"different", [3]error{io.EOF, io.ErrShortWrite, io.EOF}, [3]string{"x: EOF\n", "x: short write\n"}, [3]int{1, 1, 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
				r := job.Rank()
				err := Agree(ctx, job, tt.errs[r])
				if tt.errs[r] != nil && !errors.Is(err, tt.errs[r]) {
					return fmt.Errorf("got error %v, want %v", err, tt.errs[r])
				}
				var b strings.Builder
				code := report(&b, "x", Tell(ctx, job, err))
				if b.String() != tt.printed[r] || code != tt.codes[r] {
					return fmt.Errorf("printed %q, code %d, want %q, %d", b.String(), code, tt.printed[r], tt.codes[r])
				}
				return nil
			})
		})
	}
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		var b strings.Builder
		report(&b, "x", Tell(ctx, job, Common(io.EOF)))
		if got, want := b.String(), [2]string{"x: EOF\n", ""}[job.Rank()]; got != want {
			return fmt.Errorf("printed %q, want %q", got, want)
		}
		return nil
	})
}
