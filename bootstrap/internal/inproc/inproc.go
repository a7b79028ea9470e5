// Package inproc lets tests reach into a job whose ranks live in one process.
package inproc

// Die makes the rank of a *bootstrap.Job die for the others. Package bootstrap sets it.
var Die func(job any, cause string)
