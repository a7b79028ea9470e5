package launcher

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
)

// outputFiles are the files of --output-dir: one of each rank and stream, on gorun's machine. They hold what the ranks wrote, byte for
// byte, with times if these are wanted, and without tags.
type outputFiles struct {
	out, err []*os.File // by rank; err is empty if stderr goes where stdout goes
}

// openOutputFiles makes the files, so that what is wrong with them is known before any rank runs. Files that are there
// are emptied, unless they are to go on: those of an earlier attempt of the same job.
func openOutputFiles(dir string, ranks int, merge, goOn bool) (*outputFiles, error) {
	f := &outputFiles{}
	flag := os.O_WRONLY | os.O_CREATE | os.O_APPEND
	if !goOn {
		flag |= os.O_TRUNC
	}
	for rank := range ranks {
		of := filepath.Join(dir, "rank."+strconv.Itoa(rank))
		err := os.MkdirAll(of, 0o777)
		if err == nil {
			err = openInto(&f.out, filepath.Join(of, "stdout"), flag)
		}
		if err == nil && !merge {
			err = openInto(&f.err, filepath.Join(of, "stderr"), flag)
		}
		if err != nil {
			f.close()
			return nil, outputFileError(err)
		}
	}
	return f, nil
}

// openInto opens a file and adds it to a list.
func openInto(list *[]*os.File, name string, flag int) error {
	f, err := os.OpenFile(name, flag, 0o666)
	if err == nil {
		*list = append(*list, f)
	}
	return err
}

// outputFileError is nil for nil. It names the file, and the way to say another.
func outputFileError(err error) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return fmt.Errorf("write output to %s (--output-dir): %w", p.Path, p.Err)
	}
	return err
}

// of is the file of a rank's stdout, or stderr, nil without one.
func (f *outputFiles) of(rank int, stderr bool) *os.File {
	list := f.out
	if stderr {
		list = f.err
	}
	if rank >= len(list) {
		return nil
	}
	return list[rank]
}

// close closes the files. The error is the first.
func (f *outputFiles) close() error {
	var errs []error
	for _, list := range [][]*os.File{f.out, f.err} {
		for _, file := range list {
			if err := file.Close(); err != nil {
				errs = append(errs, outputFileError(err))
			}
		}
	}
	if len(errs) > 0 {
		return errs[0]
	}
	return nil
}
