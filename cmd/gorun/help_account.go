package main

const signalsHelp = `What gorun does on a signal:

  SIGINT (Ctrl-C)      SIGINT to the ranks, SIGTERM after --kill-grace, SIGKILL after another
  SIGINT again         SIGKILL to the ranks at once
  SIGTERM, SIGHUP      SIGTERM to the ranks, SIGKILL after --kill-grace
  SIGQUIT (Ctrl-\)     gorun says what the ranks do; then SIGQUIT to the ranks, which
                       ends those that do not catch it
  SIGIO                gorun says what the ranks do, and nothing else happens
  SIGUSR1, SIGUSR2,    the same signal to the ranks, as often as gorun sees it
  SIGALRM, SIGXCPU,
  SIGPWR,
  35 to 64 (real time)
  SIGTSTP (Ctrl-Z)     SIGSTOP to the ranks, and gorun stops; when it goes on, they do
                       (ranks lead sessions of their own, where SIGTSTP stops nothing)
  SIGCONT              SIGCONT to the ranks
  SIGKILL              cannot be seen: the keeper, a second process, kills the ranks
  SIGABRT              gorun ends with a dump of its own state; the keeper kills the ranks

Others stay with gorun: SIGWINCH, SIGTTIN and SIGTTOU are about a terminal, which ranks do
not have; SIGPROF, SIGVTALRM, SIGCHLD, SIGPIPE, SIGURG and the like mean gorun's own
process. SIGINT and SIGHUP stay ignored, by gorun and its ranks, where gorun was started
with them ignored (nohup; the background of a script).

--timeout-signal USR1@30s sends the ranks a signal 30 s before the timeout, to save what
they have. A rank that does not catch it ends by it, which is a failure. The timeout itself
is SIGTERM (see below for Python), and SIGKILL after --kill-grace.

What the ranks do (kill -IO PID, Ctrl-\, and before the ranks hear of a timeout) takes up
to three seconds and stops no rank. First come the ranks that others wait for, and in what;
then the stacks of the goroutines of ranks that have joined the job (bootstrap.Join), equal
ones once; of other programs, and of ranks that do not answer, what Linux says of each
process: its state, and the system call that it is in. -v shows goroutines and frames of
the Go runtime and of gorun, too; with --output-dir all that is in DIR/stacks.txt, and
--report has it as hang. A Python program shows its own stacks on SIGUSR1 to gorun if it
has called faulthandler.register(signal.SIGUSR1). With -x PYTHONFAULTHANDLER=1 it writes them
at the timeout: it gets SIGABRT then instead of SIGTERM; if it catches SIGTERM, before SIGKILL.

Each rank is the leader of a session of its own, and signals go to its whole process
group. When the last rank has ended, whatever ranks left running is killed.

On other hosts gorun's agents do it. When gorun or the connection to it is gone, an
agent ends its ranks within two seconds. A host that has not answered for 8 s, and that
the other hosts, if any, do not reach either, is given up (exit code 123); 20 s without an
answer are enough alone. An agent that is cut off ends its ranks by the same rule, and
after 45 s in any case: so long may gorun itself be stopped by SIGSTOP.
`

const failuresHelp = `The rank that failed first, by time, is the cause: its exit code, or 128+N for a signal
N, is gorun's, and the last lines on stderr name it, its host and process, and what it
wrote last; the others are told in one line. A rank fails by an exit code that is not 0 or
by a signal that gorun did not send it. A rank that ended by itself is believed before
one that failed because of it, whichever is gone first: by what ranks say of each other
and, where they are no members of the job (PyTorch, JAX), by their last words on stderr: one
that says "Connection closed by peer" is not the cause if another failed with an error
of its own.

--on-fail kill (the default) gives the other ranks 0.15 s to end by themselves, asks them to
end (SIGTERM) and kills them after --kill-grace. On gorun's own host they get up to 1 s as
long as they wait for a CPU there.
--on-fail wait lets them go on until they end by themselves. The first failure still gives
the exit code, whatever comes later: other failures, Ctrl-C, the timeout. A lost host
ends the job in any case. The end of a rank with code 0 ends nothing.

--restarts N starts the whole job again after a failure: the same program on the same
hosts, with the same ranks in the same places, under a new job id. GORUN_RESTART (and
TORCHELASTIC_RESTART_COUNT) says how often that was done: 0 at first. It is done when a
rank fails or a host is lost; not when the program or a host could not be started, after
a signal to gorun, or after the timeout, which counts from the first start.
--restart-window TIME counts only the failures of that time: the job is given up when more
than N lie within it. Without it N is for ever.
When attempts fail within 10 s, the second and later restarts wait: 0.1 s, then twice as
long each time, up to 10 s.
What ranks had read of gorun's stdin is gone: after a restart the rest follows. Output
goes on where it was. A program that wants to go on must have saved its state itself.
`

const reportHelp = `--report FILE writes how the job went, in JSON. FILE is replaced as a whole; a pipe or device
is written to. Times are RFC 3339 by the clock of gorun's host; durations end in _ns
and count from start.

  job            the job's id
  code           gorun's exit code
  reason         done, failed, timeout, signal, cannotrun, notstarted, hostlost, reader
                 (nobody reads stdout) or internal
  cause          the rank that failed first; -1: none
  signal         that interrupted the job
  error          what went wrong in gorun, with a host or with the program
  later          what ended the job, where ranks were to go on after the first failure
  start, end     of the attempt
  prepared_ns    until the first rank was to be started: the build, the hosts
  started_ns     until the last rank was started
  met_ns         until the hosts had met each other
  ended_ns       until the last rank had ended
  left_over      how many processes that ranks left behind were killed
  output_cut     gorun was ended before all output had been read from it
  hang           what the ranks did at the timeout, or at the last SIGQUIT or SIGIO:
    after_ns         when it was asked for
    lines            as gorun showed it
    ranks            each rank that ran:
      rank             its number
      goroutines       of one that answered: id, state, frames (func, line), by
      processes        else: pid, command, threads (name, state, syscall, where), and
                       catches_abrt, catches_term: whether it has handlers for those
      error            why there is less than that
  restarts       how often the job had been started again
  attempts       the attempts before this one, each in this form: the first and the last
                 nine; of the ranks' stacks (hang) those that were taken last
  attempts_left_out   how many attempts between them are not kept
  hosts          of a job with ranks on other hosts:
    host, addr       its name, and the address of gorun's agent there
    interface        that holds this address
    chosen           the address, and why it is that one
    agent, sent      the agent's file, and whether it was sent for this job
    dir              where its ranks run, if that is the job's own directory
    staged_bytes     of the program and files that were sent
    opened_ns, prepared_ns, met_ns   until its agent spoke, was prepared, had met the others
    error            why it did not start, or was given up
  ranks          each rank:
    rank, host, pid  pid 0: it was not started
    code             as a shell has it: 128+N for signal N
    signal           that killed it
    core_dumped      by that signal
    out_of_memory    the kernel killed it, or a process of it, for lack of memory
    cause            how it ended, in words
    stderr           its last lines there; of the cause
    start, end       by the clock of gorun's host
    joined, left     it joined the job (bootstrap.Join), and said goodbye
    lost             with its host
    stopped          the last signal that gorun sent it to end it, before it ended
    program          its program, of a job with several
    place            the CPUs and the GPU that it has:
      cpus             that it may use
      bound            gorun bound it to them
      why              what they are, or why it is not bound
      gpu, visible_gpus   its own by its local rank, and those that it sees
`
