package gpulib

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Search says where a library may be.
type Search struct {
	Env     string   // variable that names the file or its folder: if it is set, nothing else is tried
	Sonames []string // what the system's loader is asked for, best first: "libnccl.so.2"
	Dirs    []string // folders that the loader may not know
	HomeEnv []string // variables that name the folder of a toolkit: CUDA_HOME
	Homes   []string // where a toolkit is when no variable says it
	HomeLib []string // folders of a toolkit that hold libraries: "lib64"
	Wheels  []string // folders below site-packages of the active Python: "nvidia/nccl/lib"
	Last    []string // names tried when all else failed (links of development packages)
}

// System is where a bare name for the system's loader comes from.
const System = "system"

// Place is one where a library may be.
type Place struct {
	Path string // absolute, or a bare name for the system's loader
	From string // "GORUN_NCCL_LIB", System, "CUDA_HOME", "known folder", "wheel of VIRTUAL_ENV"
}

// Host is where a library is looked for: this machine as a rank sees it, or as one with another environment would.
type Host struct {
	Getenv func(name string) string
	Root   string // of the folders that are known; "" or "/", but in tests
}

// Here is this machine with the process's own environment.
var Here = Host{Getenv: os.Getenv}

// Places are those where the library may be, in the order in which they are tried. Not all exist.
func (s Search) Places(h Host) []Place {
	if s.Env != "" {
		if v := h.Getenv(s.Env); v != "" {
			return s.explicit(v)
		}
	}
	var out []Place
	seen := map[string]bool{}
	add := func(path, from string) {
		if !seen[path] {
			seen[path] = true
			out = append(out, Place{path, from})
		}
	}
	in := func(dir, from string) {
		for _, n := range s.Sonames {
			add(filepath.Join(dir, n), from)
		}
	}
	for _, n := range s.Sonames {
		add(n, System)
	}
	for _, d := range s.Dirs {
		in(h.path(d), "known folder")
	}
	for _, e := range s.HomeEnv {
		if v := h.Getenv(e); v != "" {
			for _, d := range s.HomeLib {
				in(filepath.Join(v, d), e)
			}
		}
	}
	for _, home := range s.Homes {
		for _, d := range s.HomeLib {
			in(filepath.Join(h.path(home), d), "known folder")
		}
	}
	if len(s.Wheels) > 0 {
		for _, site := range h.sitePackages() {
			for _, w := range s.Wheels {
				dir := filepath.Join(site.Path, w)
				if isDir(dir) {
					in(dir, "wheel of "+site.From)
				}
			}
		}
	}
	for _, n := range s.Last {
		add(n, System)
	}
	return out
}

// explicit is what the user named: a file, or a folder that holds it.
func (s Search) explicit(v string) []Place {
	if abs, err := filepath.Abs(v); err == nil && strings.ContainsRune(v, '/') {
		v = abs
	}
	if !isDir(v) {
		return []Place{{v, s.Env}}
	}
	var out []Place
	for _, n := range s.Sonames {
		out = append(out, Place{filepath.Join(v, n), s.Env})
	}
	return out
}

func (h Host) path(dir string) string { return filepath.Join(cmp.Or(h.Root, "/"), dir) }

// sitePackages are the package folders of the active Python, found without running it: PYTHONPATH, the active
// environment (VIRTUAL_ENV, CONDA_PREFIX), the python3 on PATH, the user's own folder.
func (h Host) sitePackages() []Place {
	var out []Place
	seen := map[string]bool{}
	add := func(dir, from string) {
		if !seen[dir] && isDir(dir) {
			seen[dir] = true
			out = append(out, Place{dir, from})
		}
	}
	for _, d := range filepath.SplitList(h.Getenv("PYTHONPATH")) {
		if d != "" {
			add(d, "PYTHONPATH")
		}
	}
	for _, e := range []string{"VIRTUAL_ENV", "CONDA_PREFIX"} {
		if p := h.Getenv(e); p != "" {
			for _, d := range sitesIn(p) {
				add(d, e)
			}
		}
	}
	if py, err := exec.LookPath("python3"); err == nil {
		// The prefix of a virtual environment is that of the link; that of a plain installation may be the target's.
		files := []string{py}
		if real, err := filepath.EvalSymlinks(py); err == nil && real != py {
			files = append(files, real)
		}
		for _, f := range files {
			prefix := filepath.Dir(filepath.Dir(f))
			for _, d := range sitesIn(prefix) {
				add(d, py)
			}
			if prefix == "/usr" || prefix == "/" { // Debian's layout, where pip as root installs to /usr/local
				for _, d := range sitesIn("/usr/local") {
					add(d, py)
				}
				add("/usr/lib/python3/dist-packages", py)
			}
		}
	}
	if home := h.Getenv("HOME"); home != "" && h.Getenv("VIRTUAL_ENV") == "" && h.Getenv("PYTHONNOUSERSITE") == "" {
		for _, d := range sitesIn(filepath.Join(home, ".local")) {
			add(d, "user")
		}
	}
	return out
}

// sitesIn are the package folders under a prefix, those of the newest Python first.
func sitesIn(prefix string) []string {
	var out []string
	for _, pattern := range []string{"lib/python3*/site-packages", "lib/python3*/dist-packages", "lib64/python3*/site-packages"} {
		m, _ := filepath.Glob(filepath.Join(escapeGlob(prefix), pattern)) // the pattern is well formed
		slices.SortStableFunc(m, func(a, b string) int { return cmp.Compare(pythonMinor(b), pythonMinor(a)) })
		out = append(out, m...)
	}
	return out
}

// pythonMinor is 12 for …/python3.12/site-packages.
func pythonMinor(site string) int {
	n, _ := strconv.Atoi(strings.TrimPrefix(filepath.Base(filepath.Dir(site)), "python3.")) // 0 for plain python3
	return n
}

func escapeGlob(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}

func isDir(p string) bool {
	fi, err := os.Stat(p)
	return err == nil && fi.IsDir()
}
