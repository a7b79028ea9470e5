package syscalls

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParse(t *testing.T) {
	line := func(n int) string { return fmt.Sprintf("%d 0x5 0xffffffffffffffff 0x400 0x0 0x0 0x0 0x7ffd 0x7f\n", n) }
	for _, c := range []struct {
		line string
		want string // the name, "none" or "error"
		kind Kind
		fd   int // -1: none
	}{
		{"running\n", "none", Else, -1}, {"-1 0x7ffd 0x7f\n", "none", Else, -1}, {"", "none", Else, -1}, {"0", "none", Else, -1}, // the last: cut short
		{line(unix.SYS_READ), "read", Read, 5}, {line(unix.SYS_READ | x32), "read", Read, 5}, {line(unix.SYS_SENDFILE), "sendfile", Copy, 5},
		{line(unix.SYS_PPOLL), "poll", Poll, -1}, {line(unix.SYS_FUTEX), "futex", Else, -1}, {line(unix.SYS_WRITE), "write", FD, 5},
		{line(3), "system call 3", Unclear, -1}, {line(9999), "system call 9999", Else, -1},
		{strings.Replace(line(unix.SYS_READ), "0x5", "0xffffffff", 1), "read", Read, -1},
		{strings.Replace(line(unix.SYS_READ), "0x400", "0xzz", 1), "error", Else, -1}, {"x 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0", "error", Else, -1},
		{"-2 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0", "error", Else, -1},
	} {
		call, in, err := Parse(c.line)
		got, kind, fd := "none", Else, -1
		switch {
		case err != nil:
			got = "error"
		case in:
			got, kind = call.Name(), call.Kind()
			if n, ok := call.FD(); ok {
				fd = n
			}
			if call.Descriptor(1) != -1 {
				t.Errorf("%q: the second argument is %d", c.line, call.Descriptor(1))
			}
		}
		if got != c.want || kind != c.kind || fd != c.fd {
			t.Errorf("%q: got %s of kind %d with descriptor %d, want %s, %d, %d", c.line, got, kind, fd, c.want, c.kind, c.fd)
		}
	}
}

// What is said of this architecture's own calls hides none of the common ones.
func TestTables(t *testing.T) {
	for n, e := range here {
		if c, ok := common[n]; ok {
			t.Errorf("%d is both %v and %v", n, e, c)
		}
	}
}

// FuzzParse reads what a kernel of another version may write.
func FuzzParse(f *testing.F) {
	f.Add("0 0x3 0x7ffe 0x20 0x0 0x0 0x0 0x7ffe 0x7f2a")
	f.Add("running")
	f.Add("-1 0x7ffe 0x7f2a")
	f.Fuzz(func(t *testing.T, line string) {
		c, in, err := Parse(line)
		if in && (err != nil || c.Number < 0 || c.Name() == "") || !in && c != (Call{}) {
			t.Errorf("%q: %+v, %t, %v", line, c, in, err)
		}
	})
}
