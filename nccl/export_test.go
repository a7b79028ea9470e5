package nccl

// SetRanksPerRoot makes so many ranks meet at one root.
func SetRanksPerRoot(n int) { ranksPerRoot = n }

// SetStrangeLimit makes so many connections at once prove the key.
func SetStrangeLimit(n int) { strangeLimit = n }

// SetStraight says whether eager calls that can go straight do.
func SetStraight(c *Comm, on bool) {
	c.lib = nil
	if on {
		c.lib, _ = c.be.(*library)
	}
}

// GoesStraight reports whether a call does.
func GoesStraight(c *Comm, call Call) bool { return c.lib != nil && c.lib.straight(&call) }

// HoldStep is a step on the host platform that lasts until end is called.
func HoldStep(c *Comm) (end func()) {
	h := c.be.(*host)
	h.mu.Lock()
	return h.mu.Unlock
}

// Undone is how many operations a library's communicator does not know to be done.
func Undone(c *Comm) int { return c.be.(*library).behind() }
