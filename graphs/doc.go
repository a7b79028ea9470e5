// Package graphs captures collectives into graphs: each call is compared between the ranks before the library sees it, the buffers are
// registered by the capture and let go when the graph is destroyed.
package graphs
