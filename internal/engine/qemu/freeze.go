package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu/qmp"
)

// quitTime is how long QEMU may take to write out what it holds of the disk and end.
const quitTime = 10 * time.Second

// Freeze implements engine.Machine.
func (m *machine) Freeze(ctx context.Context) (*engine.Checkpoint, error) {
	ctx, cancel := withLimit(ctx)
	defer cancel()
	c, err := m.freeze(ctx)
	if err != nil {
		return nil, fmt.Errorf("freeze machine %s: %w", m.spec.ID, errors.Join(err, m.Close()))
	}
	if err := m.Close(); err != nil {
		return nil, fmt.Errorf("freeze machine %s: %w", m.spec.ID, errors.Join(err, c.Memory.Close()))
	}
	return c, nil
}

func (m *machine) freeze(ctx context.Context) (*engine.Checkpoint, error) {
	m.mu.Lock()
	scratch := m.scratch
	m.mu.Unlock()
	if scratch == nil {
		return nil, errors.New("only a machine that booted, and still runs, can be frozen")
	}
	err := m.monitor.Batch(ctx, []qmp.Command{
		{Name: "stop"},
		m.saveState(),
	}, nil)
	if err != nil {
		return nil, m.failed(err)
	}
	state, err := m.readState()
	if err != nil {
		return nil, err
	}
	if err := m.quit(ctx); err != nil {
		return nil, err
	}
	// Only now: sealing needs the process's writable mapping gone, and nothing may change what was frozen.
	image, err := scratch.Seal()
	if err != nil {
		return nil, err
	}
	return &engine.Checkpoint{Format: m.format, State: state, Memory: image}, nil
}

// quit lets QEMU end by itself, so that what it holds of a qcow2 disk's tables reaches the file.
func (m *machine) quit(ctx context.Context) error {
	m.mu.Lock()
	m.ended = true
	m.mu.Unlock()
	err := m.monitor.Do(ctx, qmp.Command{Name: "quit"}, nil)
	if err != nil && !errors.Is(err, qmp.ErrClosed) { // It may be gone before its answer is read.
		return err
	}
	limit := time.NewTimer(quitTime)
	defer limit.Stop()
	select {
	case <-m.done:
	case <-ctx.Done():
		return fmt.Errorf("wait for QEMU to end: %w", context.Cause(ctx))
	case <-limit.C:
		return fmt.Errorf("QEMU did not end within %s of being told to", quitTime)
	}
	return m.process.Err() // Nothing but status 0 means that the disk was written out.
}

func (m *machine) readState() ([]byte, error) {
	st, err := m.state.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() == 0 || st.Size() > maxState {
		return nil, fmt.Errorf("QEMU saved a device state of %d bytes; 1 to %d are expected", st.Size(), maxState)
	}
	state := make([]byte, st.Size())
	if _, err := io.ReadFull(io.NewSectionReader(m.state, 0, st.Size()), state); err != nil {
		return nil, fmt.Errorf("read device state: %w", err)
	}
	return state, nil
}
