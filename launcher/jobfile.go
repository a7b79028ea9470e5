package launcher

import (
	"bytes"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"

	"github.com/gorun-dev/gorun/launcher/internal/files"
)

// hostKeys are the keys of a [[host]]; those with a max are numbers from 1.
var hostKeys = []struct {
	key  string
	max  int
	help string
}{
	{"name", 0, "the host: a name, an address, or an alias of the ssh configuration"},
	{"address", 0, "where ssh finds it (default: the name)"},
	{"user", 0, "who logs in there (default: as the ssh configuration says)"},
	{"port", 65535, "port of sshd (default: as the ssh configuration says)"},
	{"slots", maxSlots, "ranks that it takes (default 1)"},
	{"max_slots", maxSlots, "ranks that it takes with oversubscribe (default: any number)"},
}

// jobTables are the tables of a job file.
var jobTables = []string{"job", "app", "host", "env", "output", "launch", "nccl", "mccl"}

// keysOf are the keys of a table of a job file; those of the document for "".
func keysOf(table string) []string {
	switch table {
	case "":
		return jobTables
	case "host":
		var keys []string
		for _, k := range hostKeys {
			keys = append(keys, k.key)
		}
		return keys
	case "nccl", "mccl":
		return ncclKeys(table)
	}
	var keys []string
	for key := range optionsOf(table) {
		keys = append(keys, key)
	}
	if table == "app" {
		keys = append(keys, "env")
	}
	return keys
}

// optionsOf are the options that a table of a job file may have, by their keys, also those of earlier versions.
func optionsOf(table string) iter.Seq2[string, *Option] {
	return func(yield func(string, *Option) bool) {
		for i := range JobOptions {
			o := &JobOptions[i]
			for _, at := range []string{o.Key, o.Also} {
				if t, key, _ := strings.Cut(at, "."); key != "" && (t == table || table == "app" && o.App) && !yield(key, o) {
					return
				}
			}
		}
	}
}

// jobHints are for keys that a job file has under another name.
var jobHints = map[string]string{
	"hosts": "a host is a table of its own: [[host]]", "host": "a host is a table of its own: [[host]]",
	"nodes": "a host is a table of its own: [[host]]", "ranks": "the number of ranks is np", "command": "the program is program, and args",
}

// maxJobFile bounds a job file, in bytes: one with all hosts that there may be is smaller.
const maxJobFile = 16 << 20

// ReadJobFile reads a job from a TOML file, and says where in the file each setting stands. Paths in it are relative to the directory in which gorun
// runs, as on a command line. An error is a *UsageError that names file and line.
func ReadJobFile(name string) (Job, Places, error) {
	data, err := files.Read(name, maxJobFile)
	if err != nil {
		return Job{}, nil, usagef("job file %s: %s", name, files.Reason(err))
	}
	return decodeJob(name, data)
}

// decodeJob is ReadJobFile for the text of a file; name is for errors.
func decodeJob(name string, data []byte) (Job, Places, error) {
	data = bytes.TrimPrefix(data, []byte("\ufeff")) // some editors begin UTF-8 with it
	d := jobDecoder{file: name, index: map[string]*tomlKey{}, places: Places{}}
	var doc map[string]any
	if _, err := toml.Decode(string(data), &doc); err != nil {
		if p, ok := errors.AsType[toml.ParseError](err); ok {
			return Job{}, nil, syntaxError(name, string(data), p)
		}
		return Job{}, nil, usagef("%s: %s", name, strings.TrimPrefix(err.Error(), "toml: "))
	}
	d.keys = indexKeys(string(data))
	for i := range d.keys {
		if k := pathID(d.keys[i].path); d.index[k] == nil { // a table counts where it stands first
			d.index[k] = &d.keys[i]
		}
	}
	d.unknown()
	var j Job
	for i := range JobOptions {
		o := &JobOptions[i]
		twice := false
		for _, at := range []string{o.Key, o.Also} {
			table, key, ok := strings.Cut(at, ".")
			if !ok || !d.option(&j, o, d.table(doc, table), table, key) {
				continue
			}
			if twice {
				d.failf([]string{table, key}, "%s is the same as %s: give one of them", at, o.Key)
			}
			twice = true
		}
	}
	d.hosts(&j, doc["host"])
	for _, table := range []string{"nccl", "mccl"} {
		j.Env = append(j.Env, d.library(d.table(doc, table), table)...)
	}
	j.Env = append(j.Env, d.env(d.table(doc, "env"), "env")...)
	d.apps(&j, doc["app"])
	if len(j.Stage) > 1 && slices.Contains(j.Stage, StageNone) {
		d.failf([]string{"launch", "stage"}, "stage = %q and files to send contradict each other", StageNone)
	}
	if len(j.Hosts) > 0 && j.Hostfile != "" {
		d.failf([]string{"launch", "hostfile"}, "hosts are given twice, by [[host]] and by hostfile: give one of them")
	}
	if d.err != nil {
		return Job{}, nil, d.err
	}
	return j, d.places, nil
}

// jobDecoder reads a document; the first error stays.
type jobDecoder struct {
	file   string
	keys   []tomlKey
	index  map[string]*tomlKey // by pathID
	places Places
	err    error
}

// pathID tells paths apart.
func pathID(path []string) string { return strings.Join(path, "\x00") }

// at is the place of a key: file, line and column.
func (d *jobDecoder) at(path ...string) string {
	if k := d.index[pathID(path)]; k != nil {
		return fmt.Sprintf("%s:%d:%d", d.file, k.line, k.col)
	}
	return d.file
}

// has reports whether a key is there.
func (d *jobDecoder) has(path ...string) bool { return d.index[pathID(path)] != nil }

// note remembers where the setting of a name stands.
func (d *jobDecoder) note(name string, path ...string) {
	if k := d.index[pathID(path)]; k != nil {
		d.places[name] = fmt.Sprintf("%s:%d", d.file, k.line)
	}
}

func (d *jobDecoder) failf(path []string, format string, args ...any) {
	if d.err == nil {
		d.err = usagef("%s: %s", d.at(path...), fmt.Sprintf(format, args...))
	}
}

// unknown finds the first key that a job file does not have.
func (d *jobDecoder) unknown() {
	for _, k := range d.keys {
		path := k.path
		if k.element {
			continue
		}
		if len(path) > 1 && (path[0] == "host" || path[0] == "app") {
			path = append([]string{path[0]}, path[2:]...) // without the index
		}
		switch {
		case len(path) == 1 && slices.Contains(jobTables, path[0]):
			continue
		case path[0] == "env", len(path) > 2: // told as a wrong type, where it is one
			continue
		case len(path) == 2 && slices.Contains(keysOf(path[0]), path[1]):
			continue
		}
		table, last := "", path[len(path)-1]
		if len(path) > 1 {
			table = path[0]
		}
		if !slices.Contains(jobTables, table) && table != "" {
			continue // the table itself was told
		}
		known := keysOf(table)
		e := &UsageError{Msg: fmt.Sprintf("%s:%d:%d: unknown key %s", d.file, k.line, k.col, toml.Key(path))}
		if table == "nccl" || table == "mccl" {
			e.Hint = ncclHint(table, last)
		} else if hint := jobHints[last]; hint != "" {
			e.Hint = hint
		} else if i := slices.IndexFunc(jobTables, func(t string) bool { return t != table && slices.Contains(keysOf(t), last) }); i >= 0 {
			e.Hint = "it belongs into [" + jobTables[i] + "]"
		} else if near := Nearest(last, known); near != "" {
			e.Hint = "did you mean " + near + "?"
		} else {
			e.Hint = "known there: " + strings.Join(known, ", ")
		}
		d.err = e
		return
	}
}

func (d *jobDecoder) table(doc map[string]any, key string) map[string]any {
	v, there := doc[key]
	t, ok := v.(map[string]any)
	if there && !ok {
		d.failf([]string{key}, "%s must be a table: [%s]", key, key)
	}
	return t
}

// value is the value of a key if it is of type T: otherwise the zero value, and an error if it is there.
func value[T any](d *jobDecoder, t map[string]any, path ...string) (got T) {
	if v, there := t[path[len(path)-1]]; there {
		got, _ = typed[T](d, v, path)
	}
	return got
}

// typed is a value if it is of type T: otherwise the zero value, and an error.
func typed[T any](d *jobDecoder, v any, path []string) (T, bool) {
	got, ok := v.(T)
	if !ok {
		d.failf(path, "%s is of type %s, must be of type %s", keyName(path), tomlType(v), tomlType(got))
	}
	return got, ok
}

// keyName is a path for a person: without the indices of [[host]].
func keyName(path []string) string {
	if len(path) > 2 && (path[0] == "host" || path[0] == "app") {
		path = append([]string{path[0]}, path[2:]...)
	}
	return strings.Join(path, ".")
}

// text is a string that is not empty if it is there.
func (d *jobDecoder) text(t map[string]any, path ...string) string {
	key := path[len(path)-1]
	s := value[string](d, t, path...)
	if _, there := t[key]; there && strings.TrimSpace(s) == "" {
		d.failf(path, "%s is empty", key)
	}
	if strings.ContainsRune(s, 0) {
		d.failf(path, "%s: %q holds a zero byte", key, s)
	}
	return s
}

// option reads the value of an option, of which path tells the place and whose table is t; false if it is not there.
func (d *jobDecoder) option(j *Job, o *Option, t map[string]any, path ...string) bool {
	key := path[len(path)-1]
	v, there := t[key]
	if !there {
		return false
	}
	d.note(strings.Join(path, "."), path...)
	set := func(path []string, s string) {
		err := o.set(j, s)
		if e, ok := errors.AsType[*valueError](err); ok {
			d.failf(path, "%s = %s: must be %s", key, e.value, e.must)
		} else if errors.Is(err, errEmpty) {
			d.failf(path, "%s %v", key, err)
		} else if err != nil {
			d.failf(path, "%s: %v", key, err)
		}
		if strings.ContainsRune(s, 0) {
			d.failf(path, "%s: %q holds a zero byte", key, s)
		}
	}
	_, one := v.(string)
	switch {
	case o.kind == kindNumber:
		if n, ok := typed[int64](d, v, path); ok {
			set(path, strconv.FormatInt(n, 10))
		}
	case o.kind == kindSwitch:
		if on, ok := typed[bool](d, v, path); ok {
			set(path, strconv.FormatBool(on))
		}
	case o.kind == kindText, o.kind == kindWords && one:
		if s, ok := typed[string](d, v, path); ok {
			set(path, s)
		}
	case o.kind == kindWord:
		if s, ok := scalarText(v); ok {
			set(path, s)
		} else {
			typed[string](d, v, path)
		}
	default:
		if s, ok := v.(string); ok && len(strings.Fields(s)) > 0 {
			words := strings.Fields(s)
			for i, w := range words {
				words[i] = strconv.Quote(w)
			}
			d.failf(path, "%s is of type string, must be of type array: [%s]", keyName(path), strings.Join(words, ", "))
		}
		list, _ := typed[[]any](d, v, path)
		for i, v := range list {
			at := append(slices.Clone(path), strconv.Itoa(i))
			if s, ok := v.(string); ok {
				set(at, s)
			} else {
				d.failf(at, "an element of %s is of type %s, must be of type string", keyName(path), tomlType(v))
			}
		}
	}
	return true
}

// number is an integer from 1 to most, 0 if it is not there.
func (d *jobDecoder) number(t map[string]any, most int64, path ...string) int {
	n := value[int64](d, t, path...)
	key := path[len(path)-1]
	if _, there := t[key]; there && (n < 1 || n > most) {
		d.failf(path, "%s = %d: must be a number from 1 to %d", key, n, most)
		return 0
	}
	return int(n)
}

// tables is an array of tables.
func (d *jobDecoder) tables(v any, name string) []map[string]any {
	switch v := v.(type) {
	case nil:
	case []map[string]any:
		return v
	case []any: // an array that is written in one: host = [{name = "a"}]
		var tables []map[string]any
		for i, e := range v {
			t, ok := e.(map[string]any)
			if !ok {
				d.failf([]string{name, strconv.Itoa(i)}, "an element of %s is of type %s, must be of type table", name, tomlType(e))
				return nil
			}
			tables = append(tables, t)
		}
		return tables
	default:
		d.failf([]string{name}, "%s must be an array of tables: [[%s]]", name, name)
	}
	return nil
}

func (d *jobDecoder) apps(j *Job, v any) {
	for i, t := range d.tables(v, "app") {
		table := []string{"app", strconv.Itoa(i)}
		var of Job
		for key, o := range optionsOf("app") {
			d.option(&of, o, t, table[0], table[1], key)
		}
		if e, there := t["env"]; there {
			at := append(slices.Clone(table), "env")
			vars, ok := e.(map[string]any)
			if !ok {
				d.failf(at, "app.env must be a table: env = {NAME = \"VALUE\"}")
			}
			of.Env = d.env(vars, at...)
		}
		if of.Program == "" {
			d.failf(table, "an app without a program")
		}
		if of.NP == 0 {
			d.failf(table, "app %q without np, its number of ranks", of.Program)
		}
		j.Apps = append(j.Apps, NewApp(of))
	}
	if len(j.Apps) == 0 {
		return
	}
	for _, key := range []string{"np", "program", "args"} {
		if d.has("job", key) {
			d.failf([]string{"job", key}, "programs are given by [[app]], each with its own %s: then there is none in [job]", key)
		}
	}
	if _, err := j.apps(); err != nil {
		d.failf([]string{"app", strconv.Itoa(len(j.Apps) - 1)}, "%v", err)
	}
}

func (d *jobDecoder) hosts(j *Job, v any) {
	tables := d.tables(v, "host")
	if len(tables) > maxHosts {
		d.failf([]string{"host"}, "more than %d hosts", maxHosts)
		return
	}
	seen := map[string]int{}
	for i, t := range tables {
		table := []string{"host", strconv.Itoa(i)}
		at := func(key string) []string { return append(slices.Clone(table), key) }
		h := Host{Name: d.text(t, at("name")...), User: d.text(t, at("user")...), Addr: d.text(t, at("address")...),
			Port: d.number(t, 65535, at("port")...), Slots: d.number(t, maxSlots, at("slots")...), MaxSlots: d.number(t, maxSlots, at("max_slots")...)}
		if h.Name == "" {
			d.failf(table, "a host without a name")
			return
		}
		if h.MaxSlots > 0 && h.slots() > h.MaxSlots {
			d.failf(at("max_slots"), "max_slots = %d: fewer than its slots, %d", h.MaxSlots, h.slots())
		}
		for _, h := range []struct {
			key  string
			host Host
		}{{"name", Host{Addr: h.Name}}, {"user", Host{Addr: h.Name, User: h.User}}} {
			if err := h.host.check(); err != nil {
				d.failf(at(h.key), "host %q: %v", h.host.Addr, err)
			}
		}
		if h.Addr == "" {
			h.Addr = h.Name
		} else if inner, ok := strings.CutPrefix(h.Addr, "["); ok {
			h.Addr = strings.TrimSuffix(inner, "]")
		}
		if err := h.check(); err != nil {
			d.failf(at("address"), "host %q: address %q: %v", h.Name, h.Addr, err)
		}
		if k, twice := seen[h.Name]; twice {
			_, first, _ := strings.Cut(strings.TrimPrefix(d.at("host", strconv.Itoa(k), "name"), d.file), ":")
			line, _, _ := strings.Cut(first, ":")
			d.failf(at("name"), "host %q is given twice, first in line %s: give the slots of both in one", h.Name, line)
		}
		seen[h.Name] = i
		d.note("host."+strconv.Itoa(i), table...)
		j.Hosts = append(j.Hosts, h)
	}
}

// env is a table of variables, at a path.
func (d *jobDecoder) env(t map[string]any, path ...string) []Setting {
	var env []Setting
	for _, k := range slices.Sorted(maps.Keys(t)) {
		s, ok := scalarText(t[k])
		if !ok {
			d.failf(append(slices.Clone(path), k), "variable %s: must be a string, a number, true or false", k)
		}
		set := Setting{Name: k, Value: s}
		if _, err := checkSettings([]Setting{set}); err != nil {
			d.failf(append(slices.Clone(path), k), "%v", err)
		}
		d.note(strings.Join(path, ".")+"."+k, append(slices.Clone(path), k)...)
		env = append(env, set)
	}
	return env
}

// tomlType is the TOML name of a value's type.
func tomlType(v any) string {
	switch v.(type) {
	case string:
		return "string"
	case int64:
		return "integer"
	case float64:
		return "float"
	case bool:
		return "boolean"
	case []any, []map[string]any:
		return "array"
	case map[string]any:
		return "table"
	case time.Time:
		return "date"
	}
	return fmt.Sprintf("%T", v)
}

// scalarText is a TOML string, number or boolean as text.
func scalarText(v any) (string, bool) {
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
