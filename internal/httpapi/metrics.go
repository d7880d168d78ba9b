package httpapi

import (
	"fmt"
	"net/http"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/wire"
)

// metrics asks a sandbox what it uses.
func (s *Server) metrics(w http.ResponseWriter, r *http.Request) error {
	conn, err := s.Host.Look(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	m, err := conn.Metrics(r.Context())
	if err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	return Reply(w, http.StatusOK, guestMetrics(m))
}

func guestMetrics(m *wire.Metrics) api.Metrics {
	return api.Metrics{
		TimestampUnix: float64(m.Time.UnixMilli()) / 1000, UptimeSeconds: m.UptimeSeconds, CPUs: m.CPUs, CPUPercent: m.CPUPercent,
		CPUSeconds: m.CPUSeconds, Load: m.Load, MemoryTotalBytes: m.MemTotal, MemoryUsedBytes: m.MemUsed,
		MemoryCachedBytes: m.MemCached, MemoryAvailableBytes: m.MemAvailable, SwapTotalBytes: m.SwapTotal,
		DiskTotalBytes: m.DiskTotal, DiskUsedBytes: m.DiskUsed, DiskFreeBytes: m.DiskFree, Processes: m.Processes,
		Threads: m.Threads, OOMKills: m.OOMKills,
	}
}
