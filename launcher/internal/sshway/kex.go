package sshway

import (
	"slices"
	"strings"

	"golang.org/x/crypto/ssh"
)

// keyExchanges are those that are offered, in this order: first the one that a quantum computer does not break. Of those of 128 bits NIST's
// curve goes before Curve25519: sshd has OpenSSL's assembly for the one and portable C for the other. 64 logins on 2 cores take 0.86 s and
// 1.1 s, most of which the hosts compute.
var keyExchanges = []string{
	ssh.KeyExchangeMLKEM768X25519, ssh.KeyExchangeECDHP256, ssh.KeyExchangeCurve25519, ssh.KeyExchangeECDHP384, ssh.KeyExchangeECDHP521,
	ssh.KeyExchangeDH16SHA512, ssh.KeyExchangeDH14SHA256, ssh.KeyExchangeDHGEXSHA256,
}

// chosen is what a list of ssh_config's makes of the algorithms that there are: names and patterns in order, or with +, - or ^ in front those
// that are added, left out or preferred.
func chosen(all []string, list string) []string {
	how, rest := byte(0), list
	if list != "" && strings.IndexByte("+-^", list[0]) >= 0 {
		how, rest = list[0], list[1:]
	}
	var named []string
	for _, pattern := range strings.Split(rest, ",") {
		pattern = strings.TrimSuffix(pattern, "@libssh.org") // an older name of the same
		for _, name := range all {
			if matchPattern(pattern, name) && !slices.Contains(named, name) {
				named = append(named, name)
			}
		}
	}
	others := slices.DeleteFunc(slices.Clone(all), func(name string) bool { return slices.Contains(named, name) })
	switch how {
	case '+':
		return all // nothing is left out that could be added
	case '-':
		return others
	case '^':
		return append(named, others...)
	}
	return named
}
