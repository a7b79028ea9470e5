package pmix

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/procman"
)

// request is one that is answered later.
type request struct {
	conn  *conn
	tag   uint32
	since time.Time
}

// Requests.
const (
	cmdJobInfo         = 0
	cmdAbort           = 1
	cmdCommit          = 2
	cmdFence           = 3
	cmdGet             = 4
	cmdFinalize        = 5
	cmdRegisterEvent   = 13
	cmdDeregisterEvent = 14
	cmdLog             = 16
	cmdJobControl      = 18
)

// handle carries a request out. Each has an answer, sooner or later, but one. The answer to what is not known, and to all that fails, is a status.
func (c *conn) handle(tag uint32, body []byte) error {
	s := c.s
	u := &unpacker{b: body}
	u.one()
	cmd := u.u8()
	if u.err != nil {
		return u.err
	}
	var err error
	switch cmd {
	case cmdJobInfo:
		c.jobInfo(tag)
	case cmdAbort:
		err = c.abort(tag, u)
	case cmdCommit:
		err = c.commit(tag, u)
	case cmdFence:
		err = c.fence(tag, u)
	case cmdGet:
		err = c.get(tag, u)
	case cmdLog:
		err = c.log(tag, u)
	case cmdJobControl:
		err = c.jobControl(tag, u)
	default:
		s.mu.Lock()
		defer s.mu.Unlock()
		switch cmd {
		case cmdFinalize:
			s.ranks[c.rank].finalized = true
			c.answerStatus(tag, success)
		case cmdRegisterEvent:
			// None is ever sent: gorun itself ends the ranks of a job that fails.
			c.answerStatus(tag, success)
		case cmdDeregisterEvent:
		default:
			c.answerStatus(tag, errNotSupported)
		}
		return nil
	}
	if errors.Is(err, errUnknownType) {
		s.mu.Lock()
		defer s.mu.Unlock()
		c.answerStatus(tag, errNotSupported)
		return nil
	}
	return err
}

// jobInfo answers with what a rank is told of its job: the same for all, but for a directory of its own.
func (c *conn) jobInfo(tag uint32) {
	s := c.s
	info, own := s.info(), &packer{}
	if s.dir != "" {
		own.kval(keyProcDir, filepath.Join(s.dir, strconv.Itoa(c.rank)))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c.answer(tag, info, own.b)
}

func (c *conn) abort(tag uint32, u *unpacker) error {
	s := c.s
	u.one()
	code := int32(u.u32())
	u.one()
	text := u.str()
	if u.err != nil {
		return u.err
	}
	if text == "N/A" {
		text = "" // what Open MPI 4 says when it has nothing to say
	}
	s.end(c.rank, procman.Departure{Aborted: true, Code: int(code), Text: plain(text)})
	s.mu.Lock()
	defer s.mu.Unlock()
	c.answerStatus(tag, success)
	return nil
}

// plain is a text as one short line.
func plain(text string) string {
	const most = 200
	text = strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\uFFFD' }), " ")
	if r := []rune(text); len(r) > most {
		text = string(r[:most]) + "..."
	}
	return text
}

// Scopes of what is published.
const (
	scopeLocal  = 1
	scopeRemote = 2
	scopeGlobal = 3
)

// maxPublished bounds what the ranks of a host publish for others, in bytes: a host gives it at once.
const maxPublished = 48 << 20

// commit takes what a rank publishes: for each scope all that it has published in it so far.
func (c *conn) commit(tag uint32, u *unpacker) error {
	s := c.s
	type part struct {
		scope uint8
		data  []byte
	}
	var parts []part
	for len(u.b) > 0 {
		u.one()
		scope := u.u8()
		u.one()
		u.u8() // the kind of the buffer
		data := u.bytes()
		if u.err != nil {
			return u.err
		}
		parts = append(parts, part{scope, data})
	}
	s.mu.Lock()
	k := s.ranks[c.rank]
	local, remote, dirty := k.local, k.remote, k.dirty
	for _, p := range parts {
		if p.scope == scopeLocal || p.scope == scopeGlobal {
			local = p.data
		}
		if p.scope == scopeRemote || p.scope == scopeGlobal {
			remote, dirty = p.data, true
		}
	}
	held := s.held - len(k.remote) + len(remote)
	if held > maxPublished {
		c.answerStatus(tag, errOutOfResource)
		s.mu.Unlock()
		// Clients take no notice of the answer.
		s.end(c.rank, procman.Departure{Fault: fmt.Sprintf("publishes too much by PMIx: %d bytes with the other ranks of its host, the most is %d", held, maxPublished)})
		return nil
	}
	defer s.mu.Unlock()
	k.local, k.remote, k.dirty, s.held = local, remote, dirty, held
	if !k.known {
		k.known, k.dirty = true, true
		if !k.ended { // a child of its process may say so later
			s.unheard--
		}
	}
	c.answerStatus(tag, success)
	s.published(c.rank)
	if s.unheard == 0 {
		s.spread()
	}
	return nil
}

// never tells those who wait for what a rank publishes that it has ended without. s.mu is held.
func (s *server) never(number int) {
	k := s.ranks[number]
	k.ended = true
	for _, q := range k.wait {
		q.conn.answerStatus(q.tag, errNotFound)
	}
	k.wait = nil
}

// published answers those who wait for what a rank has published. s.mu is held.
func (s *server) published(number int) {
	k := s.ranks[number]
	wait := k.wait
	k.wait = nil
	for _, q := range wait {
		q.conn.tell(q.tag, number)
	}
}

// maxAhead bounds what an answer tells of ranks that were not asked for, in bytes.
const maxAhead = 64 << 10

// tell answers a client that asks for what a rank has published. With it goes what others of that rank's host have published, once: the client, which asks for
// one after the other, finds it there, which takes a small part of the time. It would not see another value that is published for the same key later; MPI does
// not do that. s.mu is held.
func (c *conn) tell(tag uint32, number int) {
	s := c.s
	p := &packer{}
	p.status(success)
	parts := append([][]byte{p.b}, s.publishedBy(number)...)
	if c.told == nil {
		c.told = make([]bool, len(s.ranks))
	}
	c.told[number] = true
	room := maxAhead
	for _, other := range s.ranksOf[s.w.HostOf[number]] {
		if other == c.rank || c.told[other] || !s.ranks[other].known {
			continue
		}
		more := s.publishedBy(other)
		for _, b := range more {
			room -= len(b)
		}
		if room < 0 {
			break
		}
		c.told[other] = true
		parts = append(parts, more...)
	}
	c.answer(tag, parts...)
}

// publishedBy is what ranks of this host are told that a rank has published. s.mu is held.
func (s *server) publishedBy(number int) [][]byte {
	k := s.ranks[number]
	data := k.remote
	if s.w.HostOf[number] == s.w.Host {
		data = k.local
	}
	of := &packer{}
	of.count(1)
	of.proc(proc{s.namespace, uint32(number)})
	p := &packer{}
	p.count(1)
	p.size(len(of.b) + len(data))
	p.b = append(p.b, of.b...)
	return [][]byte{p.b, data}
}

// get answers with all that a rank has published; the client looks for the key. One that asks for a rank that has published nothing yet waits until it has.
func (c *conn) get(tag uint32, u *unpacker) error {
	s := c.s
	u.one()
	namespace := u.str()
	u.one()
	number := u.u32()
	infos := u.infos()
	key := ""
	if u.err == nil && len(u.b) > 0 {
		u.one()
		key = u.str()
	}
	if u.err != nil {
		return u.err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if namespace != s.namespace || uint64(number) >= uint64(len(s.ranks)) {
		c.answerStatus(tag, errNotFound) // what there is to know of the job the client knows
		return nil
	}
	switch k := s.ranks[number]; {
	case k.known:
		c.tell(tag, int(number))
	case k.ended || isTrue(infos, "pmix.immediate") || strings.HasPrefix(key, "pmix"):
		c.answerStatus(tag, errNotFound)
	default:
		k.wait = append(k.wait, request{c, tag, time.Now()})
	}
	return nil
}

// log has a text shown that the rank's library has for the user.
func (c *conn) log(tag uint32, u *unpacker) error {
	u.one()
	u.u64() // when
	infos := u.infos()
	if u.err != nil {
		return u.err
	}
	st := errNotSupported
	for _, i := range infos {
		if text, ok := i.value.(string); ok && (i.key == "pmix.log.stderr" || i.key == "pmix.log.stdout") && c.s.w.Say != nil {
			c.s.w.Say(c.rank, text)
			st = success
		}
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.answerStatus(tag, st)
	return nil
}

// jobControl notes files that are to be removed when the ranks are gone. Directories are not: those that Open MPI makes are in the server's own.
func (c *conn) jobControl(tag uint32, u *unpacker) error {
	s := c.s
	u.procs()
	infos := u.infos()
	if u.err != nil {
		return u.err
	}
	var files []string
	st := errNotSupported
	for _, i := range infos {
		switch i.key {
		case "pmix.reg.cleanup":
			list, _ := i.value.(string)
			for path := range strings.SplitSeq(list, ",") {
				// Elsewhere a rank, which may see other files than this process, has no business.
				if path = filepath.Clean(path); within(path, shmDir) || within(path, os.TempDir()) {
					files = append(files, path)
				}
			}
			st = success
		case "pmix.reg.cleanupdir":
			st = success
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.clean)+len(files) > maxClean {
		files, st = nil, errGeneral
	}
	s.clean = append(s.clean, files...)
	c.answerStatus(tag, st)
	return nil
}

// within reports whether a path is below a directory.
func within(path, dir string) bool { return strings.HasPrefix(path, filepath.Clean(dir)+"/") }

// maxClean bounds the files that ranks have removed.
const maxClean = 1 << 14
