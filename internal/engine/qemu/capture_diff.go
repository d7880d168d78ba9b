package qemu

import (
	"context"
	"errors"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu/qmp"
	"forkd.dev/forkd/internal/memory"
)

// bufferSlack is what is reserved beyond a machine's own pages: it goes on writing until the pause.
const bufferSlack = 16 << 20

// diffCapture is a capture that copies in the pause.
type diffCapture struct {
	m      *machine
	memory *memory.Process
	buffer *memory.Buffer
	disk   *diskSwitch
}

// captureDiff copies, while the machine stands still, the pages of its private mapping that are its own. They are
// found in the page table of the process, so nothing has to be armed, and a capture that fails loses nothing.
func (m *machine) captureDiff(ctx context.Context, spec *engine.CaptureSpec, ram *memory.Process) (*engine.Capture, error) {
	began := time.Now()
	c := &diffCapture{m: m, memory: ram}
	if err := c.prepare(ctx, spec); err != nil {
		return nil, err
	}
	setup := time.Since(began)
	if err := spec.Quiesce(ctx); err != nil {
		return nil, errors.Join(err, c.undo(ctx))
	}
	captured, pause, err := c.take(ctx)
	if err != nil {
		return nil, err
	}
	return &engine.Capture{
		Mode: engine.CaptureDiff, Pause: pause, Setup: setup,
		Finish: func(context.Context) (*engine.Captured, error) { return captured, nil },
	}, nil
}

// prepare does everything slow, with the machine running.
func (c *diffCapture) prepare(ctx context.Context, spec *engine.CaptureSpec) error {
	own, err := c.memory.OwnPages(ctx)
	if err != nil {
		return err
	}
	bytes := int64(bufferSlack)
	for _, e := range own {
		bytes += e.Length
	}
	if c.buffer, err = memory.NewBuffer(min(bytes, c.m.spec.MemoryBytes)); err != nil {
		return err
	}
	if err := c.m.state.Truncate(0); err != nil {
		return errors.Join(err, c.buffer.Close())
	}
	if c.disk, err = c.m.addTop(ctx, spec.DiskTop); err != nil {
		return errors.Join(err, c.buffer.Close())
	}
	return nil
}

// undo gives back what prepare made.
func (c *diffCapture) undo(ctx context.Context) error {
	ctx, cancel := pauseContext(ctx)
	defer cancel()
	return errors.Join(c.buffer.Close(), c.m.dropTop(ctx, c.disk))
}

// take is the pause.
func (c *diffCapture) take(ctx context.Context) (captured *engine.Captured, pause time.Duration, err error) {
	ctx, cancel := pauseContext(ctx)
	defer cancel()
	m := c.m
	stopped := time.Now()
	errs := m.monitor.Each(ctx, []qmp.Command{
		{Name: "stop"},
		m.saveState(),
		c.disk.command(),
	})
	moved := mayHave(errs[2])
	var pages *memory.Pages
	if err = first(errs); err == nil {
		pages, err = c.copy(ctx)
	}
	err = errors.Join(err, m.run(ctx))
	pause = time.Since(stopped)
	var state []byte
	if err == nil {
		state, err = m.readState()
	}
	if err != nil {
		return nil, 0, c.fail(ctx, err, pages, moved)
	}
	return &engine.Captured{Format: m.format, State: state, Pages: pages}, pause, nil
}

func (c *diffCapture) copy(ctx context.Context) (*memory.Pages, error) {
	own, err := c.memory.OwnPages(ctx)
	if err != nil {
		return nil, err
	}
	pages, err := c.memory.Copy(ctx, own, c.buffer)
	if err != nil {
		return nil, fmt.Errorf("copy the machine's own pages: %w", err)
	}
	return pages, nil
}

// fail gives back what a capture holds that failed in or after the pause.
func (c *diffCapture) fail(ctx context.Context, err error, pages *memory.Pages, moved bool) error {
	if pages != nil {
		err = errors.Join(err, pages.Close())
	} else {
		err = errors.Join(err, c.buffer.Close())
	}
	if moved {
		return &engine.DiskMovedError{Err: err}
	}
	return errors.Join(err, c.m.dropTop(ctx, c.disk))
}

// saveState writes devices and CPUs into the state file. Neither RAM nor disks; despite the name nothing in it is about
// Xen.
func (m *machine) saveState() qmp.Command {
	return qmp.Command{
		Name: "xen-save-devices-state",
		Args: map[string]any{"filename": fmt.Sprintf("/proc/self/fd/%d", fdState)},
	}
}
