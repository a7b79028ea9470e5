package pmix

import (
	"maps"
	"slices"
	"strconv"
	"strings"
)

// PMIx's names of what a job's ranks are told.
const (
	keyAppLeader    = "pmix.aldr"
	keyAppNumber    = "pmix.appnum"
	keyAppRank      = "pmix.apprank"
	keyAppSize      = "pmix.app.size"
	keyApps         = "pmix.job.napps"
	keyAppInfo      = "pmix.app.arr"
	keyBlob         = "pmix.pblob"
	keyCleansDirs   = "pmix.tdir.rmclean"
	keyGlobalRank   = "pmix.grank"
	keyHostname     = "pmix.hname"
	keyJobID        = "pmix.jobid"
	keyJobSize      = "pmix.job.size"
	keyLocalLeader  = "pmix.lldr"
	keyLocalPeers   = "pmix.lpeers"
	keyLocalRank    = "pmix.lrank"
	keyLocalSize    = "pmix.local.size"
	keyMaxProcs     = "pmix.max.size"
	keyNamespaceDir = "pmix.nsdir"
	keyNodeID       = "pmix.nodeid"
	keyNodeInfo     = "pmix.node.arr"
	keyNodeList     = "pmix.nlist"
	keyNodeRank     = "pmix.nrank"
	keyNodeSize     = "pmix.node.size"
	keyNodes        = "pmix.num.nodes"
	keyOffset       = "pmix.offset"
	keyProcDir      = "pmix.pdir"
	keySessionDir   = "pmix.tmpdir"
	keyUniverseSize = "pmix.univ.size"
)

// jobInfo is the answer to a rank that asks what there is to know of its job: values of the job, of each host, of each program and of each rank.
func (s *server) jobInfo() []byte {
	appRanks := map[int][]int{}
	size := len(s.ranks)
	for r := range size {
		appRanks[s.w.AppOf[r]] = append(appRanks[s.w.AppOf[r]], r)
	}
	var names []string
	for _, h := range s.hosts {
		names = append(names, s.names[h])
	}
	p := &packer{}
	p.count(1)
	p.str(s.namespace)
	p.kval(keyJobID, s.namespace)
	p.kval(keyJobSize, uint32(size))
	p.kval(keyMaxProcs, uint32(max(size, s.w.Universe)))
	p.kval(keyUniverseSize, uint32(max(size, s.w.Universe)))
	p.kval(keyOffset, uint32(0))
	p.kval(keyNodes, uint32(len(s.hosts)))
	p.kval(keyNodeList, strings.Join(names, ","))
	p.kval(keyApps, uint32(len(appRanks)))
	if s.dir != "" {
		p.kval(keySessionDir, s.dir)
		p.kval(keyNamespaceDir, s.dir)
		p.kval(keyCleansDirs, true)
	}
	for _, h := range s.hosts {
		peers := make([]string, len(s.ranksOf[h]))
		for i, r := range s.ranksOf[h] {
			peers[i] = strconv.Itoa(r)
		}
		host := []info{{keyLocalSize, uint32(len(peers))}, {keyNodeSize, uint32(len(peers))}, {keyLocalPeers, strings.Join(peers, ",")},
			{keyLocalLeader, rankValue(s.ranksOf[h][0])}}
		if h == s.w.Host {
			// Clients before 3.2 look for those of their own host among the job's, later ones there, too, if their host calls itself by another name.
			for _, v := range host {
				p.kval(v.key, v.value)
			}
		}
		p.kval(keyNodeInfo, append([]info{{keyNodeID, uint32(h)}, {keyHostname, s.names[h]}}, host...))
	}
	appRank := make([]int, size)
	for _, app := range slices.Sorted(maps.Keys(appRanks)) {
		ranks := appRanks[app]
		for i, r := range ranks {
			appRank[r] = i
		}
		p.kval(keyAppInfo, []info{{keyAppNumber, uint32(app)}, {keyAppSize, uint32(len(ranks))}, {keyAppLeader, rankValue(ranks[0])}})
	}
	for _, h := range s.hosts {
		for local, r := range s.ranksOf[h] {
			b := &packer{}
			b.count(1)
			b.u32(uint32(r))
			b.kval(keyLocalRank, uint16(local))
			b.kval(keyNodeRank, uint16(local))
			b.kval(keyGlobalRank, rankValue(r))
			b.kval(keyAppRank, rankValue(appRank[r]))
			b.kval(keyNodeID, uint32(h))
			b.kval(keyHostname, s.names[h])
			b.kval(keyAppNumber, uint32(s.w.AppOf[r]))
			p.kval(keyBlob, b.b)
		}
	}
	return p.b
}
