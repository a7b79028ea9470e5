package hostfacts

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// What is shown is what ranks load: the places are looked at in the order in which ranks look at them.
func TestSearchOrderIsThatOfRanks(t *testing.T) {
	dir := t.TempDir()
	at := func(parts ...string) string { return filepath.Join(append([]string{dir}, parts...)...) }
	for _, prefix := range []string{"venv", "conda", "py", "home/.local"} {
		for _, site := range []string{"lib/python3.9/site-packages", "lib/python3.12/site-packages", "lib/python3/dist-packages", "lib64/python3.10/site-packages"} {
			for _, w := range libraries {
				for _, wheel := range w.search.Wheels {
					if err := os.MkdirAll(at(prefix, site, wheel), 0o755); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
	}
	for _, d := range []string{"py/bin", "venv/bin", "path/nvidia/nccl/lib", "lib"} {
		if err := os.MkdirAll(at(d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(at("py/bin/python3"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(at("py/bin/python3"), at("venv/bin/python3")); err != nil {
		t.Fatal(err)
	}
	for name, env := range map[string]map[string]string{
		"plain":        {"PATH": at("py/bin")},
		"environment":  {"PATH": at("venv/bin"), "VIRTUAL_ENV": at("venv")},
		"by its link":  {"PATH": at("venv/bin")},
		"conda":        {"PATH": "/nowhere", "CONDA_PREFIX": at("conda"), "PYTHONNOUSERSITE": "1"},
		"this machine": {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": at("path") + "::/nowhere"},
		"toolkits":     {"PATH": "/nowhere", "NCCL_HOME": at("1"), "CUDA_HOME": at("2"), "CUDA_PATH": at("3"), "MUSA_PATH": at("4"), "ROCM_PATH": at("5"), "HIP_PATH": at("6")},
	} {
		t.Run(name, func(t *testing.T) {
			for _, e := range []string{"PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONNOUSERSITE", "LD_LIBRARY_PATH", "NCCL_HOME", "CUDA_HOME", "CUDA_PATH", "MUSA_HOME", "MUSA_PATH", "ROCM_PATH", "HIP_PATH"} {
				t.Setenv(e, env[e])
			}
			t.Setenv("PATH", env["PATH"])
			t.Setenv("HOME", at("home"))
			h := host{Options{Root: "/", Environ: os.Environ()}}
			for _, w := range libraries {
				t.Setenv(w.search.Env, "")
				var got, want []string
				for _, c := range w.search.Places(gpulib.Here) {
					if c.From == "system" {
						c.Path = "by the loader: " + c.Path
					}
					want = append(want, c.Path)
				}
				for _, c := range h.candidates(w.search) {
					if c.From == "system" {
						c.Path = "by the loader: " + filepath.Base(c.Path)
					}
					if !slices.Contains(got, c.Path) {
						got = append(got, c.Path)
					}
				}
				if d := cmp.Diff(strings.Join(got, "\n"), strings.Join(want, "\n")); d != "" {
					t.Errorf("%s: got - want +:\n%s", w.name, d)
				}
			}
		})
	}
}
