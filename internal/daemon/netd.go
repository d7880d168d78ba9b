package daemon

import (
	"context"
	"sync/atomic"

	"forkd.dev/forkd/internal/engine/qemu"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/network/netd"
)

// Netd is the process of the sandboxes' networks, which a daemon starts: `forkd netd`. It runs until ctx ends, the daemon
// says so, or nobody needs it any more. staged: the outside is that of a test.
func Netd(ctx context.Context, staged bool) error { return netd.Main(ctx, staged) }

// networks are those of the daemon's sandboxes. The host is set when there is one.
func (c *Config) networks(ctx context.Context, of *atomic.Pointer[host.Host]) *netd.Client {
	ids := c.JailIDs.OrDefault()
	if c.Jail == qemu.JailOff {
		ids = qemu.IDs{}
	}
	return netd.New(ctx, netd.Config{
		Socket: c.Home.NetworkSocket(), Record: c.Home.NetworkRecord(), First: ids.First, Last: ids.Last, Stage: c.NetworkStage, Log: c.Log,
		Restarted: func(ids []string, reason string) { //nolint:contextcheck // What it begins lasts as long as the host.
			if h := of.Load(); h != nil {
				h.NetworkRestarted(ids, reason)
			}
		},
	})
}
