package host

import (
	"context"
	"time"

	"forkd.dev/forkd/internal/guest"
)

// answerTimeout bounds the wait for the agent of a running sandbox when it has to be connected to anew.
const answerTimeout = 30 * time.Second

// Guest is the way into a sandbox: processes, files, contexts. The connection is shared; the caller does not close
// it. It breaks when the machine ends.
func (h *Host) Guest(ctx context.Context, id string) (*guest.Conn, error) {
	s, err := h.find(id)
	if err != nil {
		return nil, err
	}
	return s.guest(ctx)
}
