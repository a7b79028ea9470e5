package graphs

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

var messages = map[string]*message{
	"call": {kind: kindCall, calls: 3, require: nccl.Window, place: "train.go:41", text: "all-reduce of 8 float32, sum", desc: []byte{1, 2, 3}, layout: []byte("layout"),
		never: "GORUN_WINDOWS=off", idle: []byte{0, 1}},
	"pair": {kind: kindPair, calls: 300, place: "a.go:1",
		sends: []transfer{{typ: cuda.Float32DType, count: 1 << 40, place: "a.go:2", layout: []byte{9}}, {typ: cuda.Int8DType}},
		recvs: []transfer{{typ: cuda.Float64DType, count: 1}}},
	"end":     {kind: kindEnd, calls: 7, place: "b.go:9", fate: fatePanicked, text: "boom", ordinal: 1 << 63, hash: 1<<64 - 1},
	"confirm": {kind: kindConfirm},
}

var compareMessages = cmp.Options{
	cmp.AllowUnexported(message{}, transfer{}),
	cmp.Comparer(func(a, b []byte) bool { return bytes.Equal(a, b) }),
}

func TestMessageRoundTrip(t *testing.T) {
	for name, m := range messages {
		t.Run(name, func(t *testing.T) {
			got, err := decodeMessage(m.encode())
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(got, m, compareMessages); d != "" {
				t.Errorf("decoded (-) differs from encoded (+):\n%s", d)
			}
		})
	}
}

func TestMessageDamaged(t *testing.T) {
	for name, m := range messages {
		b := m.encode()
		for n := range len(b) {
			if _, err := decodeMessage(b[:n]); !errors.Is(err, errMessage) {
				t.Errorf("%s cut to %d of %d bytes: error %v, want %v", name, n, len(b), err, errMessage)
			}
		}
		if _, err := decodeMessage(append(b, 0)); !errors.Is(err, errMessage) {
			t.Errorf("%s with a byte more: error %v, want %v", name, err, errMessage)
		}
	}
	// A count of transfers that the message does not have must not be believed.
	b := (&message{kind: kindPair}).encode()
	b = append(b[:len(b)-1], 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f)
	if _, err := decodeMessage(b); !errors.Is(err, errMessage) {
		t.Errorf("2^62 transfers: error %v, want %v", err, errMessage)
	}
}

func TestMessageCutsTexts(t *testing.T) {
	m := &message{kind: kindEnd, text: strings.Repeat("ä", maxText)}
	got, err := decodeMessage(m.encode())
	if err != nil {
		t.Fatal(err)
	}
	if len(got.text) > maxText || !strings.HasSuffix(got.text, "ä…") {
		t.Errorf("text of %d bytes ends with %q, want at most %d and a whole rune before the ellipsis", len(got.text), got.text[len(got.text)-5:], maxText)
	}
}

func FuzzDecodeMessage(f *testing.F) {
	for _, m := range messages {
		f.Add(m.encode())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMessage(b)
		if err != nil {
			return
		}
		again, err := decodeMessage(m.encode())
		if err != nil {
			t.Fatalf("decoded, but not again: %v", err)
		}
		// Texts may have been cut once.
		if d := cmp.Diff(again.encode(), m.encode()); d != "" {
			t.Error(d)
		}
	})
}

// fakeMeeting is an all-gather of n goroutines.
type fakeMeeting struct {
	mu    sync.Mutex
	n     int
	gens  map[int]*fakeGen
	limit int
}

type fakeGen struct {
	values [][]byte
	came   int
	done   chan struct{}
}

func (f *fakeMeeting) member(rank int) func([]byte) ([][]byte, error) {
	gen := 0
	return func(v []byte) ([][]byte, error) {
		if len(v) > f.limit {
			return nil, errors.New("value too large")
		}
		f.mu.Lock()
		g := f.gens[gen]
		if g == nil {
			g = &fakeGen{values: make([][]byte, f.n), done: make(chan struct{})}
			f.gens[gen] = g
		}
		gen++
		g.values[rank] = bytes.Clone(v)
		if g.came++; g.came == f.n {
			close(g.done)
		}
		f.mu.Unlock()
		<-g.done
		return g.values, nil
	}
}

func TestGather(t *testing.T) {
	for name, sizes := range map[string][]int{
		"empty":           {0, 0},
		"small":           {1, 20, 3},
		"one chunk":       {chunkSize, chunkSize - 1, 0},
		"one byte more":   {chunkSize + 1, 5},
		"several":         {3*chunkSize + 17, 1, 2 * chunkSize, 0},
		"a single member": {5 * chunkSize},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakeMeeting{n: len(sizes), gens: map[int]*fakeGen{}, limit: 64 << 10}
			want := make([][]byte, len(sizes))
			for r, n := range sizes {
				want[r] = bytes.Repeat([]byte{byte('a' + r)}, n)
			}
			var wg sync.WaitGroup
			for r := range sizes {
				wg.Go(func() {
					got, err := gather(want[r], f.member(r))
					if err != nil {
						t.Error(err)
						return
					}
					for i := range want {
						if !bytes.Equal(got[i], want[i]) {
							t.Errorf("rank %d: value of rank %d has %d bytes, want %d of %q", r, i, len(got[i]), len(want[i]), rune('a'+i))
						}
					}
				})
			}
			wg.Wait()
		})
	}
}

// TestGatherPair: a meeting of two gives each the other's value only.
func TestGatherPair(t *testing.T) {
	f := &fakeMeeting{n: 2, gens: map[int]*fakeGen{}, limit: 64 << 10}
	values := [][]byte{bytes.Repeat([]byte{'a'}, 3*chunkSize+1), []byte("short")}
	var wg sync.WaitGroup
	for r := range 2 {
		meet := f.member(r)
		wg.Go(func() {
			got, err := gather(values[r], func(v []byte) ([][]byte, error) {
				all, err := meet(v)
				if err != nil {
					return nil, err
				}
				return all[1-r : 2-r], nil
			})
			if err != nil {
				t.Error(err)
			} else if len(got) != 1 || !bytes.Equal(got[0], values[1-r]) {
				t.Errorf("rank %d got %d bytes, want %d", r, len(got[0]), len(values[1-r]))
			}
		})
	}
	wg.Wait()
}

func TestGatherRefusesNonsense(t *testing.T) {
	for name, replies := range map[string][][]byte{
		"short head":   {{1, 2}},
		"huge":         {{0xff, 0xff, 0xff, 0xff}},
		"wrong length": {{1, 0, 0, 0, 'a', 'b'}},
	} {
		if _, err := gather(nil, func([]byte) ([][]byte, error) { return replies, nil }); !errors.Is(err, errMessage) {
			t.Errorf("%s: error %v, want %v", name, err, errMessage)
		}
	}
	want := errors.New("no meeting")
	if _, err := gather(nil, func([]byte) ([][]byte, error) { return nil, want }); !errors.Is(err, want) {
		t.Errorf("error %v, want %v", err, want)
	}
}
