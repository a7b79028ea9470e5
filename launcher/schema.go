package launcher

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// JobSchema is the JSON Schema (draft 7) of a job file, for editors. What a value must be beside its type, ReadJobFile tells.
func JobSchema() []byte {
	scalars := []string{"string", "number", "boolean"}
	variables := map[string]any{"type": "object", "additionalProperties": map[string]any{"type": scalars}}
	tables := map[string]any{
		"env":  described(maps.Clone(variables), "variables for the ranks, beside those that they inherit"),
		"app":  described(map[string]any{"type": "array", "items": appSchema(variables)}, "one of several programs, instead of np, program and args in [job]"),
		"host": described(map[string]any{"type": "array", "maxItems": maxHosts, "items": hostSchema()}, "a host on which ranks run"),
	}
	for _, table := range []string{"job", "output", "launch"} {
		keys := map[string]any{}
		for key, o := range optionsOf(table) {
			keys[key] = o.schema()
		}
		tables[table] = object(keys)
	}
	for table, maker := range map[string]string{"nccl": "NCCL", "mccl": "MCCL"} {
		keys := map[string]any{}
		for _, key := range ncclKeys(table) {
			if s := ncclSchema(table, key); s != nil {
				keys[key] = described(s, strings.ToUpper(table+"_"+key))
			}
		}
		tables[table] = described(object(keys), maker+"'s settings for the ranks")
	}
	schema := object(tables)
	schema["$schema"], schema["title"] = "http://json-schema.org/draft-07/schema#", "a job of gorun"
	var b bytes.Buffer
	writeSchema(&b, schema, "")
	b.WriteByte('\n')
	return b.Bytes()
}

// writeSchema writes a part of a schema: in one line, if it is not too long for one.
func writeSchema(b *bytes.Buffer, v any, indent string) {
	const long = 240
	line, err := json.Marshal(v)
	if err != nil {
		panic(err) // maps of strings and numbers
	}
	parts, ok := v.(map[string]any)
	if !ok || len(line) <= long {
		b.Write(line)
		return
	}
	b.WriteString("{\n")
	for i, key := range slices.Sorted(maps.Keys(parts)) {
		if i > 0 {
			b.WriteString(",\n")
		}
		fmt.Fprintf(b, "%s  %q: ", indent, key)
		writeSchema(b, parts[key], indent+"  ")
	}
	b.WriteString("\n" + indent + "}")
}

func object(keys map[string]any, required ...string) map[string]any {
	s := map[string]any{"type": "object", "properties": keys, "additionalProperties": false}
	if len(required) > 0 {
		s["required"] = required
	}
	return s
}

func described(s map[string]any, text string) map[string]any {
	s["description"] = text
	return s
}

func appSchema(variables map[string]any) map[string]any {
	keys := map[string]any{"env": described(maps.Clone(variables), "variables for its ranks, beside [env]")}
	for key, o := range optionsOf("app") {
		keys[key] = o.schema()
	}
	return object(keys, "np", "program")
}

func hostSchema() map[string]any {
	keys := map[string]any{}
	for _, k := range hostKeys {
		s := map[string]any{"type": "string", "minLength": 1}
		if k.max > 0 {
			s = map[string]any{"type": "integer", "minimum": 1, "maximum": k.max}
		}
		keys[k.key] = described(s, k.help)
	}
	return object(keys, "name")
}

// schema is what a job file may have for an option.
func (o *Option) schema() map[string]any {
	s := map[string]any{}
	switch o.kind {
	case kindText:
		s["type"], s["minLength"] = "string", 1
	case kindNumber:
		s["type"], s["minimum"], s["maximum"] = "integer", o.min, o.max
	case kindSwitch:
		s["type"], s["default"] = "boolean", false
	case kindWord:
		s["type"] = []string{"string", "number"}
		if len(o.choices) > 0 {
			s = map[string]any{"type": "string", "enum": o.choices}
		}
	case kindList:
		s["type"], s["items"] = "array", map[string]any{"type": "string"}
	case kindWords:
		s["type"], s["items"] = []string{"string", "array"}, map[string]any{"type": "string"}
	}
	text := o.Help
	if len(o.Flags) > 0 {
		text += " [" + o.Flags[0] + "]"
	}
	return described(s, text)
}

// ncclSchema is what [nccl] or [mccl] may have for a key, nil if it is refused whatever it is.
func ncclSchema(table, key string) map[string]any {
	list := ncclWords[key]
	switch {
	case key == "comm_id":
		return nil
	case strings.HasPrefix(key, "legacy_"):
		return map[string]any{"enum": []any{false, 0, "0"}}
	case slices.Contains(ncclSwitches, key):
		return map[string]any{"enum": []any{true, false, 1, 0, "1", "0"}}
	case slices.Contains(ncclNumbers, key):
		return map[string]any{"type": []string{"integer", "string"}}
	case list != nil:
		var words []any
		for _, w := range list {
			if ncclRefused(table, key, w) != "" {
				continue
			}
			words = append(words, w)
			if n, err := strconv.Atoi(w); err == nil {
				words = append(words, n)
			} else if low := strings.ToLower(w); low != w {
				words = append(words, low)
			}
		}
		return map[string]any{"enum": words}
	}
	return map[string]any{"type": []string{"string", "number", "boolean"}}
}
