package nccl

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/gorun-dev/gorun/cuda"
)

// A layout is, for each call, its op and its buffers:
//
//	version, number of calls; for each call: op, root (4 bytes), number of buffers;
//	for each buffer: flags, kind, offset, length, memory id, memory size, window (8 bytes each)
const (
	layoutVersion = 1
	layoutBuffer  = 2 + 5*8

	layoutSend       = 1 << 0
	layoutRegistered = 1 << 1
)

type layoutCall struct {
	op      Op
	root    int32
	buffers []layoutBuf
}

type layoutBuf struct {
	flags          byte
	kind           cuda.AllocKind
	off, len       uint64
	memory, memLen uint64
	window         uint64 // its number, 0 outside
}

// Layout describes where the buffers of a group lie: for each, allocation kind, whether registered by the user, head offset, and what a peer on this host
// needs to reach it. All members' layouts go to Prepare. For libraries.
func (c *Comm) Layout(group []Call) ([]byte, error) {
	if len(group) > 0xffff {
		return nil, c.errorf("layout", causef(ErrArgument, "a group of %d calls", len(group)))
	}
	b := []byte{layoutVersion}
	b = binary.LittleEndian.AppendUint16(b, uint16(len(group)))
	for i := range group {
		call := &group[i]
		b = append(b, byte(call.Op))
		b = binary.LittleEndian.AppendUint32(b, uint32(call.Root))
		at := len(b)
		b = append(b, 0)
		for _, send := range []bool{true, false} {
			r := call.Recv
			if send {
				r = call.Send
			}
			if r.Mem == nil {
				continue
			}
			var flags byte
			if send {
				flags |= layoutSend
			}
			if c.userRegistered(r) != nil {
				flags |= layoutRegistered
			}
			b[at]++
			b = append(b, flags, byte(r.Mem.Kind()))
			window := uint64(0)
			if l, ok := c.be.(*library); ok {
				window = l.windowOf(r)
			}
			for _, w := range []uint64{r.Off, r.Len, r.Mem.ID(), r.Mem.Size(), window} {
				b = binary.LittleEndian.AppendUint64(b, w)
			}
		}
	}
	return b, nil
}

func decodeLayout(b []byte) ([]layoutCall, error) {
	if len(b) < 3 || b[0] != layoutVersion {
		return nil, fmt.Errorf("layout of %d bytes: unknown version", len(b))
	}
	n := int(binary.LittleEndian.Uint16(b[1:]))
	b = b[3:]
	var calls []layoutCall
	for i := range n {
		if len(b) < 6 {
			return nil, fmt.Errorf("layout: ends in call %d of %d", i+1, n)
		}
		c := layoutCall{op: Op(b[0]), root: int32(binary.LittleEndian.Uint32(b[1:]))}
		buffers := int(b[5])
		b = b[6:]
		if !c.op.valid() || buffers > 2 || len(b) < buffers*layoutBuffer {
			return nil, fmt.Errorf("layout: call %d: operation %d with %d buffers in %d bytes", i+1, uint8(c.op), buffers, len(b))
		}
		for range buffers {
			w := func(i int) uint64 { return binary.LittleEndian.Uint64(b[2+8*i:]) }
			buf := layoutBuf{flags: b[0], kind: cuda.AllocKind(b[1]), off: w(0), len: w(1), memory: w(2), memLen: w(3), window: w(4)}
			if buf.off > buf.memLen || buf.len > buf.memLen-buf.off {
				return nil, fmt.Errorf("layout: call %d: range of %d bytes at %d in memory of %d", i+1, buf.len, buf.off, buf.memLen)
			}
			c.buffers = append(c.buffers, buf)
			b = b[layoutBuffer:]
		}
		calls = append(calls, c)
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("layout: %d bytes behind the last call", len(b))
	}
	return calls, nil
}

// LayoutInfo is one buffer of a decoded layout.
type LayoutInfo struct {
	Send       bool // else the recv buffer
	Kind       cuda.AllocKind
	Registered bool   // by Comm.Register
	Offset     uint64 // from the head of the allocation
	ID         uint64 // of the allocation, in its process
	Window     uint64 // number of the library's window that it lies in, the same on all members; 0 outside
	Memory     string // for messages: "[0,4096) of 8192-byte allocation 7"
}

// DecodeLayout reads a member's layout: for each call of the group its buffers.
func DecodeLayout(b []byte) ([][]LayoutInfo, error) {
	calls, err := decodeLayout(b)
	if err != nil {
		return nil, err
	}
	infos := make([][]LayoutInfo, len(calls))
	for i, c := range calls {
		for _, buf := range c.buffers {
			infos[i] = append(infos[i], LayoutInfo{Send: buf.flags&layoutSend != 0, Kind: buf.kind, Registered: buf.flags&layoutRegistered != 0,
				Offset: buf.off, ID: buf.memory, Window: buf.window, Memory: fmt.Sprintf("[%d,%d) of %d-byte allocation %d", buf.off, buf.off+buf.len, buf.memLen, buf.memory)})
		}
	}
	return infos, nil
}

// Prepare does the real registration of a captured group: peers' memory is mapped here now, not at the first replay. The mappings live as
// long as the registrations of this rank's buffers in the group (which must exist). layouts are by rank; those that are nil take no part.
// It waits for the peers' registrations, at most as long as ctx. For libraries.
func (c *Comm) Prepare(ctx context.Context, group []Call, layouts [][]byte) error {
	if err := c.usable(); err != nil {
		return c.errorf("prepare", err)
	}
	if len(layouts) != len(c.ranks) {
		return c.errorf("prepare", causef(ErrArgument, "%d layouts for %d ranks", len(layouts), len(c.ranks)))
	}
	if err := c.be.prepare(ctx, group, layouts); err != nil {
		return c.errorf("prepare", err)
	}
	return nil
}
