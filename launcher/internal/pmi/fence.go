package pmi

import (
	"encoding/binary"
	"fmt"
)

// pair is what a rank has put.
type pair struct{ key, value string }

// given is what a host gives at a fence.
type given struct {
	broken string // why the fence cannot be passed; "": it can
	pairs  []pair // that its ranks have put since the last one
}

func (g *given) encode() []byte {
	b := appendText(nil, g.broken)
	b = binary.AppendUvarint(b, uint64(len(g.pairs)))
	for _, p := range g.pairs {
		b = appendText(appendText(b, p.key), p.value)
	}
	return b
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// decodeGiven reads what another host gives.
func decodeGiven(b []byte) (*given, error) {
	ok := true
	number := func() uint64 {
		n, size := binary.Uvarint(b)
		if size <= 0 {
			ok, b = false, nil
			return 0
		}
		b = b[size:]
		return n
	}
	text := func() string {
		n := number()
		if n > uint64(len(b)) {
			ok, b = false, nil
			return ""
		}
		s := string(b[:n])
		b = b[n:]
		return s
	}
	g := &given{broken: text()}
	for n := number(); ok && n > 0; n-- {
		g.pairs = append(g.pairs, pair{text(), text()})
	}
	if !ok || len(b) > 0 {
		return nil, fmt.Errorf("%w (%d bytes are left)", errHostData, len(b))
	}
	return g, nil
}
