package gpulib

import (
	"fmt"
	"strings"
)

// Effect is how bad a setting is.
type Effect uint8

const (
	Warns         Effect = iota // works, but not as the user would expect
	BreaksGraphs                // breaks captured graphs, nothing else
	BreaksProgram               // must not be set
)

// Setting is an environment variable of a vendor's library with values that work against gorun.
type Setting struct {
	Name   string
	Values []string // the values that do; empty: any
	Not    []string // the values that do not, if Values is empty
	Effect Effect
	Why    string
}

// Finding is a setting that was found with such a value.
type Finding struct {
	Setting
	Value string
	From  string // "environment", or the file that sets it
}

func (f Finding) String() string {
	s := fmt.Sprintf("%s=%s", f.Name, f.Value)
	if f.From != "environment" {
		s += " (" + f.From + ")"
	}
	return s + ": " + f.Why
}

// SettingError refuses settings.
type SettingError struct{ Findings []Finding }

func (e *SettingError) Error() string {
	var b strings.Builder
	b.WriteString("refused settings, unset them:")
	for _, f := range e.Findings {
		b.WriteString("\n\t" + f.String())
	}
	return b.String()
}

// Lookup tells a variable's value and where it comes from; from is "" if it is not set.
type Lookup func(name string) (value, from string)

// CheckSettings looks settings up. Those that break the program are a *SettingError, those that break graphs too if
// graphs is true; the others are returned.
func CheckSettings(settings []Setting, look Lookup, graphs bool) ([]Finding, error) {
	var warn, refuse []Finding
	for _, s := range settings {
		v, from := look(s.Name)
		if from == "" || !s.Bad(v) {
			continue
		}
		f := Finding{s, v, from}
		if s.Effect == BreaksProgram || s.Effect == BreaksGraphs && graphs {
			refuse = append(refuse, f)
		} else {
			warn = append(warn, f)
		}
	}
	if refuse != nil {
		return warn, &SettingError{refuse}
	}
	return warn, nil
}

// Bad reports whether a value works against gorun.
func (s Setting) Bad(v string) bool {
	if len(s.Values) == 0 {
		for _, n := range s.Not {
			if strings.EqualFold(v, n) {
				return false
			}
		}
		return true
	}
	for _, b := range s.Values {
		if strings.EqualFold(v, b) {
			return true
		}
	}
	return false
}
