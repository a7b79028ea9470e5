//go:build !race

package graphs_test

const raceEnabled = false
