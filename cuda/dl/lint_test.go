package dl

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// The rules about pointers to Go variables in calls of C. Breaking them loses what C writes whenever the stack grows
// inside the call, which no ordinary test sees.
//
//   - No function returns uintptr(unsafe.Pointer(x)).
//   - In packages that call C, uintptr(unsafe.Pointer(x)) stands in the argument list of a function that is marked
//     //go:uintptrescapes, or of a system call.
//   - In those packages, a function that passes its own uintptr arguments on to such a function is marked itself. What is
//     not an address has a type of its own.
const marker = "//go:uintptrescapes"

// callers are the imports that make a package one that calls C.
var callers = []string{
	"github.com/ebitengine/purego",
	"github.com/gorun-dev/gorun/cuda/dl",
	"github.com/gorun-dev/gorun/cuda/internal/cusys",
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys",
}

// escaping are the functions that are marked in other modules and the standard library.
var escaping = []string{"SyscallN", "Syscall", "Syscall6", "RawSyscall", "RawSyscall6"}

// pointerFaults finds breaches in the parsed files of a module.
func pointerFaults(fset *token.FileSet, files []*ast.File) []string {
	marked := map[string]bool{}
	for _, n := range escaping {
		marked[n] = true
	}
	for _, f := range files {
		for _, d := range f.Decls {
			if fd, ok := d.(*ast.FuncDecl); ok && isMarked(fd) {
				marked[fd.Name.Name] = true
			}
		}
	}
	var out []string
	fault := func(n ast.Node, text string) {
		out = append(out, fmt.Sprintf("%s: %s", fset.Position(n.Pos()), text))
	}
	for _, f := range files {
		for _, d := range f.Decls {
			ast.Inspect(d, func(n ast.Node) bool {
				if r, ok := n.(*ast.ReturnStmt); ok {
					for _, e := range r.Results {
						if isPointerNumber(e) {
							fault(e, "returns a pointer as a number: the variable may move before it is used")
						}
					}
				}
				return true
			})
		}
		if !callsC(f) {
			continue
		}
		good := map[ast.Node]bool{}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				if marked[calleeName(n)] {
					for _, a := range n.Args {
						good[a] = true
					}
				}
			case *ast.ReturnStmt:
				for _, e := range n.Results {
					good[e] = true // told above
				}
			}
			if e, ok := n.(ast.Expr); ok && isPointerNumber(e) && !good[e] {
				fault(e, "makes a pointer a number outside the argument list of a marked function")
			}
			return true
		})
		for _, d := range f.Decls {
			fd, ok := d.(*ast.FuncDecl)
			if !ok || fd.Body == nil || isMarked(fd) {
				continue
			}
			numbers := uintptrParams(fd.Type)
			ast.Inspect(fd.Body, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.FuncLit: // cannot be marked at all
					numbers = append(numbers, uintptrParams(n.Type)...)
				case *ast.CallExpr:
					if !marked[calleeName(n)] {
						return true
					}
					for _, a := range n.Args {
						if id, ok := a.(*ast.Ident); ok && slices.Contains(numbers, id.Name) {
							fault(a, fmt.Sprintf("%s passes its argument %s to %s, but is not marked %s", fd.Name.Name, id.Name, calleeName(n), marker))
						}
					}
				}
				return true
			})
		}
	}
	return out
}

func isMarked(fd *ast.FuncDecl) bool {
	return fd.Doc != nil && slices.ContainsFunc(fd.Doc.List, func(c *ast.Comment) bool { return strings.TrimSpace(c.Text) == marker })
}

// isPointerNumber matches uintptr(unsafe.Pointer(…)), also in parentheses.
func isPointerNumber(e ast.Expr) bool {
	c, ok := ast.Unparen(e).(*ast.CallExpr)
	if !ok || len(c.Args) != 1 {
		return false
	}
	if id, ok := ast.Unparen(c.Fun).(*ast.Ident); !ok || id.Name != "uintptr" {
		return false
	}
	in, ok := ast.Unparen(c.Args[0]).(*ast.CallExpr)
	if !ok {
		return false
	}
	sel, ok := ast.Unparen(in.Fun).(*ast.SelectorExpr)
	if !ok || sel.Sel.Name != "Pointer" {
		return false
	}
	pkg, ok := sel.X.(*ast.Ident)
	return ok && pkg.Name == "unsafe"
}

func calleeName(c *ast.CallExpr) string {
	switch f := ast.Unparen(c.Fun).(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		return f.Sel.Name
	}
	return ""
}

// uintptrParams are the names of the parameters of type uintptr or ...uintptr.
func uintptrParams(t *ast.FuncType) []string {
	var out []string
	for _, p := range t.Params.List {
		typ := p.Type
		if e, ok := typ.(*ast.Ellipsis); ok {
			typ = e.Elt
		}
		if id, ok := typ.(*ast.Ident); ok && id.Name == "uintptr" {
			for _, n := range p.Names {
				out = append(out, n.Name)
			}
		}
	}
	return out
}

func callsC(f *ast.File) bool {
	if f.Name.Name == "dl" {
		return true
	}
	return slices.ContainsFunc(f.Imports, func(i *ast.ImportSpec) bool { return slices.Contains(callers, strings.Trim(i.Path.Value, `"`)) })
}

// moduleFiles parses all Go files of the module that the test stands in.
func moduleFiles(t *testing.T, fset *token.FileSet) []*ast.File {
	t.Helper()
	root, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(root, "go.mod")); err == nil {
			break
		}
		if root == filepath.Dir(root) {
			citest.Lacking(t, "the module's source: no go.mod above this test")
		}
		root = filepath.Dir(root)
	}
	var files []*ast.File
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := e.Name()
		if e.IsDir() && path != root && (name == "testdata" || strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_")) {
			return filepath.SkipDir
		}
		if e.IsDir() || !strings.HasSuffix(name, ".go") {
			return nil
		}
		f, err := parser.ParseFile(fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestPointersInTheModule(t *testing.T) {
	fset := token.NewFileSet()
	files := moduleFiles(t, fset)
	calling := 0
	for _, f := range files {
		if callsC(f) {
			calling++
		}
	}
	if calling < 20 {
		t.Errorf("only %d files that call C were found: the test looks in the wrong place", calling)
	}
	for _, fault := range pointerFaults(fset, files) {
		t.Error(fault)
	}
}

func TestPointerFaultsAreFound(t *testing.T) {
	const head = "package p\n\nimport (\n\t\"unsafe\"\n\n\t\"github.com/ebitengine/purego\"\n)\n\n"
	tests := []struct {
		name, src string
		want      []string
	}{
		{"helper that returns the number", head + "func P[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }",
			[]string{"x.go:9:38: returns a pointer as a number: the variable may move before it is used"}},
		{"the same without calls of C", "package p\n\nimport \"unsafe\"\n\nfunc P(p *int) uintptr { return (uintptr)((unsafe.Pointer)(p)) }",
			[]string{"x.go:5:33: returns a pointer as a number: the variable may move before it is used"}},
		{"variadic wrapper", head + "func call(f uintptr, a ...uintptr) uintptr {\n\tr, _, _ := purego.SyscallN(f, a...)\n\treturn r\n}", []string{
			"x.go:10:29: call passes its argument f to SyscallN, but is not marked //go:uintptrescapes",
			"x.go:10:32: call passes its argument a to SyscallN, but is not marked //go:uintptrescapes"}},
		{"wrapper of a marked wrapper", head + "//go:uintptrescapes\nfunc good(a uintptr) { purego.SyscallN(1, a) }\n\nfunc bad(a uintptr) { good(a) }",
			[]string{"x.go:12:28: bad passes its argument a to good, but is not marked //go:uintptrescapes"}},
		{"function literal", head + "func f() { g := func(a uintptr) { purego.SyscallN(1, a) }; g(0) }",
			[]string{"x.go:9:54: f passes its argument a to SyscallN, but is not marked //go:uintptrescapes"}},
		{"mark in a comment", head + "// //go:uintptrescapes\nfunc f(a uintptr) { purego.SyscallN(1, a) }",
			[]string{"x.go:10:40: f passes its argument a to SyscallN, but is not marked //go:uintptrescapes"}},
		{"kept in a variable", head + "func f(p *int) { a := uintptr(unsafe.Pointer(p)); purego.SyscallN(1, a) }",
			[]string{"x.go:9:23: makes a pointer a number outside the argument list of a marked function"}},
		{"argument of an unmarked function", head + "func f(p *int) { g(uintptr(unsafe.Pointer(p))) }\n\nfunc g(uintptr) {}",
			[]string{"x.go:9:20: makes a pointer a number outside the argument list of a marked function"}},
		{"arithmetic", head + "func f(p *int) { purego.SyscallN(1, uintptr(unsafe.Pointer(p))+8) }",
			[]string{"x.go:9:37: makes a pointer a number outside the argument list of a marked function"}},
		{"good forms", head + "//go:uintptrescapes\nfunc good(a ...uintptr) { purego.SyscallN(1, a...) }\n\nfunc f(p *int, n handle) {\n\tgood(uintptr(unsafe.Pointer(p)), uintptr(n))\n\tpurego.SyscallN(1, uintptr(unsafe.Pointer(p)))\n}\n\ntype handle uintptr", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			fset := token.NewFileSet()
			f, err := parser.ParseFile(fset, "x.go", tt.src, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(pointerFaults(fset, []*ast.File{f}), tt.want); diff != "" {
				t.Errorf("faults (-got +want):\n%s", diff)
			}
		})
	}
}
