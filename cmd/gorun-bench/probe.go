package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

const probeHelp = `gorun-bench probe opens each rank's device, makes a communicator, and checks a collective. gorun check starts it.

It writes a JSON object. Exit code 0: all works; 1: a rank failed; 2: wrong command line; 3: something does not work.
`

// probed is what the ranks of a probe have found.
type probed struct {
	Ranks   []probedRank `json:"ranks"`
	Library string       `json:"library,omitempty"` // NCCL
	Version string       `json:"version,omitempty"`
	Path    string       `json:"path,omitempty"`
	Explain []string     `json:"explain,omitempty"` // what the communicator can do
	Error   string       `json:"error,omitempty"`   // of the communicator
}

type probedRank struct {
	Rank    int    `json:"rank"`
	Device  string `json:"device,omitempty"`
	UUID    string `json:"uuid,omitempty"`
	Bus     string `json:"bus,omitempty"`
	Driver  string `json:"driver,omitempty"` // version of its interface
	Library string `json:"driver_library,omitempty"`
	Free    uint64 `json:"free,omitempty"` // bytes of the device's memory
	Memory  uint64 `json:"memory,omitempty"`
	Error   string `json:"error,omitempty"` // why the device cannot be opened
}

// probeElements is small: it is checked, not measured.
const probeElements = 1 << 16

func probeMain(ctx context.Context, args []string, stdout, _ io.Writer) error {
	fs := flag.NewFlagSet("gorun-bench probe", flag.ContinueOnError)
	if err := parseFlags(fs, args); err != nil {
		return err
	}
	job, err := bootstrap.Join(ctx)
	if err != nil {
		return err
	}
	defer job.Close()
	dev, devErr := cuda.Open(job.Device())
	p, err := probe(ctx, job, dev, devErr)
	if dev != nil {
		err = errors.Join(err, dev.Close())
	}
	if err != nil {
		return err
	}
	faults := 0
	for _, r := range p.Ranks {
		if r.Error != "" {
			faults++
		}
	}
	if p.Error != "" {
		faults++
	}
	if job.Rank() == 0 {
		if err := json.NewEncoder(stdout).Encode(p); err != nil {
			return err
		}
	}
	return told(ctx, job, faults)
}

// probe is collective. All ranks get the same.
func probe(ctx context.Context, job *bootstrap.Job, dev *cuda.Device, devErr error) (*probed, error) {
	mine := probedRank{Rank: job.Rank()}
	if devErr != nil {
		mine.Error = devErr.Error()
	} else {
		i := dev.Info()
		mine.Device, mine.UUID, mine.Bus, mine.Driver, mine.Library = dev.String(), i.UUID, i.PCIBusID, i.Driver, i.Library
		var err error
		if mine.Free, mine.Memory, err = dev.MemoryInfo(); err != nil {
			mine.Error = err.Error()
		}
	}
	msg, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	all, err := job.AllGather(ctx, msg)
	if err != nil {
		return nil, err
	}
	p := &probed{Ranks: make([]probedRank, len(all))}
	well := true
	for r, b := range all {
		if err := json.Unmarshal(b, &p.Ranks[r]); err != nil {
			return nil, fmt.Errorf("what rank %d has found: %w", r, err)
		}
		well = well && p.Ranks[r].Error == ""
	}
	if !well {
		return p, nil
	}
	// A failure is every rank's, but its text may be each one's own: the first one's is told.
	text := ""
	if err := p.collective(ctx, job, dev); err != nil {
		text = err.Error()
	}
	if all, err = job.AllGather(ctx, []byte(text)); err != nil {
		return nil, err
	}
	for r, b := range all {
		if len(b) > 0 {
			p.Error = fmt.Sprintf("rank %d: %s", r, b)
			break
		}
	}
	return p, nil
}

// collective makes a communicator and sees whether an all-reduce is right.
func (p *probed) collective(ctx context.Context, job *bootstrap.Job, dev *cuda.Device) (err error) {
	comm, err := nccl.Init(ctx, job, dev)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, comm.Close()) }()
	if info, ok := comm.Library(); ok {
		p.Library, p.Version, p.Path = info.Name, info.Version, info.Path
	}
	for line := range strings.Lines(nccl.Explain(comm)) {
		p.Explain = append(p.Explain, strings.TrimSuffix(line, "\n"))
	}
	s, err := dev.NewStream()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	buf, err := nccl.Alloc[float32](dev, probeElements)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, buf.Free()) }()
	got := make([]float32, probeElements)
	err = errors.Join(cuda.Fill(buf.All(), float32(job.Rank()+1), s), nccl.AllReduce(comm, buf.All(), buf.All(), nccl.Sum, s),
		cuda.CopyToHost(got, buf.All(), s), s.Synchronize(ctx))
	if err != nil {
		return err
	}
	want := float32(job.Size()) * float32(job.Size()+1) / 2
	for i, v := range got {
		if v != want {
			return fmt.Errorf("all-reduce of %d float32: element %d is %v, want %v", probeElements, i, v, want)
		}
	}
	return nil
}

// told ends a check: no rank ends before rank 0 has told what was found, for the end of the first one may be the end of all.
func told(ctx context.Context, job *bootstrap.Job, faults int) error {
	if err := job.Barrier(ctx); err != nil {
		return err
	}
	if faults > 0 {
		return &faultsError{faults}
	}
	return nil
}
