package cuda

import (
	"fmt"
	"os"
)

// roleVariable makes this test binary a rank of a test instead.
const roleVariable = "GORUN_CUDA_TEST_ROLE"

func runRole(role string) int {
	err := fmt.Errorf("no role %q", role)
	switch role {
	case "barrier":
		err = runBarrierRank()
	case "import":
		err = runImport()
	case "lost GPU":
		err = runLostGPU()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
