// Package files is what the packages of the launcher need of files beside what os and path/filepath give.
package files

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
)

// Read is os.ReadFile for a file of at most so many bytes: what a user names may be a device that never ends.
func Read(name string, most int64) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(text)) > most {
		err = &fs.PathError{Op: "read", Path: name, Err: fmt.Errorf("more than %d KiB", most>>10)}
	}
	if err != nil {
		return nil, err
	}
	return text, nil
}

// Reason is an error without the system call and the path, which stand beside it.
func Reason(err error) string {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err.Error()
	}
	return err.Error()
}

var globSigns = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`)

// GlobQuote makes a path a pattern of filepath.Glob that stands for it alone.
func GlobQuote(path string) string { return globSigns.Replace(path) }
