package launcher_test

import (
	"context"
	"fmt"
	"os"

	"github.com/gorun-dev/gorun/launcher"
)

func Example() {
	job := launcher.Job{NP: 3, Program: "sh", Args: []string{"-c", "test $GORUN_RANK != 1 || exit 7; sleep 60"}}
	prog, err := launcher.FindProgram(job.Program, os.Getenv("PATH"))
	if err != nil {
		fmt.Println(err)
		return
	}
	plan, err := job.Plan(launcher.Facts{Programs: []launcher.Program{prog}, Host: "here", Dir: "/", Environ: os.Environ()})
	if err != nil {
		fmt.Println(err)
		return
	}
	account := launcher.Run(context.Background(), plan, launcher.Options{Stdout: os.Stdout, Stderr: os.Stderr})
	fmt.Println("code", account.Code, "by rank", account.Cause)
	// Output: code 7 by rank 1
}

func ExampleDecodeJob() {
	job, err := launcher.DecodeJob("job.toml", []byte(`
[job]
np = 4
program = "./train"
[launch]
timeout = "10m"
`))
	fmt.Println(job.CommandLine(), err)
	_, err = launcher.DecodeJob("job.toml", []byte("[job]\nnpp = 4\n"))
	fmt.Println(err)
	// Output:
	// gorun -np 4 --timeout 10m0s ./train <nil>
	// job.toml:2:1: unknown key job.npp; did you mean np?
}
