package bootstrap

import "testing"

func TestCycleErrorText(t *testing.T) {
	err := &CycleError{Waits: []CycleWait{{0, "send of x"}, {3, "barrier"}, {1, "recv of y"}}}
	const want = "ranks wait for each other: rank 0 is in send of x and waits for rank 3, which is in barrier and waits for rank 1, which is in recv of y and waits for rank 0"
	if got := err.Error(); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
