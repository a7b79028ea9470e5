// Package hostfacts tells what a host is like, for gorun check: what a job needs of it, and what would stop one. It opens no GPU library: it
// reads /proc, /sys, /dev and files, so that it runs in gorun and in its agent on another host.
package hostfacts

import "time"

// Facts are what is known of a host. Sizes are bytes; a limit of -1 is none.
type Facts struct {
	Host       string      `json:"host"`
	User       User        `json:"user"`
	Kernel     Kernel      `json:"kernel"`
	Cores      Cores       `json:"cores"`
	Memory     Memory      `json:"memory"`
	Limits     Limits      `json:"limits"`
	Memfd      string      `json:"memfd_error,omitempty"` // why there is no anonymous shared memory
	Shm        Dir         `json:"shm"`                   // /dev/shm
	Tmp        Dir         `json:"tmp"`                   // TMPDIR
	Cache      Dir         `json:"cache"`                 // gorun's own
	Clock      Clock       `json:"clock"`
	Interfaces []Interface `json:"interfaces"`
	InfiniBand []string    `json:"infiniband,omitempty"` // devices
	Device     string      `json:"device,omitempty"`     // that ranks are told to use: "host"; "": each rank chooses
	GPUs       []GPU       `json:"gpus"`
	VisibleGPU int         `json:"visible_gpus"` // how many of them ranks may use
	Driver     Driver      `json:"driver"`
	Libraries  []Library   `json:"libraries,omitempty"`
	SSH        string      `json:"ssh,omitempty"` // the client's path, "" without one
	Dir        *Dir        `json:"wdir,omitempty"`
	Programs   []Program   `json:"programs,omitempty"`
}

// User is whose processes the ranks are.
type User struct {
	UID  int    `json:"uid"`
	Name string `json:"name,omitempty"`
	Home string `json:"home,omitempty"`
}

// Kernel is the system.
type Kernel struct {
	Release string `json:"release"` // "6.1.0-18-amd64"
	Arch    string `json:"arch"`    // "x86_64"
}

// Cores are what ranks compute on.
type Cores struct {
	Online int     `json:"online"`
	Usable int     `json:"usable"`          // by this process's affinity
	Limit  float64 `json:"limit,omitempty"` // by its control group, in cores; 0: none
}

// Memory is the host's, and what the control group leaves of it.
type Memory struct {
	Total     int64 `json:"total"`
	Available int64 `json:"available"`
	Limit     int64 `json:"limit"` // of the control group
	Used      int64 `json:"used"`  // of this limit
}

// Limit is a resource limit that a rank begins with; -1: there is none.
type Limit struct {
	Soft int64 `json:"soft"`
	Hard int64 `json:"hard"`
}

// Limits are those that jobs run into.
type Limits struct {
	NoFile  Limit `json:"nofile"`
	NProc   Limit `json:"nproc"`
	MemLock Limit `json:"memlock"`
}

// Dir is a directory and the file system that it is in.
type Dir struct {
	Path   string   `json:"path"`
	Exists bool     `json:"exists"`
	Write  bool     `json:"writable"`
	Owner  int      `json:"owner"`
	Mode   string   `json:"mode,omitempty"` // "drwx------"
	FS     string   `json:"fs,omitempty"`   // "tmpfs"
	Size   int64    `json:"size"`
	Free   int64    `json:"free"`
	Flags  []string `json:"flags,omitempty"` // "ro", "noexec", "nosuid", "nodev"
	Err    string   `json:"error,omitempty"`
}

// Clock is the wall clock.
type Clock struct {
	Now    time.Time `json:"now"`
	Synced bool      `json:"synchronized"` // as the kernel was told
	Source string    `json:"source,omitempty"`
}

// Interface is a network interface.
type Interface struct {
	Name     string   `json:"name"`
	Up       bool     `json:"up"`
	Loopback bool     `json:"loopback,omitempty"`
	MTU      int      `json:"mtu"`
	Addrs    []string `json:"addresses"` // "10.0.0.7/24"
}

// GPU is a GPU of the host, as far as the kernel shows it.
type GPU struct {
	Vendor string `json:"vendor"` // NVIDIA, AMD, Moore Threads
	Model  string `json:"model,omitempty"`
	UUID   string `json:"uuid,omitempty"`
	Bus    string `json:"bus,omitempty"`          // "0000:1b:00.0"
	Device string `json:"device,omitempty"`       // "/dev/nvidia0"; "" where there is none
	Err    string `json:"device_error,omitempty"` // why the device cannot be opened
}

// Driver is the GPUs' kernel module.
type Driver struct {
	Vendor  string   `json:"vendor,omitempty"`
	Version string   `json:"version,omitempty"` // "580.159.04"
	Errors  []string `json:"errors,omitempty"`  // of the device files that all its GPUs need
	Lacks   []string `json:"lacks,omitempty"`   // device files that are not there yet: the driver makes them at the first use, but not in a container
}

// Library is a GPU library, as its file shows it.
type Library struct {
	Name    string `json:"name"` // "CUDA driver", "NCCL"
	Path    string `json:"path,omitempty"`
	From    string `json:"from,omitempty"` // where it was found: "system", "GORUN_NCCL_LIB", "wheel of python3"
	Version string `json:"version,omitempty"`
	Err     string `json:"error,omitempty"` // why it cannot be loaded; or where it was looked for
}

// Program is a program of a job.
type Program struct {
	Name string `json:"name"`
	Path string `json:"path,omitempty"`
	Same bool   `json:"same,omitempty"` // on another host than gorun's: it is the same file
	Sent bool   `json:"sent,omitempty"` // it would be sent there
	Err  string `json:"error,omitempty"`
}
