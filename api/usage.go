package api

// Usage is what a sandbox costs its host, of GET /v1/sandboxes/{id}/usage, and of GET /v1/usage for all of them. What it does
// by its own accounting is in Metrics. What is counted goes on over a suspend and another daemon, and never gets less.
type Usage struct {
	ID            string            `json:"id"`
	SnapshotTag   string            `json:"snapshot_tag"`
	State         string            `json:"state"`
	Labels        map[string]string `json:"labels,omitempty"`
	TimestampUnix float64           `json:"timestamp_unix"` // when it was read
	AgeSeconds    float64           `json:"age_seconds"`    // since it was forked
	CPUs          int               `json:"cpus"`
	CPUSeconds    float64           `json:"cpu_seconds"` // of its VM process, the guest's included

	MemoryBytes       int64 `json:"memory_bytes"`        // of the machine; the other three are of its VM process, now
	MemoryOwnBytes    int64 `json:"memory_own_bytes"`    // what is there for this sandbox alone: pages it has written, and its VM process's
	MemorySharedBytes int64 `json:"memory_shared_bytes"` // what it maps and others may map as well, such as its snapshot's pages
	// Own, and of each shared page the share of those who map it. In the reply for one sandbox only, and not where the host
	// hides it.
	MemoryProportionalBytes int64 `json:"memory_proportional_bytes,omitempty"`

	DiskOwnBytes   int64 `json:"disk_own_bytes"`   // what it has written to its disk, as the host stores it; of a suspended one, with its memory
	IOReadBytes    int64 `json:"io_read_bytes"`    // from the host's storage; what its page cache had is not counted
	IOWrittenBytes int64 `json:"io_written_bytes"` // to it

	NetworkReceivedBytes int64 `json:"network_received_bytes"` // payload that came to the guest from outside
	NetworkSentBytes     int64 `json:"network_sent_bytes"`     // and that it sent there
	NetworkFlows         int64 `json:"network_flows"`          // begun by the guest, refused ones among them
	NetworkRefused       int64 `json:"network_refused"`        // attempts of it that its policy or a limit refused
}
