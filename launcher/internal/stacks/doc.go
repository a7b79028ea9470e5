// Package stacks tells what the processes of a job are doing, without stopping them: the goroutines of ranks that can be asked (ParseGo), and what
// Linux says of any process (Look). Tell merges what many ranks do alike into few lines.
package stacks
