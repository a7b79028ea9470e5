package launcher

import (
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/procman"
)

// The ranks that MPI ends by MPI_Abort, since another one is gone, are not the cause, also where that one's end is seen later.
func TestMPIAbortIsNoCause(t *testing.T) {
	const own = 876203535 // an error of MPICH's
	abort := func(code int) exitStatus {
		return exitStatus{Code: code & 0xff, MPI: procman.Departure{Aborted: true, Code: code}}
	}
	gone := procman.Departure{Unfinished: true}
	for _, c := range []struct {
		name    string
		aborted int           // code of rank 0's MPI_Abort
		other   exitStatus    // of rank 1
		after   time.Duration // of its end
		stopped string        // the signal that gorun sent it before
		cause   int
		code    int
	}{
		{"killed", own, exitStatus{Signal: syscall.SIGKILL, MPI: gone}, 100 * time.Millisecond, "", 1, 137},
		{"killed, and the user aborts", 7, exitStatus{Signal: syscall.SIGSEGV, MPI: gone}, 100 * time.Millisecond, "", 1, 139},
		{"killed much later", own, exitStatus{Signal: syscall.SIGKILL, MPI: gone}, 3 * time.Second, "", 0, 15},
		{"ended by gorun", own, exitStatus{Signal: syscall.SIGTERM, MPI: gone}, 100 * time.Millisecond, "SIGTERM", 0, 15},
		{"without MPI_Finalize", own, exitStatus{MPI: gone}, 100 * time.Millisecond, "", 1, 1},
		{"exited", own, exitStatus{Code: 3, MPI: gone}, 100 * time.Millisecond, "", 1, 3},
		{"exited, and the user aborts", 7, exitStatus{Code: 3, MPI: gone}, 100 * time.Millisecond, "", 0, 7},
		{"aborts itself", own, abort(9), 100 * time.Millisecond, "", 0, 15},
		{"ended before", 7, exitStatus{Code: 3, MPI: gone}, -100 * time.Millisecond, "", 1, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			start := time.Now()
			at := start.Add(10 * time.Second)
			a := &Account{Reason: ReasonFailed, Ranks: []RankAccount{
				{Rank: 0, PID: 1, Start: start, End: at.Add(50 * time.Millisecond), fell: at, status: abort(c.aborted), done: true, order: 1},
				{Rank: 1, PID: 2, Start: start, End: at.Add(c.after), status: c.other, done: true, order: 2, Stopped: c.stopped},
			}}
			a.settle(0, 0)
			if a.Cause != c.cause || a.Code != c.code {
				t.Errorf("got cause %d, code %d, want %d, %d", a.Cause, a.Code, c.cause, c.code)
			}
		})
	}
}
