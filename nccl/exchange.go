package nccl

import "github.com/gorun-dev/gorun/cuda"

// Gather puts send of rank i at recv[i*len(send):] on root; recv is ignored elsewhere (may be empty). On root len(recv) = size*len(send). In place:
// send is that part of recv on root.
//
// Gather, Scatter and AllToAll are each a Group of Sends and Recvs, and count as that in what members compare, in Stats and in errors.
func Gather[T cuda.Element](c *Comm, send, recv cuda.Slice[T], root int, s *cuda.Stream) error {
	const what = "gather"
	if err := c.checkRoot(what, root); err != nil {
		return err
	}
	if root != c.rank {
		return Send(c, send, root, s)
	}
	n := send.Len()
	if err := c.checkParts(what, "recv", recv.Len(), n); err != nil {
		return err
	}
	mine := recv.Slice(root*n, (root+1)*n)
	if mine.Range() != send.Range() && meet(send.Range(), recv.Range()) {
		return c.refuse(what, "send %v and recv %v overlap; in place send is part %d of recv", send.Range(), recv.Range(), root)
	}
	return Group(func() error {
		for r := range c.Size() {
			if r == root {
				if err := toSelf(c, send, mine, s); err != nil {
					return err
				}
			} else if err := Recv(c, recv.Slice(r*n, (r+1)*n), r, s); err != nil {
				return err
			}
		}
		return nil
	}, c)
}

// Scatter gives part i of root's send to recv of rank i; send is ignored elsewhere (may be empty). On root len(send) = size*len(recv). In place:
// recv is that part of send on root. See Gather.
func Scatter[T cuda.Element](c *Comm, send, recv cuda.Slice[T], root int, s *cuda.Stream) error {
	const what = "scatter"
	if err := c.checkRoot(what, root); err != nil {
		return err
	}
	if root != c.rank {
		return Recv(c, recv, root, s)
	}
	n := recv.Len()
	if err := c.checkParts(what, "send", send.Len(), n); err != nil {
		return err
	}
	mine := send.Slice(root*n, (root+1)*n)
	if mine.Range() != recv.Range() && meet(send.Range(), recv.Range()) {
		return c.refuse(what, "send %v and recv %v overlap; in place recv is part %d of send", send.Range(), recv.Range(), root)
	}
	return Group(func() error {
		for r := range c.Size() {
			if r == root {
				if err := toSelf(c, mine, recv, s); err != nil {
					return err
				}
			} else if err := Send(c, send.Slice(r*n, (r+1)*n), r, s); err != nil {
				return err
			}
		}
		return nil
	}, c)
}

// AllToAll gives part i of send to rank i, which has it as part r of recv, where r is this rank. Both have the same length, size parts; never in
// place. Parts of different lengths are a Group of Sends and Recvs of the program's own. See Gather.
func AllToAll[T cuda.Element](c *Comm, send, recv cuda.Slice[T], s *cuda.Stream) error {
	const what = "all-to-all"
	if c == nil {
		return c.errorf(what, errNoComm)
	}
	if send.Len() != recv.Len() {
		return c.refuse(what, "send has %d elements, recv %d", send.Len(), recv.Len())
	}
	n := send.Len() / c.Size()
	if n*c.Size() != send.Len() {
		return c.refuse(what, "send has %d elements, not as many for each of %d ranks", send.Len(), c.Size())
	}
	if meet(send.Range(), recv.Range()) {
		return c.refuse(what, "send %v and recv %v overlap; they must be apart", send.Range(), recv.Range())
	}
	return Group(func() error {
		for r := range c.Size() {
			if err := Send(c, send.Slice(r*n, (r+1)*n), r, s); err != nil {
				return err
			}
			if err := Recv(c, recv.Slice(r*n, (r+1)*n), r, s); err != nil {
				return err
			}
		}
		return nil
	}, c)
}

// toSelf is a rank's own part, which in place is there already.
func toSelf[T cuda.Element](c *Comm, send, recv cuda.Slice[T], s *cuda.Stream) error {
	if send.Range() == recv.Range() {
		return nil
	}
	if err := Send(c, send, c.rank, s); err != nil {
		return err
	}
	return Recv(c, recv, c.rank, s)
}

// meet reports whether two ranges have memory in common.
func meet(a, b cuda.Range) bool {
	return a.Mem != nil && a.Mem == b.Mem && a.Off < b.Off+b.Len && b.Off < a.Off+a.Len
}

func (c *Comm) checkRoot(what string, root int) error {
	if root < 0 || root >= c.Size() {
		return c.refuse(what, "root %d is no rank of a communicator of %d", root, c.Size())
	}
	return nil
}

func (c *Comm) checkParts(what, name string, length, n int) error {
	if length != c.Size()*n {
		return c.refuse(what, "%s has %d elements, not %d ranks x %d", name, length, c.Size(), n)
	}
	return nil
}

// refuse is the error for a call that this rank alone can see to be wrong.
func (c *Comm) refuse(what, format string, args ...any) error {
	if c == nil {
		return c.errorf(what, errNoComm)
	}
	return c.errorf(what, causef(ErrArgument, format, args...))
}
