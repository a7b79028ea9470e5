//go:build !race

package node

// manyMembers join at once: twice as many as a member takes.
const manyMembers = 256
