package launcher

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Source is one of the places where a job's settings come from: flags, variables, a job file.
type Source struct {
	Job    Job
	Name   func(o *Option) string // says where an option was set; nil: Places do
	Places Places
}

// Places are where settings stand in a job file, as "job.toml:3": by the option's key, of host number n by "host.n", of a variable by
// "env.NAME", and of app number n with "app.n." in front.
type Places map[string]string

// Origin is a setting of a job and where it comes from.
type Origin struct {
	Key   string   // as in a job file
	Value []string // as flags have it; several of a list, none where nothing was set and help tells what happens
	List  bool     // it may have several values
	From  string   // where it was set: a flag, a variable, a file and line; "default"
	Flag  string   // the flag that sets it, "" if none does
	Env   string   // the variable that sets it, "" if none does
}

// MarshalJSON writes the value as a string, that of a list as an array; null where nothing was set.
func (o Origin) MarshalJSON() ([]byte, error) {
	var value any
	switch {
	case o.List:
		value = o.Value
	case len(o.Value) > 0:
		value = o.Value[0]
	}
	return json.Marshal(struct {
		Key   string `json:"key"`
		Value any    `json:"value"`
		From  string `json:"from"`
		Flag  string `json:"flag,omitempty"`
		Env   string `json:"variable,omitempty"`
	}{o.Key, value, o.From, o.Flag, o.Env})
}

// WriteOrigins prints settings for a person.
func WriteOrigins(w io.Writer, all []Origin) error {
	text := func(o Origin) string {
		var words []string
		for _, v := range o.Value {
			words = append(words, ShellQuote(v))
		}
		if len(words) == 0 {
			return "-"
		}
		return strings.Join(words, " ")
	}
	const widest = 48 // a longer value pushes its origin aside
	keys, values := 0, 0
	for _, o := range all {
		keys = max(keys, len(o.Key))
		if n := len(text(o)); n <= widest {
			values = max(values, n)
		}
	}
	var b strings.Builder
	for _, o := range all {
		fmt.Fprintf(&b, "%-*s  %-*s  %s\n", keys, o.Key, values, text(o), o.From)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// fromDefault is the origin of what nobody has set.
const fromDefault = "default"

// Origins says of each setting of the job that Merge makes of sources, the strongest first, where it comes from.
func Origins(sources ...Source) []Origin {
	var j Job
	origin := map[string]*Source{} // by Option.Key; "": hosts
	apps := -1                     // the source of the apps
	for i := range sources {
		before := j
		j = Merge(j, sources[i].Job)
		for _, o := range JobOptions {
			if len(o.values(&before)) == 0 && len(o.values(&j)) > 0 {
				origin[optionID(&o)] = &sources[i]
			}
		}
		if apps < 0 && len(j.Apps) > 0 {
			apps = i
		}
	}
	var out []Origin
	for _, table := range jobTables {
		for i := range JobOptions {
			o := &JobOptions[i]
			if t, _, _ := strings.Cut(o.Key, "."); t != table || len(j.Apps) > 0 && slices.Contains([]string{"job.np", "job.program", "job.args"}, o.Key) {
				continue
			}
			out = append(out, explainOption(o, o.Key, &j, origin[optionID(o)]))
		}
		switch table {
		case "host":
			if s := origin["-H"]; s != nil {
				out = append(out, explainHosts(s)...)
			}
		case "app":
			if apps >= 0 {
				out = append(out, explainApps(&sources[apps])...)
			}
		case "env":
			out = append(out, explainEnv("env.", sources, "")...)
		}
	}
	return out
}

// optionID tells options apart.
func optionID(o *Option) string {
	if o.Key != "" {
		return o.Key
	}
	return o.Flags[0]
}

// from is where a source has set an option; key is its place in a job file.
func (s *Source) from(o *Option, keys ...string) string {
	if s.Name != nil {
		return s.Name(o)
	}
	for _, key := range keys {
		if at, ok := s.Places[key]; ok {
			return at
		}
	}
	return ""
}

func explainOption(o *Option, key string, j *Job, s *Source) Origin {
	e := Origin{Key: key, Value: o.values(j), List: o.kind == kindList || o.kind == kindWords, From: fromDefault, Env: o.Env}
	if len(o.Flags) > 0 {
		e.Flag = o.Flags[0]
	}
	if s != nil {
		e.From = s.from(o, key, o.Also)
	} else if o.Default != "" {
		e.Value = []string{o.Default}
	} else if o.kind == kindSwitch {
		e.Value = []string{"false"}
	}
	return e
}

func optionOf(flag string) *Option {
	i := slices.IndexFunc(JobOptions, func(o Option) bool { return slices.Contains(o.Flags, flag) })
	return &JobOptions[i]
}

func optionByKey(key string) *Option {
	i := slices.IndexFunc(JobOptions, func(o Option) bool { return o.Key == key })
	return &JobOptions[i]
}

func explainHosts(s *Source) []Origin {
	var out []Origin
	for i, h := range s.Job.Hosts {
		out = append(out, Origin{Key: "host." + h.Name, Value: []string{h.String()}, From: s.from(optionOf("-H"), fmt.Sprintf("host.%d", i)), Flag: "-H"})
	}
	return out
}

func explainApps(s *Source) []Origin {
	var out []Origin
	for i, a := range s.Job.Apps {
		of := a.job()
		prefix := fmt.Sprintf("app.%d.", i)
		for key, o := range optionsOf("app") {
			if len(o.values(&of)) > 0 {
				out = append(out, explainOption(o, prefix+key, &of, s))
			}
		}
		out = append(out, explainEnv(prefix+"env.", []Source{{Job: of, Name: s.Name, Places: s.Places}}, prefix)...)
	}
	return out
}

// explainEnv explains variables, which begin with prefix in Places.
func explainEnv(name string, sources []Source, prefix string) []Origin {
	var out []Origin
	seen := map[string]bool{}
	for i := range sources {
		s := &sources[i]
		var some []Origin
		for _, set := range slices.Backward(s.Job.Env) { // of two of one place the last wins
			if seen[set.Name] {
				continue
			}
			seen[set.Name] = true
			value := set.Value
			if set.Inherit {
				value = "(that of gorun's environment)"
			}
			some = append(some, Origin{Key: name + set.Name, Value: []string{value}, From: s.from(optionOf("-x"), prefix+"env."+set.Name), Flag: "-x"})
		}
		slices.Reverse(some)
		out = append(out, some...)
	}
	return out
}
