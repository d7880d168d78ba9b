package api

// Metrics is what a sandbox uses, by its own accounting: of GET /v1/sandboxes/{id}/metrics.
type Metrics struct {
	TimestampUnix float64 `json:"timestamp_unix"` // by the sandbox's clock
	UptimeSeconds float64 `json:"uptime_seconds"` // of the machine; a fork's begins with its parent's
	CPUs          int     `json:"cpus"`
	// CPUPercent is the work of all CPUs together since the sample before, whoever took it: 100 is all of them.
	CPUPercent           float64    `json:"cpu_percent"`
	CPUSeconds           float64    `json:"cpu_seconds"` // worked in all
	Load                 [3]float64 `json:"load"`        // of 1, 5 and 15 minutes
	MemoryTotalBytes     int64      `json:"memory_total_bytes"`
	MemoryUsedBytes      int64      `json:"memory_used_bytes"` // without what is only cached
	MemoryCachedBytes    int64      `json:"memory_cached_bytes"`
	MemoryAvailableBytes int64      `json:"memory_available_bytes"`
	SwapTotalBytes       int64      `json:"swap_total_bytes"` // 0: there is none
	DiskTotalBytes       int64      `json:"disk_total_bytes"`
	DiskUsedBytes        int64      `json:"disk_used_bytes"`
	DiskFreeBytes        int64      `json:"disk_free_bytes"`
	Processes            int        `json:"processes"`
	Threads              int        `json:"threads"`   // with the kernel's
	OOMKills             int64      `json:"oom_kills"` // processes killed for want of memory
}
