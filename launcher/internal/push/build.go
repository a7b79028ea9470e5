package push

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/procgroup"
	"github.com/gorun-dev/gorun/launcher/internal/shell"
)

// module is where gorun's command is, for go build.
const module = "github.com/gorun-dev/gorun/cmd/gorun"

// Builds are the gorun programs that can be sent, by architecture. They are read at the first use and kept in memory.
type Builds struct {
	own *build
	dir string // where gorun itself is: builds for other architectures stand beside it

	mu    sync.Mutex // guards other and failed; it is held while one is built
	other map[string]*build
	// failed says why there is none: the hosts that come later are not to wait for the same again.
	failed map[string]error
}

// build is one program.
type build struct {
	arch string // as Go names it
	hash string // SHA-256, hex
	data []byte
	zip  func() []byte // data in gzip's form, made once
}

func readBuild(arch, file string) (*build, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return newBuild(arch, data), nil
}

// ownBuild is the program of this process. Its file is mapped and not read: that takes a third of the time, which each launch to hosts
// takes. The kernel lets nobody write to it while it runs.
func ownBuild() (*build, error) {
	f, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_POPULATE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	return newBuild(runtime.GOARCH, data), nil
}

func newBuild(arch string, data []byte) *build {
	sum := sha256.Sum256(data)
	b := &build{arch: arch, hash: hex.EncodeToString(sum[:]), data: data}
	b.zip = sync.OnceValue(func() []byte {
		var z bytes.Buffer
		w, _ := gzip.NewWriterLevel(&z, gzip.BestSpeed)
		w.Write(data) // to memory: it does not fail
		w.Close()
		return z.Bytes()
	})
	return b
}

// NewBuilds reads the program of this process; exe is its path for a user's eyes, and says where others stand beside it.
func NewBuilds(exe string) (*Builds, error) {
	own, err := ownBuild()
	if err != nil {
		return nil, fmt.Errorf("read gorun's own program: %w", err)
	}
	return &Builds{own: own, dir: filepath.Dir(exe), other: map[string]*build{}, failed: map[string]error{}}, nil
}

// For is the build for what a host says it is: "arm64 Linux". It is looked for beside gorun, else built if Go is there.
func (b *Builds) For(ctx context.Context, machine string) (*build, error) {
	arch, system, _ := strings.Cut(machine, " ")
	if system != "Linux" {
		return nil, fmt.Errorf("gorun's agent runs on Linux, not on %s", system)
	}
	if arch == b.own.arch {
		return b.own, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if o, err := b.other[arch], b.failed[arch]; o != nil || err != nil {
		return o, err
	}
	o, err := b.find(ctx, arch)
	switch {
	case err == nil:
		b.other[arch] = o
	case ctx.Err() == nil: // not for want of time
		b.failed[arch] = err
	}
	return o, err
}

// find looks for another architecture's build, or makes it.
func (b *Builds) find(ctx context.Context, arch string) (*build, error) {
	file := filepath.Join(b.dir, "gorun-linux-"+arch)
	o, err := readBuild(arch, file)
	if errors.Is(err, fs.ErrNotExist) && (arch == "amd64" || arch == "arm64") {
		if o, err = goBuild(ctx, arch); err != nil {
			return nil, fmt.Errorf("there is no %s, and it cannot be built here: %w; in gorun's sources: GOARCH=%s CGO_ENABLED=0 go build -o %s ./cmd/gorun", file, err, arch, shell.Quote(file))
		}
	}
	return o, err
}

// goBuild builds gorun in the module of the current directory: gorun's own, or one that requires it.
func goBuild(ctx context.Context, arch string) (*build, error) {
	dir, err := os.MkdirTemp("", "gorun-build-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "gorun")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", file, module)
	cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH="+arch, "CGO_ENABLED=0")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := procgroup.Run(cmd); err != nil {
		if text := strings.TrimSpace(out.String()); text != "" {
			line, _, _ := strings.Cut(text, "\n")
			return nil, fmt.Errorf("go build: %s", line)
		}
		return nil, err
	}
	return readBuild(arch, file)
}

// Verify is what "gorun agent verify HASH" does on a host: whether the file of this process, which runs, is what was sent.
func Verify(hash string) error {
	own, err := ownBuild()
	if err != nil {
		return err
	}
	if own.hash != hash {
		return fmt.Errorf("it is damaged: its SHA-256 is %s, not %s", own.hash, hash)
	}
	return nil
}
