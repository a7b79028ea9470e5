package gpulib

import (
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
)

// machines are what this program can load.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

const (
	elfHeader  = 64 // bytes of an ELF-64 header
	elfSegment = 56 // and of a segment's
)

// CheckFile says why a file cannot be loaded as a library by programs of this architecture; nil if its head shows nothing. The system's loader would map a file that was cut short all the same, and the process would be killed by the first touch of
// what is missing.
func CheckFile(path string) error {
	st, err := os.Stat(path) // first: to open a pipe waits for its writer
	if err != nil {
		return errors.Unwrap(err) // the path stands before it already
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("it is no file (%v)", st.Mode())
	}
	f, err := os.Open(path)
	if err != nil {
		return errors.Unwrap(err)
	}
	defer f.Close()
	return checkELF(f, st.Size())
}

func checkELF(r io.ReaderAt, size int64) error {
	var h [elfHeader]byte
	n, err := r.ReadAt(h[:], 0)
	if err != nil && err != io.EOF {
		return err
	}
	ours := machines[runtime.GOARCH]
	le := binary.LittleEndian
	switch {
	case n < elf.EI_NIDENT || string(h[:4]) != elf.ELFMAG:
		return fmt.Errorf("it is no shared library: %d bytes that begin with %q", size, h[:min(n, 16)])
	case elf.Class(h[elf.EI_CLASS]) == elf.ELFCLASS32:
		return errors.New("it is a 32-bit library, this program needs a 64-bit one")
	case elf.Class(h[elf.EI_CLASS]) != elf.ELFCLASS64 || elf.Data(h[elf.EI_DATA]) != elf.ELFDATA2LSB:
		return fmt.Errorf("it is of class %v, %v", elf.Class(h[elf.EI_CLASS]), elf.Data(h[elf.EI_DATA]))
	case n < elfHeader:
		return fmt.Errorf("it is cut short: %d bytes", size)
	case ours != 0 && elf.Machine(le.Uint16(h[18:])) != ours:
		return fmt.Errorf("it is for %v, this program for %v", elf.Machine(le.Uint16(h[18:])), ours)
	case elf.Type(le.Uint16(h[16:])) != elf.ET_DYN:
		return fmt.Errorf("it is no shared library but of type %v", elf.Type(le.Uint16(h[16:])))
	case le.Uint16(h[54:]) != elfSegment:
		return fmt.Errorf("its segment headers have %d bytes, not %d", le.Uint16(h[54:]), elfSegment)
	}
	at := le.Uint64(h[32:])
	for range le.Uint16(h[56:]) {
		var p [elfSegment]byte
		if at > uint64(size) || uint64(size)-at < elfSegment {
			return fmt.Errorf("it is cut short: %d bytes, without all its segment headers", size)
		}
		if _, err := r.ReadAt(p[:], int64(at)); err != nil {
			return err
		}
		at += elfSegment
		off, n := le.Uint64(p[8:]), le.Uint64(p[32:])
		if elf.ProgType(le.Uint32(p[0:])) == elf.PT_LOAD && (off > uint64(size) || n > uint64(size)-off) {
			return fmt.Errorf("it is cut short: %d bytes, its segments end at %d", size, off+n)
		}
	}
	return nil
}
