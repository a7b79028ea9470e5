package nccl

// SetRanksPerRoot makes so many ranks meet at one root.
func SetRanksPerRoot(n int) { ranksPerRoot = n }
