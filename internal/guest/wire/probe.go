package wire

// MethodProbe asks a service in the guest whether it answers.
const MethodProbe = "agent.Probe"

// ProbeRequest is a GET of http://Address/Path. A redirect is an answer like any other.
type ProbeRequest struct {
	Address   string `json:"address"` // ip:port
	Host      string `json:"host"`    // of the request's header
	Path      string `json:"path"`    // with the query
	TimeoutMS int64  `json:"timeoutMs,omitempty"`
}

// ProbeReply has the status of the answer, or 0 and why there was none.
type ProbeReply struct {
	Status  int    `json:"status"`
	Problem string `json:"problem,omitempty"`
}
