//go:build race

package node

// manyMembers join at once: under the race detector a state exchange takes many times as long.
const manyMembers = 96
