package keeper

import (
	"syscall"
	"time"
)

// TempName begins the names of files that are not complete yet; the job's id and a "-" follow.
const TempName = ".gorun-job-"

const (
	// othersBound is how long the keeper waits for what other hosts of the job have in its directories: gorun must hear that this host is lost,
	// and ranks there may take their kill grace.
	othersBound = 30 * time.Second
	// firstLook and mostLook are between two looks whether it has gone.
	firstLook = 10 * time.Millisecond
	mostLook  = 500 * time.Millisecond
)

// Shared knows what the hosts of a job may put into directories that one of them has made and that they share. The host that made a
// directory removes it, and each one what it put there: so the first waits for the others.
type Shared struct {
	job   string
	temp  string          // begins the names of temporary files of the job
	files map[string]bool // that a host may put
	ways  map[string]bool // the directories on the way to these
}

// NewShared knows nothing but the job's temporary files.
func NewShared(job string) *Shared {
	return &Shared{job: job, temp: TempName + job + "-", files: map[string]bool{}, ways: map[string]bool{}}
}

// Add adds a file that a host may put. The path is absolute and clean.
func (s *Shared) Add(path string) {
	s.files[path] = true
	for i := len(path) - 1; i > 0; i-- {
		if path[i] == '/' {
			if s.ways[path[:i]] {
				return
			}
			s.ways[path[:i]] = true
		}
	}
}

// Stays takes note of a file, or directory, that this host could not remove: no other one will.
func (s *Shared) Stays(path string) {
	delete(s.files, path)
	delete(s.ways, path)
}

// RemoveDirs removes those of some directories that are empty, the last first. One in which there is nothing but what another host of the
// job may have put is waited for, for the bound at most; one that holds a rank's file stays at once, and one that another job uses is left to
// that. The error is the first of another kind.
func (s *Shared) RemoveDirs(dirs []string, bound time.Duration) error {
	var failed error
	end := time.Now().Add(bound)
	for look := firstLook; ; look = min(2*look, mostLook) {
		var full []string // the last first
		for i := len(dirs) - 1; i >= 0; i-- {
			switch err := rmdir(dirs[i]); err {
			case nil, syscall.ENOENT, syscall.ENOTDIR: // another one's now
			case syscall.ENOTEMPTY, syscall.EEXIST:
				full = append(full, dirs[i])
			default:
				s.Stays(dirs[i])
				if failed == nil {
					failed = &dirError{dirs[i], err}
				}
			}
		}
		dirs = nil
		late := !time.Now().Before(end)
		for i := len(full) - 1; i >= 0; i-- {
			if _, other := Marked(full[i], s.job); other || late || !s.passing(full[i]) {
				unmark(full[i], s.job)
				continue
			}
			dirs = append(dirs, full[i])
		}
		if len(dirs) == 0 {
			return failed
		}
		time.Sleep(look)
	}
}

// passing reports whether all that is in a directory may be another host's of the job.
func (s *Shared) passing(dir string) bool {
	for _, name := range entries(dir) {
		path := dir + "/" + name
		if s.files[path] || len(name) >= len(s.temp) && name[:len(s.temp)] == s.temp {
			continue
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err == syscall.ENOENT {
			continue
		} else if err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFDIR || !s.ways[path] || !s.passing(path) {
			return false
		}
	}
	return true
}

func rmdir(dir string) error {
	for {
		if err := syscall.Rmdir(dir); err != syscall.EINTR {
			return err
		}
	}
}

type dirError struct {
	dir string
	err error
}

func (e *dirError) Error() string { return "remove " + e.dir + ": " + e.err.Error() }
func (e *dirError) Unwrap() error { return e.err }
