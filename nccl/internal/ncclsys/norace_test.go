//go:build !race

package ncclsys

const raceEnabled = false
