package stacks

import (
	"bytes"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"
)

// Goroutine is one of a dump.
type Goroutine struct {
	ID     int     `json:"id"`
	State  string  `json:"state"` // as the runtime says: "select", "sync.Mutex.Lock", "IO wait"
	Frames []Frame `json:"frames"`
	By     string  `json:"by,omitempty"` // the function that started it
}

// Frame is a call.
type Frame struct {
	Func string `json:"func"` // with its package's path, without arguments
	Line string `json:"line"` // file and line, with the file's directory: "train/main.go:88"
}

const (
	maxGoroutines = 4096 // of a dump; the others are like them
	maxFrames     = 100  // as many as the runtime writes
	maxText       = 400  // of a name, in bytes
)

// ParseGo reads what runtime.Stack, or a dying Go program, writes. Lines around it, and what is cut off at its end, are skipped.
func ParseGo(dump []byte) []Goroutine {
	var all []Goroutine
	var g *Goroutine
	for len(dump) > 0 {
		line, rest, _ := bytes.Cut(dump, []byte{'\n'})
		dump = rest
		text := strings.TrimRight(string(line), "\r")
		if id, state, ok := header(text); ok {
			if len(all) == maxGoroutines {
				break
			}
			all = append(all, Goroutine{ID: id, State: state})
			g = &all[len(all)-1]
			continue
		}
		if g == nil {
			continue
		}
		switch at, indented := strings.CutPrefix(text, "\t"); {
		case text == "":
			g = nil
		case indented:
			if n := len(g.Frames); n > 0 && g.By == "" && g.Frames[n-1].Line == "" {
				g.Frames[n-1].Line = place(at)
			}
		case strings.HasPrefix(text, "created by "):
			by, _, _ := strings.Cut(strings.TrimPrefix(text, "created by "), " in goroutine ")
			g.By = clip(by)
		case len(g.Frames) < maxFrames && strings.HasSuffix(text, ")") && !strings.HasPrefix(text, "..."):
			g.Frames = append(g.Frames, Frame{Func: clip(function(text))})
		}
	}
	return all
}

// header reads "goroutine 7 [sync.Mutex.Lock, 2 minutes]:", and what later releases of Go put between the number and the bracket.
func header(line string) (id int, state string, ok bool) {
	line, ok = strings.CutPrefix(line, "goroutine ")
	if !ok {
		return 0, "", false
	}
	number, rest, _ := strings.Cut(line, " ")
	id, err := strconv.Atoi(number)
	from := strings.IndexByte(rest, '[')
	if err != nil || id < 0 || from < 0 || !strings.HasSuffix(rest, "]:") {
		return 0, "", false
	}
	// Times and the lock to a thread differ between ranks that do the same.
	state, _, _ = strings.Cut(rest[from+1:len(rest)-len("]:")], ", ")
	return id, clip(strings.TrimSuffix(state, " (scan)")), true
}

// function is a call's name: "main.(*T).run(0x1, ...)" is "main.(*T).run".
func function(call string) string {
	depth := 0
	for i := len(call) - 1; i >= 0; i-- {
		switch call[i] {
		case ')':
			depth++
		case '(':
			if depth--; depth == 0 {
				return call[:i]
			}
		}
	}
	return call
}

// place is "train/main.go:88" of "/src/train/main.go:88 +0x1d".
func place(at string) string {
	at, _, _ = strings.Cut(at, " +0x")
	dir, file := filepath.Split(at)
	return clip(filepath.Join(filepath.Base(dir), file))
}

func clip(s string) string {
	if len(s) > maxText {
		s = s[:maxText]
	}
	// Processes choose their names: they are not to write to a terminal.
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}

// module is the path of gorun's own packages.
const module = "github.com/gorun-dev/gorun/"

// own reports whether a function is of the runtime or of gorun's packages that a program calls, not of the program.
func own(function string) bool {
	if rest, ok := strings.CutPrefix(function, module); ok {
		pkg, _, _ := strings.Cut(rest, ".")
		top, _, _ := strings.Cut(pkg, "/")
		return top != "examples" && top != "cmd" // those are programs
	}
	pkg := function
	if i := strings.LastIndexByte(function, '/'); i >= 0 {
		dot := strings.IndexByte(function[i:], '.')
		if dot < 0 {
			return false
		}
		pkg = function[:i+dot]
	} else if dot := strings.IndexByte(function, '.'); dot >= 0 {
		pkg = function[:dot]
	}
	first, _, _ := strings.Cut(pkg, "/")
	switch first {
	case "runtime", "internal", "sync", "syscall", "os", "net", "time", "context", "reflect", "vendor", "io", "bufio":
		return true
	}
	return false
}

// machinery reports whether nobody but the runtime and gorun itself has a hand in a goroutine.
func (g *Goroutine) machinery() bool {
	if g.ID == 1 {
		return false
	}
	for _, f := range g.Frames {
		if !own(f.Func) {
			return false
		}
	}
	return g.By == "" || own(g.By)
}

// innards reports whether a function is of the Go runtime, below what a person wants to see.
func innards(function string) bool {
	return strings.HasPrefix(function, "runtime.") || strings.HasPrefix(function, "internal/") || strings.HasPrefix(function, "runtime/")
}
