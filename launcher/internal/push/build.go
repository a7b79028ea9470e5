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
	"time"
)

// module is where gorun's command is, for go build.
const module = "github.com/gorun-dev/gorun/cmd/gorun"

// Builds are the gorun programs that can be sent, by architecture. They are read at the first use and kept in memory.
type Builds struct {
	own *build
	dir string // where gorun itself is: builds for other architectures stand beside it

	mu    sync.Mutex
	other map[string]*build
}

// build is one program.
type build struct {
	arch string // as Go names it
	hash string // SHA-256, hex
	data []byte
	zip  func() []byte
}

func newBuild(arch, file string) (*build, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(data)
	b := &build{arch: arch, hash: hex.EncodeToString(sum[:]), data: data}
	b.zip = sync.OnceValue(func() []byte {
		var z bytes.Buffer
		w, _ := gzip.NewWriterLevel(&z, gzip.BestSpeed)
		w.Write(data) // to memory: it does not fail
		w.Close()
		return z.Bytes()
	})
	return b, nil
}

// zipped is the program in gzip's form, made once.
func (b *build) zipped() []byte { return b.zip() }

// NewBuilds reads the program of this process; exe is its path for a user's eyes, and says where others stand beside it.
func NewBuilds(exe string) (*Builds, error) {
	own, err := newBuild(runtime.GOARCH, "/proc/self/exe")
	if err != nil {
		return nil, fmt.Errorf("read gorun's own program: %w", err)
	}
	return &Builds{own: own, dir: filepath.Dir(exe), other: map[string]*build{}}, nil
}

// Hash is the SHA-256, in hex, of this process's program.
func (b *Builds) Hash() string { return b.own.hash }

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
	if o := b.other[arch]; o != nil {
		return o, nil
	}
	file := filepath.Join(b.dir, "gorun-linux-"+arch)
	o, err := newBuild(arch, file)
	if errors.Is(err, fs.ErrNotExist) && (arch == "amd64" || arch == "arm64") {
		o, err = goBuild(ctx, arch)
		if err != nil {
			return nil, fmt.Errorf("there is no %s, and it cannot be built here: %w; in gorun's sources: GOARCH=%s CGO_ENABLED=0 go build -o %s ./cmd/gorun", file, err, arch, file)
		}
	}
	if err != nil {
		return nil, err
	}
	b.other[arch] = o
	return o, nil
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
	cmd.WaitDelay = time.Second // go's own children hold the pipe
	if out, err := cmd.CombinedOutput(); err != nil {
		if text := strings.TrimSpace(string(out)); text != "" {
			line, _, _ := strings.Cut(text, "\n")
			return nil, fmt.Errorf("go build: %s", line)
		}
		return nil, err
	}
	return newBuild(arch, file)
}

// Verify is what "gorun agent verify HASH" does on a host: whether the file of this process, which runs, is what was sent.
func Verify(hash string) error {
	own, err := newBuild(runtime.GOARCH, "/proc/self/exe")
	if err != nil {
		return err
	}
	if own.hash != hash {
		return fmt.Errorf("it is damaged: its SHA-256 is %s, not %s", own.hash, hash)
	}
	return nil
}
