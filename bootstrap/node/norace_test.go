//go:build !race

package node

// manyMembers join at once: more than the 128 that a member takes.
const manyMembers = 160
