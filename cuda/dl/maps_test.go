package dl

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMappings(t *testing.T) {
	const text = `00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/dbus daemon
7ffd1000-7ffd2000 rw-p 00000000 00:00 0
7f0000000000-7f0000001000 r--p 00001000 fe:01 77    /tmp/lib x.so (deleted)
7f0000002000-7f0000003000 r--p 00001000 fe:01 78    /tmp/a\012b
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0    [vsyscall]
`
	got, err := mappings(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	want := []mapping{
		{0x400000, 0x452000, "/usr/bin/dbus daemon"},
		{0x7f0000000000, 0x7f0000001000, "/tmp/lib x.so (deleted)"},
		{0x7f0000002000, 0x7f0000003000, "/tmp/a\nb"},
	}
	if diff := cmp.Diff(got, want, cmp.AllowUnexported(mapping{})); diff != "" {
		t.Errorf("mappings (-got +want):\n%s", diff)
	}
}

func FuzzMappings(f *testing.F) {
	f.Add("1-2 r /a\n")
	f.Add("zz-2 r /a\n")
	f.Add("/")
	f.Fuzz(func(t *testing.T, s string) {
		ms, err := mappings(strings.NewReader(s))
		if err != nil {
			return
		}
		for _, m := range ms {
			if !strings.HasPrefix(m.path, "/") {
				t.Errorf("path %q of %q", m.path, s)
			}
		}
	})
}
