// Package nccl holds communicators: collectives, point to point, memory that can be registered, registration.
// On the host platform its collectives are pure Go over shared memory; on GPUs the vendor's library.
package nccl
