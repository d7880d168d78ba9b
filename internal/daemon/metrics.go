package daemon

import (
	"time"

	"forkd.dev/forkd/internal/audit"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/metrics"
)

// meters are the daemon's metrics and where they are read from.
type meters struct {
	*metrics.Metrics

	host *host.Host // set before anybody can read
	log  *audit.Log
}

func newMeters(version string, log *audit.Log) *meters {
	m := &meters{log: log}
	m.Metrics = metrics.New(version, m.state)
	return m
}

// took is the host's word in the metrics' words, which are the same.
func (m *meters) took(what host.Timed, mode string, how host.Outcome, took time.Duration) {
	m.Took(metrics.Operation(what), mode, metrics.Result(how), took)
}

func (m *meters) state() metrics.State {
	f := m.host.Figures()
	s := metrics.State{
		Sandboxes: map[string]int{}, SandboxesMax: f.SandboxesMax, Snapshots: map[string]int{}, Images: f.Images,
		MemoryOwn: f.Memory.OwnBytes, MemoryShared: f.Memory.SharedBytes, Hot: f.Hot, HotReserved: f.HotReserved, HotMax: f.HotMax,
		MemoryAvailable: f.Available, DiskSandboxes: f.DiskSandboxes, DiskSnapshots: f.DiskSnapshots, DiskImages: f.DiskImages,
		DiskFree: f.DiskFree, Forking: f.Forking, Branching: f.Branching, Building: f.Building, EventsTold: f.EventsTold,
	}
	n := f.Network
	s.NetworkOpen, s.NetworkFlows, s.NetworkRefused, s.NetworkCut, s.NetworkQueries = f.NetworkOpen, n.Flows, n.Refused, n.Cut, n.Questions
	s.NetworkSent, s.NetworkReceived, s.NetworkFramesDropped, s.NetworkFramesRefused = n.Sent, n.Received, n.FramesDropped, n.FramesRefused
	s.NetworkLost, s.NetworkMemory, s.NetworkMemoryMax, s.NetworkOpenMax = n.Lost, f.NetworkUse.Held, f.NetworkUse.Memory, f.NetworkUse.Flows
	for state, n := range f.Sandboxes {
		s.Sandboxes[string(state)] = n
	}
	for status, n := range f.Snapshots {
		s.Snapshots[string(status)] = n
	}
	if m.log != nil {
		s.AuditWriteFailure = m.log.Failed()
	}
	return s
}
