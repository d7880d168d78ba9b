package qemu

import (
	"context"
	"fmt"

	"forkd.dev/forkd/internal/engine/qemu/qmp"
)

// SetPaused implements engine.Pauser.
func (m *machine) SetPaused(ctx context.Context, paused bool) error {
	ctx, cancel := withLimit(ctx)
	defer cancel()
	if err := m.setPaused(ctx, paused); err != nil {
		return fmt.Errorf("pause or resume machine %s: %w", m.spec.ID, m.failed(err))
	}
	return nil
}

func (m *machine) setPaused(ctx context.Context, paused bool) error {
	if isClosed(m.done) {
		return m.dead()
	}
	if err := m.acquire(ctx); err != nil {
		return err
	}
	defer m.release()
	command := "cont"
	if paused {
		command = "stop"
	}
	// Not cut short by the caller: what was sent is done, and paused must say so.
	ctx, cancel := pauseContext(ctx)
	defer cancel()
	if err := m.monitor.Do(ctx, qmp.Command{Name: command}, nil); err != nil {
		return err
	}
	m.paused = paused
	return nil
}
