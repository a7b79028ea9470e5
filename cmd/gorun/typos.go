package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/gorun-dev/gorun/launcher"
	"github.com/gorun-dev/gorun/rankenv"
)

// tellTypos names the variables that were meant for something, it seems, and do nothing: those of -x NAME that are not set, and those of
// gorun's environment whose names are nearly ones that gorun or its ranks read. Others with GORUN_ may be the program's.
func tellTypos(io stdio, job launcher.Job, environ []string) {
	for _, name := range notSet(job) {
		fmt.Fprintf(io.err, "gorun: -x %s: the variable is not set here, and no rank is given it\n", name)
	}
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if near := misspelt(name); near != "" && value != "" {
			fmt.Fprintf(io.err, "gorun: variable %s: gorun reads none of this name; did you mean %s?\n", name, near)
		}
	}
}

// notSet are the names of all -x NAME that neither gorun's environment nor gorun itself sets, each once.
func notSet(job launcher.Job) []string {
	var names []string
	find := func(settings []launcher.Setting) {
		for i, s := range settings {
			given := slices.ContainsFunc(settings[i+1:], func(later launcher.Setting) bool { return later.Name == s.Name })
			if _, set := os.LookupEnv(s.Name); s.Inherit && !set && !given && !isSet(s.Name) && !slices.Contains(names, s.Name) {
				names = append(names, s.Name)
			}
		}
	}
	if len(job.Apps) == 0 {
		find(job.Env)
	}
	for _, a := range job.Apps {
		find(slices.Concat(job.Env, a.Env))
	}
	return names
}

// misspelt is the variable of gorun that a name most likely means, "" if it is one or none is near.
func misspelt(name string) string {
	const ours = "GORUN_"
	word, ok := strings.CutPrefix(name, ours)
	if !ok {
		return ""
	}
	var words []string
	for _, d := range flagDefs {
		if d.env != "" {
			words = append(words, strings.TrimPrefix(d.env, ours))
		}
	}
	for _, v := range rankenv.Vars {
		if v.Name == name {
			return ""
		}
		if v.By == rankenv.ByUser {
			words = append(words, strings.TrimPrefix(v.Name, ours))
		}
	}
	if slices.Contains(words, word) {
		return ""
	}
	for i := range words {
		words[i] = strings.ToLower(words[i])
	}
	near := launcher.Slip(word, words)
	if near == "" {
		return ""
	}
	return ours + strings.ToUpper(near)
}
