//go:build race

package cuda

// raceEnabled: host memory comes from the Go heap, where the race detector sees who touches it.
const raceEnabled = true
