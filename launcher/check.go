package launcher

import (
	"os/exec"
	"slices"

	"github.com/gorun-dev/gorun/launcher/internal/hostfacts"
)

// HostFacts are what is known of a host, without opening a GPU library. They can be encoded in JSON.
type HostFacts = hostfacts.Facts

// HostFault is what would stop a job on a host, or hamper it, and what mends it.
type HostFault = hostfacts.Fault

// HostDir is a directory of a host, and the file system that it is on.
type HostDir = hostfacts.Dir

// CheckHost looks at this host, and at what the job (the zero value: none) needs of it. HostFacts.Faults judges what it finds.
func CheckHost(job Job, environ []string) *HostFacts {
	f := hostfacts.Collect(hostfacts.Options{Environ: environ, WDir: job.Dir, Device: job.Device})
	f.VisibleGPU = VisibleGPUs("/", environ)
	var seen []string
	for _, name := range job.Programs() {
		if slices.Contains(seen, name) {
			continue
		}
		seen = append(seen, name)
		p, err := FindProgram(name, getenv(environ, "PATH"))
		if err == nil && p.GoDir != "" {
			p.Path = p.GoDir
			_, err = exec.LookPath("go")
		}
		found := hostfacts.Program{Name: name, Path: p.Path}
		if err != nil {
			found.Err = err.Error()
		}
		f.Programs = append(f.Programs, found)
	}
	return f
}

// FormatBytes is a size for people: "7.8 GiB"; -1 is unlimited.
func FormatBytes(n int64) string { return hostfacts.Bytes(n) }
