package ranktest

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Patient are a package's tests, and then a wait, for goleak.VerifyTestMain: memberlist, of tests with several hosts, waits for none of its last probes, which take some
// seconds.
type Patient struct{ *testing.M }

// Run runs the tests, and waits until nothing is left of them, a minute at most.
func (p Patient) Run() int {
	code := p.M.Run()
	for end := time.Now().Add(time.Minute); goleak.Find() != nil && time.Now().Before(end); {
	}
	return code
}
