package hostfacts

import (
	"bytes"
	"debug/elf"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// wanted is a library that ranks open, and how its file tells its version.
type wanted struct {
	vendor string
	name   string
	search gpulib.Search
	tells  string // stands before its version in its read-only data; "" where the file's name must tell it
}

var libraries = []wanted{
	{nvidia, "CUDA driver", gpulib.CUDA, ""},
	{nvidia, "NCCL", gpulib.NCCL, "CCL version "},
	{mooreThreads, "MUSA driver", gpulib.MUSA, ""},
	{mooreThreads, "MCCL", gpulib.MCCL, ""},
	{amd, "HIP runtime", gpulib.HIP, ""},
	{amd, "RCCL", gpulib.RCCL, "CCL version "},
}

// libraries looks for those of the makers whose GPUs ranks can reach, and for those that the environment names.
func (h host) libraries(gpus []GPU) []Library {
	var out []Library
	for _, w := range libraries {
		has := slices.ContainsFunc(gpus, func(g GPU) bool { return g.Vendor == w.vendor && g.Device != "" }) || h.env(w.search.Env) != ""
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
	for _, c := range h.candidates(w.search) {
		if _, err := os.Stat(c.Path); err != nil && c.From != w.search.Env {
			continue
		}
		err := gpulib.CheckFile(c.Path)
		if err == nil {
			return Library{Name: w.name, Path: c.Path, From: c.From, Version: versionOf(c.Path, w.tells)}
		}
		if l.Err == "" { // what comes after it may do
			l.Path, l.From, l.Err = c.Path, c.From, err.Error()
		}
	}
	if l.Err == "" {
		l.Err = "not found: neither where the dynamic loader looks, nor in the usual folders"
		if len(w.search.Wheels) > 0 {
			l.Err = "not found: neither where the dynamic loader looks, nor in the usual folders, nor in Python's packages"
		}
	}
	return l
}

// candidates are the files that ranks try, in their order.
func (h host) candidates(s gpulib.Search) []gpulib.Place {
	var out []gpulib.Place
	for _, p := range s.Places(gpulib.Host{Getenv: h.env, Root: h.Root}) {
		if filepath.IsAbs(p.Path) {
			out = append(out, p)
		} else {
			out = append(out, h.system(p.Path)...)
		}
	}
	return out
}

// system is where the dynamic loader looks for a name.
func (h host) system(name string) []gpulib.Place {
	var out []gpulib.Place
	for _, d := range filepath.SplitList(h.env("LD_LIBRARY_PATH")) {
		out = append(out, gpulib.Place{Path: filepath.Join(d, name), From: "LD_LIBRARY_PATH"})
	}
	if cache, err := os.ReadFile(h.path("etc/ld.so.cache")); err == nil {
		for _, file := range ldCache(cache, name) {
			out = append(out, gpulib.Place{Path: h.path(file), From: gpulib.System})
		}
	}
	multiarch := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	for _, d := range []string{"lib/" + multiarch, "usr/lib/" + multiarch, "lib64", "usr/lib64", "lib", "usr/lib"} {
		out = append(out, gpulib.Place{Path: filepath.Join(h.path(d), name), From: gpulib.System})
	}
	return out
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
