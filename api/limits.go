package api

// Limits bound what a sandbox takes of its host: its VM process, with the guest in it. What is left away is not bounded, or
// as its snapshot's recipe says. A limit that this host cannot hold is refused.
type Limits struct {
	MemoryBytes         int64   `json:"memory_bytes,omitempty" minimum:"0"`           // reaching it ends the sandbox: failed, "memory limit"
	CPUs                float64 `json:"cpus,omitempty" minimum:"0"`                   // processors' worth of time: 0.05 is a twentieth of one
	IOBytesPerSecond    int64   `json:"io_bytes_per_second,omitempty" minimum:"0"`    // of its disk, reading and writing each
	IORequestsPerSecond int64   `json:"io_requests_per_second,omitempty" minimum:"0"` // of its disk, reading and writing each
	PIDs                int64   `json:"pids,omitempty" minimum:"0"`                   // threads of the VM process; not of the guest's processes
}

// Bounds are a sandbox's limits, and what becomes of it when nobody wants it any more. Actions are "kill", "pause" and
// "suspend".
type Bounds struct {
	Limits      *Limits `json:"limits,omitempty"`
	TTLAction   string  `json:"ttl_action,omitempty" enum:"kill,pause,suspend"`          // at the end of its time to live; default "kill"
	IdleSeconds float64 `json:"idle_seconds,omitempty" minimum:"0" maximum:"4611686018"` // without a call into the guest; 0: any
	IdleAction  string  `json:"idle_action,omitempty" enum:"kill,pause,suspend"`         // after that; default "suspend"
	AutoResume  bool    `json:"auto_resume,omitempty"`                                   // a call into the guest resumes or wakes it first
}
