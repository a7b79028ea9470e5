package main

import (
	"bufio"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// completeLaunch completes the command line of a launch: flags and their values up to the program, files behind it, and so on behind
// each colon.
func completeLaunch(_ *cobra.Command, before []string, word string) ([]string, cobra.ShellCompDirective) {
	further, program := false, false
	var wants *flagDef // the flag whose value comes next
	for _, a := range before {
		switch {
		case wants != nil:
			wants = nil
		case a == "--":
			return nil, cobra.ShellCompDirectiveDefault
		case a == ":":
			further, program = true, false
		case program:
		case len(a) < 2 || a[0] != '-':
			program = true
		case !strings.Contains(a, "="):
			if d := findFlag(a); d != nil && d.arg != "" {
				wants = d
			}
		}
	}
	switch {
	case wants != nil:
		return completeValue(wants, "", word)
	case program || !strings.HasPrefix(word, "-"):
		return nil, cobra.ShellCompDirectiveDefault
	}
	if name, value, ok := strings.Cut(word, "="); ok {
		if d := findFlag(name); d != nil {
			return completeValue(d, name+"=", value)
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, d := range flagDefs {
		if further && !d.app {
			continue
		}
		for _, n := range d.names {
			if strings.HasPrefix(n, word) {
				names = append(names, n+"\t"+d.help)
			}
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeBench completes gorun bench: the flags of a launch that it takes.
func completeBench(_ *cobra.Command, before []string, word string) ([]string, cobra.ShellCompDirective) {
	known := func(d *flagDef) bool { return d != nil && slices.Contains(benchFlags, d.names[0]) }
	if n := len(before); n > 0 && !strings.Contains(before[n-1], "=") {
		if d := findFlag(before[n-1]); known(d) && d.arg != "" && before[n-1][0] == '-' {
			return completeValue(d, "", word)
		}
	}
	var names []string
	for i := range flagDefs {
		if d := &flagDefs[i]; known(d) && strings.HasPrefix(d.names[0], word) {
			names = append(names, d.names[0]+"\t"+d.help)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeValue completes what a flag is given; prefix stands before it in the same word.
func completeValue(d *flagDef, prefix, value string) ([]string, cobra.ShellCompDirective) {
	var words []string
	directive := cobra.ShellCompDirectiveNoFileComp
	switch {
	case len(d.values) > 0:
		words = d.values
	case d.arg == "" && d.mayBeOff:
		words = []string{"true", "false"}
	case d.arg == "DIR":
		return nil, cobra.ShellCompDirectiveFilterDirs
	case d.arg == "FILE" || d.arg == "CMD":
		return nil, cobra.ShellCompDirectiveDefault
	case d.arg == "LIST":
		// One host after the other; slots may follow.
		done := strings.LastIndexByte(value, ',') + 1
		for _, h := range knownHosts(os.Getenv("HOME")) {
			words = append(words, value[:done]+h)
		}
		directive |= cobra.ShellCompDirectiveNoSpace
	case d.arg == "NAME[=VALUE]":
		for _, kv := range os.Environ() {
			name, _, _ := strings.Cut(kv, "=")
			words = append(words, name)
		}
		slices.Sort(words)
		directive |= cobra.ShellCompDirectiveNoSpace
	}
	var out []string
	for _, w := range words {
		if strings.HasPrefix(w, value) {
			out = append(out, prefix+w)
		}
	}
	return out, directive
}

// knownHosts are the names in a user's ssh configuration and known_hosts. Patterns, hashed names and addresses with a port are left out, and what cannot
// be read.
func knownHosts(home string) []string {
	names := []string{"localhost"}
	fields := func(file string, each func(words []string)) {
		f, err := os.Open(filepath.Join(home, ".ssh", file))
		if err != nil {
			return
		}
		defer f.Close()
		for s := bufio.NewScanner(io.LimitReader(f, 1<<20)); s.Scan(); {
			if words := strings.Fields(s.Text()); len(words) > 1 && !strings.HasPrefix(words[0], "#") {
				each(words)
			}
		}
	}
	fields("config", func(words []string) {
		if strings.EqualFold(words[0], "Host") {
			names = append(names, words[1:]...)
		}
	})
	fields("known_hosts", func(words []string) {
		if words[0][0] != '@' {
			names = append(names, strings.Split(words[0], ",")...)
		}
	})
	names = slices.DeleteFunc(names, func(n string) bool { return n == "" || strings.ContainsAny(n, `*?!|[]"=`) })
	slices.Sort(names)
	return slices.Compact(names)
}
