package launcher

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"
)

// jobFile is the form of a TOML job file.
type jobFile struct {
	Job struct {
		NP      int      `toml:"np"`
		Program string   `toml:"program"`
		Args    []string `toml:"args"`
		Dir     string   `toml:"wdir"`
		Device  string   `toml:"device"`
	} `toml:"job"`
	Env    map[string]any `toml:"env"`
	Launch struct {
		Timeout         any    `toml:"timeout"`
		KillGrace       any    `toml:"kill_grace"`
		TagOutput       *bool  `toml:"tag_output"`
		Stdin           any    `toml:"stdin"`
		KeepLauncherEnv bool   `toml:"keep_launcher_env"`
		Report          string `toml:"report"`
	} `toml:"launch"`
}

// jobKeys are the keys of a job file by table, for suggestions.
var jobKeys = map[string][]string{
	"":       {"job", "env", "launch"},
	"job":    {"np", "program", "args", "wdir", "device"},
	"launch": {"timeout", "kill_grace", "tag_output", "stdin", "keep_launcher_env", "report"},
}

// ReadJobFile reads a job from a TOML file. Paths in it are relative to the directory in which gorun runs, as on a
// command line. An error is a *UsageError that names file and line.
func ReadJobFile(name string) (Job, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		if p, ok := errors.AsType[*fs.PathError](err); ok {
			err = p.Err
		}
		return Job{}, usagef("job file %s: %v", name, err)
	}
	return DecodeJob(name, data)
}

// DecodeJob decodes the text of a job file; name is for errors.
func DecodeJob(name string, data []byte) (Job, error) {
	var f jobFile
	at := func(table, key string) string {
		if n := lineOf(data, table, key); n > 0 {
			return name + ":" + strconv.Itoa(n)
		}
		return name
	}
	meta, err := toml.Decode(string(data), &f)
	if err != nil {
		if p, ok := errors.AsType[toml.ParseError](err); ok {
			msg := p.Message
			if msg == "" {
				msg = p.Error()
			}
			return Job{}, usagef("%s:%d: %s", name, p.Position.Line, msg)
		}
		return Job{}, usagef("%s%s", name, typeError(err.Error()))
	}
	if key := unknownKey(meta.Keys()); key != nil {
		table := ""
		if len(key) > 1 {
			table = key[0]
		}
		last := key[len(key)-1]
		e := &UsageError{Msg: fmt.Sprintf("%s: unknown key %s", at(table, last), key)}
		if near := Nearest(last, jobKeys[table]); near != "" {
			e.Hint = "did you mean " + near + "?"
		} else if keys := jobKeys[table]; keys != nil {
			e.Hint = "known there: " + strings.Join(keys, ", ")
		}
		return Job{}, e
	}

	j := Job{NP: f.Job.NP, Program: f.Job.Program, Args: f.Job.Args, Dir: f.Job.Dir, Device: f.Job.Device,
		TagOutput: f.Launch.TagOutput, KeepLauncherEnv: f.Launch.KeepLauncherEnv, Report: f.Launch.Report}
	if meta.IsDefined("job", "np") && (j.NP < 1 || j.NP > MaxNP) {
		return Job{}, usagef("%s: np = %d: must be from 1 to %d", at("job", "np"), j.NP, MaxNP)
	}
	for _, a := range append([]string{j.Program, j.Dir}, j.Args...) {
		if strings.ContainsRune(a, 0) {
			return Job{}, usagef("%s: %q holds a zero byte", at("job", "args"), a)
		}
	}
	for _, s := range []struct{ table, key, value string }{{"job", "program", j.Program}, {"job", "wdir", j.Dir}, {"launch", "report", j.Report}} {
		if meta.IsDefined(s.table, s.key) && s.value == "" {
			return Job{}, usagef("%s: %s is empty", at(s.table, s.key), s.key)
		}
	}
	if v := f.Launch.Timeout; v != nil {
		s, ok := scalar(v)
		if ok {
			j.Timeout, err = ParseDuration(s)
		}
		if !ok || err != nil {
			return Job{}, usagef("%s: timeout = %v: must be a duration such as \"10m\", or a number of seconds", at("launch", "timeout"), v)
		}
	}
	if v := f.Launch.KillGrace; v != nil {
		s, ok := scalar(v)
		if ok {
			j.KillGrace, err = ParseGrace(s)
		}
		if !ok || err != nil {
			return Job{}, usagef("%s: kill_grace = %v: must be a duration such as \"30s\", or a number of seconds", at("launch", "kill_grace"), v)
		}
	}
	if v := f.Launch.Stdin; v != nil {
		switch s, _ := scalar(v); s {
		case StdinRank0, StdinNone:
			j.Stdin = s
		default:
			return Job{}, usagef("%s: stdin = %v: must be 0 or \"none\"", at("launch", "stdin"), v)
		}
	}
	names := make([]string, 0, len(f.Env))
	for k := range f.Env {
		names = append(names, k)
	}
	slices.Sort(names)
	for _, k := range names {
		s, ok := scalar(f.Env[k])
		if !ok {
			return Job{}, usagef("%s: variable %s: must be a string, a number, true or false", at("env", k), k)
		}
		set := Setting{Name: k, Value: s}
		if _, err := checkSettings([]Setting{set}); err != nil {
			return Job{}, usagef("%s: %v", at("env", k), err)
		}
		j.Env = append(j.Env, set)
	}
	return j, nil
}

// unknownKey is the first key that a job file does not have, nil if there is none. The toml package would also take
// "NP" for "np", whichever comes last.
func unknownKey(keys []toml.Key) toml.Key {
	for _, k := range keys {
		switch {
		case len(k) == 1 && slices.Contains(jobKeys[""], k[0]):
		case len(k) == 2 && k[0] == "env":
		case len(k) == 2 && jobKeys[k[0]] != nil && slices.Contains(jobKeys[k[0]], k[1]):
		case len(k) > 2 && k[0] == "env": // told as a wrong type of the variable
		default:
			return k
		}
	}
	return nil
}

// typeError shortens what the toml package says of a value of a wrong type, which it gives as text only:
// `toml: line 2 (last key "job.np"): incompatible types: TOML value has type string; destination has type integer`.
func typeError(msg string) string {
	var line int
	var key string
	if n, _ := fmt.Sscanf(msg, "toml: line %d (last key %q):", &line, &key); n < 2 {
		return ": " + strings.TrimPrefix(msg, "toml: ")
	}
	_, what, _ := strings.Cut(msg, "): ")
	if strings.Contains(what, "type mismatch for struct") {
		return ":" + strconv.Itoa(line) + ": " + key + " must be a table: [" + key + "]"
	}
	if _, types, ok := strings.Cut(what, "TOML value has type "); ok {
		if is, must, ok := strings.Cut(types, "; destination has type "); ok {
			what = "is of type " + tomlType(is) + ", must be of type " + tomlType(must)
		}
	}
	return ":" + strconv.Itoa(line) + ": " + key + " " + what
}

// tomlType is the TOML name of what the toml package calls by its Go type.
func tomlType(t string) string {
	switch t {
	case "int64":
		return "integer"
	case "float64":
		return "float"
	case "bool":
		return "boolean"
	case "[]any", "slice":
		return "array"
	case "map[string]any":
		return "table"
	case "time.Time":
		return "date"
	}
	return t
}

// scalar is a TOML string, number or boolean as text.
func scalar(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case int64:
		return strconv.FormatInt(v, 10), true
	case float64:
		// As it was most likely written: 1000000.0 is no 1e+06.
		if abs := math.Abs(v); abs >= 1e-6 && abs < 1e21 {
			s := strconv.FormatFloat(v, 'f', -1, 64)
			if !strings.Contains(s, ".") {
				s += ".0"
			}
			return s, true
		}
		return strconv.FormatFloat(v, 'g', -1, 64), true
	case bool:
		return strconv.FormatBool(v), true
	}
	return "", false
}

// lineOf finds the line of a key for an error: the first in the table, or for a table itself its header; 0 if it is
// written in a way that this doesn't see.
func lineOf(data []byte, table, key string) int {
	in := ""
	for i, line := range strings.Split(string(data), "\n") {
		t := strings.TrimSpace(line)
		if strings.HasPrefix(t, "[") {
			end := strings.IndexByte(t, ']')
			if end < 0 {
				continue
			}
			in = unquoteKey(strings.Trim(t[:end], "[ \t"))
			if head, tail, dotted := strings.Cut(in, "."); in == key && table == "" || dotted && head == table && unquoteKey(tail) == key {
				return i + 1
			}
			continue
		}
		k, _, ok := strings.Cut(t, "=")
		if !ok || strings.HasPrefix(t, "#") {
			continue
		}
		k = strings.TrimSpace(k)
		if in == table && unquoteKey(k) == key {
			return i + 1
		}
		if head, tail, dotted := strings.Cut(k, "."); dotted && in == "" && unquoteKey(head) == table && unquoteKey(tail) == key {
			return i + 1
		}
	}
	return 0
}

func unquoteKey(k string) string {
	k = strings.TrimSpace(k)
	if len(k) >= 2 && (k[0] == '"' || k[0] == '\'') && k[len(k)-1] == k[0] {
		return k[1 : len(k)-1]
	}
	return k
}
