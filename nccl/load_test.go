package nccl_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/nccl"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// beginning is a file with the first bytes of a library, of which more are gone.
func beginning(dir, library string) (string, error) {
	f, err := os.Open(library)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 8<<10))
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "short-"+filepath.Base(library))
	return path, os.WriteFile(path, b, 0o600)
}

// wrongFile makes a file that is no library that this program can load.
func wrongFile(dir, name string, content []byte) (string, error) {
	path := filepath.Join(dir, name)
	return path, os.WriteFile(path, content, 0o600)
}

// installed finds the file that a variable names, or that the system has.
func installed(variable, soname string) string {
	if p := os.Getenv(variable); p != "" {
		return p
	}
	for _, pattern := range []string{"/usr/lib/*/", "/usr/lib64/", "/lib64/", "/usr/local/lib/", "/usr/local/cuda/lib64/"} {
		if found, _ := filepath.Glob(pattern + soname); len(found) > 0 {
			return found[0]
		}
	}
	for _, c := range gpulib.NCCL.Places(gpulib.Here) {
		if _, err := os.Stat(c.Path); err == nil && filepath.Base(c.Path) == soname {
			return c.Path
		}
	}
	return ""
}

// TestLibraryDoesNotLoad: the collective library, or the driver, is missing, too old, or a file that cannot be loaded, on one rank or on all. That rank's error names the file
// and what is wrong with it; the others are told, or told that the rank has ended.
func TestLibraryDoesNotLoad(t *testing.T) {
	dltest.Parallel(t)
	short := map[string]string{"GORUN_NCCL_LIB": "libnccl.so.2", "GORUN_CUDA_LIB": "libcuda.so.1"}
	cases := []struct {
		name     string
		variable string
		file     func(dir string, variable string) (string, error)
		text     []string // FILE stands for it
	}{
		{"missing", "", func(string, string) (string, error) { return "/nowhere/lib.so", nil }, []string{"/nowhere/lib.so", "no such file or directory"}},
		{"text", "", func(dir, _ string) (string, error) { return wrongFile(dir, "text", []byte("INPUT(libnccl.so.2)\n")) }, []string{"FILE", "it is no shared library: 20 bytes"}},
		{"32 bits", "", func(dir, _ string) (string, error) {
			return wrongFile(dir, "lib32", append([]byte("\x7fELF\x01\x01\x01"), bytes.Repeat([]byte{0}, 100)...))
		}, []string{"FILE", "it is a 32-bit library"}},
		{"cut short", "", func(dir, variable string) (string, error) {
			lib := installed(variable, short[variable])
			if lib == "" {
				return "", nil
			}
			return beginning(dir, lib)
		}, []string{"FILE", "it is cut short: 8192 bytes"}},
		{"the other library", "GORUN_NCCL_LIB", func(string, string) (string, error) { return installed("GORUN_CUDA_LIB", "libcuda.so.1"), nil },
			[]string{"FILE", "it is not NCCL (it lacks nccl"}},
	}
	open := func(ctx context.Context, job *bootstrap.Job) error {
		dev, err := device(job)
		if err != nil {
			return err
		}
		c, err := nccl.InitConfig(ctx, job, dev, &nccl.Config{Timeout: 40 * time.Second})
		if err == nil {
			err = errors.Join(errors.New("no error"), c.Close())
		}
		return errors.Join(err, dev.Close())
	}
	const ranks = 2
	for _, variable := range []string{"GORUN_NCCL_LIB", "GORUN_CUDA_LIB"} {
		for _, tc := range cases {
			if tc.variable != "" && tc.variable != variable {
				continue
			}
			for _, culprit := range []int{0, 1, ranks} { // ranks: all of them
				rank := func(ctx context.Context, job *bootstrap.Job) error {
					if culprit == ranks || culprit == job.Rank() {
						dir, err := os.MkdirTemp("", "load")
						if err != nil {
							return err
						}
						defer os.RemoveAll(dir)
						file, err := tc.file(dir, variable)
						if err != nil {
							return err
						}
						if file == "" {
							return errors.New("SKIP: no library found to make the file of")
						}
						fmt.Printf("FILE %s\n", file)
						os.Setenv(variable, file)
					}
					begin := time.Now()
					err := open(ctx, job)
					if took := time.Since(begin); took > room {
						err = fmt.Errorf("after %v: %w", took, err)
					}
					return err
				}
				ended := func(t *testing.T, results []ranktest.Result) {
					for _, r := range results {
						if strings.Contains(r.Err, "SKIP: ") {
							t.Skip(r.Err)
						}
					}
					file := ""
					for _, r := range results {
						for l := range strings.Lines(r.Output) {
							if f, ok := strings.CutPrefix(l, "FILE "); ok {
								file = strings.TrimSpace(f)
							}
						}
					}
					for _, r := range results {
						want := slices.Clone(tc.text)
						if culprit != ranks && culprit != r.Rank {
							want = []string{fmt.Sprintf("rank %d", culprit)}
							if variable == "GORUN_NCCL_LIB" { // it comes to Init
								want = append(want, tc.text...)
							}
						}
						if strings.HasPrefix(r.Err, "after ") {
							t.Errorf("rank %d: %s", r.Rank, r.Err)
						}
						for _, w := range want {
							if w == "FILE" {
								w = filepath.Base(file)
							}
							if r.Code != 1 || !strings.Contains(r.Err, w) {
								t.Errorf("rank %d: code %d, error %q has no %q", r.Rank, r.Code, r.Err, w)
							}
						}
						t.Logf("rank %d: %s", r.Rank, strings.ReplaceAll(r.Err, "\n", " | "))
					}
				}
				place := fmt.Sprintf("rank %d", culprit)
				if culprit == ranks {
					place = "all ranks"
				}
				t.Run(fmt.Sprintf("%s/%s/%s", variable, tc.name, place), func(t *testing.T) {
					if testing.Short() && culprit != 1 {
						t.Skip("the same on other ranks")
					}
					t.Run("fake", func(t *testing.T) { ended(t, ranktest.RunProcesses(t, ranks, rank, fakeLibraries(t)...)) })
					t.Run("GPU", func(t *testing.T) {
						dltest.NeedGPUs(t, ranks)
						if culprit == 0 || testing.Short() {
							t.Skip("in another place")
						}
						ended(t, ranktest.RunProcesses(t, ranks, rank, dltest.GPUEnv()...))
					})
				})
			}
		}
	}
	t.Run("too old", func(t *testing.T) {
		for _, r := range ranktest.RunProcesses(t, 2, open, fakeLibraries(t, "-DncclSend=send", "-DncclRecv=recv")...) {
			for _, w := range []string{"load NCCL", "lacks ncclSend, ncclRecv", "it is older than NCCL 2.7.3"} {
				if !strings.Contains(r.Err, w) {
					t.Errorf("rank %d: error %q has no %q", r.Rank, r.Err, w)
				}
			}
		}
	})
}

// TestLibraryMissingOnOneOfThree: of more than two ranks one has no library. Nothing of it is asked when its Init gives everything back.
func TestLibraryMissingOnOneOfThree(t *testing.T) {
	results := ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		if job.Rank() == 1 {
			os.Setenv("GORUN_NCCL_LIB", "/nowhere/lib.so")
		}
		dev, err := device(job)
		if err != nil {
			return err
		}
		c, err := nccl.Init(ctx, job, dev)
		if err == nil {
			err = errors.Join(errors.New("no error"), c.Close())
		}
		return errors.Join(err, dev.Close())
	}, fakeLibraries(t)...)
	for _, r := range results {
		want := []string{"load NCCL", "/nowhere/lib.so"}
		if r.Rank != 1 {
			want = append(want, "rank 1: ")
		}
		for _, w := range want {
			if r.Code != 1 || !strings.Contains(r.Err, w) {
				t.Errorf("%v\nits error has no %q", r, w)
			}
		}
	}
}

// otherVersionVar names a library of another version than the one that is found, for TestLibraryOtherVersion on GPUs.
const otherVersionVar = "GORUN_TEST_OTHER_NCCL"

// TestLibraryOtherVersion: one rank has another version of the library.
func TestLibraryOtherVersion(t *testing.T) {
	dltest.Parallel(t)
	for _, n := range []int{2, 4} {
		for _, culprit := range positions(n) {
			rank := func(ctx context.Context, job *bootstrap.Job) error {
				if job.Rank() == culprit {
					os.Setenv("GORUN_NCCL_LIB", os.Getenv(otherVersionVar))
				}
				dev, err := device(job)
				if err != nil {
					return err
				}
				err = withComm(ctx, job, dev, nil, func(*world) error { return errors.New("a communicator of two versions") })
				fmt.Println("TEXT", err)
				return errors.Join(wantErr(err, nccl.ErrMismatch, fmt.Sprintf("rank %d has NCCL 2.", max(culprit, 1)), ", rank 0 NCCL 2.", "all ranks need the same version"), dev.Close())
			}
			t.Run(fmt.Sprintf("%d ranks/rank %d", n, culprit), func(t *testing.T) {
				t.Run("fake", func(t *testing.T) {
					if testing.Short() && n > 2 {
						t.Skip("-short")
					}
					env := fakeLibraries(t)
					if env != nil {
						env = append(env, otherVersionVar+"="+dltest.Build(t, "testdata/nccl.c", "libnccl.so.2", "-lpthread", "-ldl", "-DVERSION=22809"))
					}
					allWell(t, ranktest.RunProcesses(t, n, rank, env...))
				})
				t.Run("GPU", func(t *testing.T) {
					dltest.NeedGPUs(t, n)
					if os.Getenv(otherVersionVar) == "" {
						t.Skip(otherVersionVar + " names no other library")
					}
					allWell(t, ranktest.RunProcesses(t, n, rank, dltest.GPUEnv()...))
				})
			})
		}
	}
}
