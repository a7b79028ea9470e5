package main

import (
	"fmt"
	"strings"
)

// manPage is the manual page gorun(1), in roff. It is made of what help shows.
func manPage() string {
	var b strings.Builder
	b.WriteString(".TH GORUN 1 \"\" \"gorun\" \"User Commands\"\n.nh\n.SH NAME\ngorun \\- start the ranks of an SPMD program\n.SH SYNOPSIS\n")
	verbatim(&b, synopsis)
	b.WriteString(".SH DESCRIPTION\n")
	paragraphs(&b, description)
	b.WriteString(".SH OPTIONS\n")
	for _, d := range flagDefs {
		var names []string
		for _, n := range d.names[:min(len(d.names), 2)] {
			names = append(names, `\fB`+roff(n)+`\fR`)
		}
		arg := ""
		if d.arg != "" {
			arg = ` \fI` + roff(d.arg) + `\fR`
		}
		fmt.Fprintf(&b, ".TP\n%s%s\n%s\n", strings.Join(names, ", "), arg, roff(d.helpAndEnv()))
	}
	b.WriteString(".PP\n" + roff(precedence) + "\n.SH COMMANDS\n")
	verbatim(&b, commandsHelp())
	b.WriteString(".SH EXIT STATUS\n")
	for _, c := range exitCodes {
		fmt.Fprintf(&b, ".TP\n\\fB%s\\fR\n%s\n", roff(c.code), roff(c.text))
	}
	b.WriteString(".PP\n" + roff(exitCodesEnd) + "\n")
	for _, t := range helpTopics() {
		if t.name == "exit-codes" || t.name == "man" {
			continue
		}
		title := strings.ToUpper(strings.ReplaceAll(t.name, "-", " "))
		fmt.Fprintf(&b, ".SH %s\n", roff(title))
		verbatim(&b, t.text())
	}
	b.WriteString(".SH SEE ALSO\n" + roff("gorun check --help, gorun config --help, gorun bench --help; ssh_config(5), taskset(1), mpirun(1)") + "\n")
	return b.String()
}

// verbatim writes text whose lines stand as they are.
func verbatim(b *strings.Builder, text string) {
	b.WriteString(".nf\n")
	for line := range strings.Lines(strings.TrimRight(text, "\n")) {
		b.WriteString(roff(strings.TrimSuffix(line, "\n")) + "\n")
	}
	b.WriteString(".fi\n")
}

// paragraphs writes text that is filled.
func paragraphs(b *strings.Builder, text string) {
	for i, p := range strings.Split(strings.TrimSpace(text), "\n\n") {
		if i > 0 {
			b.WriteString(".PP\n")
		}
		for line := range strings.Lines(p) {
			b.WriteString(roff(strings.TrimSuffix(line, "\n")) + "\n")
		}
	}
}

var roffSigns = strings.NewReplacer(`\`, `\e`, "-", `\-`)

// roff is a line of text that roff takes for nothing else.
func roff(line string) string {
	line = roffSigns.Replace(line)
	if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
		line = `\&` + line
	}
	return line
}
