package keeper

import "syscall"

// removeAll removes a file, or a directory with all in it; what cannot be removed stays, and makes it false. A file that another job uses, too, stays as well.
// Symbolic links are not followed.
func removeAll(path, job string) bool {
	var st syscall.Stat_t
	if err := syscall.Lstat(path, &st); err != nil {
		return err == syscall.ENOENT
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
		return RemoveFile(path, job) == nil
	}
	syscall.Chmod(path, 0o700) // a rank may have closed a directory to itself
	for _, name := range entries(path) {
		removeAll(path+"/"+name, job)
	}
	err := rmdir(path)
	return err == nil || err == syscall.ENOENT
}

// entries are the names in a directory.
func entries(path string) (names []string) {
	eachEntry(path, 8192, func(name string) { names = append(names, name) })
	return names
}

// eachEntry hands on the names in a directory, as many at once as a buffer of size bytes takes.
func eachEntry(path string, size int, f func(name string)) {
	dir, err := open(path, syscall.O_DIRECTORY)
	if err != nil {
		return
	}
	defer syscall.Close(dir)
	var names []string
	for buf := make([]byte, size); ; {
		n, err := syscall.ReadDirent(dir, buf)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return
		}
		_, _, names = syscall.ParseDirent(buf[:n], -1, names[:0])
		for _, name := range names {
			f(name)
		}
	}
}
