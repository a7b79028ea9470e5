package launcher

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
)

// Ranks that are no members of the job, as those of PyTorch and JAX, say only on stderr why they fail; and one that closes its connections before it ends
// (destroy_process_group in a finally, the end of an interpreter) is often gone after those that failed because of it. What they wrote tells them apart.

// peerGone is how libraries say that the other end of a connection is gone.
var peerGone = [][]byte{
	[]byte("Connection closed by peer"), []byte("Connection reset by peer"), // Gloo; the words of ECONNRESET: PyTorch's store, MPICH
	[]byte("Broken pipe"),
	[]byte("Endpoint timeout"), []byte("Destination is unreachable"), []byte("Connection reset by remote peer"), // UCX, below MPI
	[]byte("got barrier_failed"),                                              // MPICH, as gorun's PMI answers it
	[]byte("Connection was likely closed"),                                    // PyTorch's store
	[]byte("Connection closed by remote peer"), []byte("remote process exit"), // NCCL
	[]byte("ncclRemoteError"),                                                       // NCCL
	[]byte("Socket closed"), []byte("most likely indicates that another task died"), // JAX's coordinator
}

var traceback = []byte("Traceback (most recent call last)")

// lastError is the end of what a rank wrote to stderr: from Python's last traceback on, else the last lines.
func lastError(text []byte) []byte {
	if at := bytes.LastIndex(text, traceback); at >= 0 {
		return text[at:]
	}
	const lines = 10
	text = bytes.TrimRight(text, "\r\n")
	from := len(text)
	for range lines {
		if from = bytes.LastIndexByte(text[:from], '\n'); from < 0 {
			return text
		}
	}
	return text[from:]
}

// blamesPeer reports whether a rank says on stderr that it fails because another one is gone.
func blamesPeer(text []byte) bool {
	text = lastError(text)
	return slices.ContainsFunc(peerGone, func(words []byte) bool { return bytes.Contains(text, words) })
}

// raised reports whether a rank has written a traceback that does not blame another.
func raised(text []byte) bool {
	return bytes.Contains(text, traceback) && !blamesPeer(text)
}

// wordsOrigin is the failed rank behind the first failure by what they wrote: where the first blames one that is gone, and another that failed then does not.
func (a *Account) wordsOrigin(first *RankAccount) *RankAccount {
	if !blamesPeer(first.tail) {
		return first
	}
	origin := first
	for i := range a.Ranks {
		if r := &a.Ranks[i]; r.failedItself() && r.End.Sub(first.End) < originSpan && !blamesPeer(r.tail) && (origin == first || r.before(origin)) {
			origin = r
		}
	}
	return origin
}

// raisers are the living ranks that have written why they fail, where the one that failed first blames another: an interpreter takes its time to end.
func (r *runner) raisers() []int {
	if !blamesPeer(r.output.said(r.failed)) {
		return nil
	}
	var ranks []int
	for i := range r.acct.Ranks {
		if !r.acct.Ranks[i].done && raised(r.output.said(i)) {
			ranks = append(ranks, i)
		}
	}
	return ranks
}

// adviceFor is what would mend a failure, by the rank's last words; "" if that is not known.
func adviceFor(text []byte) string {
	if bytes.Contains(lastError(text), []byte("Number of processes must be defined.")) {
		return "jax.distributed.initialize() finds its arguments with --env-like ompi (gorun help python)"
	}
	return ""
}

// textOf is a line without a time, and without the "[rank3]:" that PyTorch writes before each line of a traceback.
func textOf(line string) string {
	line = unstamped(line)
	if rest, ok := strings.CutPrefix(line, "[rank"); ok {
		if number, text, ok := strings.Cut(rest, "]:"); ok && strings.Trim(number, "0123456789") == "" {
			return strings.TrimPrefix(text, " ")
		}
	}
	return line
}

// raisedTexts says which ranks that have written why they fail run all the same: interpreters wait in their exit for other ranks (MPI_Finalize, JAX's shutdown).
func (r *runner) raisedTexts(running []RankStacks) []string {
	var texts []string
	for _, s := range running {
		if said := r.output.said(s.Rank); raised(said) {
			texts = append(texts, fmt.Sprintf("rank %d has written a traceback (%s) and has not ended since", s.Rank, exception(said)))
		}
	}
	return texts
}

// exception is the line that names the exception of a traceback, shortened.
func exception(text []byte) string {
	lines := strings.Split(string(lastError(text)), "\n")
	for _, l := range lines[1:] {
		if l = strings.TrimRight(textOf(l), "\r"); l != "" && !strings.HasPrefix(l, " ") {
			return shorten(l, 100)
		}
	}
	return "not whole"
}

// isMark tells the lines of a Python traceback that only mark a part of the line above.
func isMark(line string) bool {
	line = textOf(line)
	return strings.ContainsAny(line, "^~") && strings.Trim(line, " ^~\r") == ""
}

// isThrow tells the line with which a C++ program says why it dies.
func isThrow(line string) bool {
	return strings.HasPrefix(unstamped(line), "terminate called after throwing")
}

// exceptionLine is the line that names the exception of the last Python traceback where a C++ stack ends the text, as below exceptions of PyTorch; else -1.
func exceptionLine(lines []string) int {
	if !strings.HasPrefix(textOf(lines[len(lines)-1]), "frame #") {
		return -1
	}
	at := -1
	for i, l := range lines {
		if strings.HasPrefix(textOf(l), string(traceback)) {
			at = i
		}
	}
	if at < 0 {
		return -1
	}
	for i, l := range lines[at+1:] {
		if !strings.HasPrefix(textOf(l), " ") {
			return at + 1 + i
		}
	}
	return -1
}
