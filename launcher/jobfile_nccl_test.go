package launcher

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDecodeNCCL(t *testing.T) {
	got, _, err := decodeJob("job.toml", []byte("[nccl]\ndebug = \"info\"\ngraph_register = false\nib_disable = 1\nmax_ctas = 4\nalgo = \"^Tree\"\nib_sl = \"0x3\"\n[mccl]\nsocket_ifname = \"eth0\"\n[env]\nNCCL_PROTO = \"Simple\"\n"))
	want := []Setting{{Name: "NCCL_ALGO", Value: "^Tree"}, {Name: "NCCL_DEBUG", Value: "info"}, {Name: "NCCL_GRAPH_REGISTER", Value: "0"}, {Name: "NCCL_IB_DISABLE", Value: "1"}, {Name: "NCCL_IB_SL", Value: "0x3"},
		{Name: "NCCL_MAX_CTAS", Value: "4"}, {Name: "MCCL_SOCKET_IFNAME", Value: "eth0"}, {Name: "NCCL_PROTO", Value: "Simple"}}
	if d := cmp.Diff(got.Env, want); d != "" || err != nil {
		t.Errorf("%v, -got +want:\n%s", err, d)
	}
	for _, c := range []struct{ name, text, want string }{
		{"misspelt", "[nccl]\ndebgu = \"INFO\"\n", "job.toml:2:1: unknown key nccl.debgu; did you mean debug? A variable that gorun does not know goes into [env], as NCCL_DEBGU"},
		{"unknown", "[mccl]\nxyzzy_plugh = 1\n", "job.toml:2:1: unknown key mccl.xyzzy_plugh; a variable that gorun does not know goes into [env], as MCCL_XYZZY_PLUGH"},
		{"the variable's name", "[nccl]\nNCCL_DEBUG = \"INFO\"\n", "job.toml:2:1: unknown key nccl.NCCL_DEBUG; it is called debug here"},
		{"another maker's", "[nccl]\nlegacy_musa_register = 0\n", "job.toml:2:1: unknown key nccl.legacy_musa_register; did you mean legacy_cuda_register? A variable that gorun does not know goes into [env], as NCCL_LEGACY_MUSA_REGISTER"},
		{"word", "[nccl]\n debug = \"LOUD\"\n", "job.toml:2:2: debug = LOUD: must be VERSION, WARN, INFO, ABORT or TRACE"},
		{"switch", "[nccl]\nib_disable = \"yes\"\n", "job.toml:2:1: ib_disable = yes: must be true or false (1 or 0)"},
		{"number", "[nccl]\nmax_ctas = 1.5\n", "job.toml:2:1: max_ctas = 1.5: must be a whole number"},
		{"digits", "[nccl]\nmax_ctas = \"1_0\"\n", "job.toml:2:1: max_ctas = 1_0: must be a whole number"},
		{"text", "[nccl]\nib_hca = \"\"\n", "job.toml:2:1: ib_hca = : must be a string that is not empty"},
		{"table", "[nccl.debug]\nx = 1\n", "job.toml:1:2: nccl.debug is of type table, must be of type string"},
		{"array", "[nccl]\nib_hca = [\"a\"]\n", "job.toml:2:1: nccl.ib_hca is of type array, must be of type string"},
		{"comm id", "[nccl]\ncomm_id = \"10.0.0.1:7000\"\n", "job.toml:2:1: comm_id = 10.0.0.1:7000 is refused: every unique id becomes the same one, but an id makes only one communicator; gorun passes the ids itself"},
		{"legacy", "[mccl]\nlegacy_musa_register = true\n", "job.toml:2:1: legacy_musa_register = 1 is refused: it registers memory that cannot be shared safely: hangs, faults on abort, and graphs never give it back"},
		{"launch mode", "[nccl]\nlaunch_mode = \"group\"\n", "job.toml:2:1: launch_mode = group is refused: launches wait for the other devices of the process, which a capture does not allow"},
		{"twice", "[env]\nNCCL_DEBUG = \"INFO\"\n[nccl]\ndebug = \"WARN\"\n", "job.toml:4:1: debug is given twice, here and as NCCL_DEBUG in [env]"},
		{"in another table", "[launch]\nsocket_ifname = \"eth0\"\n", "job.toml:2:1: unknown key launch.socket_ifname; it belongs into [nccl]"},
	} {
		_, _, err := decodeJob("job.toml", []byte(c.text))
		if err == nil || err.Error() != c.want {
			t.Errorf("%s: got %v\nwant %s", c.name, err, c.want)
		}
	}
	if _, _, err := decodeJob("job.toml", []byte("[nccl]\nlegacy_cuda_register = 0\nlaunch_mode = \"PARALLEL\"\n")); err != nil {
		t.Errorf("harmless values: %v", err)
	}
	// Each key is of one kind.
	keys := slices.Concat(ncclSwitches, ncclNumbers, ncclTexts)
	for k := range ncclWords {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	if n := len(keys); len(slices.Compact(slices.Clone(keys))) != n {
		t.Errorf("a key is there twice: %q", keys)
	}
}
