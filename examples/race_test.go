//go:build race

package examples

import "testing"

func TestRace(t *testing.T) {
	t.Skip("programs that are built without the race detector say nothing of races: the packages of the examples do")
}
