package launcher

import (
	"fmt"
	"time"
)

// doubt takes note that gossip holds a host for dead.
func (r *runner) doubt(host int) {
	if host < 0 || host >= len(r.hosts) {
		return
	}
	if h, ok := r.hosts[host].(*remoteHost); ok {
		h.doubted.Store(time.Now().UnixNano())
	}
}

// unreached takes note that the network between two hosts is cut, although gorun reaches both: the job cannot go on.
func (r *runner) unreached(by, host int) {
	if host < 0 || host >= len(r.hosts) {
		return
	}
	if h, ok := r.hosts[host].(*remoteHost); ok {
		h.lost(fmt.Errorf("host %s has not reached it for %v; gorun does", r.plan.Hosts[by].Name, silentAgreed))
	} else if h, ok := r.hosts[by].(*remoteHost); ok {
		h.lost(fmt.Errorf("it has not reached host %s for %v; gorun reaches it", r.plan.Hosts[host].Name, silentAgreed))
	}
}

// confirm answers this host's node, which holds a host for dead.
func (r *runner) confirm(host int) bool {
	r.doubt(host)
	if h, ok := r.hosts[host].(*remoteHost); ok {
		select {
		case <-h.gone:
			return true
		default:
		}
	}
	return false
}
