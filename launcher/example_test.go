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

func ExampleReadJobFile() {
	job, places, err := launcher.ReadJobFile("../configs/local.toml")
	fmt.Println(job.CommandLine(), err)
	fmt.Println(places["job.np"])
	_, _, err = launcher.ReadJobFile("../configs/none.toml")
	fmt.Println(err)
	// Output:
	// gorun -np 4 --tag-output ./examples/allreduce <nil>
	// ../configs/local.toml:6
	// job file ../configs/none.toml: no such file or directory
}
