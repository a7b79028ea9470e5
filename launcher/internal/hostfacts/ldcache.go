package hostfacts

import (
	"bytes"
	"encoding/binary"
	"runtime"
)

// ldCache reads the dynamic loader's cache (/etc/ld.so.cache of glibc since 2.2): the files that it has for a library's name on this architecture,
// in its order. What is no such cache has none.
func ldCache(b []byte, soname string) []string {
	const (
		magic     = "glibc-ld.so.cache1.1"
		header    = 48
		entrySize = 24 // flags, key, value, osversion: 4 bytes each; hwcap: 8
	)
	// An older form may stand before it. Offsets count from the head of the newer.
	at := bytes.Index(b, []byte(magic))
	if at < 0 {
		return nil
	}
	b = b[at:]
	if len(b) < header {
		return nil
	}
	arch, ok := map[string]uint32{"amd64": 0x0300, "arm64": 0x0a00}[runtime.GOARCH]
	if !ok {
		return nil
	}
	word := binary.NativeEndian.Uint32
	n := int(word(b[len(magic):]))
	text := func(off uint32) string {
		if int64(off) >= int64(len(b)) {
			return ""
		}
		s, _, _ := bytes.Cut(b[off:], []byte{0})
		return string(s)
	}
	var out []string
	for e := b[header:]; n > 0 && len(e) >= entrySize; n, e = n-1, e[entrySize:] {
		if word(e)&0xff00 == arch && text(word(e[4:])) == soname {
			if path := text(word(e[8:])); path != "" {
				out = append(out, path)
			}
		}
	}
	return out
}
