package nccl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

// facts is what members must agree about before the library sees any of it: it would hang, or say little.
type facts struct {
	Platform string
	Device   string            `json:",omitempty"` // unique: the UUID, or host and bus
	Model    string            `json:",omitempty"`
	Version  string            `json:",omitempty"` // "NCCL 2.28.3"
	File     string            `json:",omitempty"` // name of the library's file
	Host     int               `json:",omitempty"`
	HostID   string            `json:",omitempty"` // the host's name for the library, where the user has set one
	Settings map[string]string `json:",omitempty"` // the library's environment variables
	Windows  string            `json:",omitempty"` // why there can be none
	Data     string            `json:",omitempty"` // address at which a host's first member takes data from other hosts
}

func (c *Comm) facts() facts {
	f := facts{Platform: c.dev.Platform().String(), Host: c.job.Node()}
	l, ok := c.be.(*library)
	if !ok {
		if h, ok := c.be.(*host); ok && h.links != nil {
			f.Data = h.links.address()
		}
		return f
	}
	info := c.dev.Info()
	f.Model, f.Device = info.Name, info.UUID
	if f.Device == "" {
		f.Device = fmt.Sprintf("%s on host %d", info.PCIBusID, f.Host)
	}
	v := l.sys.Vendor()
	f.Version = fmt.Sprintf("%s %s", v.Name, l.sys.Version())
	f.File = filepath.Base(l.sys.Library().Path())
	f.HostID, _ = v.Lookup()(v.Prefix() + "HOSTID")
	f.Settings = settingsOf(v, os.Environ())
	f.Windows = l.noWindows()
	return f
}

// ownSettings are those of the library's variables that may differ between ranks: where a rank writes to, and what its host has. The variables that are
// only a prefix of them end with *.
var ownSettings = []string{"DEBUG*", "TOPO_DUMP_FILE*", "GRAPH_DUMP_FILE*", "TOPO_FILE", "SOCKET_IFNAME", "COMM_ID", "HOSTID", "IB_HCA", "IB_GID_INDEX",
	"CONF_FILE", "HOME", "ROOT", "INCLUDE_DIR", "LIB_DIR", "LIBRARY", "RAS_*", "PROFILER*", "NET_PLUGIN", "TUNER_PLUGIN", "TUNER_CONFIG_FILE"}

// settingsOf picks the library's variables that must be equal on all ranks, and what configuration files say about those that matter most.
func settingsOf(v *ncclsys.Vendor, env []string) map[string]string {
	set := map[string]string{}
	prefix := v.Prefix()
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		rest, ok := strings.CutPrefix(name, prefix)
		if !ok || slices.ContainsFunc(ownSettings, func(o string) bool {
			stem, open := strings.CutSuffix(o, "*")
			return rest == stem || open && strings.HasPrefix(rest, stem)
		}) {
			continue
		}
		set[name] = value
	}
	look := v.Lookup()
	for _, s := range v.Settings() {
		if value, from := look(s.Name); from != "" {
			set[s.Name] = value
		}
	}
	return set
}

// compareFacts gives all members the same error, nil where they agree.
func compareFacts(all []facts) error {
	for r := 1; r < len(all); r++ {
		a, b := all[0], all[r]
		if a.Platform != b.Platform {
			return causef(ErrMismatch, "rank %d has a %s device, rank 0 a %s device: all ranks of a communicator have the same kind (GORUN_DEVICE chooses)", r, b.Platform, a.Platform)
		}
		if a.Version != b.Version {
			return causef(ErrMismatch, "rank %d has %s (%s), rank 0 %s (%s): all ranks need the same version", r, b.Version, b.File, a.Version, a.File)
		}
	}
	for r := range all {
		for s := range r {
			// Ranks of what it takes for different hosts the library joins by its network.
			if all[r].Device != "" && all[r].Device == all[s].Device && all[r].HostID == all[s].HostID {
				return causef(ErrMismatch, "ranks %d and %d both have %s (%s): each rank needs a GPU of its own; gorun --gpu-bind share lets ranks share", s, r, all[r].Device, all[r].Model)
			}
		}
	}
	for r := 1; r < len(all); r++ {
		a, b := all[0].Settings, all[r].Settings
		names := slices.Collect(maps.Keys(a))
		names = slices.AppendSeq(names, maps.Keys(b))
		slices.Sort(names)
		for _, n := range slices.Compact(names) {
			va, inA := a[n]
			vb, inB := b[n]
			if va != vb || inA != inB {
				return causef(ErrMismatch, "rank %d has %s, rank 0 %s: such settings must be equal on all ranks", r, settingText(n, vb, inB), settingText(n, va, inA))
			}
		}
	}
	return nil
}

func settingText(name, value string, set bool) string {
	if !set {
		return name + " unset"
	}
	return name + "=" + value
}

// agree compares what the members offered in the first commit.
func (c *Comm) agree(offers [][]byte) error {
	all := make([]facts, len(offers))
	for r, b := range offers {
		if err := json.Unmarshal(b, &all[r]); err != nil {
			return fmt.Errorf("rank %d: what it says about itself: %w", r, err)
		}
	}
	if err := compareFacts(all); err != nil {
		return err
	}
	l, ok := c.be.(*library)
	if !ok {
		return nil
	}
	for r, f := range all {
		why := ""
		if f.Windows != "" {
			why = fmt.Sprintf("rank %d: %s", r, f.Windows)
		} else if f.Host != all[0].Host {
			why = fmt.Sprintf("ranks 0 and %d are on different hosts", r)
		} else if f.HostID != all[0].HostID {
			why = fmt.Sprintf("the library takes ranks 0 and %d for ranks of different hosts (%sHOSTID)", r, l.sys.Vendor().Prefix())
		}
		if why != "" {
			l.unable.Store(&why)
			break
		}
	}
	return nil
}

func (c *Comm) offer() []byte {
	b, err := json.Marshal(c.facts())
	if err != nil {
		panic(err) // strings and numbers
	}
	return b
}

// ranksPerRoot is how many ranks meet at one member's address; tests take fewer.
var ranksPerRoot = 128

// numRoots is how many members make a unique id.
func (l *library) numRoots() int {
	if l.sys.Need(ncclsys.Scalable) != nil {
		return 1
	}
	return rootsOf(len(l.c.ranks))
}

func rootsOf(ranks int) int { return max(1, (ranks+ranksPerRoot-1)/ranksPerRoot) }

// fault reports whether the library's version has a known defect.
func (l *library) fault(id string) bool {
	return slices.ContainsFunc(l.sys.Faults(), func(f ncclsys.Fault) bool { return f.ID == id })
}

// connect makes the communicators. All members have the same library. own is why this member cannot, which the others learn as what goes wrong here: that each of
// them has come is known before the library is called, which would wait for ever.
func (l *library) connect(ctx context.Context, own error) error {
	c := l.c
	if own == nil {
		own = l.openClosings()
	}
	if o := c.origin; o != nil {
		derive, err := o.agree(ctx, c, own)
		if derive {
			_, err = c.commit(ctx, l.derive(ctx, o), nil)
			return err
		}
		if own == nil {
			own = err
		}
	}
	ids, own := l.ids(ctx, own)
	if _, err := c.commit(ctx, own, nil); err != nil {
		return err
	}
	err := l.makeAll(ctx, func(k int) func() (*ncclsys.Pending[ncclsys.Comm], error) { return l.initRank(ids[k]) })
	_, err = c.commit(ctx, err, nil)
	return err
}

// openClosings is for members on other hosts.
func (l *library) openClosings() (err error) {
	c := l.c
	if slices.ContainsFunc(c.peers, func(p peer) bool { return p.far }) {
		l.closings, err = c.job.GroupOnce("nccl "+c.key+" close", c.ranks)
	}
	return err
}

// kinds are what the library's communicators are for.
func (l *library) kinds() []string {
	kinds := []string{"collectives"}
	if l.fault("p2p-then-collective") || l.fault("message-registered-alone") {
		kinds = append(kinds, "point to point")
	}
	return kinds
}

// makeAll makes the communicator of each kind by its call of the library.
func (l *library) makeAll(ctx context.Context, call func(kind int) func() (*ncclsys.Pending[ncclsys.Comm], error)) error {
	acct := l.c.acct
	acct.SetBusy(busyInit)
	for k, to := range []*ncclsys.Comm{&l.main, &l.p2p}[:len(l.kinds())] {
		comm, err := l.make(ctx, call(k))
		if err != nil {
			if ctx.Err() == nil && !isConsequence(err) {
				acct.SetBusy(initFailed)
			}
			return err
		}
		*to = comm
	}
	acct.SetBusy("")
	if l.p2p == 0 {
		l.p2p = l.main
	}
	return nil
}

const (
	busyInit = "the library's init"
	// initFailed tells the others, which the library would leave waiting.
	initFailed = "the end of an init that failed"
)

// consequence is an error that another member's causes.
type consequence struct{ error }

func (e consequence) Unwrap() error { return e.error }

// isConsequence reports whether another member has the better error.
func isConsequence(err error) bool {
	if le, ok := errors.AsType[*LibraryError](err); ok && le.Code == int(ncclsys.ErrRemote) {
		return true
	}
	_, ok := errors.AsType[consequence](err)
	return ok
}

// ids gets the unique ids of each kind. A member that makes one, and cannot, or comes with an error of its own, publishes zeros: the others wait for it.
func (l *library) ids(ctx context.Context, own error) ([][]ncclsys.UniqueID, error) {
	kinds := l.kinds()
	ids := make([][]ncclsys.UniqueID, len(kinds))
	for k, kind := range kinds {
		for i := range l.numRoots() {
			name, root := fmt.Sprintf("nccl %s %s %d", l.c.key, kind, i), i*ranksPerRoot
			var id ncclsys.UniqueID
			if l.c.rank == root {
				id, own = l.publishID(ctx, name, own)
			} else if own == nil {
				id, own = l.awaitID(ctx, name, root)
			}
			ids[k] = append(ids[k], id)
		}
	}
	return ids, own
}

// publishID makes an id. With own, which keeps this member from it, or where that fails, it is zeros.
func (l *library) publishID(ctx context.Context, name string, own error) (id ncclsys.UniqueID, err error) {
	if err = own; err == nil {
		id, err = l.makeID()
	}
	if err == nil {
		if err = l.c.job.PublishID(ctx, name, bootstrap.UniqueID(id)); err == nil {
			return id, nil
		}
	}
	ctx, done := context.WithTimeout(context.WithoutCancel(ctx), tellWait) // the end of ctx may be the error
	defer done()
	l.c.job.PublishID(ctx, name, bootstrap.UniqueID{})
	return id, err
}

func (l *library) makeID() (id ncclsys.UniqueID, err error) {
	b := l.c.dev.Bind()
	defer b.Release()
	if err := b.Err(); err != nil {
		return id, err
	}
	if id, err = l.sys.GetUniqueID(); err != nil {
		return ncclsys.UniqueID{}, result(err)
	}
	return id, nil
}

// awaitID waits for an id that root makes, and no longer than all members are there.
func (l *library) awaitID(ctx context.Context, name string, root int) (ncclsys.UniqueID, error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	type outcome struct {
		id  bootstrap.UniqueID
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		id, err := l.c.job.UniqueID(ctx, name)
		done <- outcome{id, err}
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case end := <-done:
			if end.err == nil && end.id == (bootstrap.UniqueID{}) {
				end.err = consequence{fmt.Errorf("rank %d could not make a unique id", root)}
			}
			return ncclsys.UniqueID(end.id), end.err
		case <-tick.C:
			if err := l.gone(); err != nil {
				stop()
				<-done
				return ncclsys.UniqueID{}, err
			}
		}
	}
}

// config are the settings of a communicator, nil for versions that have none. It is a blocking one: for each call of a non-blocking one the library starts a
// thread (of 2.28, at half a millisecond).
func (l *library) config() *ncclsys.Config {
	if l.sys.Need(ncclsys.NonBlocking) != nil {
		return nil
	}
	cfg := ncclsys.NewConfig()
	cfg.Blocking, cfg.CommName = 1, l.c.name
	if l.mixing.off && l.mixing.config {
		cfg.GraphUsageMode = 1
	}
	return cfg
}

// initRank makes a communicator by the ids of its roots.
func (l *library) initRank(ids []ncclsys.UniqueID) func() (*ncclsys.Pending[ncclsys.Comm], error) {
	n, rank := len(l.c.ranks), l.c.rank
	return func() (*ncclsys.Pending[ncclsys.Comm], error) {
		if len(ids) > 1 {
			return l.sys.CommInitRankScalable(n, rank, ids, l.config())
		}
		return l.sys.CommInitRank(n, ids[0], rank, l.config())
	}
}

// make makes one communicator by a call that blocks: on a thread of its own, which is left in it when ctx ends: an abort would free what that thread uses. The
// error names those that are still in it.
func (l *library) make(ctx context.Context, call func() (*ncclsys.Pending[ncclsys.Comm], error)) (ncclsys.Comm, error) {
	type outcome struct {
		comm ncclsys.Comm
		err  error
	}
	done := make(chan outcome)
	left := make(chan struct{}) // nobody waits any more
	go func() {
		var comm ncclsys.Comm
		err := l.onThread(func() error {
			p, err := call()
			if err = l.finishInit(ctx, p, err); err == nil {
				comm = p.Handle()
			}
			if p != nil {
				p.Done()
			}
			return err
		})
		select {
		case done <- outcome{comm, err}:
		case <-left:
			if err == nil && comm != 0 {
				l.abortOne(comm)
			}
		}
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	began := time.Now()
	var end outcome
	var patience <-chan time.Time // after an error of the network, for a better one
	for {
		var err error
		select {
		case end = <-done:
			if !networkError(end.err) {
				return end.comm, end.err
			}
			patience = time.After(deathWait)
		case <-patience:
			return end.comm, end.err
		case <-ctx.Done():
			if patience != nil { // the library has said why
				return end.comm, end.err
			}
			err = l.late(ctx)
		case <-tick.C:
			l.c.askFar(0, time.Since(began))
			err = l.gone()
		}
		if err != nil {
			close(left)
			return 0, err
		}
	}
}

// finishInit waits where the library was told by its environment to make a non-blocking communicator.
func (l *library) finishInit(ctx context.Context, p *ncclsys.Pending[ncclsys.Comm], err error) error {
	if err != error(ncclsys.ErrInProgress) {
		return result(err)
	}
	for p.Handle() == 0 && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if comm := p.Handle(); comm != 0 {
		if err = l.settle(ctx, comm, connectPatience); err != nil {
			err = errors.Join(err, result(l.sys.CommAbort(comm)))
		}
		return err
	}
	return context.Cause(ctx)
}

// late is the end of a wait for the library's init.
func (l *library) late(ctx context.Context) error {
	var in []int
	for r, p := range l.c.peers {
		if r != l.c.rank && (!p.acct.Known() || p.acct.Busy() == busyInit) {
			in = append(in, l.c.ranks[r])
		}
	}
	late := &bootstrap.WaitError{Op: "init of the library", Missing: in, Err: context.Cause(ctx)}
	for _, r := range in {
		if l.c.job.Nodes() > 1 {
			late.Hosts = append(late.Hosts, l.c.job.HostName(r))
		}
	}
	return late
}

// gone is the end of a member meanwhile, or of its init.
func (l *library) gone() error {
	for r, j := range l.c.ranks {
		if re := l.c.job.RankErr(j); re != nil {
			return &cause{kind: ErrRank, text: fmt.Sprintf("rank %d has ended: %v", r, re), err: re}
		}
	}
	for r, p := range l.c.peers {
		if r != l.c.rank && p.acct.Busy() == initFailed {
			return consequence{fmt.Errorf("rank %d could not make its communicator", r)}
		}
	}
	of := l.c
	if o := l.c.origin; o != nil && o.derives {
		of = o.parent // all that wait in the library's call do so for members of it
	}
	if f := of.failed.Load(); f != nil {
		return consequence{fmt.Errorf("communicator %s: %w", of.name, f.err)}
	}
	return nil
}

// untilGone is ctx, and ends with gone's error, too; stop ends the look-out for that.
func (l *library) untilGone(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	var looks sync.WaitGroup
	looks.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if err := l.gone(); err != nil {
					cancel(err)
				}
			}
		}
	})
	return ctx, func() {
		cancel(nil)
		looks.Wait()
	}
}
