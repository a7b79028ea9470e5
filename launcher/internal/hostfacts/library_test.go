package hostfacts

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/rankenv/citest"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// build makes a shared library from C.
func build(t *testing.T, path, source string) {
	t.Helper()
	gcc := citest.Program(t, "gcc")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(gcc, "-shared", "-fPIC", "-nostdlib", "-o", path, "-x", "c", "-")
	cmd.Stdin = strings.NewReader(source)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
}

const ncclSource = `const char *version(void) { return "xx NCCL version 2.28.9+cuda12.9"; }`

func TestLibraries(t *testing.T) {
	root := tree(t, "dev/nvidia0", "etc/passwd=x")
	site := filepath.Join(root, "venv/lib/python3.12/site-packages/nvidia/nccl/lib")
	build(t, filepath.Join(site, "libnccl.so.2"), ncclSource)
	build(t, filepath.Join(root, "usr/lib64/libcuda.so.580.159.04"), "int x;")
	if err := os.Symlink("libcuda.so.580.159.04", filepath.Join(root, "usr/lib64/libcuda.so.1")); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(filepath.Join(site, "libnccl.so.2"))
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string, b []byte) string {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, b, 0o644); err != nil {
			t.Fatal(err)
		}
		return name
	}
	other := append([]byte(nil), whole...)
	binary.LittleEndian.PutUint16(other[18:], 40) // the machine: 32-bit ARM
	foreign := write("foreign/libnccl.so.2", other)
	cut := write("cut/libnccl.so.2", whole[:len(whole)-len(whole)/2])
	text := write("text.so", []byte("no library"))
	empty := write("empty.so", nil)

	machine := map[string]string{"amd64": "EM_X86_64", "arm64": "EM_AARCH64"}[runtime.GOARCH]
	cuda := Library{Name: "CUDA driver", Path: filepath.Join(root, "usr/lib64/libcuda.so.1"), From: "system", Version: "580.159.04"}
	venv := "VIRTUAL_ENV=" + filepath.Join(root, "venv")
	wheel := Library{Name: "NCCL", Path: filepath.Join(site, "libnccl.so.2"), From: "wheel of VIRTUAL_ENV", Version: "2.28.9"}
	for _, tt := range []struct {
		name string
		env  []string
		nccl Library
	}{
		{"of Python", []string{venv}, wheel},
		{"named file", []string{"GORUN_NCCL_LIB=" + wheel.Path}, Library{Name: "NCCL", Path: wheel.Path, From: "GORUN_NCCL_LIB", Version: "2.28.9"}},
		{"named folder", []string{"GORUN_NCCL_LIB=" + site}, Library{Name: "NCCL", Path: wheel.Path, From: "GORUN_NCCL_LIB", Version: "2.28.9"}},
		{"named, not there", []string{venv, "GORUN_NCCL_LIB=/nowhere/x.so"}, Library{Name: "NCCL", Path: "/nowhere/x.so", From: "GORUN_NCCL_LIB", Err: "no such file or directory"}},
		{"a text", []string{"GORUN_NCCL_LIB=" + text}, Library{Name: "NCCL", Path: text, From: "GORUN_NCCL_LIB", Err: `it is no shared library: 10 bytes that begin with "no library"`}},
		{"empty", []string{"GORUN_NCCL_LIB=" + empty}, Library{Name: "NCCL", Path: empty, From: "GORUN_NCCL_LIB", Err: `it is no shared library: 0 bytes that begin with ""`}},
		{"of another architecture", []string{"GORUN_NCCL_LIB=" + foreign}, Library{Name: "NCCL", Path: foreign, From: "GORUN_NCCL_LIB", Err: "it is for EM_ARM, this program for " + machine}},
		{"cut off", []string{"GORUN_NCCL_LIB=" + cut}, Library{Name: "NCCL", Path: cut, From: "GORUN_NCCL_LIB", Err: "cut"}},
		{"the next one does", []string{venv, "LD_LIBRARY_PATH=" + filepath.Dir(foreign)}, wheel},
		{"named, for the loader", []string{"GORUN_NCCL_LIB=libnccl.so.2", "LD_LIBRARY_PATH=" + site}, Library{Name: "NCCL", Path: wheel.Path, From: "LD_LIBRARY_PATH", Version: "2.28.9"}},
		{"missing", nil, Library{Name: "NCCL", Err: "not found: neither where the dynamic loader looks, nor in the usual folders, nor in Python's packages"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("PATH", "/nowhere") // this machine's Python may have one
			h := at(root, tt.env...)
			got := h.libraries(h.gpus())
			if tt.nccl.Err == "cut" && len(got) == 2 && strings.HasPrefix(got[1].Err, "it is cut short: ") {
				tt.nccl.Err = got[1].Err
			}
			if d := cmp.Diff(got, []Library{cuda, tt.nccl}); d != "" {
				t.Errorf("got - want +:\n%s", d)
			}
		})
	}
	if got := at(tree(t, "dev/null0")).libraries(nil); got != nil {
		t.Errorf("without a GPU: %+v", got)
	}
}

func TestFindVersion(t *testing.T) {
	const size = 1 << 20
	for _, at := range []int{0, 1, size - 300, size - 65, size - 64, size - 10, size - 1, size, 3*size - 5, 3*size + 7} {
		text := strings.Repeat("x", at) + "version 2.28.9+" + strings.Repeat("y", size/2)
		if got := findVersion(strings.NewReader(text), "version "); got != "2.28.9" {
			t.Errorf("at %d: got %q", at, got)
		}
	}
	for _, text := range []string{strings.Repeat("version ", size/4), "version 2.28", "version 2.28.", "version ..1", "version 1.2.3.4", ""} {
		if got := findVersion(strings.NewReader(text), "version "); got != "" {
			t.Errorf("%.20q: got %q where there is none", text, got)
		}
	}
	if got := findVersion(strings.NewReader("version x, version 2.x, version 2.19.3"), "version "); got != "2.19.3" {
		t.Errorf("the third: got %q", got)
	}
}

// cacheOf makes a loader's cache of soname, path pairs.
func cacheOf(arch uint32, pairs ...string) []byte {
	b := append([]byte("glibc-ld.so.cache1.1"), make([]byte, 28)...)
	binary.NativeEndian.PutUint32(b[20:], uint32(len(pairs)/2))
	strs := []byte{}
	base := len(b) + 24*len(pairs)/2
	for i := 0; i < len(pairs); i += 2 {
		e := make([]byte, 24)
		binary.NativeEndian.PutUint32(e, arch|3)
		for j := range 2 {
			binary.NativeEndian.PutUint32(e[4+4*j:], uint32(base+len(strs)))
			strs = append(append(strs, pairs[i+j]...), 0)
		}
		b = append(b, e...)
	}
	return append(b, strs...)
}

func TestLdCache(t *testing.T) {
	arch := map[string]uint32{"amd64": 0x0300, "arm64": 0x0a00}[runtime.GOARCH]
	cache := cacheOf(arch, "libnccl.so.2", "/a/libnccl.so.2", "libcuda.so.1", "/b/libcuda.so.1", "libnccl.so.2", "/c/libnccl.so.2")
	for _, tt := range []struct {
		name  string
		cache []byte
		want  []string
	}{
		{"found", cache, []string{"/a/libnccl.so.2", "/c/libnccl.so.2"}},
		{"behind an older form", append([]byte("ld.so-1.7.0\x00\x00\x00\x00\x00"), cache...), []string{"/a/libnccl.so.2", "/c/libnccl.so.2"}},
		{"of another architecture", cacheOf(0x0700, "libnccl.so.2", "/a/libnccl.so.2"), nil},
		{"cut off", cache[:60], nil},
		{"no cache", []byte("x"), nil},
		{"empty", nil, nil},
	} {
		if d := cmp.Diff(ldCache(tt.cache, "libnccl.so.2"), tt.want); d != "" {
			t.Errorf("%s: got - want +:\n%s", tt.name, d)
		}
	}
	// The machine's own, where it has one.
	if b, err := os.ReadFile("/etc/ld.so.cache"); err == nil {
		for _, path := range ldCache(b, "libc.so.6") {
			if err := gpulib.CheckFile(path); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
		if len(ldCache(b, "libc.so.6")) == 0 {
			t.Error("no libc.so.6 in /etc/ld.so.cache")
		}
	}
}

func FuzzLdCache(f *testing.F) {
	f.Add(cacheOf(0x0300, "a", "/a", "b", "/b"), "a")
	f.Add([]byte("glibc-ld.so.cache1.1"), "")
	f.Fuzz(func(t *testing.T, b []byte, soname string) {
		for _, path := range ldCache(b, soname) {
			if path == "" || strings.ContainsRune(path, 0) {
				t.Errorf("path %q", path)
			}
		}
	})
}
