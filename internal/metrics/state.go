package metrics

import (
	"maps"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// stateCollector turns a State into samples.
type stateCollector struct {
	mu    sync.Mutex
	state func() State
	descs map[string]*prometheus.Desc
}

const (
	sandboxes       = "forkd_sandboxes"
	sandboxesMax    = "forkd_sandboxes_limit"
	snapshots       = "forkd_snapshots"
	images          = "forkd_images"
	memoryOwn       = "forkd_sandbox_memory_own_bytes"
	memoryShared    = "forkd_sandbox_memory_shared_bytes"
	hot             = "forkd_hot_memory_bytes"
	hotReserved     = "forkd_hot_memory_reserved_bytes"
	hotMax          = "forkd_hot_memory_limit_bytes"
	memoryAvailable = "forkd_host_memory_available_bytes"
	disk            = "forkd_disk_bytes"
	diskFree        = "forkd_disk_free_bytes"
	queue           = "forkd_operations_in_progress"
	eventsTold      = "forkd_events_total"
	auditFailures   = "forkd_audit_write_failures_total"
	networkOpen     = "forkd_network_flows_open"
	networkFlows    = "forkd_network_flows_total"
	networkRefused  = "forkd_network_refused_total"
	networkCut      = "forkd_network_cut_total"
	networkQueries  = "forkd_network_queries_total"
	networkBytes    = "forkd_network_bytes_total"
	networkFrames   = "forkd_network_frames_lost_total"
	networkLost     = "forkd_network_refused_unrecorded_total"
	networkMemory   = "forkd_network_memory_bytes"
	networkMemMax   = "forkd_network_memory_limit_bytes"
	networkOpenMax  = "forkd_network_flows_limit"
)

func descriptions() map[string]*prometheus.Desc {
	all := map[string]*prometheus.Desc{}
	add := func(name, help string, labels ...string) { all[name] = prometheus.NewDesc(name, help, labels, nil) }
	add(sandboxes, "Sandboxes, by state.", "state")
	add(sandboxesMax, "Sandboxes that may run at once.")
	add(snapshots, "Snapshots, by status, without the steps of builds.", "status")
	add(images, "Images.")
	add(memoryOwn, "Memory that sandboxes have for themselves, those of their VM processes included.")
	add(memoryShared, "Memory that sandboxes map and others may map as well, counted once for each sandbox.")
	add(hot, "Memory of the images that children are forked from, as far as it is in use.")
	add(hotReserved, "Memory that is set aside for those images.")
	add(hotMax, "Memory that may be set aside for them.")
	add(memoryAvailable, "Memory of the host that can be had without swapping.")
	add(disk, "Disk in use: what sandboxes have written, what snapshots and images have stored.", "kind")
	add(diskFree, "Space left on the disk of the daemon's home.")
	add(queue, "Children, branches and builds that are being made.", "operation")
	add(eventsTold, "Events told since the daemon started.")
	add(auditFailures, "Entries that could not be written to the audit log.")
	add(networkOpen, "Flows of sandboxes that are open.")
	add(networkFlows, "Flows that sandboxes began, those refused among them.")
	add(networkRefused, "Attempts of sandboxes that their policies or a limit refused.")
	add(networkCut, "Open flows that were cut by a change of policy or a budget that was spent.")
	add(networkQueries, "Names that sandboxes asked for.")
	add(networkBytes, "Payload that sandboxes sent and received.", "direction")
	add(networkLost, "Those of them that were too many to be written down one by one.")
	add(networkMemory, "Memory of the process that has the networks of all sandboxes.")
	add(networkMemMax, "Memory that those networks may use together.")
	add(networkOpenMax, "Flows that may be open at once, of all sandboxes.")
	add(networkFrames, "Frames of sandboxes that went nowhere: dropped beyond a limit, or not theirs to send.", "reason")
	return all
}

func (c *stateCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, name := range slices.Sorted(maps.Keys(c.descs)) {
		ch <- c.descs[name]
	}
}

func (c *stateCollector) Collect(ch chan<- prometheus.Metric) {
	c.mu.Lock()
	s := c.state()
	c.mu.Unlock()
	gauge := func(name string, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(c.descs[name], prometheus.GaugeValue, v, labels...)
	}
	for state, n := range s.Sandboxes {
		gauge(sandboxes, float64(n), state)
	}
	for status, n := range s.Snapshots {
		gauge(snapshots, float64(n), status)
	}
	for name, v := range map[string]int64{
		sandboxesMax: int64(s.SandboxesMax), images: int64(s.Images), memoryOwn: s.MemoryOwn, memoryShared: s.MemoryShared, hot: s.Hot,
		hotReserved: s.HotReserved, hotMax: s.HotMax, memoryAvailable: s.MemoryAvailable, diskFree: s.DiskFree,
	} {
		gauge(name, float64(v))
	}
	gauge(disk, float64(s.DiskSandboxes), "sandboxes")
	gauge(disk, float64(s.DiskSnapshots), "snapshots")
	gauge(disk, float64(s.DiskImages), "images")
	gauge(queue, float64(s.Forking), "fork")
	gauge(queue, float64(s.Branching), "branch")
	gauge(queue, float64(s.Building), "build")
	gauge(networkOpen, float64(s.NetworkOpen))
	gauge(networkOpenMax, float64(s.NetworkOpenMax))
	gauge(networkMemory, float64(s.NetworkMemory))
	gauge(networkMemMax, float64(s.NetworkMemoryMax))
	counter := func(name string, v int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(c.descs[name], prometheus.CounterValue, float64(v), labels...)
	}
	for name, v := range map[string]int64{
		eventsTold: s.EventsTold, auditFailures: s.AuditWriteFailure, networkFlows: s.NetworkFlows, networkRefused: s.NetworkRefused,
		networkCut: s.NetworkCut, networkQueries: s.NetworkQueries, networkLost: s.NetworkLost,
	} {
		counter(name, v)
	}
	counter(networkBytes, s.NetworkSent, "sent")
	counter(networkBytes, s.NetworkReceived, "received")
	counter(networkFrames, s.NetworkFramesDropped, "dropped")
	counter(networkFrames, s.NetworkFramesRefused, "refused")
}
