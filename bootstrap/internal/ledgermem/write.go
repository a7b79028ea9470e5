package ledgermem

// Write enters the record of a number, which is there whole for readers or not at all. One goroutine at a time, whose stores until then they see, too.
func (s *Slot) Write(seq uint64, kind uint8, desc0, desc1, sum uint64) {
	r := &s.Record[(seq-1)%Records]
	r.Stamp.Store(0)
	store(&r.Desc[0], desc0)
	store(&r.Desc[1], desc1)
	store(&r.Sum, sum)
	store(&r.Stamp, seq<<8|uint64(kind))
	s.Last.Store(seq) // comes before what the writer reads next: of two that write and then look, one sees the other
}
