package main

import (
	"debug/elf"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/gorun-dev/gorun"

func goList(t *testing.T, args ...string) []string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		if e, ok := err.(*exec.ExitError); ok {
			t.Fatalf("go list %s: %s", strings.Join(args, " "), e.Stderr)
		}
		t.Fatal(err)
	}
	return strings.Fields(string(out))
}

func under(pkg, path string) bool { return pkg == path || strings.HasPrefix(pkg, path+"/") }

// Whatever is linked into a program, directly or not.
func TestDependencies(t *testing.T) {
	unraced(t)
	const memberlist, crypto, purego = "github.com/hashicorp/memberlist", "golang.org/x/crypto", "github.com/ebitengine/purego"
	// What a rank links: the packages for programs, and the programs that are there.
	ranks := append([]string{"./graphs", "./nccl", "./cuda", "./bootstrap", "./rankenv", "./cmd/gorun-bench"},
		goList(t, "-f", `{{if eq .Name "main"}}{{.ImportPath}}{{end}}`, "./examples/...")...)
	for _, c := range []struct {
		what string
		pkgs []string
		not  []string
	}{
		{"gorun opens no GPU library", []string{"./cmd/gorun", "./launcher/..."}, []string{purego, module + "/cuda", module + "/nccl", module + "/graphs"}},
		{"a rank is small", ranks, []string{memberlist, crypto, "github.com/spf13/cobra", "github.com/BurntSushi/toml", module + "/launcher", module + "/bootstrap/node"}},
		{"cuda knows no collectives", []string{"./cuda/..."}, []string{module + "/nccl", module + "/graphs", module + "/bootstrap"}},
		{"nccl knows no capture policy", []string{"./nccl/..."}, []string{module + "/graphs"}},
		{"bootstrap knows no devices", []string{"./bootstrap/node"}, []string{module + "/nccl", module + "/cuda", module + "/launcher"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			deps := goList(t, append([]string{"-deps"}, c.pkgs...)...)
			if len(deps) < 10 {
				t.Fatalf("go list gives only %v", deps)
			}
			for _, d := range deps {
				for _, n := range c.not {
					if under(d, n) {
						t.Errorf("%v link %s", c.pkgs, d)
					}
				}
			}
		})
	}
}

// Who may import whom within the module, and which modules from outside.
func TestImports(t *testing.T) {
	unraced(t)
	for _, c := range []struct {
		pkg  string
		may  []string // of this module
		mods []string // of others
	}{
		{"cmd/gorun", []string{"launcher", "rankenv"}, []string{"github.com/spf13/cobra", "golang.org/x/sys"}},
		{"launcher", []string{"launcher/internal", "bootstrap/node", "rankenv"}, []string{"github.com/BurntSushi/toml", "golang.org/x/sys"}},
		{"launcher/internal/keeper", nil, nil},
		{"launcher/internal/hostfacts", []string{"rankenv/gpulib", "launcher/internal/files"}, []string{"golang.org/x/sys"}},
		{"bootstrap/node", []string{"bootstrap/internal", "rankenv"}, []string{"github.com/hashicorp/memberlist", "golang.org/x/sys"}},
		{"bootstrap", []string{"bootstrap/internal", "rankenv"}, []string{"golang.org/x/sys"}},
		{"rankenv", nil, nil},
		{"rankenv/gpulib", nil, nil},
	} {
		t.Run(c.pkg, func(t *testing.T) {
			for _, imp := range goList(t, "-f", `{{join .Imports "\n"}}`, "./"+c.pkg) {
				first, _, _ := strings.Cut(imp, "/")
				allowed := c.mods
				name := imp
				switch {
				case under(imp, module):
					allowed, name = c.may, strings.TrimPrefix(imp, module+"/")
				case !strings.Contains(first, "."):
					continue // standard library
				}
				if !slices.ContainsFunc(allowed, func(a string) bool { return under(name, a) }) {
					t.Errorf("%s imports %s", c.pkg, imp)
				}
			}
		})
	}
}

// gorun and its agent are one file that runs on any Linux.
func TestStatic(t *testing.T) {
	unraced(t)
	file := filepath.Join(t.TempDir(), "gorun")
	cmd := exec.Command("go", "build", "-o", file, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	f, err := elf.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("gorun has a segment %v: it needs a dynamic loader", p.Type)
		}
	}
	if libs, err := f.ImportedLibraries(); err == nil && len(libs) > 0 {
		t.Errorf("gorun needs %v", libs)
	}
}

// Only main ends the process: a library that did would take a job's clean-up with it.
func TestExitOnlyInMain(t *testing.T) {
	for _, dir := range []string{".", "../../launcher", "../../launcher/internal/keeper", "../../bootstrap", "../../bootstrap/node", "../../rankenv"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no files in %s: %v", dir, err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") || file == "main.go" {
				continue
			}
			fset := token.NewFileSet()
			tree, err := parser.ParseFile(fset, file, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(tree, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				sel, ok := call.Fun.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				pkg, ok := sel.X.(*ast.Ident)
				if ok && (pkg.Name == "os" && sel.Sel.Name == "Exit" || pkg.Name == "log" && strings.HasPrefix(sel.Sel.Name, "Fatal")) {
					t.Errorf("%v: %s.%s", fset.Position(call.Pos()), pkg.Name, sel.Sel.Name)
				}
				return true
			})
		}
	}
}
