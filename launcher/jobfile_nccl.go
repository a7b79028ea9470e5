package launcher

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// The keys of [nccl] and [mccl] are the names of the library's variables without its prefix, in lower case. A variable that is not
// among them can be set in [env].
var (
	// ncclSwitches are on or off.
	ncclSwitches = strings.Fields(`graph_register local_register legacy_cuda_register legacy_musa_register win_enable single_proc_mem_reg_enable comm_blocking
		comm_split_share_resources comm_shrink_share_resources runtime_connect dmabuf_enable cumem_host_enable p2p_use_cuda_memcpy
		graph_mixing_support launch_order_implicit launch_race_fatal collnet_enable ras_enable multi_rank_gpu_enable
		p2p_disable p2p_direct_disable shm_disable shm_use_cuda_memcpy pxn_disable nvb_disable net_disable_intra net_shared_buffers net_shared_comms net_gdr_read net_gdr_c2c
		pxn_c2c ib_disable ib_cuda_support ib_use_inline ib_adaptive_routing ib_ece_enable ib_merge_nics ib_merge_vfs ib_split_data_on_qps ib_return_async_events
		oob_net_enable check_pointers ignore_cpu_affinity set_stack_size set_thread_name ipc_use_abstract_socket`)
	// ncclNumbers are whole numbers.
	ncclNumbers = strings.Fields(`nthreads buffsize ll_buffsize ll128_buffsize min_nchannels max_nchannels min_ctas max_ctas cga_cluster_size min_p2p_nchannels max_p2p_nchannels
		nchannels_per_net_peer nvls_nchannels nvls_chunksize p2p_net_chunksize p2p_nvl_chunksize p2p_pci_chunksize p2p_ll_threshold work_fifo_bytes collnet_node_threshold
		socket_nthreads nsocks_perthread socket_retry_cnt socket_retry_sleep_msec ib_timeout ib_retry_cnt ib_gid_index ib_pkey ib_qps_per_connection ib_sl ib_tc ib_fifo_tc
		ib_roce_version_num uid_stagger_threshold uid_stagger_rate ranks_per_root ras_timeout_factor set_cpu_stack_size mnnvl_clique_id win_stride`)
	// ncclTexts are the others, whatever they are.
	ncclTexts = strings.Fields(`debug_file debug_subsys debug_timestamp_format debug_timestamp_levels algo proto socket_ifname oob_net_ifname ib_hca ib_addr_range net net_plugin
		tuner_plugin tuner_config_file profiler_plugin env_plugin gin_plugin conf_file topo_file topo_dump_file graph_file graph_dump_file hostid comm_id ras_addr mnnvl_uuid
		netdevs_policy cta_policy`)
	// ncclWords are one of some words.
	ncclWords = map[string][]string{
		"debug": {"VERSION", "WARN", "INFO", "ABORT", "TRACE"}, "launch_mode": {"PARALLEL", "GROUP"}, "check_mode": {"DEFAULT", "DEBUG_LOCAL", "DEBUG_GLOBAL"},
		"p2p_level": {"LOC", "NVL", "PIX", "PXB", "PHB", "SYS"}, "net_gdr_level": {"LOC", "PIX", "PXB", "PHB", "SYS"}, "p2p_pxn_level": {"0", "1", "2"},
		"socket_family": {"AF_INET", "AF_INET6"}, "ib_addr_family": {"AF_INET", "AF_INET6"}, "ib_pci_relaxed_ordering": {"0", "1", "2"},
		"cross_nic": {"0", "1", "2"}, "cumem_enable": {"0", "1", "-2"}, "nvls_enable": {"0", "1", "2"}, "mnnvl_enable": {"0", "1", "2"},
	}
)

// ncclRefused says of settings that break gorun's ranks, and may hang any, why they are not taken. Package nccl refuses them, too.
func ncclRefused(table, key, value string) string {
	prefix := strings.ToUpper(table) + "_"
	for _, s := range gpulib.CollectiveSettings(prefix) {
		if s.Name == prefix+strings.ToUpper(key) && s.Effect != gpulib.Warns && s.Bad(value) {
			return s.Why
		}
	}
	return ""
}

// ncclKeys are the keys of [nccl] or [mccl].
func ncclKeys(table string) []string {
	not := map[string]string{"nccl": "legacy_musa_register", "mccl": "legacy_cuda_register"}[table]
	keys := slices.Concat(slices.Collect(maps.Keys(ncclWords)), ncclTexts, ncclSwitches, ncclNumbers)
	keys = slices.DeleteFunc(keys, func(k string) bool { return k == not })
	slices.Sort(keys)
	return keys
}

// library reads [nccl] or [mccl], whose keys unknown has looked at.
func (d *jobDecoder) library(t map[string]any, table string) []Setting {
	var env []Setting
	for _, key := range slices.Sorted(maps.Keys(t)) {
		path := []string{table, key}
		name := strings.ToUpper(table + "_" + key)
		value, ok := scalarText(t[key])
		if on, is := t[key].(bool); is {
			value = map[bool]string{false: "0", true: "1"}[on]
		}
		if !ok {
			typed[string](d, t[key], path)
		} else if must := ncclMust(key, value); must != "" {
			d.failf(path, "%s = %s: must be %s", key, value, must)
		}
		if strings.ContainsRune(value, 0) {
			d.failf(path, "%s: %q holds a zero byte", key, value)
		}
		if why := ncclRefused(table, key, value); why != "" {
			d.failf(path, "%s = %s is refused: %s", key, value, why)
		}
		if d.has("env", name) {
			d.failf(path, "%s is given twice, here and as %s in [env]", key, name)
		}
		d.note("env."+name, path...)
		env = append(env, Setting{Name: name, Value: value})
	}
	return env
}

// ncclMust says what a value must be, "" if it is that.
func ncclMust(key, value string) string {
	list := ncclWords[key]
	switch {
	case slices.Contains(ncclSwitches, key):
		list = []string{"0", "1"}
		if !slices.Contains(list, value) {
			return "true or false (1 or 0)"
		}
	case list != nil:
		if !slices.ContainsFunc(list, func(w string) bool { return strings.EqualFold(w, value) }) {
			return either(list)
		}
	case slices.Contains(ncclNumbers, key):
		if _, err := strconv.ParseInt(value, 0, 64); err != nil || strings.Contains(value, "_") {
			return "a whole number"
		}
	case strings.TrimSpace(value) == "":
		return "a string that is not empty"
	}
	return ""
}

// ncclHint is for a key that [nccl] or [mccl] does not have.
func ncclHint(table, key string) string {
	name := strings.ToUpper(table + "_" + key)
	bare := strings.ToLower(key)
	for _, prefix := range []string{"nccl_", "mccl_"} {
		if rest, ok := strings.CutPrefix(bare, prefix); ok {
			bare, name = rest, strings.ToUpper(key)
		}
	}
	keys := ncclKeys(table)
	if slices.Contains(keys, bare) {
		return "it is called " + bare + " here"
	}
	hint := fmt.Sprintf("a variable that gorun does not know goes into [env], as %s", name)
	if near := Nearest(bare, keys); near != "" {
		hint = "did you mean " + near + "? " + strings.ToUpper(hint[:1]) + hint[1:]
	}
	return hint
}
