package gpulib

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/gorun-dev/gorun/cuda/dl/dltest"
)

func TestCheckFile(t *testing.T) {
	good, err := os.ReadFile(dltest.Build(t, "../../cuda/dl/testdata/lib.c", "libgood.so", `-DNAME="good"`))
	if err != nil {
		t.Fatal(err)
	}
	with := func(at int, b ...byte) []byte {
		c := bytes.Clone(good)
		copy(c[at:], b)
		return c
	}
	other := byte(183) // EM_AARCH64
	if runtime.GOARCH == "arm64" {
		other = 62
	}
	for _, tc := range []struct {
		name string
		file []byte
		want string // "": it can be loaded
	}{
		{"good", good, ""},
		{"empty", nil, "it is no shared library: 0 bytes"},
		{"text", []byte("INPUT(/usr/lib/libnccl.so.2)\n"), `it is no shared library: 29 bytes that begin with "INPUT(/usr/lib/l"`},
		{"32 bits", with(4, 1), "it is a 32-bit library"},
		{"other byte order", with(5, 2), "ELFDATA2MSB"},
		{"other machine", with(18, other), "it is for EM_"},
		{"program", with(16, 2), "it is no shared library but of type ET_EXEC"},
		{"only the header", good[:64], "it is cut short: 64 bytes, without all its segment headers"},
		{"half the header", good[:40], "it is cut short: 40 bytes"},
		{"half", good[:len(good)/2], "it is cut short"},
		{"headers elsewhere", with(32, 255, 255, 255, 255, 255, 255, 255, 255), "it is cut short"},
		{"headers of another size", with(54, 1), "its segment headers have 1 bytes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "lib.so")
			if err := os.WriteFile(path, tc.file, 0o600); err != nil {
				t.Fatal(err)
			}
			err := CheckFile(path)
			if err == nil && tc.want != "" || err != nil && (tc.want == "" || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
	if err := CheckFile(t.TempDir()); err == nil || !strings.Contains(err.Error(), "it is no file") {
		t.Errorf("a folder: %v", err)
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := CheckFile(pipe); err == nil || !strings.Contains(err.Error(), "it is no file") {
		t.Errorf("a pipe: %v", err)
	}
}

func FuzzCheckELF(f *testing.F) {
	if exe, err := os.Executable(); err == nil {
		if b, err := os.ReadFile(exe); err == nil {
			f.Add(b[:4096], int64(len(b)))
		}
	}
	f.Add([]byte("\x7fELF\x02\x01"), int64(6))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		checkELF(bytes.NewReader(b), size) // a size that is not the file's, as of one that is being written
		if err := checkELF(bytes.NewReader(b), int64(len(b))); err == nil && len(b) < elfHeader {
			t.Errorf("%d bytes taken for a library", len(b))
		}
	})
}
