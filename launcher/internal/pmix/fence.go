package pmix

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/gorun-dev/gorun/rankenv"
)

// fence is a meeting of some ranks of the world.
type fence struct {
	number  int   // of those of the same members, from 1
	all     []int // its members
	members []int // those of this host
	hosts   []int
	collect bool
	given   bool            // this host has given its part
	in      map[int]request // those that have come
}

// maxFences bounds the fences of some members that were begun and are not met.
const maxFences = 1 << 10

// everyone names the fences of all ranks.
const everyone = "all"

// fence has a rank meet others.
func (c *conn) fence(tag uint32, u *unpacker) error {
	s := c.s
	procs := u.procs()
	infos := u.infos()
	if u.err != nil {
		return u.err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.members(procs)
	if err != nil || !slices.Contains(all, c.rank) {
		c.answerStatus(tag, errBadParam)
		return nil
	}
	name := s.meetingOf(all)
	// The oldest fence of these members that this rank has not come to.
	i := 0
	for ; i < len(s.fences[name]); i++ {
		if _, here := s.fences[name][i].in[c.rank]; !here {
			break
		}
	}
	if i == maxFences {
		c.answerStatus(tag, errGeneral)
		return nil
	}
	if i == len(s.fences[name]) {
		s.addFence(name, all)
	}
	f := s.fences[name][i]
	f.in[c.rank] = request{c, tag, time.Now()}
	f.collect = f.collect || isTrue(infos, "pmix.collect")
	s.tryFence(name)
	return nil
}

// addFence begins a fence of some members behind those that are not met. s.mu is held.
func (s *server) addFence(name string, all []int) {
	s.count[name]++
	f := &fence{number: s.count[name], all: all, hosts: s.w.HostsOf(all), in: map[int]request{}}
	for _, r := range all {
		if s.w.HostOf[r] == s.w.Host {
			f.members = append(f.members, r)
		}
	}
	s.fences[name] = append(s.fences[name], f)
}

// tryFence gives this host's part for the oldest fence of some members, if all of them have come that still can. s.mu is held.
func (s *server) tryFence(name string) {
	for len(s.fences[name]) > 0 {
		f := s.fences[name][0] // a rank comes to the oldest first, so that no later one is complete
		if f.given {
			return
		}
		if name == everyone && s.over != "" { // all hosts know, and none gives any more
			s.meet(name, s.over)
			continue
		}
		missing := ""
		for _, r := range f.members {
			if _, here := f.in[r]; here {
				continue
			}
			if !s.ranks[r].ended {
				return
			}
			missing = fmt.Sprintf("rank %d has ended", s.w.Ranks[r])
		}
		f.given = true
		if len(f.hosts) == 1 {
			s.meet(name, missing)
			continue
		}
		if name == everyone {
			s.spread() // others may wait for it
		}
		s.exchange("pmix fence "+name+" "+strconv.Itoa(f.number), f.hosts, s.given(f, missing), func(why string) {
			s.meet(name, why)
			s.tryFence(name)
			s.tryLast()
		})
		return
	}
}

// tryLast gives this host's part for the next fence of all when none of its ranks can come to one any more: ranks of other hosts may wait there. s.mu is held.
func (s *server) tryLast() {
	if s.live > 0 || s.over != "" || len(s.fences[everyone]) > 0 || len(s.hosts) == 1 {
		return
	}
	s.addFence(everyone, s.everyone())
	s.tryFence(everyone)
}

// meet ends the oldest fence of some members: it was passed, or can't be for a reason. s.mu is held.
func (s *server) meet(name, why string) {
	f := s.fences[name][0]
	s.fences[name] = s.fences[name][1:]
	if len(s.fences[name]) == 0 {
		delete(s.fences, name)
	}
	if why == "" {
		for _, q := range f.in {
			q.conn.answerStatus(q.tag, success)
		}
		return
	}
	if name == everyone {
		s.over = why
	}
	s.tasks.Go(func() {
		for r := range f.in {
			if s.w.Say != nil {
				s.w.Say(r, "PMIx fence (MPI_Init, MPI_Finalize): "+why+"\n") // what clients say does not name it
			}
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, q := range f.in {
			q.conn.answerStatus(q.tag, errGeneral)
		}
	})
}

// endFences has fences end that wait for a rank that has ended. s.mu is held.
func (s *server) endFences(number int) {
	for name, list := range s.fences {
		if slices.Contains(list[0].members, number) {
			s.tryFence(name)
		}
	}
	s.tryLast()
}

// everyone are all ranks.
func (s *server) everyone() []int {
	all := make([]int, len(s.ranks))
	for r := range all {
		all[r] = r
	}
	return all
}

// members are the ranks that processes are, ascending.
func (s *server) members(procs []proc) ([]int, error) {
	var ranks []int
	for _, p := range procs {
		switch {
		case p.namespace != s.namespace:
			return nil, errors.New("another namespace")
		case p.rank == rankWildcard:
			return s.everyone(), nil
		case uint64(p.rank) >= uint64(len(s.ranks)):
			return nil, fmt.Errorf("no rank %d", p.rank)
		}
		ranks = append(ranks, int(p.rank))
	}
	slices.Sort(ranks)
	return slices.Compact(ranks), nil
}

// meetingOf is a short name of the fences of some ranks.
func (s *server) meetingOf(ranks []int) string {
	if len(ranks) == len(s.ranks) {
		return everyone
	}
	const most = 64
	list := rankenv.RankList(ranks)
	if len(list) <= most {
		return list
	}
	sum := sha256.Sum256([]byte(list))
	return hex.EncodeToString(sum[:])
}

// spread gives to all other hosts what the ranks of this one have published, once: when all of them have that still can. So a rank can ask for what one
// elsewhere has published without any fence. What ranks publish later is given at the next fence of all. s.mu is held.
func (s *server) spread() {
	if s.has || len(s.hosts) == 1 {
		return
	}
	s.has = true
	s.exchange("pmix published", s.hosts, s.news(""), func(string) {}) // if it is not possible fences say so
}

// news are what the ranks of this host have published and other hosts don't have, and which have ended without, behind a text. From now on they have it. s.mu is held.
func (s *server) news(text string) []byte {
	var ranks, never []int
	for _, r := range s.local {
		switch k := s.ranks[r]; {
		case k.dirty:
			k.dirty = false
			ranks = append(ranks, r)
		case k.ended && !k.known:
			never = append(never, r)
		}
	}
	return s.pack(text, never, ranks)
}

// given is what this host gives for a fence: why it can't be passed, if it can't, and what its ranks have published. s.mu is held.
func (s *server) given(f *fence, missing string) []byte {
	if len(f.all) == len(s.ranks) {
		return s.news(missing)
	}
	var ranks []int
	for _, r := range f.members {
		if f.collect && s.ranks[r].known {
			ranks = append(ranks, r)
		}
	}
	return s.pack(missing, nil, ranks)
}

// pack packs what ranks have published for other hosts, behind a text and the ranks that never will publish anything.
func (s *server) pack(text string, never, ranks []int) []byte {
	b := appendBytes(nil, []byte(text))
	b = binary.BigEndian.AppendUint32(b, uint32(len(never)))
	for _, r := range never {
		b = binary.BigEndian.AppendUint32(b, uint32(r))
	}
	for _, r := range ranks {
		b = binary.BigEndian.AppendUint32(b, uint32(r))
		b = appendBytes(b, s.ranks[r].remote)
	}
	return b
}

func appendBytes(b, data []byte) []byte {
	return append(binary.BigEndian.AppendUint32(b, uint32(len(data))), data...)
}

// learn takes what a host has given. s.mu is held.
func (s *server) learn(host int, b []byte) (why string, err error) {
	u := &unpacker{b: b}
	why = string(u.take(uint64(u.u32())))
	rank := func() int {
		r := u.u32()
		if u.err == nil && err == nil && (uint64(r) >= uint64(len(s.ranks)) || s.w.HostOf[r] != host) {
			err = fmt.Errorf("host %s has published for rank %d, which is not its", s.w.Hosts[host], r)
		}
		return int(r)
	}
	for n := u.u32(); n > 0; n-- {
		r := rank()
		if u.err != nil || err != nil {
			break
		}
		if host != s.w.Host {
			s.never(r)
		}
	}
	for u.err == nil && err == nil && len(u.b) > 0 {
		r := rank()
		data := u.take(uint64(u.u32()))
		if u.err != nil || err != nil {
			break
		}
		if host != s.w.Host {
			k := s.ranks[r]
			k.remote, k.known = data, true
			s.published(r)
		}
	}
	switch {
	case err != nil:
		return "", err
	case u.err != nil:
		return "", fmt.Errorf("host %s: %w", s.w.Hosts[host], u.err)
	}
	return why, nil
}

// exchange is one that is to be begun.
type exchange struct {
	name  string
	hosts []int
	data  []byte
	then  func(why string)
}

// exchange has hosts exchange data, in the order of calls. When that is done then is called, with s.mu held and why it failed, "" if it did not. s.mu is held.
func (s *server) exchange(name string, hosts []int, data []byte, then func(why string)) {
	s.outbox = append(s.outbox, exchange{name, hosts, data, then})
	select {
	case s.kick <- struct{}{}:
	default: // it will look
	}
}

// send begins exchanges, without s.mu: they may end at once.
func (s *server) send() {
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.kick:
		}
		s.mu.Lock()
		list := s.outbox
		s.outbox = nil
		s.mu.Unlock()
		for _, x := range list {
			s.w.Exchange(x.name, x.hosts, x.data, func(all [][]byte, err error) {
				s.mu.Lock()
				defer s.mu.Unlock()
				if s.closed {
					return
				}
				why := ""
				if err == nil && len(all) != len(x.hosts) {
					err = fmt.Errorf("%d hosts of %d", len(all), len(x.hosts))
				}
				for i := 0; err == nil && i < len(all); i++ {
					var text string
					text, err = s.learn(x.hosts[i], all[i])
					if why == "" {
						why = text
					}
				}
				if err != nil {
					why = err.Error()
				}
				x.then(why)
			})
		}
	}
}
