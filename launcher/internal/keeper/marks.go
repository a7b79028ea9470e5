package keeper

import "syscall"

// markName begins the names of marks; a job's id follows. A mark is an extended attribute of a file or directory that a job has put: each job that
// uses it has one on it, and who takes off the last removes it. Where a file system knows no such attributes, or another user's job has put it, it
// goes with the job that has put it.
const markName = "user.gorun."

// Mark puts a job's mark on a file or directory.
func Mark(path, job string) error {
	for {
		if err := syscall.Setxattr(path, markName+job, []byte("1"), 0); err != syscall.EINTR {
			return err
		}
	}
}

// Marked reports whether a file or directory has the mark of a job, and whether it has that of another one.
func Marked(path, job string) (own, other bool) {
	var some [256]byte
	names := some[:]
	n, err := syscall.Listxattr(path, names)
	if err == syscall.ERANGE {
		names = make([]byte, 64<<10) // what the kernel has at most
		n, err = syscall.Listxattr(path, names)
	}
	if err != nil {
		return false, false
	}
	for names = names[:n]; len(names) > 0; {
		var name []byte
		name, names, _ = cut(names, 0)
		if len(name) > len(markName) && string(name[:len(markName)]) == markName {
			is := string(name[len(markName):]) == job
			own, other = own || is, other || !is
		}
	}
	return own, other
}

func unmark(path, job string) { syscall.Removexattr(path, markName+job) }

// RemoveFile removes a file that a job has put, unless another job uses it. It is no error if it is not there.
func RemoveFile(path, job string) error {
	if !temporary(path) { // that is one with the file that is in use
		unmark(path, job)
		if _, other := Marked(path, job); other {
			return nil
		}
	}
	for {
		switch err := syscall.Unlink(path); err {
		case syscall.EINTR:
		case syscall.ENOENT:
			return nil
		default:
			return err
		}
	}
}

// temporary reports whether a path is of a file that is not complete yet.
func temporary(path string) bool {
	i := len(path)
	for i > 0 && path[i-1] != '/' {
		i--
	}
	return len(path)-i > len(TempName) && path[i:i+len(TempName)] == TempName
}
