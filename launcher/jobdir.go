package launcher

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/files"
	"github.com/gorun-dev/gorun/launcher/internal/keeper"
)

// jobDirPrefix begins the names of jobs' own directories; the job's id and a random part follow.
const jobDirPrefix = "gorun-job-"

// sharedWait bounds the wait for what other hosts have in directories that this one made: they are told to end at the same time, and need
// reapBound before. It is less than reapSilence.
const sharedWait = 5 * time.Second

// jobFiles is what an agent has put on its host for the job: files in a directory of the job's own, and some elsewhere. All of it goes at the
// end: by the agent, else by its keeper, else, after both or the machine died, the directory by the next agent that makes one there.
type jobFiles struct {
	job    string
	keeper *keeper.Keeper
	dir    string   // "": not made
	lock   *os.File // dir, locked as long as this process lives
	inside []string // what was put into dir, relative

	other  []string        // files elsewhere
	dirs   []string        // directories that were made for them, in order
	places []string        // where this and other hosts of the job put files elsewhere
	shared *keeper.Shared  // the same; nil: nothing is put there
	looked map[string]bool // directories that were there, and were adopted if they are another job's
}

// adopt has a file or directory that another job has put stay until this one ends, too: it reports whether this one is to remove it, then.
func (f *jobFiles) adopt(path string) bool {
	own, other := keeper.Marked(path, f.job)
	return other && !own && keeper.Mark(path, f.job) == nil // own: another host of this job does
}

// adoptDirs does so with a directory and those above it.
func (f *jobFiles) adoptDirs(dir string) error {
	if f.looked[dir] {
		return nil
	}
	if above := filepath.Dir(dir); above != dir {
		if err := f.adoptDirs(above); err != nil {
			return err
		}
	}
	if f.looked == nil {
		f.looked = map[string]bool{}
	}
	f.looked[dir] = true
	if info, err := os.Lstat(dir); err == nil && info.IsDir() && f.adopt(dir) {
		return f.madeDir(dir)
	}
	return nil
}

// any reports whether anything was put, or may have been.
func (f *jobFiles) any() bool { return f.dir != "" || len(f.other) > 0 || len(f.dirs) > 0 }

// share has it expected that other hosts of the job put these files, too, where directories are shared.
func (f *jobFiles) share(places []string) {
	f.places, f.shared = places, keeper.NewShared(f.job)
	for _, path := range places {
		f.shared.Add(path)
	}
}

// makeDir makes the directory: on a file system with room for need bytes, and where a program runs, if one is to be put there.
func (f *jobFiles) makeDir(need int64, program bool) error {
	var why []string
	for _, base := range jobDirBases() {
		if err := fits(base, need, program); err != nil {
			why = append(why, fmt.Sprintf("%s: %s", base, files.Reason(err)))
			continue
		}
		f.sweep(base, time.Minute) // one that is being made is locked soon
		var random [4]byte
		rand.Read(random[:])
		dir := filepath.Join(base, jobDirPrefix+f.job+"-"+hex.EncodeToString(random[:]))
		if err := f.keeper.Remove(dir); err != nil {
			return fmt.Errorf("speak to the keeper: %w", err)
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			why = append(why, fmt.Sprintf("%s: %s", base, files.Reason(err)))
			continue
		}
		f.dir = dir
		if d, err := os.Open(dir); err == nil {
			if unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
				f.lock = d
			} else {
				d.Close()
			}
		}
		return nil
	}
	return fmt.Errorf("make a directory for the job: %s", strings.Join(why, "; "))
}

// jobDirBases are the places for a job's own directory, the first one first. The last is where the agent's own program runs.
func jobDirBases() []string {
	all := []string{os.TempDir(), "/tmp", "/var/tmp"}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		all = append(all, dir)
	}
	if exe, err := os.Executable(); err == nil {
		all = append(all, filepath.Dir(exe))
	}
	var bases []string
	for _, dir := range all {
		if dir = filepath.Clean(dir); filepath.IsAbs(dir) && !strings.Contains(dir, "\n") && !slices.Contains(bases, dir) {
			bases = append(bases, dir)
		}
	}
	return bases
}

// fits reports why a directory's file system does not take so many bytes, or does not let a program run.
func fits(dir string, need int64, program bool) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err
	}
	if program && st.Flags&unix.ST_NOEXEC != 0 {
		return errors.New("mounted noexec, no program runs there")
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return syscall.EROFS
	}
	if free := int64(st.Bavail) * st.Bsize; st.Blocks > 0 && free < need {
		return fmt.Errorf("disk full: %d MiB are free, the job's files need %d", free>>20, (need+1<<20-1)>>20)
	}
	return nil
}

// sweep removes the directories that dead agents of this user left behind some time ago: those that nobody holds locked.
func (f *jobFiles) sweep(base string, age time.Duration) {
	if !ownDisk(base) {
		return // the lock of an agent on another machine may not be seen
	}
	names, err := filepath.Glob(filepath.Join(files.GlobQuote(base), jobDirPrefix+"*"))
	if err != nil {
		return
	}
	for _, dir := range names {
		var st unix.Stat_t
		if unix.Lstat(dir, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() ||
			time.Since(time.Unix(st.Ctim.Unix())) < age {
			continue
		}
		d, err := os.Open(dir)
		if err != nil {
			continue
		}
		if unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			removeAll(dir)
		}
		d.Close()
	}
}

// ownDisk reports whether a directory is on a file system of this machine alone.
func ownDisk(dir string) bool {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return false
	}
	return slices.Contains([]int64{unix.TMPFS_MAGIC, unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.OVERLAYFS_SUPER_MAGIC,
		unix.F2FS_SUPER_MAGIC}, int64(st.Type))
}

// path is the place of a file in the directory; directories on the way are made.
func (f *jobFiles) path(rel string) (string, error) {
	file := filepath.Join(f.dir, rel)
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return "", err
	}
	f.inside = append(f.inside, rel)
	return file, nil
}

// elsewhere has a file outside of the directory removed at the end.
func (f *jobFiles) elsewhere(path string) error {
	f.other = append(f.other, path)
	return f.keeper.Remove(path)
}

// madeDir has a directory that was made for such a file removed at the end.
func (f *jobFiles) madeDir(path string) error {
	if f.dirs = append(f.dirs, path); len(f.dirs) == 1 {
		if err := f.keeper.Share(f.places); err != nil {
			return err
		}
	}
	return f.keeper.RemoveDir(path)
}

// made lists the regular files in the directory that were not put there, some of them, and counts them.
func (f *jobFiles) made() (names []string, n int) {
	const most = 3
	put := map[string]bool{}
	for _, rel := range f.inside {
		put[rel] = true
	}
	filepath.WalkDir(f.dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil
		}
		if rel, _ := filepath.Rel(f.dir, path); !put[rel] {
			if n++; n <= most {
				names = append(names, rel)
			}
		}
		return nil
	})
	return names, n
}

// remove removes all of it.
func (f *jobFiles) remove() error {
	var errs []error
	if f.dir != "" {
		errs = append(errs, removeAll(f.dir))
		f.dir = ""
	}
	if f.lock != nil {
		f.lock.Close()
		f.lock = nil
	}
	for _, path := range slices.Backward(f.other) {
		if err := keeper.RemoveFile(path, f.job); err != nil {
			errs = append(errs, &fs.PathError{Op: "remove", Path: path, Err: err})
			f.shared.Stays(path)
		}
	}
	if len(f.dirs) > 0 {
		errs = append(errs, f.shared.RemoveDirs(f.dirs, sharedWait))
	}
	f.other, f.dirs = nil, nil
	return errors.Join(errs...)
}

// removeAll is os.RemoveAll also for directories that were closed to their owner.
func removeAll(dir string) error {
	err := os.RemoveAll(dir)
	if err == nil || !errors.Is(err, fs.ErrPermission) {
		return err
	}
	filepath.WalkDir(dir, func(path string, e fs.DirEntry, _ error) error {
		if e != nil && e.IsDir() {
			os.Chmod(path, 0o700)
		}
		return nil
	})
	return os.RemoveAll(dir)
}
