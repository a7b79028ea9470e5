package launcher

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// WriteReport writes the account as JSON to a file, whole or not at all. A file that is there keeps its permissions. What is there and is no regular file
// (a pipe, a terminal, /dev/stdout) is written to, never replaced: a pipe that nobody reads is waited for. A symbolic link is followed.
func (a *Account) WriteReport(file string) error {
	data, err := json.MarshalIndent(a, "", "  ")
	if err == nil {
		err = writeWhole(linkedFile(file), append(data, '\n'))
	}
	return reportError(file, err)
}

// linkedFile is the file that a name stands for, also where that is a link to one that is still to be made. The links of /dev and /proc are those of open
// files, which have perhaps no name.
func linkedFile(name string) string {
	if strings.HasPrefix(name, "/dev/") || strings.HasPrefix(name, "/proc/") {
		return name
	}
	real, err := filepath.EvalSymlinks(name)
	if err == nil {
		return real
	}
	to, lerr := os.Readlink(name)
	if lerr != nil || !errors.Is(err, fs.ErrNotExist) {
		return name
	}
	if !filepath.IsAbs(to) {
		// Of the directory's own name, as the kernel does: a ".." leaves where the directory is, not where a link to it is.
		dir, err := filepath.EvalSymlinks(filepath.Dir(name))
		if err != nil {
			return name
		}
		to = filepath.Join(dir, to)
	}
	return linkedFile(to)
}

// writeWhole replaces a regular file, or makes one; what is none is written to.
func writeWhole(file string, data []byte) error {
	info, err := os.Lstat(file)
	there := err == nil
	if there && !info.Mode().IsRegular() {
		f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0) // /dev/stdout may be a file that the ranks wrote to
		if err != nil {
			return err
		}
		_, err = f.Write(data)
		return errors.Join(err, f.Close())
	}
	tmp := filepath.Join(filepath.Dir(file), ".gorun-report-"+newID())
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil && there {
		err = f.Chmod(info.Mode().Perm())
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(tmp, file)
	}
	if err != nil {
		os.Remove(tmp)
	}
	return err
}

// CheckReport says why WriteReport could not write the file, as far as can be known beforehand.
func CheckReport(file string) error {
	at := linkedFile(file)
	info, err := os.Stat(at)
	switch {
	case err == nil && info.IsDir():
		err = unix.EISDIR
	case err == nil && !info.Mode().IsRegular():
		err = unix.Access(at, unix.W_OK)
	default:
		err = unix.Access(filepath.Dir(at), unix.W_OK|unix.X_OK)
	}
	return reportError(file, err)
}

// reportError names the file that the user gave, not a temporary one.
func reportError(file string, err error) error {
	if err == nil {
		return nil
	}
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		err = p.Err
	} else if l, ok := errors.AsType[*os.LinkError](err); ok {
		err = l.Err
	}
	return fmt.Errorf("write report %s: %w", file, err)
}
