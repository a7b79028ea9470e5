package pmix

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// The packing is that of PMIx 3 ("v3"), not described: each call of the library's packer writes how many values follow (int32), then the values;
// integers have a fixed width and network byte order.

// dataType is a PMIx data type.
type dataType uint16

const (
	typeUndef            dataType = 0
	typeBool             dataType = 1
	typeByte             dataType = 2
	typeString           dataType = 3
	typeSize             dataType = 4
	typePID              dataType = 5
	typeInt              dataType = 6
	typeInt8             dataType = 7
	typeInt16            dataType = 8
	typeInt32            dataType = 9
	typeInt64            dataType = 10
	typeUint             dataType = 11
	typeUint8            dataType = 12
	typeUint16           dataType = 13
	typeUint32           dataType = 14
	typeUint64           dataType = 15
	typeFloat            dataType = 16
	typeDouble           dataType = 17
	typeTimeval          dataType = 18
	typeTime             dataType = 19
	typeStatus           dataType = 20
	typeProc             dataType = 22
	typeInfo             dataType = 24
	typeByteObject       dataType = 27
	typePersist          dataType = 30
	typePointer          dataType = 31
	typeScope            dataType = 32
	typeRange            dataType = 33
	typeDataType         dataType = 36
	typeProcState        dataType = 37
	typeArray            dataType = 39
	typeRank             dataType = 40
	typeCompressedString dataType = 42
	typeAllocDirective   dataType = 43
	typeIOFChannel       dataType = 45
	typeEnvar            dataType = 46
)

// status is a PMIx status, 0 or negative.
type status int32

const (
	success          status = 0
	errGeneral       status = -1
	errBadParam      status = -27
	errOutOfResource status = -29
	errNotFound      status = -46
	errNotSupported  status = -47
)

// rankWildcard stands for all ranks.
const rankWildcard = 1<<32 - 2

// proc names processes: those of a namespace that have the rank.
type proc struct {
	namespace string
	rank      uint32
}

// packer packs.
type packer struct{ b []byte }

func (p *packer) u8(v uint8)          { p.b = append(p.b, v) }
func (p *packer) u16(v uint16)        { p.b = binary.BigEndian.AppendUint16(p.b, v) }
func (p *packer) u32(v uint32)        { p.b = binary.BigEndian.AppendUint32(p.b, v) }
func (p *packer) u64(v uint64)        { p.b = binary.BigEndian.AppendUint64(p.b, v) }
func (p *packer) count(n int)         { p.u32(uint32(n)) }
func (p *packer) dataType(t dataType) { p.u16(uint16(t)) }

// size packs a size_t: a type that depends on the machine says what it is.
func (p *packer) size(n int) {
	p.dataType(typeUint64)
	p.u64(uint64(n))
}

// str packs a string with its final NUL.
func (p *packer) str(s string) {
	p.u32(uint32(len(s) + 1))
	p.b = append(append(p.b, s...), 0)
}

func (p *packer) proc(v proc) {
	p.str(v.namespace)
	p.u32(v.rank)
}

func (p *packer) bytes(b []byte) {
	p.size(len(b))
	p.b = append(p.b, b...)
}

// status packs a status as a call of its own.
func (p *packer) status(s status) {
	p.count(1)
	p.u32(uint32(s))
}

// rankValue is a rank as a value.
type rankValue uint32

// info is a key and its value.
type info struct {
	key   string
	value any // bool, string, uint16, uint32, rankValue, []byte, []info
}

// kval packs a key and its value as a call of its own.
func (p *packer) kval(key string, value any) {
	p.count(1)
	p.str(key)
	p.value(value)
}

func (p *packer) value(value any) {
	switch v := value.(type) {
	case bool:
		p.dataType(typeBool)
		if v {
			p.u8(1)
		} else {
			p.u8(0)
		}
	case string:
		p.dataType(typeString)
		p.str(v)
	case uint16:
		p.dataType(typeUint16)
		p.u16(v)
	case uint32:
		p.dataType(typeUint32)
		p.u32(v)
	case rankValue:
		p.dataType(typeRank)
		p.u32(uint32(v))
	case []byte:
		p.dataType(typeByteObject)
		p.bytes(v)
	case []info:
		p.dataType(typeArray)
		p.dataType(typeInfo)
		p.size(len(v))
		for _, i := range v {
			p.str(i.key)
			p.u32(0) // flags
			p.value(i.value)
		}
	default:
		panic(fmt.Sprintf("pmix: no packing for a %T", value))
	}
}

// Errors of an unpacker.
var (
	errShort = errors.New("ends inside a value")
	// errUnknownType is no fault of the client's: it may be newer.
	errUnknownType = errors.New("has a value of an unknown type")
)

// unpacker unpacks; the first error stays, and everything after it is zero.
type unpacker struct {
	b   []byte
	err error
}

func (u *unpacker) fail(err error) {
	if u.err == nil {
		u.err = err
	}
	u.b = nil
}

// take is the next n bytes, nil if they are not there.
func (u *unpacker) take(n uint64) []byte {
	if u.err != nil {
		return nil
	}
	if n > uint64(len(u.b)) {
		u.fail(errShort)
		return nil
	}
	b := u.b[:n:n]
	u.b = u.b[n:]
	return b
}

func (u *unpacker) u8() uint8 {
	if b := u.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (u *unpacker) u16() uint16 {
	if b := u.take(2); b != nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (u *unpacker) u32() uint32 {
	if b := u.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (u *unpacker) u64() uint64 {
	if b := u.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

// count begins what a call packed: how many values, of at least so many bytes each.
func (u *unpacker) count(least int) int {
	n := u.u32()
	if uint64(n)*uint64(least) > uint64(len(u.b)) {
		u.fail(errShort)
		return 0
	}
	return int(n)
}

// one begins what a call packed that packs one value.
func (u *unpacker) one() {
	if n := u.count(0); n != 1 && u.err == nil {
		u.fail(fmt.Errorf("has %d values where one is expected", n))
	}
}

// sized is an integer of a type that depends on the client's machine.
func (u *unpacker) sized() uint64 {
	switch t := dataType(u.u16()); t {
	case typeInt16, typeUint16:
		return uint64(u.u16())
	case typeInt32, typeUint32:
		return uint64(u.u32())
	case typeInt64, typeUint64:
		return u.u64()
	default:
		if u.err == nil {
			u.fail(fmt.Errorf("has an integer of type %d", t))
		}
		return 0
	}
}

func (u *unpacker) str() string {
	b, _, _ := bytes.Cut(u.take(uint64(u.u32())), []byte{0})
	return string(b)
}

func (u *unpacker) bytes() []byte { return u.take(u.sized()) }

func (u *unpacker) proc() proc { return proc{namespace: u.str(), rank: u.u32()} }

func (u *unpacker) procs() []proc { return list(u, "processes", 8, u.proc) }

// infos are a list; values of types that have no use here are nil.
func (u *unpacker) infos() []info {
	return list(u, "values", 10, func() info { return u.info(0) })
}

// list is an array as clients pack it: its length, then the array, whose elements have at least so many bytes each.
func list[T any](u *unpacker, what string, least int, element func() T) []T {
	u.one()
	n := u.sized()
	if u.err != nil || n == 0 {
		return nil
	}
	if c := u.count(least); uint64(c) != n && u.err == nil {
		u.fail(fmt.Errorf("has %d %s where %d are announced", c, what, n))
	}
	if u.err != nil {
		return nil
	}
	all := make([]T, n)
	for i := range all {
		all[i] = element()
	}
	return all
}

func (u *unpacker) info(depth int) info {
	i := info{key: u.str()}
	u.u32() // flags
	i.value = u.value(dataType(u.u16()), depth)
	return i
}

// maxDepth bounds arrays in arrays.
const maxDepth = 8

// value is a value of a type: a bool, string, int64, uint64, []byte, proc, []info; nil if it is of another type.
func (u *unpacker) value(t dataType, depth int) any {
	switch t {
	case typeUndef:
		return nil
	case typeBool:
		return u.u8() != 0
	case typeByte, typeUint8, typePersist, typeScope, typeRange, typeProcState, typeAllocDirective, typePointer:
		return uint64(u.u8())
	case typeInt8:
		return int64(int8(u.u8()))
	case typeInt16:
		return int64(int16(u.u16()))
	case typeUint16, typeDataType, typeIOFChannel:
		return uint64(u.u16())
	case typeInt32, typeStatus:
		return int64(int32(u.u32()))
	case typeUint32, typeRank:
		return uint64(u.u32())
	case typeInt64:
		return int64(u.u64())
	case typeUint64, typeTime:
		return u.u64()
	case typeSize, typeUint, typePID:
		return u.sized()
	case typeInt:
		return int64(int32(u.sized()))
	case typeString, typeFloat, typeDouble:
		return u.str()
	case typeTimeval:
		u.take(16)
		return nil
	case typeProc:
		return u.proc()
	case typeByteObject, typeCompressedString:
		return u.bytes()
	case typeEnvar:
		u.str()
		u.str()
		u.u8()
		return nil
	case typeArray:
		return u.array(depth)
	}
	u.fail(errUnknownType)
	return nil
}

func (u *unpacker) array(depth int) any {
	t := dataType(u.u16())
	n := u.sized()
	if u.err != nil || n == 0 || t == typeUndef {
		return nil
	}
	if depth >= maxDepth {
		u.fail(errors.New("has arrays in arrays in arrays"))
		return nil
	}
	if n > uint64(len(u.b)) { // the least that a value takes is a byte
		u.fail(errShort)
		return nil
	}
	var infos []info
	for range n {
		if u.err != nil {
			return nil
		}
		if t == typeInfo {
			infos = append(infos, u.info(depth+1))
		} else {
			u.value(t, depth+1)
		}
	}
	if infos == nil {
		return nil
	}
	return infos
}

// isTrue reports whether a key is there and set; a flag without a value is.
func isTrue(infos []info, key string) bool {
	for _, i := range infos {
		if i.key == key {
			set, isBool := i.value.(bool)
			return set || !isBool
		}
	}
	return false
}

// A message is a header and a body. The header of a client's first message has its own byte order, later ones network byte order.
const headerSize = 16

// header is that of a message: who (its index with the other side), which request, how many bytes follow.
type header struct {
	index  uint32
	tag    uint32
	length uint32
}

func (h header) encode() []byte {
	b := binary.BigEndian.AppendUint32(nil, h.index)
	b = binary.BigEndian.AppendUint32(b, h.tag)
	b = binary.BigEndian.AppendUint32(b, h.length)
	return append(b, 0, 0, 0, 0)
}

func readHeader(r io.Reader, order binary.ByteOrder) (header, error) {
	var b [headerSize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return header{}, err
	}
	return header{index: order.Uint32(b[0:]), tag: order.Uint32(b[4:]), length: order.Uint32(b[8:])}, nil
}

// readBody reads n bytes; memory is taken as they come.
func readBody(r io.Reader, n uint32) ([]byte, error) {
	var b bytes.Buffer
	if m, err := io.Copy(&b, io.LimitReader(r, int64(n))); err != nil {
		return nil, err
	} else if m < int64(n) {
		return nil, io.ErrUnexpectedEOF
	}
	return b.Bytes(), nil
}

// hello is a client's first message.
type hello struct {
	kind      uint8 // 0: a client
	proc      proc
	version   string
	packing   string
	described bool // each value has its type
}

// parseHello parses the body of a client's first message.
func parseHello(b []byte) (hello, error) {
	u := &unpacker{b: b}
	var h hello
	u.cstr()                // how it proves who it is
	u.take(uint64(u.u32())) // and that: the kernel is asked instead
	h.kind = u.u8()
	if h.kind != 0 {
		return h, u.err
	}
	h.proc = proc{namespace: u.cstr(), rank: u.u32()}
	h.version = u.cstr()
	if u.err != nil || len(u.b) == 0 {
		return h, u.err // those before 2.1 end here
	}
	h.packing = u.cstr()
	const described = 2
	h.described = u.u8() == described
	u.cstr() // how it stores what it is told
	return h, u.err
}

// cstr is a string that ends with NUL.
func (u *unpacker) cstr() string {
	s, rest, found := bytes.Cut(u.b, []byte{0})
	if !found {
		u.fail(errShort)
		return ""
	}
	u.b = rest
	return string(s)
}
