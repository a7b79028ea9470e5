// Package launcher starts the ranks of a job and carries them to their end.
//
// A [Job] is what a user asks for, by flags or a TOML job file. [Job.Plan] makes of it a [Plan]: pure data that says
// for each rank where it runs, with which arguments and environment. [Run] carries a plan out and returns an
// [Account] of what happened: who failed first, with what, and the exit code.
//
// The hosts of a job are those that [ParseHosts] or [ReadHostfile] read, or those of the [Allocation] of a resource manager; a
// [MapBy] places the ranks on their slots.
//
// Below Run, an agent starts and watches the ranks of one host, a keeper (a second process) guards them in case the agent
// is killed, and collectors carry their output in whole lines. The agent of the local host is part of this process. Those of other
// hosts are processes there (ServeAgent), which Run speaks to over one session each: messages, and the stdin, stdout and stderr of
// each rank as streams with flow control. Both ends of a session keep a heartbeat. A host is lost when its session ends, or when it
// is silent and the gossip of the other hosts misses it, too; an agent that has lost gorun ends its ranks.
package launcher
