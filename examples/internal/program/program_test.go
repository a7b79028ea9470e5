package program

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		name string
		args []string
		n    int
		code int
		want string // in the text of the error, or of the help
	}{
		{"defaults", nil, 3, 0, ""},
		{"a flag", []string{"-n", "5"}, 5, 0, ""},
		{"help", []string{"-h"}, 3, 0, "About this.\n\nFlags:\n  -n int\n    \tnumber of things (default 3)\n"},
		{"unknown flag", []string{"-m"}, 3, 2, "x: usage: flag provided but not defined: -m (-h shows the flags)\n"},
		{"bad value", []string{"-n", "five"}, 3, 2, `x: usage: invalid value "five" for flag -n`},
		{"argument", []string{"file"}, 3, 2, "x: usage: unexpected argument \"file\" (-h shows the flags)\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fs := flag.NewFlagSet("x", flag.ExitOnError)
			n := fs.Int("n", 3, "number of things")
			var stdout, stderr strings.Builder
			err := Parse(fs, "About this.", tt.args, &stdout)
			code := report(&stderr, "x", err)
			if code != tt.code || code == 0 && *n != tt.n {
				t.Errorf("n = %d, code %d, want %d and %d", *n, code, tt.n, tt.code)
			}
			if got := stdout.String() + stderr.String(); !strings.Contains(got, tt.want) || tt.want == "" && got != "" {
				t.Errorf("printed %q, want %q", got, tt.want)
			}
		})
	}
}

func TestReport(t *testing.T) {
	for _, v := range []string{"GORUN_JOB_ID", "GORUN_RANK", "GORUN_SIZE"} {
		t.Setenv(v, "")
	}
	var b strings.Builder
	if code := report(&b, "x", io.ErrUnexpectedEOF); code != 1 || b.String() != "x: unexpected EOF\n" {
		t.Errorf("code %d, printed %q", code, b.String())
	}
	if code := report(io.Discard, "x", fmt.Errorf("a: %w", Usagef("-n = %d", 0))); code != 2 {
		t.Errorf("code %d for a usage error, want 2", code)
	}
	if code := report(io.Discard, "x", errors.Join(nil)); code != 0 {
		t.Errorf("code %d without error, want 0", code)
	}
}
