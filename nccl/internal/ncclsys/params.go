package ncclsys

import (
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// ParamBind finds a parameter of the library by its key.
func (l *Library) ParamBind(key string) (ParamHandle, error) {
	b := dl.CString(key)
	var h ParamHandle
	rc := l.f.ParamBind.Result3(uintptr(unsafe.Pointer(&h)), uintptr(unsafe.Pointer(&b[0])), 0)
	return h, l.check(&l.f.ParamBind, rc)
}

// ParamInt reads a number of 8, 16, 32 or 64 bits; the parameter must have that type.
func (l *Library) ParamInt(h ParamHandle, bits int, signed bool) (int64, error) {
	f := &l.f
	var e *dl.Entry
	switch bits {
	case 8:
		e = pick(signed, &f.ParamGetI8, &f.ParamGetU8)
	case 16:
		e = pick(signed, &f.ParamGetI16, &f.ParamGetU16)
	case 32:
		e = pick(signed, &f.ParamGetI32, &f.ParamGetU32)
	default:
		e = pick(signed, &f.ParamGetI64, &f.ParamGetU64)
		bits = 64
	}
	var v uint64
	rc := e.Result3(uintptr(h), uintptr(unsafe.Pointer(&v)), 0)
	if err := l.check(e, rc); err != nil {
		return 0, err
	}
	if signed {
		return int64(v<<(64-bits)) >> (64 - bits), nil
	}
	return int64(v), nil
}

func pick(first bool, a, b *dl.Entry) *dl.Entry {
	if first {
		return a
	}
	return b
}

// ParamString reads a text.
func (l *Library) ParamString(h ParamHandle) (string, error) {
	var p uintptr
	rc := l.f.ParamGetStr.Result3(uintptr(h), uintptr(unsafe.Pointer(&p)), 0)
	return dl.GoString(p), l.check(&l.f.ParamGetStr, rc)
}

// ParamBytes reads a parameter of any type, up to max bytes.
func (l *Library) ParamBytes(h ParamHandle, max int) ([]byte, error) {
	b := make([]byte, max)
	var n int32
	rc := l.f.ParamGet.Result6(uintptr(h), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(max), uintptr(unsafe.Pointer(&n)), 0, 0)
	if err := l.check(&l.f.ParamGet, rc); err != nil {
		return nil, err
	}
	return b[:min(int(n), max)], nil
}

// Parameter is a parameter's value as text, as the library really uses it.
func (l *Library) Parameter(key string) (string, error) {
	b := dl.CString(key)
	var p uintptr
	var n int32
	rc := l.f.ParamGetParameter.Result3(uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&p)), uintptr(unsafe.Pointer(&n)))
	return dl.GoString(p), l.check(&l.f.ParamGetParameter, rc)
}

// ParameterKeys are the keys of all parameters.
func (l *Library) ParameterKeys() ([]string, error) {
	var table unsafe.Pointer // the library's array
	var n int32
	rc := l.f.ParamGetAllParameterKeys.Result3(uintptr(unsafe.Pointer(&table)), uintptr(unsafe.Pointer(&n)), 0)
	if err := l.check(&l.f.ParamGetAllParameterKeys, rc); err != nil || n <= 0 {
		return nil, err
	}
	keys := make([]string, n)
	for i, p := range unsafe.Slice((*uintptr)(table), n) {
		keys[i] = dl.GoString(p)
	}
	return keys, nil
}

// ParamDumpAll makes the library print all parameters to its log.
func (l *Library) ParamDumpAll() error {
	if l.f.ParamDumpAll.Func == 0 {
		return l.fail(&l.f.ParamDumpAll, dl.Absent)
	}
	l.f.ParamDumpAll.Call3(0, 0, 0)
	return nil
}
