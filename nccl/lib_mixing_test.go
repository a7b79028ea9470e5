package nccl_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/nccl"
)

// From NCCL 2.29.2 on graph mixing is off by the communicator's settings, unless the user has set it, and the environment is left alone.
func TestLibraryMixingBySettings(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		for _, tc := range []struct{ set, want string }{
			{"NCCL_GRAPH_MIXING_SUPPORT=", "graphUsageMode=1"},
			{"NCCL_GRAPH_MIXING_SUPPORT=1", "graphUsageMode=-2147483648"},
			{"NCCL_GRAPH_MIXING_SUPPORT=0", "graphUsageMode=-2147483648"}, // the library reads it itself
		} {
			t.Run(tc.set, func(t *testing.T) {
				log := filepath.Join(t.TempDir(), "calls")
				allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
					return withDevice(ctx, job, nil, func(w *world) error {
						half, err := nccl.InitConfig(ctx, job, w.dev, &nccl.Config{Name: "again"})
						if err != nil {
							return err
						}
						defer half.Close()
						got := libraryLog()
						if !slices.Contains(got, tc.want) || !slices.Contains(got, tc.set[len("NCCL_"):]) {
							return fmt.Errorf("the library was told %q, want %q and %s", got, tc.want, tc.set)
						}
						return nil
					})
				}, append(fakeLibraries(t, "-DVERSION=22902"), "FAKE_LOG="+log, "NCCL_NET_DISABLE_INTRA=1", tc.set)...))
			})
		}
	})
}
