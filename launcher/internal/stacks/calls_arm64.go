package stacks

// arm64 has no system calls beside the common ones.
var onFDHere, othersHere map[int]string
