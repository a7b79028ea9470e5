package nccl

import (
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
)

// The first call on registered buffers is where the library maps them on the other ranks. What it has half done then does not survive an abort (fault
// "abort-with-registrations"): the process is lost. So that call, other than all others, is compared before the library sees it: a buffer that is registered on
// some ranks only is an error before anything is launched on those that have it.

// firstUseWait is how long a call waits for the others' same call. Who comes later is late, no more: the call goes on.
const firstUseWait = 500 * time.Millisecond

// firstUse lists the registrations that these calls use in a way that is new to the library.
func (l *library) firstUse(calls []Call) (regs []*registered) {
	if l.c.userRegs.Load() == 0 {
		return nil
	}
	l.eachUse(calls, func(b *registered, op Op) {
		if b.ops.Load()&(1<<op) == 0 {
			regs = append(regs, b)
		}
	})
	return regs
}

// eachUse calls f for each registered buffer of each collective.
func (l *library) eachUse(calls []Call, f func(b *registered, op Op)) {
	for i := range calls {
		if calls[i].Op.p2p() || calls[i].Count == 0 {
			continue // the library does not have the registration where messages go
		}
		for _, b := range [...]*registered{l.c.userRegistered(calls[i].Send), l.c.userRegistered(calls[i].Recv)} {
			if b != nil {
				f(b, calls[i].Op)
			}
		}
	}
}

// agreeFirst waits for the members' record of a call on registered buffers, where it is the first of its kind. It returns the contradiction that it finds.
func (l *library) agreeFirst(rec bootstrap.Record, calls []Call) (err error) {
	regs := l.firstUse(calls)
	if regs == nil {
		return nil
	}
	defer func() {
		for _, b := range regs {
			b.mapped.Store(b.mapped.Load() || err == nil)
		}
	}()
	c := l.c
	pause := 20 * time.Microsecond
	for end := time.Now().Add(firstUseWait); ; {
		if err := c.usable(); err != nil {
			return err
		}
		waits := false
		for r, p := range c.peers {
			if r == c.rank {
				continue
			}
			if err := c.contradiction(rec, r); err != nil {
				return c.fail(err, true, false)
			}
			waits = waits || !p.far && p.acct.Last() < rec.Seq
		}
		if !waits {
			break
		}
		if time.Now().After(end) {
			return nil
		}
		time.Sleep(pause)
		pause = min(2*pause, 2*time.Millisecond)
	}
	l.eachUse(calls, func(b *registered, op Op) { b.ops.Or(1 << op) })
	return nil
}

// abortCrashes reports whether an abort would lose the process: the library has mapped registered memory on several members. Then the communicator is left as it is.
func (l *library) abortCrashes() bool {
	if len(l.c.ranks) <= 2 || l.main == 0 || !l.fault("abort-with-registrations") {
		return false
	}
	l.c.mu.Lock()
	defer l.c.mu.Unlock()
	for _, r := range l.c.regs {
		if r.user > 0 && r.mapped.Load() {
			return true
		}
	}
	return false
}
