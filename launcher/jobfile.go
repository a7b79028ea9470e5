package launcher

import (
	"errors"
	"fmt"
	"io/fs"
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
	if unknown := meta.Undecoded(); len(unknown) > 0 {
		key := unknown[0]
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
	for _, key := range []string{"program", "wdir"} {
		if v := map[string]string{"program": j.Program, "wdir": j.Dir}[key]; meta.IsDefined("job", key) && v == "" {
			return Job{}, usagef("%s: %s is empty", at("job", key), key)
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

// typeError shortens what the toml package says of a value of a wrong type, which it gives as text only:
// `toml: line 2 (last key "job.np"): incompatible types: TOML value has type string; destination has type integer`.
func typeError(msg string) string {
	var line int
	var key string
	if n, _ := fmt.Sscanf(msg, "toml: line %d (last key %q):", &line, &key); n < 2 {
		return ": " + strings.TrimPrefix(msg, "toml: ")
	}
	_, what, _ := strings.Cut(msg, "): ")
	if _, types, ok := strings.Cut(what, "TOML value has type "); ok {
		if is, must, ok := strings.Cut(types, "; destination has type "); ok {
			what = "is of type " + is + ", must be of type " + must
		}
	}
	return ":" + strconv.Itoa(line) + ": " + key + " " + what
}

// scalar is a TOML string, number or boolean as text.
func scalar(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case int64:
		return strconv.FormatInt(v, 10), true
	case float64:
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
