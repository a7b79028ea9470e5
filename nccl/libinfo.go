package nccl

// LibraryInfo names the collective library that carries out a communicator's calls.
type LibraryInfo struct {
	Name    string // "NCCL", "MCCL", "RCCL"
	Version string // "2.28.3"; RCCL and MCCL tell the NCCL version that they follow
	Path    string // of the file that was opened
}

// Library is the library behind the communicator; ok is false where there is none: on the host platform, and in a communicator of one.
func (c *Comm) Library() (info LibraryInfo, ok bool) {
	if c == nil {
		return LibraryInfo{}, false
	}
	l, ok := c.be.(*library)
	if !ok {
		return LibraryInfo{}, false
	}
	return LibraryInfo{Name: l.sys.Vendor().Name, Version: l.sys.Version().String(), Path: l.sys.Library().Path()}, true
}
