package launcher

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	"github.com/google/go-cmp/cmp"
)

func TestIndexKeys(t *testing.T) {
	doc := "a = 1 # b = 2\n" +
		"\"q k\".'x.y' = \"\"\"\nz = 1\n\\\"\"\"\"\"\n" +
		"ä.b = [ 1, # ]\n [\"]\", '''\n''' ], {c = 1, d.e = '}'} ]\r\n" +
		"[t.u]\n  v = 1979-05-27 07:32:00\n" +
		"[[h]]\nn = 'it''\n" +
		"[[h]]\n\tn = 2\n[h.s]\nm = {}\n"
	doc = strings.ReplaceAll(doc, "'it''", "'it'")
	var got []string
	for _, k := range indexKeys(doc) {
		s := fmt.Sprintf("%d:%d %s", k.line, k.col, strings.Join(k.path, "/"))
		if k.element {
			s += "#"
		}
		got = append(got, s)
	}
	want := []string{"1:1 a", "2:1 q k", "2:1 q k/x.y", "5:1 ä", "5:1 ä/b", "5:9 ä/b/0#", "6:2 ä/b/1#", "6:3 ä/b/1/0#", "6:8 ä/b/1/1#", "7:8 ä/b/2#", "7:9 ä/b/2/c", "7:16 ä/b/2/d", "7:16 ä/b/2/d/e",
		"8:2 t", "8:2 t/u", "9:3 t/u/v", "10:3 h", "10:3 h/0#", "11:1 h/0/n", "12:3 h", "12:3 h/1#", "13:2 h/1/n", "14:2 h", "14:2 h/1#", "14:2 h/1/s", "15:1 h/1/s/m"}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
}

// Every key that the toml package finds is in the index, and stands where the index says.
func FuzzIndexKeys(f *testing.F) {
	f.Add("[[h]]\nn = 'it'\n[[h]]\n\"n\" = [[{a.b = 1}], 2]\n[h.s.t]\n")
	f.Add("a.\"b\\u00e9\" = \"\"\"x\\\n  y\"\"\"\"\"\nc = {d = '''\n''', e = [ # f\n]}\n")
	f.Add(twoHosts)
	f.Fuzz(func(t *testing.T, doc string) {
		keys := indexKeys(doc) // ends, whatever it is given
		var m map[string]any
		if _, err := toml.Decode(doc, &m); err != nil {
			return
		}
		lines := strings.Split(doc, "\n")
		var walk func(path []string, v any)
		walk = func(path []string, v any) {
			if len(path) > 0 {
				i := slices.IndexFunc(keys, func(k tomlKey) bool { return slices.Equal(k.path, path) })
				if i < 0 {
					t.Fatalf("%q: key %q is not in the index: %v", doc, path, keys)
				}
				k := keys[i]
				if k.line > len(lines) || k.col > len([]rune(lines[k.line-1])) {
					t.Fatalf("%q: key %q is at %d:%d", doc, path, k.line, k.col)
				}
			}
			switch v := v.(type) {
			case map[string]any:
				for name, e := range v {
					walk(append(slices.Clone(path), name), e)
				}
			case []map[string]any:
				for i, e := range v {
					walk(append(slices.Clone(path), strconv.Itoa(i)), e)
				}
			case []any:
				for i, e := range v {
					walk(append(slices.Clone(path), strconv.Itoa(i)), e)
				}
			}
		}
		walk(nil, m)
	})
}
