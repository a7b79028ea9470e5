package main

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// randomWord is a word of any bytes but zero: mostly those that a shell, a terminal or a protocol could stumble over.
func randomWord(rnd *rand.Rand) string {
	const odd = " \t\n\r'\"\\$`!*?[]{}()<>|&;#~=%^,:@-+/"
	word := make([]byte, rnd.IntN(12))
	if rnd.IntN(20) == 0 {
		word = make([]byte, 5000)
	}
	for i := range word {
		if word[i] = odd[rnd.IntN(len(odd))]; rnd.IntN(2) == 0 {
			word[i] = byte(1 + rnd.IntN(255))
		}
	}
	return string(word)
}

// Arguments and variables arrive alike on this host and on four others. GORUN_TEST_JOBS=100 tries more of them.
func TestRandomVectors(t *testing.T) {
	jobs := often(12)
	if s := os.Getenv("GORUN_TEST_JOBS"); s != "" {
		var err error
		if jobs, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	home := remoteHome(t)
	every := make([]byte, 255)
	for i := range every {
		every[i] = byte(i + 1)
	}
	for seed := range jobs {
		rnd := rand.New(rand.NewPCG(12, uint64(seed)))
		var flags, args []string
		for range rnd.IntN(8) {
			// The value is the variable's, whatever is in it; the name can't have an = in it.
			flags = append(flags, "-x", "ODD"+strings.ReplaceAll(randomWord(rnd), "=", "")+"="+randomWord(rnd))
		}
		n := rnd.IntN(10)
		if seed == 0 {
			n = 200
			args = append(args, string(every), "")
			flags = append(flags, "-x", "ODD="+string(every), "-x", "ODD"+strings.ReplaceAll(string(every), "=", "")+"=")
		}
		for range n {
			args = append(args, randomWord(rnd))
		}
		local := newJob(t, slices.Concat([]string{"-np", "1"}, flags, []string{"--", "rank", "args"}, args)...)
		if got := local.run(); got != 0 {
			t.Fatalf("seed %d: exit code %d: %s", seed, got, local.err.String())
		}
		var want []string
		for _, a := range args {
			want = append(want, strconv.Quote(a))
		}
		lines := strings.Split(strings.TrimSuffix(local.out.String(), "\n"), "\n")
		if len(args) > 0 {
			if d := cmp.Diff(lines[:min(len(args), len(lines))], want); d != "" {
				t.Fatalf("seed %d: arguments on this host, -got +want:\n%s", seed, d)
			}
		}
		remote := remoteJob(t, home, "a,b,c,d", slices.Concat(flags, []string{"--tag-output", "--", "rank", "args"}, args)...)
		if got := remote.run(); got != 0 {
			t.Fatalf("seed %d: exit code %d: %s", seed, got, remote.err.String())
		}
		byRank := map[string][]string{}
		for line := range strings.SplitSeq(strings.TrimSuffix(remote.out.String(), "\n"), "\n") {
			tag, text, _ := strings.Cut(line, " ")
			byRank[tag] = append(byRank[tag], text)
		}
		slices.Sort(lines)
		for _, tag := range []string{"[0]", "[1]", "[2]", "[3]"} {
			got := byRank[tag]
			slices.Sort(got) // the order of variables is nobody's
			if local.out.Len() == 0 {
				got = append(got, "") // as the local lines of nothing
			}
			if d := cmp.Diff(got, lines); d != "" {
				t.Fatalf("seed %d: rank %s, -got +on this host:\n%s", seed, tag, d)
			}
		}
	}
}

// What a rank on another host has in its environment: that of a login there, and of here only what is forwarded.
func TestRemoteEnvironment(t *testing.T) {
	home := remoteHome(t)
	way := filepath.Join(t.TempDir(), "way")
	// A login has none of gorun's environment, and a rank's variables that somebody left over.
	script := "#!/bin/sh\nexec env -i HOME='" + home + "' PATH=\"$PATH\" ODD_LOGIN=there RANK=9 ODD_BOTH=there /bin/sh -c \"$2\"\n"
	if err := os.WriteFile(way, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	j := newJob(t, "--rsh", way, "-H", "a:1,me@b:2", "--tag-output", "-x", "ODD_SET=1", "-x", "ODD_KEPT", "-x", "ODD_BOTH=here", "-x", "NCCL_SOCKET_IFNAME=^none", "sh", "-c",
		`env | grep -E '^(ODD|NCCL|GORUN_(NCCL_LIB|TIMEOUT|DEVICE|NODE=|LOCAL)|RANK|LOCAL_|GROUP_|CROSS_|LD_LIBRARY_PATH|RANKDIR)'; exit 0`)
	j.cmd.Env = append(j.cmd.Env, "ODD_KEPT=2", "ODD_OTHER=3", "NCCL_DEBUG=WARN", "GORUN_NCCL_LIB=/lib.so", "GORUN_TIMEOUT=1m", "LD_LIBRARY_PATH=/x", "OMPI_COMM_WORLD_RANK=1")
	if got := j.run(); got != 0 {
		t.Fatalf("exit code %d: %s", got, j.err.String())
	}
	got := strings.Split(strings.TrimSpace(j.out.String()), "\n")
	slices.Sort(got)
	var want []string
	for rank, place := range []string{"GORUN_NODE=0 GORUN_LOCAL_RANK=0 GORUN_LOCAL_SIZE=1 LOCAL_RANK=0 LOCAL_SIZE=1 LOCAL_WORLD_SIZE=1 GROUP_RANK=0 CROSS_RANK=0",
		"GORUN_NODE=1 GORUN_LOCAL_RANK=0 GORUN_LOCAL_SIZE=2 LOCAL_RANK=0 LOCAL_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 CROSS_RANK=1",
		"GORUN_NODE=1 GORUN_LOCAL_RANK=1 GORUN_LOCAL_SIZE=2 LOCAL_RANK=1 LOCAL_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 CROSS_RANK=1"} {
		all := "ODD_SET=1 ODD_KEPT=2 ODD_BOTH=here ODD_LOGIN=there NCCL_DEBUG=WARN NCCL_SOCKET_IFNAME=^none GORUN_NCCL_LIB=/lib.so GROUP_WORLD_SIZE=2 CROSS_SIZE=2 RANK=" + strconv.Itoa(rank)
		for kv := range strings.FieldsSeq(all + " " + place) {
			want = append(want, "["+strconv.Itoa(rank)+"] "+kv)
		}
	}
	slices.Sort(want)
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
}
