//go:build !race

package main

const (
	raceEnabled = false
	raceMemory  = 1
)
