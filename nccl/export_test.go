package nccl

// SetRanksPerRoot makes so many ranks meet at one root.
func SetRanksPerRoot(n int) { ranksPerRoot = n }

// SetStrangeLimit makes so many connections at once prove the key.
func SetStrangeLimit(n int) { strangeLimit = n }
