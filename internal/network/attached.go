package network

import (
	"errors"
	"os"

	"forkd.dev/forkd/internal/network/egress"
)

// Attached is a link whose other end a machine of an earlier daemon has.
type Attached struct {
	// Link is our end, if the machine's process kept a copy of it; who takes it closes it.
	Link   *os.File
	Policy egress.Policy
	Spent  int64 // of the policy's budget, in earlier lives of the link
}

// State is how the process is that has the other ends of links, for who looks at a host.
type State struct {
	PID   int   // 0: none runs
	Links int   // that it has, or should have
	Error error // why none runs that should
	// Use is what all of them share, as it was seen last.
	Use PoolUse
}

// ErrFull says that no further machine can have a network.
var ErrFull = errors.New("too many networks")
