package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
)

// BenchmarkOutput has four ranks write lines in 64 KiB blocks, through gorun to a pipe and to a file, and for comparison through cat and,
// where it is there, through MPICH's launcher. GORUN_BENCH_OUTPUT is the size of each rank's output (default 64 MiB).
// Compare within one run: -count 5.
func BenchmarkOutput(b *testing.B) {
	size := 64 << 20
	if s := os.Getenv("GORUN_BENCH_OUTPUT"); s != "" {
		var err error
		if size, err = strconv.Atoi(s); err != nil {
			b.Fatal(err)
		}
	}
	spew := "rank spew " + strconv.Itoa(size)
	for _, c := range []struct{ name, needs, command string }{
		{"cat", "", "{ for i in 1 2 3 4; do " + spew + " & done; wait; } | cat"},
		{"gorun", "", "gorun -np 4 " + spew},
		{"gorun-tags", "", "gorun -np 4 --tag-output " + spew},
		{"gorun-times", "", "gorun -np 4 --timestamp " + spew},
		{"hydra", "mpiexec.hydra", "mpiexec.hydra -n 4 " + spew},
	} {
		for _, sink := range []string{"pipe", "file"} {
			b.Run(c.name+"/"+sink, func(b *testing.B) {
				if c.needs != "" {
					if _, err := exec.LookPath(c.needs); err != nil {
						b.Skip("no " + c.needs)
					}
				}
				b.SetBytes(4 * int64(size))
				for b.Loop() {
					cmd := exec.Command("sh", "-c", c.command)
					var err error
					if sink == "file" {
						var f *os.File
						if f, err = os.Create(filepath.Join(b.TempDir(), "f")); err != nil {
							b.Fatal(err)
						}
						cmd.Stdout = f
						err = cmd.Run()
						f.Close()
						os.Remove(f.Name())
					} else {
						var out io.ReadCloser
						if out, err = cmd.StdoutPipe(); err != nil {
							b.Fatal(err)
						}
						if err = cmd.Start(); err == nil {
							_, err = io.CopyBuffer(io.Discard, struct{ io.Reader }{out}, make([]byte, 128<<10))
						}
						if err == nil {
							err = cmd.Wait()
						}
					}
					if err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
