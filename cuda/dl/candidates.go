package dl

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Candidates are the places where the library may be, in the order in which they are tried.
func (s Spec) Candidates() []Candidate {
	if v := os.Getenv(s.Env); s.Env != "" && v != "" {
		return s.explicit(v)
	}
	var out []Candidate
	seen := map[string]bool{}
	add := func(path, from string) {
		if !seen[path] {
			seen[path] = true
			out = append(out, Candidate{path, from})
		}
	}
	in := func(dir, from string) {
		for _, n := range s.Sonames {
			add(filepath.Join(dir, n), from)
		}
	}
	for _, n := range s.Sonames {
		add(n, "system")
	}
	for _, d := range s.Dirs {
		in(d, "known folder")
	}
	for _, e := range s.HomeEnv {
		if h := os.Getenv(e); h != "" {
			for _, d := range s.HomeLib {
				in(filepath.Join(h, d), e)
			}
		}
	}
	for _, h := range s.Homes {
		for _, d := range s.HomeLib {
			in(filepath.Join(h, d), "known folder")
		}
	}
	if len(s.Wheels) > 0 {
		for _, site := range sitePackages() {
			for _, w := range s.Wheels {
				dir := filepath.Join(site.Path, w)
				if isDir(dir) {
					in(dir, "wheel of "+site.From)
				}
			}
		}
	}
	for _, n := range s.Last {
		add(n, "system")
	}
	return out
}

// explicit is what the user named: a file, or a folder that holds it.
func (s Spec) explicit(v string) []Candidate {
	if abs, err := filepath.Abs(v); err == nil && strings.ContainsRune(v, '/') {
		v = abs
	}
	if !isDir(v) {
		return []Candidate{{v, s.Env}}
	}
	var out []Candidate
	for _, n := range s.Sonames {
		out = append(out, Candidate{filepath.Join(v, n), s.Env})
	}
	return out
}

// sitePackages are the package folders of the active Python, found without running it: PYTHONPATH, the active
// environment (VIRTUAL_ENV, CONDA_PREFIX), the python3 on PATH, the user's own folder.
func sitePackages() []Candidate {
	var out []Candidate
	seen := map[string]bool{}
	add := func(dir, from string) {
		if !seen[dir] && isDir(dir) {
			seen[dir] = true
			out = append(out, Candidate{dir, from})
		}
	}
	for _, d := range filepath.SplitList(os.Getenv("PYTHONPATH")) {
		if d != "" {
			add(d, "PYTHONPATH")
		}
	}
	for _, e := range []string{"VIRTUAL_ENV", "CONDA_PREFIX"} {
		if p := os.Getenv(e); p != "" {
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
	if home, err := os.UserHomeDir(); err == nil && os.Getenv("VIRTUAL_ENV") == "" && os.Getenv("PYTHONNOUSERSITE") == "" {
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
