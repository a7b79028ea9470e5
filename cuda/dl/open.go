package dl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// Spec says what a library is and where it may be.
type Spec struct {
	Name string // for people: "NCCL"
	gpulib.Search

	// Symbol is a function that only this library has. Its address tells which file was opened.
	Symbol string
	// Foreign are functions of other libraries that bear the same file name, with what those libraries are.
	Foreign map[string]string
	// Sole is the start of the file's base name ("libnccl.so") if two different files of it in one process break
	// each other: then a second one is refused.
	Sole string
}

// Attempt is a place whose library could not be used.
type Attempt struct {
	gpulib.Place
	Err error
}

// LoadError is a library that could not be opened, with every place that was tried.
type LoadError struct {
	Name     string
	Tried    []Attempt
	Override string // the variable that can name the file
}

func (e *LoadError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "load %s: no usable library", e.Name)
	for _, t := range e.Tried {
		fmt.Fprintf(&b, "\n\t%s (%s): %v", t.Path, t.From, t.Err)
	}
	if e.Override != "" && os.Getenv(e.Override) == "" {
		fmt.Fprintf(&b, "\n\tset %s to the file if it is elsewhere", e.Override)
	}
	return b.String()
}

// Unwrap gives the causes, so that errors.Is and As see them.
func (e *LoadError) Unwrap() []error {
	var errs []error
	for _, t := range e.Tried {
		errs = append(errs, t.Err)
	}
	return errs
}

// ErrSecondCopy is a library of which the process already has another file.
var ErrSecondCopy = errors.New("a different copy is already in this process")

// MissingError is a library that lacks functions that gorun cannot do without.
type MissingError struct {
	Name, Path string
	Symbols    []string
	Since      []string // the versions that brought them: "NCCL 2.7.3"
}

func (e *MissingError) Error() string {
	text := fmt.Sprintf("load %s: %s lacks %s", e.Name, e.Path, strings.Join(e.Symbols, ", "))
	if len(e.Since) > 0 {
		text += ": it is older than " + strings.Join(e.Since, " and ")
	}
	return text
}

// NeedError is a function or feature that the library that was found does not have.
type NeedError struct {
	What  string // "ncclCommWindowRegister", "windows"
	Needs string // "NCCL 2.27.3"; "" if no version is known to have it
	Found string // "NCCL 2.21.5"
	Path  string
}

func (e *NeedError) Error() string {
	if e.Needs == "" || e.Needs == e.Found {
		return fmt.Sprintf("%s is not in %s (%s)", e.What, e.Found, e.Path)
	}
	return fmt.Sprintf("%s needs %s, found %s (%s)", e.What, e.Needs, e.Found, e.Path)
}

// Library is an open library. It stays open for the life of the process, except in tests.
type Library struct {
	name   string
	handle uintptr
	path   string
	from   gpulib.Place
	tried  []Attempt
}

// Open opens the first that can be used.
func Open(s Spec) (*Library, error) {
	le := &LoadError{Name: s.Name, Override: s.Env}
	for _, c := range s.Places(gpulib.Here) {
		l, err := open(s, c)
		if err == nil {
			l.tried = le.Tried
			return l, nil
		}
		le.Tried = append(le.Tried, Attempt{c, err})
	}
	return nil, le
}

// Name is the Spec's.
func (l *Library) Name() string { return l.name }

// Path is the real path of the file that was opened.
func (l *Library) Path() string { return l.path }

// From is the place that worked.
func (l *Library) From() gpulib.Place { return l.from }

// Tried are the places before it, that did not.
func (l *Library) Tried() []Attempt { return l.tried }

func (l *Library) String() string { return fmt.Sprintf("%s (%s, by %s)", l.name, l.path, l.from.From) }

func open(s Spec, c gpulib.Place) (*Library, error) {
	if filepath.IsAbs(c.Path) {
		if err := gpulib.CheckFile(c.Path); err != nil {
			return nil, err
		}
		if s.Sole != "" {
			if other, err := otherCopy(s.Sole, c.Path); err != nil {
				return nil, err
			} else if other != "" {
				return nil, fmt.Errorf("%w: %s", ErrSecondCopy, other)
			}
		}
	}
	handle, err := dlopen(c.Path)
	if err != nil {
		return nil, err
	}
	l := &Library{name: s.Name, handle: handle, from: c}
	if err := l.verify(s); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// verify checks that the library is the one that is meant, and finds its file.
func (l *Library) verify(s Spec) error {
	for sym, what := range s.Foreign {
		if l.Lookup(sym) != 0 {
			return fmt.Errorf("it is %s (it has %s)", what, sym)
		}
	}
	addr := l.Lookup(s.Symbol)
	if addr == 0 {
		return fmt.Errorf("it is not %s (it lacks %s)", s.Name, s.Symbol)
	}
	path, err := fileAt(uintptr(addr))
	if err != nil {
		return err
	}
	l.path = path
	if s.Sole == "" {
		return nil
	}
	other, err := otherCopy(s.Sole, path)
	if err == nil && other != "" {
		err = fmt.Errorf("%w: %s", ErrSecondCopy, other)
	}
	return err
}

// Lookup is the address of a symbol, 0 if the library does not have it.
func (l *Library) Lookup(symbol string) Func {
	return Func(dlsym(l.handle, symbol))
}

// Symbol is a function to bind.
type Symbol struct {
	Entry    *Entry
	Names    []string // alternatives; the first that is there is taken
	Since    string   // the version that brought the function, for errors: "CUDA 12.0"
	Required bool
}

// Bind looks all symbols up. Absent optional ones leave an entry whose calls return Absent; absent required ones are
// one *MissingError.
func (l *Library) Bind(symbols []Symbol) error {
	var missing, since []string
	for _, s := range symbols {
		*s.Entry = Entry{Shape: -1, Since: s.Since}
		if len(s.Names) > 0 {
			s.Entry.Name = s.Names[0]
		}
		for i, n := range s.Names {
			if a := l.Lookup(n); a != 0 {
				*s.Entry = Entry{Func: a, Name: n, Shape: i, Since: s.Since}
				break
			}
		}
		if s.Entry.Func == 0 && s.Required {
			missing = append(missing, strings.Join(s.Names, " or "))
			if s.Since != "" && !slices.Contains(since, s.Since) {
				since = append(since, s.Since)
			}
		}
	}
	if missing != nil {
		return &MissingError{Name: l.name, Path: l.path, Symbols: missing, Since: since}
	}
	return nil
}

// Close unloads the library. Only for libraries that were never used and for tests: a used one has threads of its own.
func (l *Library) Close() { dlclose(l.handle) }
