package network

import (
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
