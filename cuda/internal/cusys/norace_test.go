//go:build !race

package cusys

const raceEnabled = false
