package launcher

import "testing"

// Of two settings of a variable the first counts, for gorun check as for the ranks.
func TestCheckReadsTheFirstSetting(t *testing.T) {
	f := CheckHost(Job{Program: "sh"}, []string{"PATH=/usr/bin:/bin", "PATH=/nonexistent", "TMPDIR=/", "TMPDIR=/nonexistent"})
	if len(f.Programs) != 1 || f.Programs[0].Err != "" || f.Programs[0].Path == "" {
		t.Errorf("program %+v, want that of the first PATH", f.Programs)
	}
	if f.Tmp.Path != "/" {
		t.Errorf("TMPDIR is %s, want the first, /", f.Tmp.Path)
	}
}
