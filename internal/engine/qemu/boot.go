package qemu

import (
	"context"
	"errors"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/memory"
)

// callLimit ends a call on a QEMU that hangs, for callers whose context has no end. It is far more than the busiest
// host takes.
const callLimit = 2 * time.Minute

func withLimit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, callLimit, fmt.Errorf("QEMU does not answer for %s", callLimit))
}

// Boot implements engine.Engine.
func (e *Engine) Boot(ctx context.Context, spec *engine.Spec) (engine.Machine, error) {
	ctx, cancel := withLimit(ctx)
	defer cancel()
	m, err := e.boot(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("boot machine %s: %w", spec.ID, err)
	}
	return m, nil
}

func (e *Engine) boot(ctx context.Context, spec *engine.Spec) (*machine, error) {
	host, err := e.host(ctx)
	if err != nil {
		return nil, err
	}
	scratch, err := memory.NewScratch(spec.MemoryBytes)
	if err != nil {
		return nil, err
	}
	m, err := e.launch(ctx, host, spec, coldBoot, scratch.File())
	if err != nil {
		return nil, errors.Join(err, scratch.Close())
	}
	m.mu.Lock()
	m.scratch = scratch
	m.mu.Unlock()
	if err := m.process.Joined(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	// The first answer of the monitor comes from QEMU's main loop, which starts the CPUs on its way there.
	if err := m.monitor.Handshake(ctx); err != nil {
		return nil, errors.Join(m.failed(err), m.Close())
	}
	return m, nil
}
