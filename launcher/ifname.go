package launcher

import (
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
)

// onInterface is the environment of a rank in a job on several hosts with what tells the libraries between them to use the interface that holds
// the address at which the other hosts reach this one, where neither the user nor the host has said which. "" says nothing.
func onInterface(env []string, name string) []string {
	if name == "" {
		return env
	}
	has := func(v string) bool { return slices.ContainsFunc(env, func(kv string) bool { return isVar(kv, v) }) }
	if !has("NCCL_SOCKET_IFNAME") && !ncclHasInterface(env) {
		env = append(env, "NCCL_SOCKET_IFNAME=="+name) // "=": this one, not all whose names begin like it
	}
	if !has("MCCL_SOCKET_IFNAME") {
		env = append(env, "MCCL_SOCKET_IFNAME=="+name)
	}
	if !has("GLOO_SOCKET_IFNAME") {
		env = append(env, "GLOO_SOCKET_IFNAME="+name)
	}
	return env
}

// ncclHasInterface reports whether a file that NCCL reads sets NCCL_SOCKET_IFNAME, which one in the environment would override.
func ncclHasInterface(env []string) bool {
	files := []string{"/etc/nccl.conf"}
	if own := getenv(env, "NCCL_CONF_FILE"); own != "" {
		files = append(files, own)
	} else if home := getenv(env, "HOME"); home != "" {
		files = append(files, filepath.Join(home, ".nccl.conf"))
	}
	for _, file := range files {
		for line := range strings.Lines(string(beginning(file))) {
			if key, value, ok := strings.Cut(line, "="); ok && strings.TrimSpace(key) == "NCCL_SOCKET_IFNAME" && strings.TrimSpace(value) != "" {
				return true
			}
		}
	}
	return false
}

// interfaceNotes says which settings of interfaces name none of this host.
func interfaceNotes(env []string) []string {
	var asked []string
	for _, v := range []string{"NCCL_SOCKET_IFNAME", "MCCL_SOCKET_IFNAME"} {
		if getenv(env, v) != "" {
			asked = append(asked, v)
		}
	}
	if len(asked) == 0 {
		return nil
	}
	list, err := net.Interfaces()
	if err != nil {
		return nil
	}
	var names []string
	for _, i := range list {
		names = append(names, i.Name)
	}
	var notes []string
	for _, v := range asked {
		if value := getenv(env, v); !namesInterface(value, names) {
			notes = append(notes, fmt.Sprintf("%s=%s names none of its interfaces: %s", v, value, strings.Join(names, " ")))
		}
	}
	return notes
}

// namesInterface reports whether a value in NCCL's form names any interface: a list of beginnings of names, after "=" of whole names, after "^"
// of those that are left out.
func namesInterface(value string, names []string) bool {
	value, not := strings.CutPrefix(value, "^")
	value, exact := strings.CutPrefix(value, "=")
	list := strings.Split(value, ",")
	return slices.ContainsFunc(names, func(name string) bool {
		named := slices.ContainsFunc(list, func(one string) bool {
			return one != "" && (name == one || !exact && strings.HasPrefix(name, one))
		})
		return named != not
	})
}
