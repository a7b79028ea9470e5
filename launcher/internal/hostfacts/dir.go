package hostfacts

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/files"
)

// dir tells of a directory. One that does not exist is told by the nearest above it that does: whether it could be made, and where.
func dir(path string) Dir {
	d := Dir{Path: path, Owner: -1}
	at := path
	for {
		info, err := os.Stat(at)
		if err == nil {
			if !info.IsDir() {
				d.Err = at + " is no directory"
				return d
			}
			if at == path {
				d.Exists, d.Mode = true, info.Mode().String()
				if st, ok := info.Sys().(*syscall.Stat_t); ok {
					d.Owner = int(st.Uid)
				}
			}
			break
		}
		up := filepath.Dir(at)
		if !errors.Is(err, fs.ErrNotExist) || up == at {
			d.Err = files.Reason(err)
			return d
		}
		at = up
	}
	d.Write = unix.Access(at, unix.W_OK|unix.X_OK) == nil
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		d.Err = "statfs: " + err.Error()
		return d
	}
	block := st.Frsize
	if block == 0 {
		block = st.Bsize
	}
	d.FS = fsName(int64(st.Type))
	d.Size, d.Free = int64(st.Blocks)*block, int64(st.Bavail)*block
	for _, f := range []struct {
		bit  int64
		name string
	}{{unix.ST_RDONLY, "ro"}, {unix.ST_NOEXEC, "noexec"}, {unix.ST_NOSUID, "nosuid"}, {unix.ST_NODEV, "nodev"}} {
		if int64(st.Flags)&f.bit != 0 {
			d.Flags = append(d.Flags, f.name)
		}
	}
	return d
}

func fsName(magic int64) string {
	switch magic {
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlay"
	case unix.NFS_SUPER_MAGIC:
		return "nfs"
	case unix.RAMFS_MAGIC:
		return "ramfs"
	case unix.SQUASHFS_MAGIC:
		return "squashfs"
	case unix.FUSE_SUPER_MAGIC:
		return "fuse"
	}
	return fmt.Sprintf("%#x", uint32(magic))
}

// Has reports whether the file system has a flag: "noexec".
func (d Dir) Has(flag string) bool { return slices.Contains(d.Flags, flag) }
