package launcher

import (
	"fmt"
	"time"
)

// doubt takes note that gossip holds a host for dead.
func (r *runner) doubt(host int) {
	if h := r.remote(host); h != nil {
		h.doubted.Store(time.Now().UnixNano())
	}
}

// remote is a host that is not this one, by its index; nil: it is, or there is none.
func (r *runner) remote(host int) *remoteHost {
	if host < 0 || host >= len(r.hosts) {
		return nil
	}
	h, _ := r.hosts[host].(*remoteHost)
	return h
}

// unreached takes note that the network between two hosts is cut, although gorun reaches both: the job cannot go on.
func (r *runner) unreached(by, host int) {
	if host < 0 || host >= len(r.hosts) {
		return
	}
	if h := r.remote(host); h != nil {
		h.lost(fmt.Errorf("host %s has not reached it for %v; gorun does", r.plan.Hosts[by].Name, silentAgreed))
	} else if h := r.remote(by); h != nil {
		h.lost(fmt.Errorf("it has not reached host %s for %v; gorun reaches it", r.plan.Hosts[host].Name, silentAgreed))
	}
}

// confirm answers this host's node, which holds a host for dead.
func (r *runner) confirm(host int) bool {
	r.doubt(host)
	if h := r.remote(host); h != nil {
		select {
		case <-h.gone:
			return true
		default:
		}
	}
	return false
}
