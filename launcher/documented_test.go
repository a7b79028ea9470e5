package launcher

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// What the texts for users say of times and sizes is what the code does.
func TestNumbersAreDocumented(t *testing.T) {
	seconds := func(d time.Duration) string { return fmt.Sprintf("%g s", d.Seconds()) }
	for _, c := range []struct {
		file, text string
	}{
		{"help.go", "the others get " + seconds(lastWords) + " to end by themselves"},
		{"help_account.go", "gives the other ranks " + seconds(lastWords) + " to end by themselves, asks them to\nend (SIGTERM) and kills them after --kill-grace"},
		{"help_account.go", "they get up to " + seconds(mostWords) + " as\nlong as they wait for a CPU there"},
		{"help_account.go", "has not answered for " + seconds(silentAgreed)},
		{"help_account.go", seconds(silentAlone) + " without an\nanswer are enough alone"},
		{"help_account.go", "after " + seconds(silentAgent) + " in any case"},
		{"help_output.go", fmt.Sprintf("A line of more than %d KiB is passed on in pieces", maxLine>>10)},
		{"help_output.go", "after a pause of " + seconds(pause) + ", and at the latest " + seconds(longPause)},
		{"help_output.go", "wait up to " + seconds(hold) + " for the rest of the line"},
		{"help_output.go", "has " + seconds(drainAfterSignal) + " for it"},
		{"../../README.md", "The other ranks get " + seconds(lastWords) + " for their last words, then they are asked to end (SIGTERM) and killed after `--kill-grace` (" + seconds(DefaultKillGrace) + ")"},
		{"help_account.go", fmt.Sprintf("the first and the last\n                 %s;", map[int]string{9: "nine"}[lateAttempts])},
	} {
		text, err := os.ReadFile("../cmd/gorun/" + c.file)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), c.text) {
			t.Errorf("%s does not say %q", c.file, c.text)
		}
	}
	for _, o := range JobOptions {
		// A default that help names is the option's.
		if _, rest, ok := strings.Cut(o.Help, "(default "); ok && o.Default != "" {
			if said, _, _ := strings.Cut(rest, ")"); said != o.Default {
				t.Errorf("%s: help says default %s, it is %s", o.Flags[0], said, o.Default)
			}
		}
	}
	for flag, d := range map[string]time.Duration{"--kill-grace": DefaultKillGrace, "--connect-timeout": DefaultConnectTimeout} {
		if want := fmt.Sprintf("(default %v)", d); !strings.Contains(optionOf(flag).Help, want) {
			t.Errorf("help of %s does not say %s", flag, want)
		}
	}
}
