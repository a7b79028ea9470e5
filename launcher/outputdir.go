package launcher

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/rankenv"
)

// outputDir is the directory of --output-dir. It belongs to one job at a time: what an earlier job of gorun wrote there goes, so that nobody reads it as
// output of this one, and nothing else is touched. Which files those are is in a record beside them.
type outputDir struct {
	dir    string
	lock   *os.File // the record, locked as long as the job runs
	record outputRecord
	note   string // what there is that nobody should take for output of this job, "" for nothing
}

// outputRecord says what a job writes to its directory, and who does it.
type outputRecord struct {
	Host   string `json:"host"`
	PID    int    `json:"pid"`
	Ranks  int    `json:"ranks"`            // rank.0 and so on
	Merge  bool   `json:"merge,omitempty"`  // with no file for stderr
	Stacks bool   `json:"stacks,omitempty"` // and stacksFile
}

// outputRecordFile is the record's name.
const outputRecordFile = ".gorun.json"

// has reports whether the job wrote a rank's file of a stream.
func (r *outputRecord) has(rank int, stream string) bool {
	return rank < r.Ranks && (stream == "stdout" || stream == "stderr" && !r.Merge)
}

// takeOutputDir takes the directory for all attempts of the job.
func (r *runner) takeOutputDir() error {
	if r.series.outputDir != nil {
		return nil
	}
	host, _ := os.Hostname()
	d, err := takeOutputDir(r.plan.OutputDir, host, len(r.plan.Ranks), r.plan.Merge)
	if err != nil {
		return err
	}
	r.series.outputDir = d
	r.series.release = append(r.series.release, d.close)
	if d.note != "" {
		r.say("%s", d.note)
	}
	return nil
}

// takeOutputDir makes the directory, or takes that of an earlier job, for a job of so many ranks. A file in it that this job would write to and that gorun
// did not write is an error, and so is a job that writes there now.
func takeOutputDir(dir, host string, ranks int, merge bool) (*outputDir, error) {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, outputFileError(err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, outputRecordFile), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o666)
	if err != nil {
		return nil, outputFileError(err)
	}
	d := &outputDir{dir: dir, lock: lock}
	if err := d.take(outputRecord{Host: host, PID: os.Getpid(), Ranks: ranks, Merge: merge}); err != nil {
		lock.Close()
		return nil, err
	}
	return d, nil
}

func (d *outputDir) take(next outputRecord) error {
	locked := unix.Flock(int(d.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	var before outputRecord
	text, err := io.ReadAll(io.LimitReader(d.lock, 4096))
	if err != nil || json.Unmarshal(text, &before) != nil || before.Ranks < 0 || before.Ranks > MaxNP {
		before = outputRecord{}
	}
	if errors.Is(locked, unix.EWOULDBLOCK) { // a file system without locks does without
		return fmt.Errorf("write output to %s (--output-dir): another job is writing there: gorun on %s, pid %d", d.dir, before.Host, before.PID)
	}
	for rank := range next.Ranks {
		for _, stream := range []string{"stdout", "stderr"} {
			file := d.file(rank, stream)
			info, err := os.Stat(file) // a link's file would be emptied as well
			if err == nil && info.Mode().IsRegular() && info.Size() > 0 && next.has(rank, stream) && !before.has(rank, stream) {
				return fmt.Errorf("write output to %s (--output-dir): gorun did not write what is there; remove it, or give another directory", file)
			}
		}
	}
	for rank := range before.Ranks {
		for _, stream := range []string{"stdout", "stderr"} {
			if before.has(rank, stream) && !next.has(rank, stream) {
				if err := d.remove(rank, stream); err != nil {
					return outputFileError(err)
				}
			}
		}
		if rank >= next.Ranks {
			unix.Rmdir(d.file(rank, "")) // it stays if there is more in it
		}
	}
	if before.Stacks {
		if err := os.Remove(filepath.Join(d.dir, stacksFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return outputFileError(err)
		}
	}
	d.note = d.others(next)
	d.record = next
	return d.write()
}

func (d *outputDir) file(rank int, stream string) string {
	return filepath.Join(d.dir, "rank."+strconv.Itoa(rank), stream)
}

// remove removes a file that an earlier job wrote. A link, or a directory behind one, is somebody else's.
func (d *outputDir) remove(rank int, stream string) error {
	file := d.file(rank, stream)
	of, err := os.Lstat(filepath.Dir(file))
	if err != nil || !of.IsDir() {
		return nil
	}
	if info, err := os.Lstat(file); err != nil || !info.Mode().IsRegular() {
		return nil
	}
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// others says which files look like output of the job and are none.
func (d *outputDir) others(next outputRecord) string {
	entries, err := os.ReadDir(d.dir)
	if err != nil {
		return ""
	}
	var ranks []int
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), "rank.")
		rank, err := strconv.Atoi(number)
		if !ok || err != nil || rank < 0 || strconv.Itoa(rank) != number {
			continue
		}
		if slices.ContainsFunc([]string{"stdout", "stderr"}, func(stream string) bool {
			_, err := os.Lstat(d.file(rank, stream))
			return err == nil && !next.has(rank, stream)
		}) {
			ranks = append(ranks, rank)
		}
	}
	if len(ranks) == 0 {
		return ""
	}
	slices.Sort(ranks)
	return fmt.Sprintf("in %s are files of %s that are not of this job, and that gorun did not write: they are left as they are", d.dir, rankenv.RankText(ranks))
}

// stacks is the file for what the ranks do, which is recorded.
func (d *outputDir) stacks() (string, error) {
	file := filepath.Join(d.dir, stacksFile)
	if d.record.Stacks {
		return file, nil
	}
	if info, err := os.Lstat(file); err == nil && info.Size() > 0 {
		return file, nil // not ours: it goes on, and stays
	}
	d.record.Stacks = true
	return file, d.write()
}

func (d *outputDir) write() error {
	text, err := json.Marshal(d.record)
	if err == nil {
		err = d.lock.Truncate(0)
	}
	if err == nil {
		_, err = d.lock.WriteAt(append(text, '\n'), 0)
	}
	return outputFileError(err)
}

// close lets another job have the directory.
func (d *outputDir) close() { d.lock.Close() }
