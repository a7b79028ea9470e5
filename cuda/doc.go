// Package cuda gives a rank its device: memory, streams, events, kernels and graphs. Where the machine has
// no GPU the device is the host platform, pure Go with the same semantics, so that one program runs on both.
package cuda
