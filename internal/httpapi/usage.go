package httpapi

import (
	"net/http"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
)

func (s *Server) usage(w http.ResponseWriter, r *http.Request) error {
	u, err := s.Host.Usage(r.PathValue("id"))
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, usage(u))
}

func (s *Server) usages(w http.ResponseWriter, r *http.Request) error {
	labels, err := labelFilter(r)
	if err != nil {
		return err
	}
	list := []api.Usage{}
	for _, u := range s.Host.Usages(labels) {
		list = append(list, usage(u))
	}
	list, err = page(w, r, list, func(u *api.Usage) string { return u.ID })
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, list)
}

func usage(u host.Usage) api.Usage {
	return api.Usage{
		ID: u.ID, SnapshotTag: u.SnapshotTag, State: string(u.State), Labels: u.Labels, TimestampUnix: float64(u.Time.UnixMilli()) / 1000,
		AgeSeconds: u.Time.Sub(u.Created).Seconds(), CPUs: u.CPUs, CPUSeconds: u.Taken.CPU.Seconds(), MemoryBytes: u.MemoryBytes,
		MemoryOwnBytes: u.Memory.OwnBytes, MemorySharedBytes: u.Memory.SharedBytes, MemoryProportionalBytes: u.Memory.ProportionalBytes,
		DiskOwnBytes: u.DiskOwn, IOReadBytes: u.Taken.ReadBytes, IOWrittenBytes: u.Taken.WrittenBytes,
		NetworkReceivedBytes: u.Network.Received, NetworkSentBytes: u.Network.Sent, NetworkFlows: u.Network.Flows, NetworkRefused: u.Network.Refused,
	}
}

// prometheus is what the daemon counts, for Prometheus to read.
func (s *Server) prometheus(w http.ResponseWriter, r *http.Request) error {
	if s.Metrics == nil {
		return host.ErrUnsupported
	}
	s.Metrics.Handler().ServeHTTP(w, r)
	return nil
}
