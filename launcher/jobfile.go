package launcher

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
)

// jobKeys are the keys of a job file by table.
var jobKeys = map[string][]string{
	"":     {"job", "host", "env", "launch"},
	"job":  {"np", "program", "args", "wdir", "device"},
	"host": {"name", "address", "user", "port", "slots"},
	"launch": {"timeout", "kill_grace", "tag_output", "stdin", "keep_launcher_env", "report", "map_by", "oversubscribe", "hostfile", "rm",
		"ssh_config", "accept_new_host_keys", "rsh", "connect_timeout", "port_range", "stage"},
}

// jobHints are for keys that a job file has under another name.
var jobHints = map[string]string{
	"hosts": "a host is a table of its own: [[host]]", "host": "a host is a table of its own: [[host]]",
	"nodes": "a host is a table of its own: [[host]]", "ranks": "the number of ranks is np", "command": "the program is program, and args",
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
	d := jobDecoder{file: name}
	var doc map[string]any
	if _, err := toml.Decode(string(data), &doc); err != nil {
		if p, ok := errors.AsType[toml.ParseError](err); ok {
			msg := p.Message
			if msg == "" {
				msg = p.Error()
			}
			return Job{}, usagef("%s:%d:%d: %s", name, p.Position.Line, max(p.Position.Col, 1), msg)
		}
		return Job{}, usagef("%s: %s", name, strings.TrimPrefix(err.Error(), "toml: "))
	}
	d.keys = indexKeys(string(data))
	d.unknown()
	var j Job
	d.job(&j, d.table(doc, "job"))
	d.hosts(&j, doc["host"])
	d.env(&j, d.table(doc, "env"))
	d.launch(&j, d.table(doc, "launch"))
	if len(j.Hosts) > 0 && j.Hostfile != "" {
		d.failf([]string{"launch", "hostfile"}, "hosts are given twice, by [[host]] and by hostfile: give one of them")
	}
	if d.err != nil {
		return Job{}, d.err
	}
	return j, nil
}

// jobDecoder reads a document; the first error stays.
type jobDecoder struct {
	file string
	keys []tomlKey
	err  error
}

// at is the place of a key: file, line and column.
func (d *jobDecoder) at(path ...string) string {
	for _, k := range d.keys {
		if slices.Equal(k.path, path) {
			return fmt.Sprintf("%s:%d:%d", d.file, k.line, k.col)
		}
	}
	return d.file
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
		if len(path) > 1 && path[0] == "host" {
			path = append([]string{"host"}, path[2:]...) // without the index
		}
		switch {
		case len(path) == 1 && slices.Contains(jobKeys[""], path[0]):
			continue
		case path[0] == "env", len(path) > 2: // told as a wrong type, where it is one
			continue
		case len(path) == 2 && slices.Contains(jobKeys[path[0]], path[1]):
			continue
		}
		table, last := "", path[len(path)-1]
		if len(path) > 1 {
			table = path[0]
		}
		if jobKeys[table] == nil {
			continue // the table itself was told
		}
		e := &UsageError{Msg: fmt.Sprintf("%s:%d:%d: unknown key %s", d.file, k.line, k.col, toml.Key(path))}
		if hint := jobHints[last]; hint != "" {
			e.Hint = hint
		} else if i := slices.IndexFunc(jobKeys[""], func(t string) bool { return t != table && slices.Contains(jobKeys[t], last) }); i >= 0 {
			e.Hint = "it belongs into [" + jobKeys[""][i] + "]"
		} else if near := Nearest(last, jobKeys[table]); near != "" {
			e.Hint = "did you mean " + near + "?"
		} else {
			e.Hint = "known there: " + strings.Join(jobKeys[table], ", ")
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
func value[T any](d *jobDecoder, t map[string]any, path ...string) T {
	v, there := t[path[len(path)-1]]
	got, ok := v.(T)
	if there && !ok {
		var want T
		d.failf(path, "%s is of type %s, must be of type %s", keyName(path), tomlType(v), tomlType(want))
	}
	return got
}

// keyName is a path for a person: without the indices of [[host]].
func keyName(path []string) string {
	if len(path) == 3 && path[0] == "host" {
		return path[0] + "." + path[2]
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

// texts is an array of strings.
func (d *jobDecoder) texts(t map[string]any, path ...string) []string {
	var out []string
	for i, v := range value[[]any](d, t, path...) {
		s, ok := v.(string)
		at := append(slices.Clone(path), strconv.Itoa(i))
		if !ok {
			d.failf(at, "an element of %s is of type %s, must be of type string", keyName(path), tomlType(v))
		}
		if strings.ContainsRune(s, 0) {
			d.failf(at, "%q holds a zero byte", s)
		}
		out = append(out, s)
	}
	return out
}

// number is an integer from 1 to most, 0 if it is not there.
func (d *jobDecoder) number(t map[string]any, most int64, path ...string) int {
	n := value[int64](d, t, path...)
	key := path[len(path)-1]
	if _, there := t[key]; there && (n < 1 || n > most) {
		d.failf(path, "%s = %d: must be from 1 to %d", key, n, most)
		return 0
	}
	return int(n)
}

// parsed is what parse makes of a string, number or boolean; must says what it has to be. The zero value if it is not there.
func parsed[T any](d *jobDecoder, t map[string]any, parse func(string) (T, error), must string, path ...string) (out T) {
	key := path[len(path)-1]
	v, there := t[key]
	if !there {
		return out
	}
	s, ok := scalar(v)
	var err error
	if ok {
		out, err = parse(s)
	}
	if !ok || err != nil {
		d.failf(path, "%s = %v: must be %s", key, v, must)
	}
	return out
}

func (d *jobDecoder) job(j *Job, t map[string]any) {
	j.NP = d.number(t, MaxNP, "job", "np")
	j.Program = d.text(t, "job", "program")
	j.Args = d.texts(t, "job", "args")
	j.Dir = d.text(t, "job", "wdir")
	j.Device = value[string](d, t, "job", "device")
}

func (d *jobDecoder) hosts(j *Job, v any) {
	var tables []map[string]any
	switch v := v.(type) {
	case nil:
		return
	case []map[string]any:
		tables = v
	case []any: // an array that is written in one: host = [{name = "a"}]
		for i, e := range v {
			t, ok := e.(map[string]any)
			if !ok {
				d.failf([]string{"host", strconv.Itoa(i)}, "a host is of type %s, must be of type table", tomlType(e))
				return
			}
			tables = append(tables, t)
		}
	default:
		d.failf([]string{"host"}, "host must be an array of tables: [[host]]")
		return
	}
	if len(tables) > maxHosts {
		d.failf([]string{"host"}, "more than %d hosts", maxHosts)
		return
	}
	for i, t := range tables {
		table := []string{"host", strconv.Itoa(i)}
		at := func(key string) []string { return append(slices.Clone(table), key) }
		h := Host{Name: d.text(t, at("name")...), User: d.text(t, at("user")...), Addr: d.text(t, at("address")...),
			Port: d.number(t, 65535, at("port")...), Slots: d.number(t, maxSlots, at("slots")...)}
		if h.Name == "" {
			d.failf(table, "a host without a name")
			return
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
		j.Hosts = append(j.Hosts, h)
	}
}

func (d *jobDecoder) env(j *Job, t map[string]any) {
	for _, k := range slices.Sorted(maps.Keys(t)) {
		s, ok := scalar(t[k])
		if !ok {
			d.failf([]string{"env", k}, "variable %s: must be a string, a number, true or false", k)
		}
		set := Setting{Name: k, Value: s}
		if _, err := checkSettings([]Setting{set}); err != nil {
			d.failf([]string{"env", k}, "%v", err)
		}
		j.Env = append(j.Env, set)
	}
}

func (d *jobDecoder) launch(j *Job, t map[string]any) {
	const duration = `a duration such as "10m", or a number of seconds`
	oneOf := func(words ...string) func(string) (string, error) {
		return func(s string) (string, error) {
			if !slices.Contains(words, s) {
				return "", errors.New("another word")
			}
			return s, nil
		}
	}
	j.Timeout = parsed(d, t, ParseDuration, duration, "launch", "timeout")
	j.KillGrace = parsed(d, t, ParseGrace, duration, "launch", "kill_grace")
	if _, there := t["tag_output"]; there {
		on := value[bool](d, t, "launch", "tag_output")
		j.TagOutput = &on
	}
	j.Stdin = parsed(d, t, oneOf(StdinRank0, StdinNone), `0 or "none"`, "launch", "stdin")
	j.KeepLauncherEnv = value[bool](d, t, "launch", "keep_launcher_env")
	j.Report = d.text(t, "launch", "report")

	if _, there := t["map_by"]; there {
		m := parsed(d, t, ParseMapBy, `"slot", "node" or "ppr:N:node"`, "launch", "map_by")
		j.MapBy = &m
	}
	j.Oversubscribe = value[bool](d, t, "launch", "oversubscribe")
	j.Hostfile = d.text(t, "launch", "hostfile")
	j.RM = parsed(d, t, oneOf(RMNone, RMSlurm, RMPBS), `"none", "slurm" or "pbs"`, "launch", "rm")
	j.SSHConfig = d.text(t, "launch", "ssh_config")
	j.AcceptNewHostKeys = value[bool](d, t, "launch", "accept_new_host_keys")
	j.RSH = d.text(t, "launch", "rsh")
	j.ConnectTimeout = parsed(d, t, ParseConnectTimeout, duration, "launch", "connect_timeout")
	j.Ports = parsed(d, t, ParsePorts, `a range such as "40000-40100"`, "launch", "port_range")
	if _, one := t["stage"].(string); one {
		j.Stage = []string{d.text(t, "launch", "stage")}
	} else {
		j.Stage = d.texts(t, "launch", "stage")
	}
	if len(j.Stage) > 1 && slices.Contains(j.Stage, StageNone) {
		d.failf([]string{"launch", "stage"}, "stage = %q and files to send contradict each other", StageNone)
	}
	if slices.Contains(j.Stage, "") {
		d.failf([]string{"launch", "stage"}, "the name of a file in stage is empty")
	}
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
