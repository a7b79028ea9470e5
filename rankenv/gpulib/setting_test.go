package gpulib_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

func TestCheckSettings(t *testing.T) {
	settings := []gpulib.Setting{
		{Name: "ANY", Effect: gpulib.BreaksProgram, Why: "any value is bad"},
		{Name: "NOT", Not: []string{"0", "off"}, Effect: gpulib.BreaksGraphs, Why: "only off is good"},
		{Name: "SOME", Values: []string{"x", "y"}, Effect: gpulib.Warns, Why: "x and y are bad"},
	}
	tests := []struct {
		set      map[string]string
		graphs   bool
		warnings int
		refused  []string
	}{
		{map[string]string{}, true, 0, nil},
		{map[string]string{"ANY": ""}, false, 0, []string{"ANY=: any value is bad"}},
		{map[string]string{"NOT": "OFF", "SOME": "z"}, true, 0, nil},
		{map[string]string{"NOT": "1", "SOME": "X"}, false, 2, nil},
		{map[string]string{"NOT": "1", "SOME": "y", "ANY": "a"}, true, 1, []string{"ANY=a: any value is bad", "NOT=1: only off is good"}},
	}
	for _, tt := range tests {
		warn, err := gpulib.CheckSettings(settings, func(n string) (string, string) {
			if v, ok := tt.set[n]; ok {
				return v, "environment"
			}
			return "", ""
		}, tt.graphs)
		if len(warn) != tt.warnings {
			t.Errorf("%v: warnings %v, want %d", tt.set, warn, tt.warnings)
		}
		if (err == nil) != (tt.refused == nil) {
			t.Errorf("%v: error %v, want %q", tt.set, err, tt.refused)
			continue
		}
		var se *gpulib.SettingError
		if err != nil && (!errors.As(err, &se) || len(se.Findings) != len(tt.refused)) {
			t.Errorf("%v: error %v, want %d findings", tt.set, err, len(tt.refused))
		}
		for _, want := range tt.refused {
			if !strings.Contains(err.Error(), "\n\t"+want) {
				t.Errorf("%v: error %q, want %q in it", tt.set, err, want)
			}
		}
	}
}
