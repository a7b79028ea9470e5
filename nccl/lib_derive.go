package nccl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

// origin is the communicator that a library makes another one from, by its split or shrink: that is cheaper than an init of its own, since the members have met.
// What the two have is never shared: a parent that shares can be closed only after its parts and their graphs, and a registration would be of both.
//
// All members that the library's call waits for agree first that they come to it. Else, and where the parent has failed, the part is made as any other
// communicator.
type origin struct {
	parent *Comm
	all    bool  // a split: all members of the parent take part, else those of the part only
	color  int32 // of a split, NoColor for a member that gets no communicator of the library
	key    int
	leave  []int32 // of a shrink

	met     bool
	derives bool // how they have agreed
}

// splitOrigin is nil where the library has no split, on all members alike, or has nothing to do in it. colors are the members', negative for none.
func (c *Comm) splitOrigin(colors []int) *origin {
	l, ok := c.be.(*library)
	if !ok || l.sys.Need(ncclsys.Split) != nil {
		return nil
	}
	color, any := libraryColor(colors, c.rank)
	if !any {
		return nil
	}
	return &origin{parent: c, all: true, color: color}
}

// libraryColor numbers the parts of a split that have several members: a part of one needs no communicator of the library, which takes 32 bits for a color.
func libraryColor(colors []int, rank int) (color int32, any bool) {
	count := map[int]int{}
	for _, k := range colors {
		if k >= 0 {
			count[k]++
		}
	}
	var parts []int
	for k, n := range count {
		if n > 1 {
			parts = append(parts, k)
		}
	}
	slices.Sort(parts)
	return int32(slices.Index(parts, colors[rank])), len(parts) > 0 // -1 is NoColor
}

// able is why this member cannot come to the library's call, nil if it can.
func (o *origin) able() error {
	l := o.parent.be.(*library)
	if err := o.parent.usable(); err != nil {
		return err
	}
	v := l.sys.Vendor()
	look := v.Lookup()
	for _, name := range []string{"COMM_SPLIT_SHARE_RESOURCES", "COMM_SHRINK_SHARE_RESOURCES", "COMM_BLOCKING"} {
		if value, from := look(v.Prefix() + name); from != "" && (value != "0" || name == "COMM_BLOCKING") {
			return fmt.Errorf("%s%s=%s (%s)", v.Prefix(), name, value, from)
		}
	}
	return nil
}

// agree meets the members that the library's call waits for, once. c is the part, nil for a member without one; own is why this member does not come.
func (o *origin) agree(ctx context.Context, c *Comm, own error) (bool, error) {
	o.met = true
	if own == nil {
		own = o.able()
	}
	vote := []byte{1}
	if own != nil {
		vote[0] = 0
	}
	what := fmt.Sprintf("the library's making of a part of communicator %s", o.parent.name)
	var all [][]byte
	var err error
	if o.all {
		all, err = o.parent.Meet(ctx, vote, what)
	} else {
		all, err = c.group.Meet(ctx, vote, what)
	}
	if err != nil {
		// It is none for all of them: so all go on without the library's call.
		if ctx.Err() != nil || !o.all || o.parent.usable() != nil {
			return false, err
		}
		return false, nil
	}
	o.derives = !slices.ContainsFunc(all, func(v []byte) bool { return len(v) != 1 || v[0] == 0 })
	return o.derives, nil
}

// derive makes the part's communicators.
func (l *library) derive(ctx context.Context, o *origin) error {
	err := l.makeAll(ctx, func(k int) func() (*ncclsys.Pending[ncclsys.Comm], error) { return o.call(k, l.config) })
	if err != nil {
		o.failed(err)
	}
	return err
}

// rest is for members of a split that have not come to the library's call, with err if something went wrong before: all members of the parent do, also
// those that get nothing from it.
func (o *origin) rest(ctx context.Context, err error) error {
	if o == nil || o.met {
		return nil
	}
	derive, meetErr := o.agree(ctx, nil, err)
	if err != nil || meetErr != nil || !derive {
		return meetErr
	}
	p := o.parent
	l := p.be.(*library)
	o.color = ncclsys.NoColor
	p.acct.SetBusy(busyInit)
	for k := range l.kinds() {
		if _, err := l.make(ctx, o.call(k, func() *ncclsys.Config { return nil })); err != nil {
			o.failed(err)
			return p.errorf("split", err)
		}
	}
	p.acct.SetBusy("")
	return nil
}

// failed follows a call of the library that failed here: the others may wait in it for this member, and a thread be left in it with the parent's communicator. So the parent
// fails, which lets them out.
func (o *origin) failed(err error) {
	p := o.parent
	if isConsequence(err) { // the member with the cause tells it
		for end := time.Now().Add(tellWait); p.usable() == nil && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
	}
	if re, ok := errors.AsType[*bootstrap.RankError](err); ok {
		if r := slices.Index(p.ranks, re.Rank); r >= 0 {
			if end := p.ended(r, re); end != nil {
				p.fail(end, true, false)
				return
			}
		}
	}
	p.fail(&cause{kind: ErrAborted, err: err, text: fmt.Sprintf("%v by rank %d: a part of it could not be made: %v", ErrAborted, p.rank, err)}, true, false)
}

// call is the library's call for one kind of communicator.
func (o *origin) call(kind int, config func() *ncclsys.Config) func() (*ncclsys.Pending[ncclsys.Comm], error) {
	l := o.parent.be.(*library)
	return func() (*ncclsys.Pending[ncclsys.Comm], error) {
		l.mu.Lock()
		defer l.unlock()
		if err := l.enter(); err != nil {
			return nil, consequence{err}
		}
		defer l.leave()
		comm := l.comms()[kind]
		if o.all {
			return l.sys.CommSplit(comm, int(o.color), o.key, config())
		}
		return l.sys.CommShrink(comm, slices.Clone(o.leave), config(), 0)
	}
}
