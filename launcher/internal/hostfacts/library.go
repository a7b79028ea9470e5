package hostfacts

import (
	"bytes"
	"cmp"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// wanted is a library that ranks open, where they look for it, and how its file tells its version.
type wanted struct {
	vendor  string
	name    string
	env     string // names a file, or a folder that has it
	sonames []string
	dirs    []string
	homeEnv []string
	homes   []string
	homeLib []string // folders of those that hold libraries
	last    []string // sonames that only the dynamic loader is asked for, when all else failed
	wheels  []string // folders under Python's site-packages
	tells   string   // stands before its version in its read-only data; "" where the file's name must tell it
}

var libraries = []wanted{
	{vendor: nvidia, name: "CUDA driver", env: "GORUN_CUDA_LIB", sonames: []string{"libcuda.so.1"},
		dirs: []string{"/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/run/opengl-driver/lib"}},
	{vendor: nvidia, name: "NCCL", env: "GORUN_NCCL_LIB", sonames: []string{"libnccl.so.2"}, last: []string{"libnccl.so"},
		homeEnv: []string{"NCCL_HOME", "CUDA_HOME", "CUDA_PATH"}, homes: []string{"/usr/local/cuda", "/usr/local/nccl"}, homeLib: []string{"lib64", "lib"},
		wheels: []string{"nvidia/nccl/lib"}, tells: "CCL version "},
	{vendor: mooreThreads, name: "MUSA driver", env: "GORUN_MUSA_LIB", sonames: []string{"libmusa.so.1", "libmusa.so"},
		homeEnv: []string{"MUSA_HOME", "MUSA_PATH"}, homes: []string{"/usr/local/musa"}, homeLib: []string{"lib"}},
	{vendor: mooreThreads, name: "MCCL", env: "GORUN_MCCL_LIB", sonames: []string{"libmccl.so.2", "libmccl.so"},
		homeEnv: []string{"MUSA_HOME", "MUSA_PATH"}, homes: []string{"/usr/local/musa"}, homeLib: []string{"lib"}},
	{vendor: amd, name: "HIP runtime", env: "GORUN_HIP_LIB", sonames: []string{"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"},
		homeEnv: []string{"ROCM_PATH", "HIP_PATH"}, homes: []string{"/opt/rocm"}, homeLib: []string{"lib"}, wheels: []string{"_rocm_sdk_core/lib"}},
	{vendor: amd, name: "RCCL", env: "GORUN_RCCL_LIB", sonames: []string{"librccl.so.1"}, last: []string{"librccl.so"},
		homeEnv: []string{"ROCM_PATH"}, homes: []string{"/opt/rocm"}, homeLib: []string{"lib"}, wheels: []string{"_rocm_sdk_libraries/lib"}, tells: "CCL version "},
}

// libraries looks for those of the makers whose GPUs ranks can reach, and for those that the environment names.
func (h host) libraries(gpus []GPU) []Library {
	var out []Library
	for _, w := range libraries {
		has := slices.ContainsFunc(gpus, func(g GPU) bool { return g.Vendor == w.vendor && g.Device != "" }) || h.env(w.env) != ""
		if w.vendor == amd {
			has = has || h.exists("dev/kfd")
		}
		if has {
			out = append(out, h.library(w))
		}
	}
	return out
}

// library is the first of the candidates that could be loaded, by what its file shows.
func (h host) library(w wanted) Library {
	l := Library{Name: w.name}
	for _, c := range h.candidates(w) {
		if _, err := os.Stat(c.path); err != nil && c.from != w.env {
			continue
		}
		err := loadable(c.path)
		if err == nil {
			return Library{Name: w.name, Path: c.path, From: c.from, Version: versionOf(c.path, w.tells)}
		}
		if l.Err == "" { // what comes after it may do
			l.Path, l.From, l.Err = c.path, c.from, reason(err)
		}
	}
	if l.Err == "" {
		l.Err = "not found: neither where the dynamic loader looks, nor in the usual folders"
		if len(w.wheels) > 0 {
			l.Err = "not found: neither where the dynamic loader looks, nor in the usual folders, nor in Python's packages"
		}
	}
	return l
}

type candidate struct{ path, from string }

// candidates are the places where ranks look, in their order.
func (h host) candidates(w wanted) []candidate {
	var out []candidate
	in := func(from, dir string, names []string) {
		for _, n := range names {
			out = append(out, candidate{filepath.Join(dir, n), from})
		}
	}
	add := func(from, dir string) { in(from, dir, w.sonames) }
	home := func(from, dir string) {
		for _, d := range w.homeLib {
			add(from, filepath.Join(dir, d))
		}
	}
	if v := h.env(w.env); v != "" {
		if info, err := os.Stat(v); err == nil && info.IsDir() {
			add(w.env, v)
			return out
		}
		return []candidate{{v, w.env}}
	}
	h.system(w.sonames, in)
	for _, d := range w.dirs {
		add("known folder", h.path(d))
	}
	for _, e := range w.homeEnv {
		if v := h.env(e); v != "" {
			home(e, v)
		}
	}
	for _, d := range w.homes {
		home("known folder", h.path(d))
	}
	for _, site := range h.sites() {
		for _, wheel := range w.wheels {
			add("Python's packages", filepath.Join(site, wheel))
		}
	}
	h.system(w.last, in)
	return out
}

// system is where the dynamic loader looks.
func (h host) system(names []string, in func(from, dir string, names []string)) {
	for _, d := range filepath.SplitList(h.env("LD_LIBRARY_PATH")) {
		in("LD_LIBRARY_PATH", d, names)
	}
	if cache, err := os.ReadFile(h.path("etc/ld.so.cache")); err == nil {
		for _, n := range names {
			for _, file := range ldCache(cache, n) {
				in("system", h.path(filepath.Dir(file)), []string{filepath.Base(file)})
			}
		}
	}
	multiarch := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	for _, d := range []string{"lib/" + multiarch, "usr/lib/" + multiarch, "lib64", "usr/lib64", "lib", "usr/lib"} {
		in("system", h.path(d), names)
	}
}

// sites are the package folders of the active Python, found without running it, in the order of package cuda/dl: ranks take the first that
// has the library.
func (h host) sites() []string {
	var out []string
	for _, d := range filepath.SplitList(h.env("PYTHONPATH")) {
		if d != "" {
			out = append(out, d)
		}
	}
	for _, e := range []string{"VIRTUAL_ENV", "CONDA_PREFIX"} {
		if v := h.env(e); v != "" {
			out = append(out, sitesIn(v)...)
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
			out = append(out, sitesIn(prefix)...)
			if prefix == "/usr" || prefix == "/" { // Debian's layout, where pip as root installs to /usr/local
				out = append(append(out, sitesIn("/usr/local")...), "/usr/lib/python3/dist-packages")
			}
		}
	}
	if home := h.env("HOME"); home != "" && h.env("VIRTUAL_ENV") == "" && h.env("PYTHONNOUSERSITE") == "" {
		out = append(out, sitesIn(filepath.Join(home, ".local"))...)
	}
	return out
}

// sitesIn are the package folders under a prefix, those of the newest Python first.
func sitesIn(prefix string) []string {
	minor := func(site string) int { // 12 for .../python3.12/site-packages, 0 for plain python3
		n, _ := strconv.Atoi(strings.TrimPrefix(filepath.Base(filepath.Dir(site)), "python3."))
		return n
	}
	var out []string
	for _, pattern := range []string{"lib/python3*/site-packages", "lib/python3*/dist-packages", "lib64/python3*/site-packages"} {
		found, _ := filepath.Glob(filepath.Join(globQuote(prefix), pattern)) // the pattern is well formed
		slices.SortStableFunc(found, func(a, b string) int { return cmp.Compare(minor(b), minor(a)) })
		out = append(out, found...)
	}
	return out
}

// loadable is why the dynamic loader of a rank would refuse the file; nil where its head shows nothing.
func loadable(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		if _, ok := errors.AsType[*elf.FormatError](err); ok || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return errors.New("no ELF file, or a damaged one")
		}
		return err
	}
	defer f.Close()
	machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[runtime.GOARCH]
	switch {
	case f.Type != elf.ET_DYN:
		return fmt.Errorf("no shared library (%v)", f.Type)
	case f.Machine != machine || f.Class != elf.ELFCLASS64:
		return fmt.Errorf("for another architecture (%v, %v)", f.Machine, f.Class)
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_LOAD && p.Off+p.Filesz > uint64(info.Size()) {
			return errors.New("the file is cut off")
		}
	}
	return nil
}

// versionOf is a library's version by the name of its file, else by a text in it; "" if neither tells.
func versionOf(path, tells string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		if _, v, ok := strings.Cut(filepath.Base(real), ".so."); ok && strings.Contains(v, ".") && leadingVersion(v) == v {
			return v
		}
	}
	if tells == "" {
		return ""
	}
	f, err := elf.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	s := f.Section(".rodata")
	if s == nil || s.Type == elf.SHT_NOBITS {
		return ""
	}
	return findVersion(s.Open(), tells)
}

// leadingVersion is the version with which s begins: "2.28.9" of "2.28.9+cuda12.9".
func leadingVersion(s string) string {
	n := 0
	for n < len(s) && (s[n] >= '0' && s[n] <= '9' || s[n] == '.' && n > 0 && s[n-1] != '.') {
		n++
	}
	return strings.TrimSuffix(s[:n], ".")
}

// findVersion looks for the first mark with a version of three numbers behind it.
func findVersion(r io.Reader, mark string) string {
	const longest = 64 // mark and version
	buf := make([]byte, 0, 1<<20)
	for {
		n, err := io.ReadFull(r, buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		// What begins near the end may go on in what follows.
		end := len(buf)
		if err == nil {
			end -= longest
		}
		for at := 0; ; {
			i := bytes.Index(buf[at:], []byte(mark))
			if i < 0 || at+i >= end {
				break
			}
			at += i + len(mark)
			if v := leadingVersion(string(buf[at:min(at+longest, len(buf))])); strings.Count(v, ".") == 2 {
				return v
			}
		}
		if err != nil {
			return ""
		}
		buf = buf[:copy(buf, buf[end:])]
	}
}
