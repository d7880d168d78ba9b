package qemu

import (
	"context"
	"fmt"

	"forkd.dev/forkd/internal/engine/qemu/qmp"
)

// Throttle implements engine.Throttler. QEMU holds up what the guest asks of the device, before its caches and the
// host's: a control group sees reads and writes only when the kernel does them, which for writes is later and on nobody's
// account in version 1.
func (m *machine) Throttle(ctx context.Context, bytes, requests int64) error {
	ctx, cancel := withLimit(ctx)
	defer cancel()
	if isClosed(m.done) {
		return m.dead()
	}
	// All are required; the sums of both directions stay unbounded. Nothing is saved up for later bursts, beyond the tenth of
	// a second that QEMU grants.
	err := m.monitor.Do(ctx, qmp.Command{Name: "block_set_io_throttle", Args: map[string]any{
		"id": "/machine/peripheral/" + diskDevice + "/virtio-backend", "bps": 0, "bps_rd": bytes, "bps_wr": bytes, "iops": 0, "iops_rd": requests, "iops_wr": requests,
	}}, nil)
	if err != nil {
		return fmt.Errorf("throttle the disk of machine %s: %w", m.spec.ID, m.failed(err))
	}
	return nil
}
