package dl_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

const soname = "libgoruntest.so.2"

func build(t testing.TB, args ...string) string {
	return dltest.Build(t, "testdata/lib.c", soname, append([]string{`-DNAME="a"`}, args...)...)
}

func spec() dl.Spec {
	return dl.Spec{
		Name: "Test", Symbol: "probe_name", Sole: "libgoruntest.so",
		Search: gpulib.Search{Env: "GORUN_TEST_LIB", Sonames: []string{soname},
			HomeEnv: []string{"TEST_HOME"}, HomeLib: []string{"lib64"}, Wheels: []string{"test/lib"}},
		Foreign: map[string]string{"foreign_mark": "another maker's library"},
	}
}

// bare gives the test an environment in which no library is found.
func bare(t *testing.T) {
	t.Helper()
	for _, v := range []string{"GORUN_TEST_LIB", "TEST_HOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"} {
		t.Setenv(v, "")
	}
	t.Setenv("PATH", t.TempDir())
	t.Setenv("HOME", t.TempDir())
}

// place copies a built library to dir.
func place(t *testing.T, lib, dir string) string {
	t.Helper()
	b, err := os.ReadFile(lib)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(dir, soname)
	if err := os.WriteFile(to, b, 0o755); err != nil {
		t.Fatal(err)
	}
	return to
}

func real(t *testing.T, path string) string {
	t.Helper()
	p, err := filepath.EvalSymlinks(path)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestOpenFindsTheFile(t *testing.T) {
	lib := build(t)
	root := real(t, t.TempDir())
	python := filepath.Join(root, "bin", "python3")
	tests := []struct {
		name, at, from string
		set            map[string]string
		path           bool
	}{
		{name: "file", at: "x", from: "GORUN_TEST_LIB", set: map[string]string{"GORUN_TEST_LIB": "x/" + soname}},
		{name: "folder", at: "y", from: "GORUN_TEST_LIB", set: map[string]string{"GORUN_TEST_LIB": "y"}},
		{name: "toolkit", at: "home/lib64", from: "TEST_HOME", set: map[string]string{"TEST_HOME": "home"}},
		{name: "virtual environment", at: "venv/lib/python3.12/site-packages/test/lib", from: "wheel of VIRTUAL_ENV", set: map[string]string{"VIRTUAL_ENV": "venv"}},
		{name: "conda", at: "conda/lib/python3.9/site-packages/test/lib", from: "wheel of CONDA_PREFIX", set: map[string]string{"CONDA_PREFIX": "conda"}},
		{name: "PYTHONPATH", at: "pp/test/lib", from: "wheel of PYTHONPATH", set: map[string]string{"PYTHONPATH": "pp"}},
		{name: "user", at: "h/.local/lib/python3.12/site-packages/test/lib", from: "wheel of user", set: map[string]string{"HOME": "h"}},
		{name: "python3 on PATH", at: "lib/python3.12/site-packages/test/lib", from: "wheel of " + python, set: map[string]string{"PATH": "bin"}},
	}
	if err := os.MkdirAll(filepath.Dir(python), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(python, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bare(t)
			want := place(t, lib, filepath.Join(root, tt.at))
			for k, v := range tt.set {
				t.Setenv(k, filepath.Join(root, v))
			}
			l, err := dl.Open(spec())
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			if l.Path() != want {
				t.Errorf("path = %q, want %q", l.Path(), want)
			}
			if l.From().From != tt.from {
				t.Errorf("from = %q, want %q", l.From().From, tt.from)
			}
			if got := dl.GoString(l.Lookup("probe_name").Call()); got != "a" {
				t.Errorf("probe_name() = %q, want a", got)
			}
		})
	}
}

func TestNewestPythonFirst(t *testing.T) {
	lib := build(t)
	bare(t)
	venv := real(t, t.TempDir())
	t.Setenv("VIRTUAL_ENV", venv)
	place(t, lib, filepath.Join(venv, "lib/python3.9/site-packages/test/lib"))
	want := place(t, lib, filepath.Join(venv, "lib/python3.12/site-packages/test/lib"))
	l, err := dl.Open(spec())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if l.Path() != want {
		t.Errorf("path = %q, want %q", l.Path(), want)
	}
	if len(l.Tried()) == 0 || l.Tried()[0].Path != soname || l.Tried()[0].From != "system" {
		t.Errorf("tried before = %v, want the system's loader first", l.Tried())
	}
}

func TestOpenErrorsNameEveryPathAndCause(t *testing.T) {
	dir := real(t, t.TempDir())
	tests := []struct {
		name string
		make func(t *testing.T) // sets the environment
		want []string
	}{
		{"nothing there", func(t *testing.T) { t.Setenv("TEST_HOME", dir+"/none") }, []string{
			"load Test: no usable library\n",
			soname + " (system): " + soname + ": cannot open shared object file",
			dir + "/none/lib64/" + soname + " (TEST_HOME): no such file or directory",
			"set GORUN_TEST_LIB to the file"}},
		{"not a library", func(t *testing.T) {
			p := filepath.Join(dir, "garbage")
			if err := os.WriteFile(p, []byte("this is not ELF, nor anything else\n"), 0o644); err != nil {
				t.Fatal(err)
			}
			t.Setenv("GORUN_TEST_LIB", p)
		}, []string{dir + "/garbage (GORUN_TEST_LIB): ", "it is no shared library: 35 bytes that begin with"}},
		{"does not load", func(t *testing.T) { t.Setenv("GORUN_TEST_LIB", build(t, "-DNEEDS")) }, []string{
			"(GORUN_TEST_LIB): ", "undefined symbol: no_such_function_anywhere"}},
		{"another library", func(t *testing.T) { t.Setenv("GORUN_TEST_LIB", build(t, "-Dprobe_name=other")) }, []string{
			"it is not Test (it lacks probe_name)"}},
		{"another maker's", func(t *testing.T) { t.Setenv("GORUN_TEST_LIB", build(t, "-DFOREIGN")) }, []string{
			"it is another maker's library (it has foreign_mark)"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bare(t)
			tt.make(t)
			_, err := dl.Open(spec())
			var le *dl.LoadError
			if !errors.As(err, &le) {
				t.Fatalf("error = %v (%T), want a *LoadError", err, err)
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error = %q, want it to contain %q", err, w)
				}
			}
			if os.Getenv("GORUN_TEST_LIB") != "" && len(le.Tried) != 1 {
				t.Errorf("tried %v, want only what GORUN_TEST_LIB names", le.Tried)
			}
		})
	}
}

func TestNotThereIsErrNotExist(t *testing.T) {
	bare(t)
	t.Setenv("GORUN_TEST_LIB", filepath.Join(t.TempDir(), "none.so"))
	if _, err := dl.Open(spec()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error = %v, want fs.ErrNotExist", err)
	}
}

func TestSecondCopyIsRefused(t *testing.T) {
	lib := build(t)
	bare(t)
	a := place(t, lib, filepath.Join(real(t, t.TempDir()), "one"))
	b := place(t, lib, filepath.Join(real(t, t.TempDir()), "two"))
	link := filepath.Join(real(t, t.TempDir()), soname)
	if err := os.Symlink(a, link); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GORUN_TEST_LIB", a)
	l, err := dl.Open(spec())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv("GORUN_TEST_LIB", b)
	if _, err := dl.Open(spec()); !errors.Is(err, dl.ErrSecondCopy) || !strings.Contains(err.Error(), a) || !strings.Contains(err.Error(), b) {
		t.Errorf("open of a second file: %v, want ErrSecondCopy with both paths", err)
	}
	t.Setenv("GORUN_TEST_LIB", link) // the same file by another name
	same, err := dl.Open(spec())
	if err != nil {
		t.Fatal(err)
	}
	defer same.Close()
	if same.Path() != a {
		t.Errorf("path = %q, want %q", same.Path(), a)
	}
}

func open(t testing.TB) *dl.Library {
	lib := build(t)
	s := spec()
	os.Setenv(s.Env, lib)
	t.Cleanup(func() { os.Unsetenv(s.Env) })
	l, err := dl.Open(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

func TestBind(t *testing.T) {
	l := open(t)
	var put, neg, absent dl.Entry
	if err := l.Bind([]dl.Symbol{
		{Entry: &put, Names: []string{"put64_v2", "put64"}, Required: true},
		{Entry: &neg, Names: []string{"negative"}, Required: true},
		{Entry: &absent, Names: []string{"absent_v2", "absent"}, Since: "Test 3"},
	}); err != nil {
		t.Fatal(err)
	}
	got := []dl.Entry{put, neg, absent}
	want := []dl.Entry{
		{Func: l.Lookup("put64"), Name: "put64", Shape: 1},
		{Func: l.Lookup("negative"), Name: "negative"},
		{Name: "absent_v2", Shape: -1, Since: "Test 3"},
	}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("entries (-got +want):\n%s", diff)
	}
	for _, got := range []int32{neg.Result3(0, 0, 0), neg.Result6(0, 0, 0, 0, 0, 0), neg.Result9(0, 0, 0, 0, 0, 0, 0, 0, 0), neg.Result12(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)} {
		if got != -7 {
			t.Errorf("negative() = %d, want -7", got)
		}
	}
	for _, got := range []int32{absent.Result3(0, 0, 0), absent.Result6(0, 0, 0, 0, 0, 0), absent.Result9(0, 0, 0, 0, 0, 0, 0, 0, 0), absent.Result12(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)} {
		if got != dl.Absent {
			t.Errorf("absent() = %d, want Absent", got)
		}
	}
	err := l.Bind([]dl.Symbol{
		{Entry: &absent, Names: []string{"one_v2", "one"}, Required: true},
		{Entry: &put, Names: []string{"put64"}, Required: true},
		{Entry: &absent, Names: []string{"two"}, Required: true},
	})
	missing := "load Test: " + l.Path() + " lacks one_v2 or one, two"
	if diff := cmp.Diff(errText(err), missing); diff != "" {
		t.Errorf("error (-got +want):\n%s", diff)
	}
}

func errText(err error) string {
	if err == nil {
		return "<nil>"
	}
	return err.Error()
}

func TestElevenArguments(t *testing.T) {
	f := open(t).Lookup("weigh")
	big := uintptr(1) << 40
	want := uint64(1+6+15+28+45+66) + 30*uint64(big)
	if got := uint64(f.Call(1, big, 2, big, 3, big, 4, big, 5, big, 6)); got != want {
		t.Errorf("by Call = %d, want %d", got, want)
	}
}

// TestOutPointersOnFreshStacks is the case in which a badly passed pointer loses its value: the stack of a new
// goroutine grows inside the call.
func TestOutPointersOnFreshStacks(t *testing.T) {
	put := open(t).Lookup("put64")
	// Each form has its own variable: one marked call would put a shared one on the heap for all.
	e := &dl.Entry{Func: put}
	forms := map[string]func(n uint64) uint64{
		"Result3": func(n uint64) (v uint64) { e.Result3(uintptr(unsafe.Pointer(&v)), uintptr(n), 0); return v },
		"Result6": func(n uint64) (v uint64) { e.Result6(uintptr(unsafe.Pointer(&v)), uintptr(n), 0, 0, 0, 0); return v },
		"Result9": func(n uint64) (v uint64) {
			e.Result9(uintptr(unsafe.Pointer(&v)), uintptr(n), 0, 0, 0, 0, 0, 0, 0)
			return v
		},
		"Result12": func(n uint64) (v uint64) {
			e.Result12(uintptr(unsafe.Pointer(&v)), uintptr(n), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
			return v
		},
		"Call":  func(n uint64) (v uint64) { put.Call(uintptr(unsafe.Pointer(&v)), uintptr(n)); return v },
		"Call3": func(n uint64) (v uint64) { put.Call3(uintptr(unsafe.Pointer(&v)), uintptr(n), 0); return v },
	}
	for name, get := range forms {
		var wg sync.WaitGroup
		var lost atomic.Int64
		const n = 500
		for i := range n {
			wg.Go(func() {
				if get(uint64(i)+1) != uint64(i)+1 {
					lost.Add(1)
				}
			})
		}
		wg.Wait()
		if lost.Load() != 0 {
			t.Errorf("%s: %d of %d goroutines did not see the value", name, lost.Load(), n)
		}
	}
}

func TestCallAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool drop items on purpose")
	}
	f := open(t).Lookup("negative")
	e := &dl.Entry{Func: f}
	if got := testing.AllocsPerRun(1000, func() {
		f.Call3(1, 2, 3)
		e.Result9(1, 2, 3, 4, 5, 6, 7, 8, 9)
	}); got != 0 {
		t.Errorf("allocations = %v, want 0", got)
	}
}

func TestGoString(t *testing.T) {
	b := dl.CString("héllo")
	if got := dl.GoString(uintptr(unsafe.Pointer(&b[0]))); got != "héllo" {
		t.Errorf("got %q", got)
	}
	runtime.KeepAlive(b)
	if got := dl.GoString(0); got != "" {
		t.Errorf("at 0: %q", got)
	}
}

func BenchmarkCall(b *testing.B) {
	f := open(b).Lookup("negative")
	b.ReportAllocs()
	for b.Loop() {
		f.Call3(1, 2, 3)
	}
}

// Arguments come in their places.
func TestResultArguments(t *testing.T) {
	e := dl.Entry{Func: open(t).Lookup("spread")}
	const a = 0x1234567800000000
	if got := e.Result12(a, a+1, a+2, a+3, a+4, a+5, a+6, a+7, a+8, a+9, a+10, a+11); got != 0 {
		t.Errorf("got %d, want 0: the argument with this number is wrong, or for -1 the stack", got)
	}
}

// The goroutine's stack moves while C calls back into Go, and while it is collected.
func TestResultCallback(t *testing.T) {
	e := dl.Entry{Func: open(t).Lookup("call_back")}
	var deep func(n int) int
	deep = func(n int) int {
		var page [1024]byte
		if n == 0 {
			runtime.GC()
			return int(page[0])
		}
		page[n] = byte(n)
		return deep(n-1) + int(page[n])
	}
	var came atomic.Uint64
	f := dl.NewCallback(func(arg uintptr) {
		came.Store(uint64(arg))
		deep(int(arg))
	})
	for i := range 20 {
		n := uintptr(10 * i)
		done := make(chan int32)
		go func() { done <- e.Result3(uintptr(f), n, 0) }() // a new stack, which is small
		if got := <-done; got != int32(n)+1 || came.Load() != uint64(n) {
			t.Errorf("got %d with %d there, want %d with %d", got, came.Load(), n+1, n)
		}
	}
}

func BenchmarkResult(b *testing.B) {
	e := dl.Entry{Func: open(b).Lookup("negative")}
	b.ReportAllocs()
	for b.Loop() {
		e.Result9(1, 2, 3, 4, 5, 6, 7, 0, 0)
	}
}
