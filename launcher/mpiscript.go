package launcher

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// ScriptMPI is what a program has to do with MPI that is not linked with it: it is Python, and its script imports mpi4py; a tool that runs the program that
// it is given, such as valgrind; or a shell, whose script runs a program.
type ScriptMPI struct {
	Script  string // the script or the program that is given, as the user wrote it; "": neither
	Library string // the MPI library that it, or the interpreter's mpi4py, is linked with; "": that was not found, or there are several
	Given   bool   // it is a program that is given
	Named   bool   // it is a program that stands in a shell's script: what happens to it there is not known
}

// text says it of a program's name.
func (s ScriptMPI) text(by string) string {
	switch {
	case s.Named:
		return fmt.Sprintf("%s runs %s, which is linked with MPI", ShellQuote(by), ShellQuote(s.Script))
	case s.Given:
		return fmt.Sprintf("%s, which %s is given, is linked with MPI", ShellQuote(s.Script), ShellQuote(by))
	}
	return ShellQuote(s.Script) + " imports mpi4py"
}

// maxScript is how much of a script is read, in bytes: imports stand at the beginning.
const maxScript = 64 << 10

var importsMPI = regexp.MustCompile(`(?m)^[ \t]*(from|import)[ \t]+mpi4py\b`)

// maxGiven is how many arguments are looked at: the program that a tool is given stands behind the tool's own.
const maxGiven = 32

// starters are programs that start others in another launcher's job: gorun's process manager is not for these.
var starters = regexp.MustCompile(`^(mpi(run|exec).*|.*prun|srun|prte.*|orte.*|flux|jsrun|aprun|gorun|ssh)$`)

// shells read their script as words, if roughly.
var shells = regexp.MustCompile(`^(ba|da|z|k|c|tc|fi)?sh$`)

// FindScripts is what the scripts of a job's programs say of MPI: for Facts.Scripts, of which the programs and the current directory are known.
func (j Job) FindScripts(f Facts) []ScriptMPI {
	apps, err := j.apps()
	if err != nil {
		return nil // Plan says why
	}
	var scripts []ScriptMPI
	for i, a := range apps[:min(len(apps), len(f.Programs))] {
		dir := f.Dir
		if d := cmp.Or(a.Dir, j.Dir); d != "" {
			dir = absolute(f.Dir, d)
		}
		scripts = append(scripts, findScriptMPI(f.Programs[i], a.Args, dir))
	}
	return scripts
}

// findScriptMPI looks whether a program is Python with a script that imports mpi4py, or such a script itself, or is given a program that is linked with MPI, by its
// path, or is a shell whose script names one. A relative path is one of dir. Only files are read: what the interpreter would find by code of its own is not.
func findScriptMPI(p Program, args []string, dir string) ScriptMPI {
	if p.Path == "" || p.MPI != "" {
		return ScriptMPI{}
	}
	interpreter, script := p.Path, ""
	if strings.HasPrefix(filepath.Base(p.Path), "python") {
		script = pythonScript(args)
	} else if interpreter = shebangPython(p.Path); interpreter != "" {
		script = p.Path
	} else if given := givenMPI(p, args, dir); given.Script != "" {
		return given
	} else {
		return namedMPI(shellText(p, args, dir), dir)
	}
	if script == "" || !importsMPI.Match(beginning(absolute(dir, script))) {
		return ScriptMPI{}
	}
	found := ScriptMPI{Script: script, Library: mpi4pyLibrary(interpreter)}
	if script == p.Path {
		found.Script = p.Name
	}
	return found
}

// givenMPI is the first program among the arguments that is linked with MPI.
func givenMPI(p Program, args []string, dir string) ScriptMPI {
	if starters.MatchString(filepath.Base(p.Path)) {
		return ScriptMPI{}
	}
	for _, a := range args[:min(len(args), maxGiven)] {
		if !strings.Contains(a, "/") {
			continue
		}
		if file := absolute(dir, a); executable(file) == nil {
			if library := mpiLibrary(file); library != "" {
				return ScriptMPI{Script: a, Library: library, Given: true}
			}
		}
	}
	return ScriptMPI{}
}

// namedMPI is the first program that is linked with MPI and that a shell's text names by its path, unless the text names another launcher, too.
func namedMPI(text []byte, dir string) (found ScriptMPI) {
	looks := 0
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(strings.TrimSpace(line), "#") {
			continue
		}
		for _, word := range strings.FieldsFunc(line, func(r rune) bool { return unicode.IsSpace(r) || strings.ContainsRune("\"'`;|&()<>={}", r) }) {
			if starters.MatchString(filepath.Base(word)) {
				return ScriptMPI{}
			}
			if found.Script != "" || !strings.Contains(word, "/") || looks == maxGiven {
				continue
			}
			looks++
			if file := absolute(dir, word); executable(file) == nil {
				if library := mpiLibrary(file); library != "" {
					found = ScriptMPI{Script: word, Library: library, Named: true}
				}
			}
		}
	}
	return found
}

// shellText is what a shell runs: the program itself, if that is a script, or the script or text that a shell is given.
func shellText(p Program, args []string, dir string) []byte {
	if !shells.MatchString(filepath.Base(p.Path)) {
		if shells.MatchString(filepath.Base(shebang(p.Path))) {
			return beginning(p.Path)
		}
		return nil
	}
	for i := 0; i < len(args); i++ {
		switch a := args[i]; {
		case strings.HasPrefix(a, "--"):
		case !strings.HasPrefix(a, "-"):
			return beginning(absolute(dir, a))
		case strings.Contains(a, "c"): // -c, -ec, -ceu
			return []byte(strings.Join(args[i+1:min(len(args), i+2)], ""))
		case strings.HasSuffix(a, "o") || strings.HasSuffix(a, "O"): // -o pipefail, -euo pipefail
			i++
		}
	}
	return nil
}

// pythonScript is the script among the arguments of an interpreter; "" if it runs another thing.
func pythonScript(args []string) string {
	for i := 0; i < len(args); i++ {
		switch a := args[i]; {
		case a == "-X" || a == "-W":
			i++
		case a == "" || a == "-" || strings.HasPrefix(a, "-c") || strings.HasPrefix(a, "-m"):
			return ""
		case a[0] != '-':
			return a
		}
	}
	return ""
}

// beginning is the beginning of a regular file, up to maxScript; nil where it cannot be read.
func beginning(file string) []byte {
	f, _, err := openRegular(file)
	if err != nil {
		return nil
	}
	defer f.Close()
	text, _ := io.ReadAll(io.LimitReader(f, maxScript))
	return text
}

// shebang is the interpreter that the first line of a script names; "" if that names none.
func shebang(file string) string {
	line, _, _ := bytes.Cut(beginning(file), []byte{'\n'})
	text, is := strings.CutPrefix(string(line), "#!")
	words := strings.Fields(text)
	if !is || len(words) == 0 {
		return ""
	}
	name := words[0]
	if filepath.Base(name) == "env" {
		i := slices.IndexFunc(words[1:], func(w string) bool { return w[0] != '-' })
		if i < 0 {
			return ""
		}
		name = words[1+i]
	}
	return name
}

// shebangPython is the Python that the first line of a script names; "" if that is none.
func shebangPython(file string) string {
	name := shebang(file)
	if !strings.HasPrefix(filepath.Base(name), "python") {
		return ""
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return ""
	}
	return path
}

// mpi4pyLibrary is the MPI library that the mpi4py of an interpreter is linked with; "" if none is found where it has its packages, or they ask for different
// process managers.
func mpi4pyLibrary(interpreter string) string {
	places := filepath.SplitList(os.Getenv("PYTHONPATH"))         // the first that has it counts, as for the interpreter
	prefixes := []string{filepath.Dir(filepath.Dir(interpreter))} // a virtual environment's
	if home, err := os.UserHomeDir(); err == nil {
		prefixes = append(prefixes, filepath.Join(home, ".local"))
	}
	if real, err := filepath.EvalSymlinks(interpreter); err == nil {
		prefixes = append(prefixes, filepath.Dir(filepath.Dir(real)))
	}
	for _, p := range prefixes {
		places = append(places, p+"/lib/python3*/site-packages", p+"/local/lib/python3*/dist-packages", p+"/lib/python3/dist-packages")
	}
	for _, dir := range places {
		files, _ := filepath.Glob(filepath.Join(dir, "mpi4py", "MPI*.so"))
		library := ""
		for _, file := range files {
			lib := mpiLibrary(file)
			if library != "" && mpiDialect(lib) != mpiDialect(library) {
				return ""
			}
			library = lib
		}
		if len(files) > 0 {
			return library
		}
	}
	return ""
}
