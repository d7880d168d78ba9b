package qemu

import (
	"context"
	"errors"
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
	if !paused {
		if err := m.connect(ctx); err != nil {
			return err
		}
	}
	if err := m.order(ctx, paused); err != nil {
		if refused(err) == nil {
			return err
		}
		// QEMU may carry it out yet, when nobody counts on it any more.
		return errors.Join(err, m.order(ctx, m.paused))
	}
	m.paused = paused
	return nil
}

// connect makes the connection for the next DialGuest before the CPUs run, if there is none: the machine was adopted. A
// halted QEMU 7.2 does not tell its serial port that a connection has ended. When the guest then writes before there is a
// new one, the port is throttled until that ends, too, and nothing the guest says arrives.
func (m *machine) connect(ctx context.Context) error {
	m.dialMu.Lock()
	defer m.dialMu.Unlock()
	m.mu.Lock()
	connected := m.conn != nil || m.first != nil
	m.mu.Unlock()
	if connected {
		return nil
	}
	conn, err := m.dialControl(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.first = conn
	return nil
}

// order has the CPUs stand still or run. It is not cut short by the caller: what was sent is done, and paused must say so.
func (m *machine) order(ctx context.Context, paused bool) error {
	ctx, cancel := pauseContext(ctx)
	defer cancel()
	command := "cont"
	if paused {
		command = "stop"
	}
	return m.monitor.Do(ctx, qmp.Command{Name: command}, nil)
}
