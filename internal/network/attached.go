package network

import "forkd.dev/forkd/internal/network/egress"

// Attached is a link whose other end a machine has: what a later daemon knows of it.
type Attached struct {
	PID       int    // the machine's process, and
	StartTime uint64 // when that was started
	Policy    egress.Policy
	Spent     int64 // of the policy's budget, in earlier lives of the link
}
