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
			code, err := c.Compile("source", "x.cu", "-O3", "--std=c++17")
			if err != nil || string(code) != "code\x00" {
				t.Fatalf("code %q, %v", code, err)
			}
			calls := strings.NewReplacer("P:", map[*Vendor]string{CUDA: "nvrtc", MUSA: "mtrtc", HIP: "hiprtc"}[v]).Replace(`P:CreateProgram src=source name=x.cu headers=0,0,0
P:CompileProgram same=1 n=2 first=-O3 last=--std=c++17
P:DestroyProgram same=1
`)
			if diff := cmp.Diff(log(), calls); diff != "" {
				t.Errorf("C saw (-got +want):\n%s", diff)
			}
			_, err = c.Compile("error", "x.cu")
			var ce *CompileError
			if !errors.As(err, &ce) || err.Error() != "compile x.cu:\nx.cu(1): wrong" {
				t.Errorf("error = %v, want a *CompileError with the log", err)
			}
			if !strings.HasSuffix(log(), "DestroyProgram same=1\n") {
				t.Error("the program was not destroyed")
			}
			c.lib.Lookup("fake_fail").Call(11)
			if _, err = c.Compile("source", "x.cu"); err == nil || !strings.Contains(err.Error(), "CreateProgram: OTHER (") {
				t.Errorf("error = %v", err)
			}
		})
	}
}
