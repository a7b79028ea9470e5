package gpulib

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPlaces(t *testing.T) {
	root := t.TempDir()
	at := func(p string) string { return filepath.Join(root, p) }
	for _, site := range []string{"path", "venv/lib/python3.9/site-packages", "venv/lib/python3.12/site-packages", "venv/lib64/python3.12/site-packages", "conda[1]/lib/python3/dist-packages", "home/.local/lib/python3.11/site-packages"} {
		if err := os.MkdirAll(at(site+"/x/lib"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", at("none")) // without python3
	s := Search{Env: "X_LIB", Sonames: []string{"libx.so.2", "libx.so.1"}, Dirs: []string{"/known"}, HomeEnv: []string{"X_HOME"}, Homes: []string{"/opt/x"}, HomeLib: []string{"lib64", "lib"},
		Wheels: []string{"x/lib"}, Last: []string{"libx.so"}}
	one := s
	one.Sonames = s.Sonames[:1]
	for _, c := range []struct {
		name string
		s    Search
		env  map[string]string
		want []Place
	}{
		{"bare", s, nil, []Place{
			{"libx.so.2", System}, {"libx.so.1", System}, {at("known/libx.so.2"), "known folder"}, {at("known/libx.so.1"), "known folder"},
			{at("opt/x/lib64/libx.so.2"), "known folder"}, {at("opt/x/lib64/libx.so.1"), "known folder"}, {at("opt/x/lib/libx.so.2"), "known folder"}, {at("opt/x/lib/libx.so.1"), "known folder"},
			{"libx.so", System}}},
		{"toolkit", one, map[string]string{"X_HOME": at("home")}, []Place{
			{"libx.so.2", System}, {at("known/libx.so.2"), "known folder"}, {at("home/lib64/libx.so.2"), "X_HOME"}, {at("home/lib/libx.so.2"), "X_HOME"},
			{at("opt/x/lib64/libx.so.2"), "known folder"}, {at("opt/x/lib/libx.so.2"), "known folder"}, {"libx.so", System}}},
		{"Python", Search{Sonames: one.Sonames, Wheels: s.Wheels}, map[string]string{"PYTHONPATH": ":" + at("path") + ":" + at("nowhere"), "VIRTUAL_ENV": at("venv"), "CONDA_PREFIX": at("conda[1]"), "HOME": at("home")}, []Place{
			{"libx.so.2", System}, {at("path/x/lib/libx.so.2"), "wheel of PYTHONPATH"}, {at("venv/lib/python3.12/site-packages/x/lib/libx.so.2"), "wheel of VIRTUAL_ENV"},
			{at("venv/lib/python3.9/site-packages/x/lib/libx.so.2"), "wheel of VIRTUAL_ENV"}, {at("venv/lib64/python3.12/site-packages/x/lib/libx.so.2"), "wheel of VIRTUAL_ENV"},
			{at("conda[1]/lib/python3/dist-packages/x/lib/libx.so.2"), "wheel of CONDA_PREFIX"}}},
		{"the user's Python", Search{Wheels: s.Wheels, Sonames: one.Sonames}, map[string]string{"HOME": at("home")}, []Place{
			{"libx.so.2", System}, {at("home/.local/lib/python3.11/site-packages/x/lib/libx.so.2"), "wheel of user"}}},
		{"without it", Search{Wheels: s.Wheels}, map[string]string{"HOME": at("home"), "PYTHONNOUSERSITE": "1"}, nil},
		{"a folder", s, map[string]string{"X_LIB": at("path"), "X_HOME": at("home")}, []Place{{at("path/libx.so.2"), "X_LIB"}, {at("path/libx.so.1"), "X_LIB"}}},
		{"a file", s, map[string]string{"X_LIB": at("path/other.so")}, []Place{{at("path/other.so"), "X_LIB"}}},
		{"a name", s, map[string]string{"X_LIB": "libother.so"}, []Place{{"libother.so", "X_LIB"}}},
	} {
		got := c.s.Places(Host{Getenv: func(name string) string { return c.env[name] }, Root: root})
		if d := cmp.Diff(got, c.want); d != "" {
			t.Errorf("%s: got - want +:\n%s", c.name, d)
		}
	}
}

// Each library has a variable of its own, and each of its settings begins with the prefix.
func TestTables(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range []Search{NCCL, MCCL, RCCL, CUDA, MUSA, HIP, NVML, NVRTC, MTRTC, HIPRTC} {
		if s.Env == "" || seen[s.Env] || len(s.Sonames) == 0 || len(s.HomeLib) == 0 && len(s.HomeEnv)+len(s.Homes) > 0 {
			t.Errorf("%+v", s)
		}
		seen[s.Env] = true
	}
	for prefix, legacy := range map[string]string{"NCCL_": "NCCL_LEGACY_CUDA_REGISTER", "MCCL_": "MCCL_LEGACY_MUSA_REGISTER"} {
		found := false
		for _, s := range CollectiveSettings(prefix) {
			found = found || s.Name == legacy && s.Effect == BreaksProgram && s.Bad("1") && !s.Bad("0")
			if s.Name[:5] != prefix || s.Why == "" {
				t.Errorf("%+v", s)
			}
		}
		if !found {
			t.Errorf("no %s", legacy)
		}
	}
}
