package cuda

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

// importedBytes is no whole number of pages.
const importedBytes = 3<<20 + 4

// exported makes memory full of a value and a descriptor of it.
func exported(t testing.TB, d *Device, s *Stream, value uint32) (*Buffer[uint32], *os.File) {
	t.Helper()
	x := shareable[uint32](t, d, importedBytes/4)
	check(t, Fill(x.All(), value, s))
	check(t, s.Synchronize(testContext(t)))
	fd, err := x.Memory().ExportFD()
	check(t, err)
	f := os.NewFile(uintptr(fd), "exported")
	t.Cleanup(func() { f.Close() })
	if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("flags %#x, %v, want close-on-exec", flags, err)
	}
	return x, f
}

// swap wants all words of an import to have one value, and gives them another.
func swap(d *Device, i *Imported, from, to uint32) (err error) {
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	x, err := Malloc[uint32](d, importedBytes/4)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.Free()) }()
	p := address(cusys.DevicePtr(i.Pointer()))
	out := make([]uint32, importedBytes/4)
	if err := errors.Join(s.raw.copy(x.Memory().ptr, p, importedBytes), s.raw.fill(p, importedBytes, uint64(to), 4), CopyToHost(out, x.All(), s)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), hang)
	defer cancel()
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	for k, v := range out {
		if v != from {
			return fmt.Errorf("word %d is %d, want %d", k, v, from)
		}
	}
	return nil
}

func wantWords(t testing.TB, s *Stream, x *Buffer[uint32], want uint32) {
	t.Helper()
	for k, v := range fetch(t, s, x.All()) {
		if v != want {
			t.Fatalf("word %d is %d, want %d", k, v, want)
		}
	}
}

// otherDevice is one that reaches this device's memory: another one if there is one.
func otherDevice(d *Device) string {
	n, linked := d.Linked()
	if !linked {
		n = 1
	}
	return strconv.Itoa((d.Info().Index + 1) % n)
}

func TestGPUImport(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	x, f := exported(t, d, s, 7)
	other, err := Open(otherDevice(d))
	check(t, err)
	i, err := other.ImportFD(int(f.Fd()), x.Memory().Size())
	check(t, err)
	if i.Pointer() == 0 || i.Pointer() == x.Memory().Pointer() || i.Size() != importedBytes {
		t.Errorf("%d bytes at %#x, the memory is at %#x", i.Size(), i.Pointer(), x.Memory().Pointer())
	}
	check(t, swap(other, i, 7, 8))
	wantWords(t, s, x, 8)

	check(t, x.Free()) // the mapping keeps it
	check(t, swap(other, i, 8, 9))
	wantText(t, other.Close(), "still open: "+i.String())
	check(t, errors.Join(i.Close(), i.Close()))
	if i.Pointer() != 0 {
		t.Errorf("closed import at %#x", i.Pointer())
	}
	i, err = other.ImportFD(int(f.Fd()), importedBytes) // so does the descriptor
	check(t, err)
	check(t, swap(other, i, 9, 0))
	check(t, errors.Join(i.Close(), other.Close()))
}

// TestGPUImportProcess has another process write the memory, by another device if there is one.
func TestGPUImportProcess(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	x, f := exported(t, d, s, 7)
	self, err := os.Executable()
	check(t, err)
	cmd := exec.CommandContext(testContext(t), self, otherDevice(d))
	cmd.Env = append(os.Environ(), roleVariable+"=import")
	cmd.ExtraFiles = []*os.File{f}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	wantWords(t, s, x, 8)
}

// runImport is the other process: the memory is its descriptor 3, the device its argument.
func runImport() error {
	d, err := Open(os.Args[1])
	if err != nil {
		return err
	}
	i, err := d.ImportFD(3, importedBytes)
	if err != nil {
		return err
	}
	return errors.Join(swap(d, i, 7, 8), i.Close(), d.Close())
}

func TestGPUImportErrors(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	x, f := exported(t, d, s, 0)
	null, err := os.Open(os.DevNull)
	check(t, err)
	defer null.Close()
	closed, err := syscall.Dup(int(null.Fd()))
	check(t, err)
	check(t, syscall.Close(closed))
	before := countFDs(t)
	for _, c := range []struct {
		name  string
		fd    int
		bytes uint64
		text  string
	}{
		{"closed", closed, importedBytes, "bad file descriptor"},
		{"negative", -1, importedBytes, "bad file descriptor"},
		{"no memory", int(null.Fd()), importedBytes, "MemImportFromShareableHandle"},
		{"too long", int(f.Fd()), 1 << 30, "MemMap"},
		{"longer than the device", int(f.Fd()), 1<<64 - 1, "the device has"},
	} {
		i, err := d.ImportFD(c.fd, c.bytes)
		if err == nil {
			t.Errorf("%s: imported", c.name)
			check(t, i.Close())
			continue
		}
		wantText(t, err, "import memory", fmt.Sprintf("%d bytes by descriptor %d", c.bytes, c.fd), c.text)
	}
	if n := countFDs(t); n != before {
		t.Errorf("%d descriptors, before %d", n, before)
	}
	i, err := d.ImportFD(int(f.Fd()), importedBytes) // nothing of that has hurt
	check(t, err)
	check(t, i.Close())

	_, err = malloc[uint32](t, d, 4).Memory().ExportFD()
	wantText(t, err, "export memory", "16-byte allocation", "private memory")
	check(t, x.Free())
	_, err = x.Memory().ExportFD()
	wantError(t, err, ErrClosed, "export memory", "was freed")

	h := newDevice(t)
	m := must(h.Alloc(4, Shareable))
	_, err = m.ExportFD()
	wantText(t, err, "export memory", "host platform")
	_, err = h.ImportFD(int(f.Fd()), importedBytes)
	wantText(t, err, "import memory", "host platform")
	_, err = h.AllocPinned(4)
	wantText(t, err, "allocate pinned memory", "host platform")
	check(t, m.Free())
}

func TestGPUPinned(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	x := malloc[uint32](t, d, 16)
	for round := range uint32(3) { // the next ones may get memory that was used
		p, err := d.AllocPinned(61)
		check(t, err)
		w := p.Words()
		if len(w) != 16 || p.Pointer()%4 != 0 {
			t.Fatalf("%d words at %#x, want 16", len(w), p.Pointer())
		}
		for k, v := range w {
			if v != 0 {
				t.Errorf("word %d is %d", k, v)
			}
		}
		at := address(cusys.DevicePtr(p.Pointer()))
		atomic.StoreUint32(&w[15], 5+round)
		check(t, s.raw.copy(x.Memory().ptr, at, 64))
		check(t, s.raw.fill(at, 4, uint64(round+1), 4))
		if got := fetch(t, s, x.All()); got[15] != 5+round || got[0] != 0 {
			t.Errorf("the device reads %d and %d, want %d and 0", got[15], got[0], 5+round)
		}
		if got := atomic.LoadUint32(&w[0]); got != round+1 {
			t.Errorf("the device's word is %d, want %d", got, round+1)
		}
		if round == 0 {
			wantText(t, d.Close(), p.String())
		}
		for k := range w {
			w[k] = 0xffffffff
		}
		check(t, errors.Join(p.Close(), p.Close()))
		if p.Words() != nil || p.Pointer() != 0 {
			t.Errorf("closed memory has %d words at %#x", len(p.Words()), p.Pointer())
		}
	}
	for _, n := range []int{0, -1} {
		_, err := d.AllocPinned(n)
		wantText(t, err, "allocate pinned memory", fmt.Sprintf("%d bytes", n))
	}
}
