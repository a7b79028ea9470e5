//go:build race

package cusys

const raceEnabled = true
