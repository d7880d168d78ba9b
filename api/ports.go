package api

// Port is a TCP port of a sandbox.
type Port struct {
	Port    int    `json:"port"`
	Address string `json:"address,omitempty"` // that a service listens on; 0.0.0.0 and :: are all of the sandbox's; none: nobody listens, but it is public
	PID     int    `json:"pid,omitempty"`     // of a process that has it open, if that is known
	Process string `json:"process,omitempty"` // its command line
	Public  bool   `json:"public"`            // who reaches the daemon reaches it without a token
	Path    string `json:"path"`              // below which it is served by the daemon
	Host    string `json:"host,omitempty"`    // as which it is served, where the daemon has a domain
}

// PortList is what is listened on. Followed, each is the whole list again.
type PortList struct {
	Ports []Port `json:"ports"`
}

// PortChange says who may connect to a port.
type PortChange struct {
	Public bool `json:"public"` // everybody; else who has a token of scope use
}
