package api

// CreateSnapshotRequest is the body of POST /v1/snapshots: a root file system that was made elsewhere. The fields of the
// existing forkd, and what is needed to say how large the machine is.
type CreateSnapshotRequest struct {
	Tag    string `json:"tag" pattern:"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"`
	Rootfs string `json:"rootfs" minLength:"1"`       // an ext4 file system in a file on the daemon's host; it is copied
	Kernel string `json:"kernel,omitempty"`           // a file there, with its modules in a directory "modules" beside it; default: forkd's own
	CPUs   int    `json:"cpus,omitempty" minimum:"0"` // default 1

	MemoryBytes int64 `json:"memory_bytes,omitempty" minimum:"0"` // default 512 MiB

	// Accepted: a sandbox always writes to a disk of its own, and a machine is frozen when its agent has answered.
	RW           bool `json:"rw,omitempty"`
	BootWaitSecs int  `json:"boot_wait_secs,omitempty" minimum:"0" maximum:"60"`
	// Refused unless it is empty: no sandbox has an interface of the host.
	Tap string `json:"tap,omitempty"`
}
