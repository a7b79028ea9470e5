package launcher

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// ScriptMPI is what a Python script that a program runs says of MPI.
type ScriptMPI struct {
	Script  string // as the user wrote it; "": there is none, or it does not import mpi4py
	Library string // the MPI library that the interpreter's mpi4py is linked with; "": it was not found, or there are several
}

// maxScript is how much of a script is read, in bytes: imports stand at the beginning.
const maxScript = 64 << 10

var importsMPI = regexp.MustCompile(`(?m)^[ \t]*(from|import)[ \t]+mpi4py\b`)

// FindScriptMPI looks whether a program is Python with a script that imports mpi4py, or such a script itself. A relative script is one of dir. Only files are read: what
// the interpreter would find by code of its own is not.
func FindScriptMPI(p Program, args []string, dir string) ScriptMPI {
	if p.Path == "" || p.MPI != "" {
		return ScriptMPI{}
	}
	interpreter, script := p.Path, ""
	if strings.HasPrefix(filepath.Base(p.Path), "python") {
		script = pythonScript(args)
	} else if interpreter = shebangPython(p.Path); interpreter != "" {
		script = p.Path
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

// beginning is the beginning of a regular file.
func beginning(file string) []byte {
	if info, err := os.Stat(file); err != nil || !info.Mode().IsRegular() { // to open a pipe waits for its writer
		return nil
	}
	f, err := os.Open(file)
	if err != nil {
		return nil
	}
	defer f.Close()
	text, _ := io.ReadAll(io.LimitReader(f, maxScript))
	return text
}

// shebangPython is the Python that the first line of a script names; "" if that is none.
func shebangPython(file string) string {
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
	var places []string // the first that has it counts, as for the interpreter
	for _, dir := range filepath.SplitList(os.Getenv("PYTHONPATH")) {
		places = append(places, dir)
	}
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
