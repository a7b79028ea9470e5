package pmi

import (
	"fmt"
	"slices"
	"strings"
)

// block is ranks that follow one another: on some hosts that follow one another, on each as many.
type block struct{ host, hosts, ranks int }

// processMapping says which ranks share a host, given the host of each: the value of the key PMI_process_mapping, "(vector,(0,2,4))" for 4 ranks on each of 2 hosts, or ""
// if there is no form of at most so many bytes. Hosts are numbered as they come.
func processMapping(hostOf []int, most int) string {
	number := map[int]int{}
	var blocks []block
	for i := 0; i < len(hostOf); {
		n := 1
		for i+n < len(hostOf) && hostOf[i+n] == hostOf[i] {
			n++
		}
		host, known := number[hostOf[i]]
		if !known {
			host = len(number)
			number[hostOf[i]] = host
		}
		i += n
		if k := len(blocks) - 1; k >= 0 && blocks[k].ranks == n && blocks[k].host+blocks[k].hosts == host {
			blocks[k].hosts++
			continue
		}
		blocks = append(blocks, block{host, 1, n})
	}
	// Who reads it begins anew where the list is at its end and ranks are left.
	for n := 1; n <= len(blocks)/2; n++ {
		if len(blocks)%n == 0 && slices.Equal(blocks[n:], blocks[:len(blocks)-n]) {
			blocks = blocks[:n]
			break
		}
	}
	var b strings.Builder
	b.WriteString("(vector")
	for _, k := range blocks {
		fmt.Fprintf(&b, ",(%d,%d,%d)", k.host, k.hosts, k.ranks)
	}
	b.WriteString(")")
	if b.Len() > most {
		return ""
	}
	return b.String()
}
