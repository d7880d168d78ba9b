package qemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu/qmp"
	"forkd.dev/forkd/internal/memory"
)

// maxState bounds the device state of a checkpoint. Ours are below 100 KiB; a guest can only make them grow by what
// the queues of its devices hold.
const maxState = 64 << 20

// Restore implements engine.Engine.
func (e *Engine) Restore(ctx context.Context, spec *engine.Spec, from *engine.Checkpoint) (engine.Machine, error) {
	ctx, cancel := withLimit(ctx)
	defer cancel()
	m, err := e.restore(ctx, spec, from)
	if err != nil {
		return nil, fmt.Errorf("restore machine %s: %w", spec.ID, err)
	}
	return m, nil
}

func (e *Engine) restore(ctx context.Context, spec *engine.Spec, from *engine.Checkpoint) (*machine, error) {
	host, err := e.host(ctx)
	if err != nil {
		return nil, err
	}
	if err := fits(host, spec, from); err != nil {
		return nil, err
	}
	image := from.Memory.File()
	if image == nil {
		return nil, errors.New("the checkpoint's memory has been closed")
	}
	m, err := e.launch(ctx, host, spec, restored, image)
	if err != nil {
		return nil, err
	}
	// Connected before the state is loaded: the guest was frozen in the middle of a connection, finds one, and waits for
	// its bytes. Otherwise it would be told of a hang-up and look for a new one now and then.
	if m.first, err = m.dialControl(ctx); err != nil {
		return nil, errors.Join(m.failed(err), m.Close())
	}
	// QEMU comes up meanwhile, and reads nothing before.
	if err := m.process.Joined(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	if err := m.load(ctx, from); err != nil {
		return nil, errors.Join(m.failed(err), m.Close())
	}
	return m, nil
}

func fits(host *host, spec *engine.Spec, from *engine.Checkpoint) error {
	if err := from.Format.Compatible(host.format()); err != nil {
		return err
	}
	switch {
	case spec.CPUs != from.Format.CPUs:
		return fmt.Errorf("%w: the snapshot has %d cpus, %d were asked for; a restored machine cannot change them",
			engine.ErrIncompatible, from.Format.CPUs, spec.CPUs)
	case spec.MemoryBytes != from.Format.MemoryBytes:
		return fmt.Errorf("%w: the snapshot has %d MiB of memory, %d MiB were asked for; a restored machine cannot change it",
			engine.ErrIncompatible, from.Format.MemoryBytes>>20, spec.MemoryBytes>>20)
	case from.Memory == nil || from.Memory.Size() != spec.MemoryBytes:
		return fmt.Errorf("%w: its memory image does not have the size its format says", engine.ErrIncompatible)
	case from.Pages != nil && from.Pages.Size() != spec.MemoryBytes:
		return fmt.Errorf("%w: its pages are not of a memory of the size its format says", engine.ErrIncompatible)
	case len(from.State) == 0 || len(from.State) > maxState:
		return fmt.Errorf("%w: a device state of %d bytes", engine.ErrIncompatible, len(from.State))
	}
	return nil
}

// load sends the device state and returns when the guest's CPUs run. Everything is sent at once, before QEMU is even
// up: it costs one round trip. Pages over the image cost another.
func (m *machine) load(ctx context.Context, from *engine.Checkpoint) error {
	commands := []qmp.Command{qmp.Capabilities()}
	if from.Pages != nil {
		if err := m.writePages(ctx, from.Pages); err != nil {
			return err
		}
		commands = nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	written := make(chan struct{})
	go func() {
		defer close(written)
		// An error here means that QEMU stopped reading; why, it says itself.
		_, _ = w.Write(withoutACPI(from.State))
		_ = w.Close()
	}()
	defer func() {
		_ = w.Close()
		<-written
	}()
	err = m.monitor.Batch(ctx, append(commands, []qmp.Command{
		{Name: "getfd", Args: map[string]string{"fdname": "state"}, File: r},
		{Name: "migrate-incoming", Args: map[string]string{"uri": "fd:state"}},
		// Carried out when the state has been loaded.
		{Name: "cont"},
	}...), nil)
	_ = r.Close()
	if err != nil {
		return err
	}
	select {
	case <-m.resumed:
		return nil
	case <-m.monitor.Done():
		return fmt.Errorf("load device state: %w", qmp.ErrClosed)
	case <-ctx.Done():
		return fmt.Errorf("load device state: %w", context.Cause(ctx))
	}
}

// writePages makes pages the machine's own before its devices are loaded: some of them look into the RAM then.
func (m *machine) writePages(ctx context.Context, pages *memory.Pages) error {
	// The answer comes from QEMU's main loop, which it reaches when the RAM is mapped.
	if err := m.monitor.Handshake(ctx); err != nil {
		return err
	}
	ram, err := memory.OpenProcess(m.process.PID(), m.spec.MemoryBytes)
	if err != nil {
		return err
	}
	return ram.Write(ctx, pages)
}

// withoutACPI leaves out of a device state what a machine that makes no ACPI tables does not know: whether they had been
// handed to the firmware. A machine captured after such a restore has no such section.
func withoutACPI(state []byte) []byte {
	const name = "\x0aacpi_build"
	const before, after = 1 + 4, 4 + 4 + 1 + 1 + 4 // kind, id; instance, version, the flag, footer: kind, id
	i := bytes.Index(state, []byte(name))
	if i < before || len(state)-i-len(name) < after {
		return state
	}
	start, end := i-before, i+len(name)+after
	id := state[start+1 : i]
	if state[start] != 0x04 || state[end-5] != 0x7e || !bytes.Equal(state[end-4:end], id) {
		return state
	}
	return slices.Concat(state[:start], state[end:])
}
