package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// golden compares text with a file in testdata, which -update writes.
func golden(t *testing.T, file, got string) {
	t.Helper()
	file = filepath.Join("testdata", file)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(got, string(want)); d != "" {
		t.Errorf("%s: -got +want (-update writes it):\n%s", file, d)
	}
}

// The manual page is what it was, and man takes it without a word.
func TestManPage(t *testing.T) {
	page := manPage()
	golden(t, "gorun.1", page)
	for i, line := range strings.Split(page, "\n") {
		if strings.HasPrefix(line, "'") {
			t.Errorf("line %d is a request: %q", i+1, line)
		}
	}
	groff := citest.Program(t, "groff")
	cmd := exec.Command(groff, "-man", "-Tascii", "-ww", "-b", "-P-cbou")
	cmd.Stdin = strings.NewReader(page)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil || said.Len() > 0 {
		t.Errorf("groff: %v\n%s", err, said.String())
	}
	for _, want := range []string{"--output-dir DIR", "[3] before each line of rank 3", `"./examples/train"`, "EXIT STATUS"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the page does not show %q", want)
		}
	}
}

// Each flag is in all the places where it can be learnt, and in a job file, unless it is of the command line alone.
func TestFlagsAreDocumented(t *testing.T) {
	// -H is [[host]] and -x is [env].
	flagOnly := []string{"-H", "-x", "-f", "--dry-run", "--json", "-v", "--version", "-h"}
	help, page, env, jobFile := launchHelp(), manPage(), environmentHelp(), jobFileHelp()
	offered, _ := completeLaunch(nil, nil, "-")
	for i := range offered {
		offered[i], _, _ = strings.Cut(offered[i], "\t")
	}
	keys := map[string]string{} // of a job file, by flag
	for _, o := range launcher.JobOptions {
		if len(o.Flags) > 0 {
			keys[o.Flags[0]] = o.Key
		}
		if table, key, ok := strings.Cut(o.Key, "."); ok && !strings.Contains(jobFile, "\n  "+key+" = ") {
			t.Errorf("help job-file lacks %s of [%s]", key, table)
		}
	}
	for _, d := range flagDefs {
		for _, n := range d.names[:min(len(d.names), 2)] {
			if !strings.Contains(help, " "+n+" ") && !strings.Contains(help, " "+n+",") {
				t.Errorf("gorun help lacks %s", n)
			}
			if !strings.Contains(page, `\fB`+roff(n)+`\fR`) {
				t.Errorf("the manual page lacks %s", n)
			}
		}
		for _, n := range d.names {
			if !slices.Contains(offered, n) {
				t.Errorf("completion lacks %s", n)
			}
		}
		if d.env != "" && !strings.Contains(env, "  "+d.env+" ") {
			t.Errorf("help environment lacks %s", d.env)
		}
		if (keys[d.names[0]] == "") != slices.Contains(flagOnly, d.names[0]) {
			t.Errorf("%s: key of a job file %q; want one, or that it is listed here as a flag only", d.names[0], keys[d.names[0]])
		}
	}
	for _, name := range benchFlags {
		if !strings.Contains(benchHelp, " "+name+",") && !strings.Contains(benchHelp, " "+name+" ") && !strings.Contains(benchHelp, " "+name+".") && !strings.Contains(benchHelp, "\n"+name+",") && !strings.Contains(benchHelp, "\n"+name+" ") {
			t.Errorf("help of gorun bench lacks %s", name)
		}
	}
}

// The help names the flags that each of several programs may have.
func TestProgramFlagsAreDocumented(t *testing.T) {
	_, behind, _ := strings.Cut(description, "behind a colon stand")
	for _, d := range flagDefs {
		word := " " + d.names[0]
		if named := strings.Contains(behind, word+",") || strings.Contains(behind, word+" ") || strings.Contains(behind, word+"."); named != d.app {
			t.Errorf("%s is named behind a colon: %t, want %t", d.names[0], named, d.app)
		}
	}
}

// Help is for terminals of 100 columns: but for what is made of the tables of flags and variables, which have a line each.
func TestHelpFits(t *testing.T) {
	texts := map[string]string{"check": checkLong, "bench": benchHelp}
	for _, topic := range helpTopics() {
		if topic.name != "environment" && topic.name != "man" {
			texts[topic.name] = topic.text()
		}
	}
	for name, text := range texts {
		for line := range strings.Lines(text) {
			if len(line) > 101 {
				t.Errorf("help %s: line of %d columns: %q", name, len(line)-1, line)
			}
		}
	}
}

// Each exit code of launcher is in help exit-codes, and none that is no code.
func TestExitCodesAreDocumented(t *testing.T) {
	for name, code := range map[string]int{"usage": launcher.ExitUsage, "not started": launcher.ExitNotStarted, "host lost": launcher.ExitHostLost, "timeout": launcher.ExitTimeout,
		"internal": launcher.ExitInternal, "cannot run": launcher.ExitCannotRun, "not found": launcher.ExitNotFound, "ok": launcher.ExitOK} {
		n := 0
		for _, c := range exitCodes {
			if c.code == fmt.Sprint(code) {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%s, code %d, is %d times in help exit-codes, want once", name, code, n)
		}
	}
}

// Each command and topic is named by gorun help, and each topic named has its text.
func TestTopicsAreListed(t *testing.T) {
	list := commandsHelp()
	for _, word := range subcommands {
		if !strings.HasPrefix(word, "__") && !strings.Contains(list, "\n  "+word+" ") && !strings.HasPrefix(list, "  "+word+" ") {
			t.Errorf("gorun help does not list %s", word)
		}
	}
	for _, topic := range helpTopics() {
		if !strings.Contains(list, " "+topic.name) || len(topic.text()) == 0 {
			t.Errorf("gorun help does not list %s", topic.name)
		}
	}
	for line := range strings.Lines(list) {
		if len(line) > 91 {
			t.Errorf("line of %d columns: %q", len(line), line)
		}
	}
}

// The shells take the completion that is written for them.
func TestCompletionScripts(t *testing.T) {
	for shell, check := range map[string][]string{"bash": {"-n"}, "zsh": {"-n"}, "fish": {"--no-execute"}} {
		t.Run(shell, func(t *testing.T) {
			path := citest.Program(t, shell)
			j := newJob(t, "completion", shell)
			if got := j.run(); got != 0 || !strings.Contains(j.out.String(), "__complete") {
				t.Fatalf("exit code %d, %d bytes: %s", got, j.out.Len(), j.err.String())
			}
			file := filepath.Join(j.dir, "script")
			if err := os.WriteFile(file, j.out.Bytes(), 0o600); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command(path, append(check, file)...).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

func TestKnownHosts(t *testing.T) {
	home := t.TempDir()
	if err := os.Mkdir(filepath.Join(home, ".ssh"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"config":      "# Host no\nHost node-a node-b *.x !y\n  HostName 10.0.0.1\nhost node-c\nHost\n",
		"known_hosts": "node-b,10.0.0.2 ssh-ed25519 AAAA\n|1|abc=|def= ssh-ed25519 AAAA\n[node-d]:2222 ssh-ed25519 AAAA\n@cert-authority *.y ssh-ed25519 AAAA\n#\n",
	} {
		if err := os.WriteFile(filepath.Join(home, ".ssh", name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if d := cmp.Diff(knownHosts(home), []string{"10.0.0.2", "localhost", "node-a", "node-b", "node-c"}); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
	if d := cmp.Diff(knownHosts(t.TempDir()), []string{"localhost"}); d != "" {
		t.Errorf("of an empty home: -got +want:\n%s", d)
	}
}
