package launcher

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"testing"

	"github.com/BurntSushi/toml"
	"github.com/google/go-cmp/cmp"
)

// schema is what of JSON Schema's draft 7 JobSchema uses.
type schema struct {
	Schema      string             `json:"$schema"`
	Title       string             `json:"title"`
	Description string             `json:"description"`
	Type        any                `json:"type"` // a name, or several
	Properties  map[string]*schema `json:"properties"`
	Additional  any                `json:"additionalProperties"` // false, or a schema
	Required    []string           `json:"required"`
	Items       *schema            `json:"items"`
	MaxItems    *int               `json:"maxItems"`
	Enum        []any              `json:"enum"`
	Minimum     *float64           `json:"minimum"`
	Maximum     *float64           `json:"maximum"`
	MinLength   *int               `json:"minLength"`
	Default     any                `json:"default"`
}

func schemaOf(t *testing.T) *schema {
	t.Helper()
	var s schema
	d := json.NewDecoder(bytes.NewReader(JobSchema()))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		t.Fatal(err)
	}
	return &s
}

// checkTOML checks a document.
func (s *schema) checkTOML(text []byte) error {
	var doc map[string]any
	if err := toml.Unmarshal(text, &doc); err != nil {
		return err
	}
	// Through JSON, as an editor sees it.
	b, err := json.Marshal(doc)
	if err != nil {
		return err
	}
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	return s.check("", v)
}

func (s *schema) check(at string, v any) error {
	if s.Type != nil {
		ok := false
		names, several := s.Type.([]any)
		if !several {
			names = []any{s.Type}
		}
		for _, n := range names {
			ok = ok || isType(v, n.(string))
		}
		if !ok {
			return fmt.Errorf("%s is of another type than %v", at, s.Type)
		}
	}
	if s.Enum != nil && !slices.ContainsFunc(s.Enum, func(e any) bool { return reflect.DeepEqual(e, v) }) {
		return fmt.Errorf("%s = %v is none of %v", at, v, s.Enum)
	}
	switch v := v.(type) {
	case float64:
		if s.Minimum != nil && v < *s.Minimum || s.Maximum != nil && v > *s.Maximum {
			return fmt.Errorf("%s = %v is out of bounds", at, v)
		}
	case string:
		if s.MinLength != nil && len(v) < *s.MinLength {
			return fmt.Errorf("%s is too short", at)
		}
	case []any:
		if s.MaxItems != nil && len(v) > *s.MaxItems {
			return fmt.Errorf("%s is too long", at)
		}
		for i, e := range v {
			if s.Items != nil {
				if err := s.Items.check(fmt.Sprintf("%s.%d", at, i), e); err != nil {
					return err
				}
			}
		}
	case map[string]any:
		for _, r := range s.Required {
			if _, ok := v[r]; !ok {
				return fmt.Errorf("%s: %s is missing", at, r)
			}
		}
		for _, k := range slices.Sorted(maps.Keys(v)) {
			p := s.Properties[k]
			if p == nil {
				if s.Additional == false {
					return fmt.Errorf("%s.%s is unknown", at, k)
				}
				if s.Additional == nil || s.Additional == true {
					continue
				}
				b, _ := json.Marshal(s.Additional)
				p = &schema{}
				if err := json.Unmarshal(b, p); err != nil {
					return err
				}
			}
			if err := p.check(at+"."+k, v[k]); err != nil {
				return err
			}
		}
	}
	return nil
}

func isType(v any, name string) bool {
	switch v := v.(type) {
	case string:
		return name == "string"
	case bool:
		return name == "boolean"
	case float64:
		return name == "number" || name == "integer" && v == float64(int64(v))
	case []any:
		return name == "array"
	case map[string]any:
		return name == "object"
	}
	return false
}

// The copy for editors is the schema of this build.
func TestJobSchemaFile(t *testing.T) {
	const file = "../configs/job.schema.json"
	if *update {
		if err := os.WriteFile(file, JobSchema(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(got), string(JobSchema())); d != "" {
		t.Errorf("%s is not what gorun config schema writes (go test ./launcher -run TestJobSchemaFile -update): -got +want:\n%s", file, d)
	}
}

// What the schema takes and refuses is what ReadJobFile does, as far as types tell.
func TestJobSchema(t *testing.T) {
	root := schemaOf(t)
	for _, o := range JobOptions {
		for _, at := range []string{o.Key, o.Also} {
			if at == "" {
				continue
			}
			if err := root.checkTOML([]byte(at + " = " + o.Example + "\n")); err != nil {
				t.Errorf("%s = %s: %v", at, o.Example, err)
			}
			if err := root.checkTOML([]byte(at + " = {}\n")); err == nil {
				t.Errorf("%s may be a table", at)
			}
		}
	}
	for _, table := range jobTables {
		s := root.Properties[table]
		if s == nil {
			t.Errorf("there is no %s", table)
			continue
		}
		if s.Items != nil {
			s = s.Items
		}
		for _, key := range keysOf(table) {
			p := s.Properties[key]
			if p == nil && key != "comm_id" {
				t.Errorf("there is no %s.%s", table, key)
			} else if p != nil && p.Description == "" {
				t.Errorf("%s.%s has no description", table, key)
			}
		}
	}
	for _, text := range []string{
		"[[app]]\nnp = 1\nprogram = 'a'\nargs = ['x']\nenv = {A = 1, B = 'x', C = true}\n[[app]]\nnp = 2\nprogram = 'b'\nwdir = '/d'\ndevice = 0\n",
		"[[host]]\nname = 'a'\naddress = 'b'\nuser = 'u'\nport = 22\nslots = 1\nmax_slots = 2\n[env]\nA = 1.5\n",
		"[nccl]\ndebug = 'info'\ncross_nic = 1\nib_disable = true\nmax_ctas = 4\nalgo = 'Ring'\nlegacy_cuda_register = 0\n[mccl]\ndebug = 'WARN'\n",
		"[launch]\ntimeout = 90\nkill_grace = 0.5\nstdin = 0\nstage = 'none'\nrestarts = 0\n",
	} {
		if _, _, err := decodeJob("job.toml", []byte(text)); err != nil {
			t.Errorf("%q: %v", text, err)
		}
		if err := root.checkTOML([]byte(text)); err != nil {
			t.Errorf("%q: %v", text, err)
		}
	}
	for _, text := range []string{
		"jobs = {}", "np = 1", "[job]\nnp = 0", "[job]\nnp = '4'", "[job]\nnp = 16385", "[job]\nnp = 1.5", "[job]\nprogram = ''", "[job]\nargs = 'x'", "[job]\nargs = [1]", "[job]\nfoo = 1",
		"job = 1", "[[job]]", "[host]\nname = 'a'", "[[host]]\nslots = 1", "[[host]]\nname = 'a'\nport = 0", "[[host]]\nname = 'a'\nport = 70000", "[[app]]\nnp = 1", "[[app]]\nprogram = 'a'",
		"[[app]]\nnp = 1\nprogram = 'a'\ntimeout = 1", "[env]\nA = [1]", "[env.A]\nb = 1", "[launch]\nrm = 'lsf'", "[launch]\non_fail = 'x'", "[launch]\noversubscribe = 1", "[launch]\nstage = 1",
		"[output]\ntag = 'yes'", "[nccl]\ndebug = 'LOUD'", "[nccl]\ncomm_id = 'x'", "[nccl]\nlegacy_cuda_register = 1", "[nccl]\nlaunch_mode = 'GROUP'", "[nccl]\nib_disable = 2", "[nccl]\nfoo = 1",
	} {
		if _, _, err := decodeJob("job.toml", []byte(text)); err == nil {
			t.Errorf("%q is a job", text)
		}
		if err := root.checkTOML([]byte(text)); err == nil {
			t.Errorf("%q: the schema takes it", text)
		}
	}
}
