package main

const outputHelp = `What ranks write, and what they read:

Lines of several ranks do not mix: gorun shows whole lines, however ranks write them.
Without flags every byte is shown as it was written. Text without a line end, such as a
prompt, is shown after a pause of 0.05 s, and at the latest 0.15 s after its first byte;
the ranks then wait up to 0.5 s for the rest of the line. A carriage return ends a line,
too: progress bars work. A line of more than 64 KiB is passed on in pieces, and the other
ranks wait for its end, or until it pauses for 0.5 s.

  --tag-output         [3] before each line of rank 3; [3]+ where a line goes on that
                       another rank's line has cut
  --timestamp          the time (UTC) before each line: that at which its host had its
                       first byte, whenever gorun shows it
  --merge              a rank's stderr is its stdout: both in the order of writing
  --output-dir DIR     also a file for each rank and stream: DIR/rank.3/stdout holds what
                       rank 3 wrote, byte for byte (with times, if these are wanted, and
                       without tags). They are on the machine of gorun. Those of a job
                       that restarts go on; those of an earlier job of gorun (it is in
                       DIR/.gorun.json) are emptied or, where this one has none of that
                       name, removed. What gorun did not write stays; in the way of a
                       file it is an error.
                       DIR/stacks.txt: what the ranks did at a timeout (help signals)
  --files-only         nothing but these files

A reader that is slow holds up the ranks, and not gorun's memory. All that ranks wrote is
shown before gorun ends, however they ended; after Ctrl-C, SIGTERM or --timeout a reader
has 0.5 s for it. When the reader of stdout is gone (gorun ... | head), the job ends with
code 141; when the reader of stderr is gone, it goes on. When stdout or a file of
--output-dir can't be written, as on a full disk, the job ends with code 125.

  --stdin RANK         this rank reads gorun's stdin (default 0), the others read nothing
  --stdin all          all ranks read the same. The slowest sets the pace: a rank that
                       does not read should close its stdin, or end. One that does is
                       done without
  --stdin none         no rank reads

A file or a pipe for one rank on this host is handed to it: what it does not read stays.
Otherwise up to some 100 KiB more are read than the ranks read. Of a terminal only what a
rank waits for is read, line by line: what is typed ahead is the shell's. In the
background nothing is read. With --restarts, a new attempt reads what the ones before
have left.
`
