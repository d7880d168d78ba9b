package wire

// Methods of the guest's network; feature "network".
const (
	MethodDial  = "agent.Dial"
	MethodPorts = "agent.Ports"
	MethodSever = "agent.Sever" // ends all connections that leave the machine, also where user processes are frozen
)

// FeatureNetwork in Hello's features says that the agent sets up the guest's network interface, severs connections when it
// is awakened (AwakenRequest.Sever), and knows the methods above. One that does not refuses a request to awaken
// that asks for it.
const FeatureNetwork = "network"

// RenewedConnections in a report says that Sever was done.
const RenewedConnections = "connections"

// SeverReply is the reply to MethodSever, whose request is empty.
type SeverReply struct {
	Severed int `json:"severed"` // connections
}

// DialRequest connects to a service in the guest, by its loopback addresses first. After the DialReply data frames go
// both ways as they come; a half-close is the end of one direction. The call ends when both have.
type DialRequest struct {
	Port int `json:"port"`
}

// DialReply is the address that answered.
type DialReply struct {
	Address string `json:"address"`
}

// PortsRequest asks for the TCP ports that are listened on. With Follow a whole new PortsReply comes whenever they change,
// until the caller leaves.
type PortsRequest struct {
	Follow bool `json:"follow,omitempty"`
}

// PortsReply is ordered by port and address.
type PortsReply struct {
	Ports []Port `json:"ports"`
}

// Port is one that is listened on. PID and Process are of a process that has it open, if that could be found.
type Port struct {
	Port    int    `json:"port"`
	Address string `json:"address"` // 0.0.0.0 and :: are all of the machine's
	PID     int    `json:"pid,omitempty"`
	Process string `json:"process,omitempty"` // command line
}
