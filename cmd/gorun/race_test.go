//go:build race

package main

const (
	raceEnabled = true
	raceMemory  = 4
)
