package placement

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseSet(t *testing.T) {
	for list, want := range map[string]Set{"": nil, "\n": nil, "0": {0}, "0-2,8": {0, 1, 2, 8}, "7,9-9\n": {7, 9}} {
		got, err := ParseSet(list)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("ParseSet(%q) = %v, %v, want %v", list, got, err, want)
		}
	}
	for _, list := range []string{"a", "1-", "-1", "2-1", "0,0", "3,1", "0-99999", "1,,2", "0-3:2"} {
		if got, err := ParseSet(list); err == nil {
			t.Errorf("ParseSet(%q) = %v, want an error", list, got)
		}
	}
}

func FuzzParseSet(f *testing.F) {
	for _, s := range []string{"", "0-3,8", "0", "65535", "1-0", "0-4294967295"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, list string) {
		s, err := ParseSet(list)
		if err != nil {
			return
		}
		back, err := ParseSet(s.String())
		if err != nil || !slices.Equal(back, s) || !slices.IsSorted(s) {
			t.Errorf("%q: %v, read back %v, %v", list, s, back, err)
		}
	})
}

func TestParseBind(t *testing.T) {
	for s, want := range map[string]Bind{"none": {To: None}, "core": {To: ToCore}, "numa": {To: ToNUMA}, "core:2": {ToCore, 2}} {
		got, err := ParseBind(s)
		if err != nil || got != want || got.String() != s {
			t.Errorf("ParseBind(%q) = %v, %v, want %v", s, got, err, want)
		}
	}
	for s, want := range map[string]string{
		"":         `"" must be none, core, core:N or numa`,
		"core:0":   `"core:0" must be core:N, N cores for each rank`,
		"core:+1":  `"core:+1" must be core:N, N cores for each rank`,
		"socket":   `"socket" must be none, core, core:N or numa: a NUMA node is a package or a part of one`,
		"hwthread": `"hwthread" must be none, core, core:N or numa: the hardware threads of a core stay together`,
	} {
		if _, err := ParseBind(s); err == nil || err.Error() != want {
			t.Errorf("ParseBind(%q): %v, want %s", s, err, want)
		}
	}
}

// TestPlaceRandom holds what is true of every placement, on random hosts.
func TestPlaceRandom(t *testing.T) {
	for seed := range uint64(3000) {
		rnd := rand.New(rand.NewPCG(seed, 5))
		m := &Machine{}
		cpu := 0
		kinds := 1 + rnd.IntN(2)
		for n := range 1 + rnd.IntN(4) {
			node := Node{ID: n * (1 + rnd.IntN(2))}
			for range 1 + rnd.IntN(6) {
				c := Core{Node: n, Speed: rnd.IntN(kinds)}
				for range 1 + rnd.IntN(2) {
					cpu += 1 + rnd.IntN(2)
					c.CPUs = append(c.CPUs, cpu)
				}
				node.CPUs = append(node.CPUs, c.CPUs...)
				m.Cores = append(m.Cores, c)
			}
			m.Nodes = append(m.Nodes, node)
			m.Allowed = append(m.Allowed, node.CPUs...)
		}
		if rnd.IntN(3) == 0 {
			m.Quota = float64(1+rnd.IntN(40)) / 4
		}
		b := Bind{To: []string{"", None, ToCore, ToNUMA}[rnd.IntN(4)]}
		if b.To == ToCore {
			b.Cores = rnd.IntN(4)
		}
		n := 1 + rnd.IntN(10)
		p, err := m.Place(ask(b, n, ""))
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		bound := p.Ranks[0].CPUs != nil
		free := slices.Clone(m.Allowed)
		cores := -1
		for i, r := range p.Ranks {
			if (r.CPUs != nil) != bound {
				t.Fatalf("seed %d: some ranks are bound and some are not: %+v", seed, p)
			}
			if len(r.CPUs.and(m.Allowed)) != len(r.CPUs) || !slices.IsSorted(r.CPUs) {
				t.Fatalf("seed %d: rank %d has CPUs %v of %v", seed, i, r.CPUs, m.Allowed)
			}
			if b.To != ToCore || !bound {
				continue
			}
			if len(r.CPUs.and(free)) != len(r.CPUs) {
				t.Fatalf("seed %d: rank %d has a CPU that another has: %+v", seed, i, p)
			}
			free = slices.DeleteFunc(free, r.CPUs.Has)
			has := 0
			for _, c := range m.Cores {
				if some := len(c.CPUs.and(r.CPUs)); some == len(c.CPUs) {
					has++
				} else if some > 0 {
					t.Fatalf("seed %d: rank %d has a part of the core %v: %v", seed, i, c, r.CPUs)
				}
			}
			if cores >= 0 && has != cores || b.Cores > 0 && has != b.Cores {
				t.Fatalf("seed %d: rank %d has %d cores, others %d, %v was asked for", seed, i, has, cores, b)
			}
			cores = has
		}
		crowded := float64(n) > m.usable()
		if (p.Crowded != "") != crowded || (p.Refused != "") != (b.To == ToCore && !bound) {
			t.Fatalf("seed %d: %d ranks on %d CPUs, quota %v: %+v", seed, n, len(m.Allowed), m.Quota, p)
		}
		if want := b.To == ToCore && !crowded && n*max(1, b.Cores) <= len(m.Cores) || b.To == ToNUMA && len(m.Nodes) > 1; bound != want {
			t.Fatalf("seed %d: %d ranks, %v, bound %v: %+v", seed, n, b, bound, p)
		}
	}
}

// GPUs are opaque tokens, taken by local rank (launchers.md 4, row 51).
func TestVisibleTokens(t *testing.T) {
	root, allowed := recordedHost(t, "server")
	const uuid = "GPU-1a5e1b00-0000-4000-8000-000000000001"
	for _, c := range []struct {
		name, env string
		tokens    string
		nodes     []int // of each; nil: not looked at
	}{
		{"all", "", "0 1 2 3 4 5 6 7", []int{0, 0, 0, 0, 1, 1, 1, 1}},
		{"a part in another order", "CUDA_VISIBLE_DEVICES=6,1", "6 1", []int{1, 0}},
		{"spaces", "CUDA_VISIBLE_DEVICES= 2 , 5 ", "2 5", []int{0, 1}},
		{"UUID", "CUDA_VISIBLE_DEVICES=" + uuid + ",7", uuid + " 7", []int{0, 1}},
		{"prefix", "CUDA_VISIBLE_DEVICES=GPU-5,gpu-1A5E", "GPU-5 gpu-1A5E", []int{1, 0}},
		{"prefix of several", "CUDA_VISIBLE_DEVICES=GPU-", "GPU-", []int{-1}},
		{"instance", "CUDA_VISIBLE_DEVICES=MIG-" + uuid + "/1/0,MIG-4f00aa", "MIG-" + uuid + "/1/0 MIG-4f00aa", []int{0, -1}},
		{"duplicate", "CUDA_VISIBLE_DEVICES=3,3", "3 3", []int{0, 0}},
		{"empty", "CUDA_VISIBLE_DEVICES=", "", nil},
		{"minus one", "CUDA_VISIBLE_DEVICES=-1", "", nil},
		{"minus one behind others", "CUDA_VISIBLE_DEVICES=1,-1,0", "1", nil},
		{"NoDevFiles", "CUDA_VISIBLE_DEVICES=NoDevFiles", "", nil},
		{"one that isn't there", "CUDA_VISIBLE_DEVICES=1,8,0", "1", nil},
		{"another maker's variable", "HIP_VISIBLE_DEVICES=0", "0 1 2 3 4 5 6 7", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := Read(root, allowed, Bind{To: ToNUMA})
			var environ []string
			if c.env != "" {
				environ = []string{c.env, "CUDA_VISIBLE_DEVICES=0"} // the first of two settings counts
				if !strings.HasPrefix(c.env, "CUDA") {
					environ = environ[:1]
				}
			}
			v := m.GPUs.Visible(LookupIn(environ))
			if got := strings.Join(v.Tokens, " "); got != c.tokens {
				t.Errorf("tokens %q, want %q", got, c.tokens)
			}
			for i, want := range c.nodes {
				if got := v.node(i); got != want {
					t.Errorf("token %s is near node %d, want %d", v.Tokens[i], got, want)
				}
			}
			// What hides the others has each token as it was given.
			a := ask(Bind{}, len(v.Tokens), "", environ...)
			a.Hide = true
			if len(v.Tokens) == 0 {
				a.Ranks = make([]RankAsk, 2) // nothing to hide: no error
				for i := range a.Ranks {
					a.Ranks[i].Env = LookupIn(environ)
				}
			}
			p, err := m.Place(a)
			if err != nil {
				t.Fatal(err)
			}
			for i, r := range p.Ranks {
				var want []string
				if len(v.Tokens) > 0 {
					want = []string{"CUDA_VISIBLE_DEVICES=" + v.Tokens[i]}
				}
				if d := cmp.Diff(r.Vars, want); d != "" {
					t.Errorf("rank %d: -got +want:\n%s", i, d)
				}
			}
		})
	}
}

func FuzzVisible(f *testing.F) {
	root, allowed := recordedHost(f, "server")
	gpus := Read(root, allowed, Bind{To: ToNUMA}).GPUs
	for _, list := range []string{"", "0", "1,0", "-1", "GPU-1a5e,MIG-GPU-1a5e1b00-0000-4000-8000-000000000001/1/0", "NoDevFiles", " 3 ,3", ",", "99999999999999999999"} {
		f.Add(list)
	}
	f.Fuzz(func(t *testing.T, list string) {
		env := LookupIn([]string{"CUDA_VISIBLE_DEVICES=" + list})
		v := gpus.Visible(env)
		for i, item := range strings.Split(list, ",")[:len(v.Tokens)] {
			if strings.TrimSpace(item) != v.Tokens[i] { // only the white space around it goes
				t.Fatalf("%q: token %d is %q", list, i, v.Tokens[i])
			}
		}
		for i := range v.Tokens {
			if n := v.node(i); n < -1 || n > 1 {
				t.Errorf("%q: token %q is near node %d", list, v.Tokens[i], n)
			}
			if hidden := v.only(i, env); len(hidden) != 1 || hidden[0] != "CUDA_VISIBLE_DEVICES="+v.Tokens[i] {
				t.Errorf("%q: hidden as %q", list, hidden)
			}
		}
	})
}

func TestVisibleOtherMakers(t *testing.T) {
	root, allowed := recordedHost(t, "amd")
	musa := t.TempDir()
	if err := os.MkdirAll(filepath.Join(musa, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"mtgpu.0", "mtgpu.1"} {
		if err := os.WriteFile(filepath.Join(musa, "dev", name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ name, root, env, hidden0, hidden1 string }{
		{"all of AMD", root, "", "HIP_VISIBLE_DEVICES=0", "HIP_VISIBLE_DEVICES=1"},
		{"numbers of what ROCR left", root, "ROCR_VISIBLE_DEVICES=GPU-1,GPU-0", "HIP_VISIBLE_DEVICES=0", "HIP_VISIBLE_DEVICES=1"},
		{"both", root, "ROCR_VISIBLE_DEVICES=1,0 HIP_VISIBLE_DEVICES=1,0", "HIP_VISIBLE_DEVICES=1", "HIP_VISIBLE_DEVICES=0"},
		{"CUDA's variable, which HIP reads", root, "CUDA_VISIBLE_DEVICES=1,0", "HIP_VISIBLE_DEVICES=1 CUDA_VISIBLE_DEVICES=1", "HIP_VISIBLE_DEVICES=0 CUDA_VISIBLE_DEVICES=0"},
		{"HIP's own wins", root, "CUDA_VISIBLE_DEVICES=0 HIP_VISIBLE_DEVICES=1,0", "HIP_VISIBLE_DEVICES=1 CUDA_VISIBLE_DEVICES=1", "HIP_VISIBLE_DEVICES=0 CUDA_VISIBLE_DEVICES=0"},
		{"Moore Threads", musa, "MUSA_VISIBLE_DEVICES=1,0 CUDA_VISIBLE_DEVICES=", "MUSA_VISIBLE_DEVICES=1", "MUSA_VISIBLE_DEVICES=0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := ask(Bind{}, 2, "", strings.Fields(c.env)...)
			a.Hide = true
			p, err := Read(c.root, allowed, Bind{}).Place(a)
			if err != nil {
				t.Fatal(err)
			}
			for i, want := range []string{c.hidden0, c.hidden1} {
				if got := strings.Join(p.Ranks[i].Vars, " "); got != want {
					t.Errorf("rank %d: got %s, want %s", i, got, want)
				}
			}
		})
	}
	// A rank near the GPU that ROCR's numbers name.
	p, err := Read(root, allowed, Bind{}).Place(ask(Bind{}, 2, "", "ROCR_VISIBLE_DEVICES=1,0"))
	if err != nil || p.Ranks[0].CPUs.String() != "4-7" || p.Ranks[1].CPUs.String() != "0-3" {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestHideNeedsAGPUEach(t *testing.T) {
	root, allowed := recordedHost(t, "server")
	m := Read(root, allowed, Bind{})
	a := ask(Bind{}, 9, "")
	a.Hide = true
	if _, err := m.Place(a); err == nil || err.Error() != "9 ranks, but 8 GPUs are visible: --gpu-bind hide needs a GPU for each rank" {
		t.Error(err)
	}
	a = ask(Bind{}, 2, "", "CUDA_VISIBLE_DEVICES=5")
	a.Hide = true
	if _, err := m.Place(a); err == nil || err.Error() != "2 ranks, but 1 GPU is visible (CUDA_VISIBLE_DEVICES=5): --gpu-bind hide needs a GPU for each rank" {
		t.Error(err)
	}
	// A job file that hides runs on a laptop, too.
	root, allowed = recordedHost(t, "laptop")
	if p, err := Read(root, allowed, Bind{}).Place(a); err != nil || p.Ranks[0].Vars != nil {
		t.Errorf("without a GPU: %+v, %v", p, err)
	}
}

// A device that all ranks are told to use.
func TestNamedDevice(t *testing.T) {
	root, allowed := recordedHost(t, "server")
	for _, c := range []struct{ device, env, cpus, gpu string }{
		{"5", "", "8-15,24-31", "5"},
		{"1", "CUDA_VISIBLE_DEVICES=6,7", "8-15,24-31", "7"},
		{"GPU-7a5e", "", "8-15,24-31", "7"},
		{"GPU-7a5e", "CUDA_VISIBLE_DEVICES=0,GPU-7a5e7", "8-15,24-31", "GPU-7a5e7"},
		{"host", "", "0-7,16-23", ""},
		{"9", "", "0-7,16-23", "9"}, // the rank will say that it isn't there
	} {
		var environ []string
		if c.env != "" {
			environ = []string{c.env}
		}
		p, err := Read(root, allowed, Bind{To: ToNUMA}).Place(ask(Bind{To: ToNUMA}, 1, c.device, environ...))
		if err != nil || p.Ranks[0].CPUs.String() != c.cpus || p.Ranks[0].GPU != c.gpu {
			t.Errorf("device %s, %s: got %+v, %v; want CPUs %s, GPU %q", c.device, c.env, p.Ranks, err, c.cpus, c.gpu)
		}
	}
}

// TestUse binds a thread of this machine, and what it forks has no more.
func TestUse(t *testing.T) {
	allowed, err := Allowed()
	if err != nil {
		t.Fatal(err)
	}
	if n := runtime.NumCPU(); len(allowed) != n {
		t.Errorf("allowed %v, the runtime counts %d", allowed, n)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer func() {
		if err := Use(allowed); err != nil {
			t.Error(err)
		}
	}()
	one := allowed[len(allowed)-1:]
	if err := Use(one); err != nil {
		t.Fatal(err)
	}
	if got, err := Allowed(); err != nil || !slices.Equal(got, one) {
		t.Errorf("the thread may use %v, %v; want %v", got, err, one)
	}
	if err := Use(nil); err == nil {
		t.Error("bound to nothing")
	}
}
