package netd

import (
	"context"
	"os"
	"time"

	"forkd.dev/forkd/internal/network"
)

// lastLimit is how long the end of a sandbox waits for its counters.
const lastLimit = time.Second

// TotalsOf are the counters of one link, if the process knows it and answers at once.
func (c *Client) TotalsOf(ctx context.Context, id string) (totals network.Totals, ok bool) {
	c.mu.Lock()
	conn := c.conn
	c.mu.Unlock()
	if conn == nil || isClosed(conn.closed) || conn.deaf.Load() || !c.has(id) {
		return totals, false
	}
	ctx, cancel := context.WithTimeoutCause(ctx, lastLimit, ErrDown)
	defer cancel()
	err := conn.ask(ctx, &request{Op: opTotals, ID: id}, func(r *reply, files []*os.File) {
		closeAll(files)
		totals, ok = r.Totals[id]
	})
	return totals, ok && err == nil
}
