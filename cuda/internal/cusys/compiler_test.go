package cusys

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
)

func TestCompilers(t *testing.T) {
	for _, v := range Vendors {
		t.Run(v.Name, func(t *testing.T) {
			t.Setenv(v.Compiler.Env, dltest.Build(t, "testdata/rtc.c", v.Compiler.Sonames[0], "-I../../dl/dltest", "-D"+v.Name))
			c, err := OpenCompiler(v)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			log := func() string {
				s := dl.GoString(c.lib.Lookup("fake_log").Call())
				c.lib.Lookup("fake_reset").Call()
				return s
			}
			if got, err := c.Version(); err != nil || got != (Version{13, 2}) {
				t.Errorf("version = %v, %v", got, err)
			}
			code, err := c.Compile("source", "x.cu", []string{"twice<float>"}, "-O3", "--std=c++17")
			if err != nil {
				t.Fatal(err)
			}
			want := &Code{Image: []byte("code\x00"), Names: map[string]string{"twice<float>": "_Z5twicef"}}
			if diff := cmp.Diff(code, want); diff != "" {
				t.Errorf("code (-got +want):\n%s", diff)
			}
			calls := strings.NewReplacer("P:", map[*Vendor]string{CUDA: "nvrtc", MUSA: "mtrtc", HIP: "hiprtc"}[v]).Replace(`P:CreateProgram src=source name=x.cu headers=0,0,0
P:AddNameExpression same=1 name=twice<float>
P:CompileProgram same=1 n=2 first=-O3 last=--std=c++17
P:GetLoweredName same=1 name=twice<float>
P:DestroyProgram same=1
`)
			if diff := cmp.Diff(log(), calls); diff != "" {
				t.Errorf("C saw (-got +want):\n%s", diff)
			}
			_, err = c.Compile("error", "x.cu", nil)
			var ce *CompileError
			if !errors.As(err, &ce) || err.Error() != "compile x.cu:\nx.cu(1): wrong" {
				t.Errorf("error = %v, want a *CompileError with the log", err)
			}
			if !strings.HasSuffix(log(), "DestroyProgram same=1\n") {
				t.Error("the program was not destroyed")
			}
			c.lib.Lookup("fake_fail").Call(11)
			if _, err = c.Compile("source", "x.cu", nil); err == nil || !strings.Contains(err.Error(), "CreateProgram: OTHER (") {
				t.Errorf("error = %v", err)
			}
		})
	}
}

// TestFormsWithEdgeData are the newer forms of two functions, for a CUDA driver that has dropped the older ones.
func TestFormsWithEdgeData(t *testing.T) {
	f := newFake(t, CUDA, "-DEDGES")
	f.log()
	info, err := f.StreamCaptureInfo(7)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(info, CaptureInfo{Status: CaptureActive, ID: 12, Graph: 0x99, Deps: []GraphNode{0x101, 0x102}}); diff != "" {
		t.Errorf("info (-got +want):\n%s", diff)
	}
	if err := f.StreamAddCaptureDependencies(7, []GraphNode{0x101, 0x102}); err != nil {
		t.Fatal(err)
	}
	want := "cuStreamGetCaptureInfo_v3 s=0x7 edges=1\ncuStreamUpdateCaptureDependencies_v2 s=0x7 edges=0 n=2 first=0x101 last=0x102 flags=0\n"
	if diff := cmp.Diff(f.log(), want); diff != "" {
		t.Errorf("C saw (-got +want):\n%s", diff)
	}
}
