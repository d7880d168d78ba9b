package qemu

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu/qmp"
	"forkd.dev/forkd/internal/memory"
)

// resumeLimit is how long a machine may take to run again before the capture is given up. The busiest hosts need a
// fraction of a second.
const resumeLimit = 20 * time.Second

// Capture implements engine.Capturer.
func (m *machine) Capture(ctx context.Context, spec *engine.CaptureSpec) (*engine.Capture, error) {
	ctx, cancel := withLimit(ctx)
	defer cancel()
	c, err := m.capture(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("capture machine %s: %w", m.spec.ID, m.failed(err))
	}
	return c, nil
}

func (m *machine) capture(ctx context.Context, spec *engine.CaptureSpec) (*engine.Capture, error) {
	var take func(context.Context, *engine.CaptureSpec, *memory.Process) (*engine.Capture, error)
	switch spec.Mode {
	case engine.CaptureDiff:
		take = m.captureDiff
	case engine.CaptureLive:
		reason, err := m.live(ctx)
		if err != nil {
			return nil, err
		}
		if reason != "" {
			return nil, fmt.Errorf("%w: %s", engine.ErrLiveUnavailable, reason)
		}
		take = m.captureLive
	default:
		return nil, fmt.Errorf("unknown mode %q", spec.Mode)
	}
	if isClosed(m.done) {
		return nil, m.dead()
	}
	if err := m.acquire(ctx); err != nil {
		return nil, err
	}
	defer m.release()
	if m.copying.Load() {
		return nil, errors.New("the capture before this one is still being copied; wait until it is finished")
	}
	ram, err := memory.OpenProcess(m.process.PID(), m.spec.MemoryBytes)
	if err != nil {
		return nil, err
	}
	if !ram.Private() {
		return nil, errors.New("only a machine made by Restore can be captured; one that boots shares its memory with its file")
	}
	return take(ctx, spec, ram)
}

// acquire waits until no other operation stops, starts or captures the machine.
func (m *machine) acquire(ctx context.Context) error {
	select {
	case m.operation <- struct{}{}:
		return nil
	case <-m.done:
		return m.dead()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (m *machine) release() { <-m.operation }

// dead is why the machine cannot do anything any more.
func (m *machine) dead() error {
	if err := m.Err(); err != nil {
		return err
	}
	return fmt.Errorf("%w: it was closed", engine.ErrDead)
}

// diskSwitch is the change of a machine's disk to a new top.
type diskSwitch struct {
	from, to string // node names
}

// addTop opens path as the disk's next top, beside the machine's disk: opening takes time and must not be in the pause.
func (m *machine) addTop(ctx context.Context, path string) (*diskSwitch, error) {
	ctx, cancel := answerContext(ctx)
	defer cancel()
	from, err := m.topNode(ctx)
	if err != nil {
		return nil, err
	}
	if err := give(path, m.id); err != nil {
		return nil, err
	}
	s := &diskSwitch{from: from, to: topPrefix + strings.ToLower(rand.Text()[:8])}
	err = m.monitor.Do(ctx, qmp.Command{Name: "blockdev-add", Args: topOptions(s.to, path)}, nil)
	if err != nil {
		return nil, fmt.Errorf("open the new disk %s: %w", filepath.Base(path), err)
	}
	return s, nil
}

// topPrefix begins the names of nodes that a capture adds.
const topPrefix = "top-"

// topOptions opens a qcow2 file as diskArgs does. It has no backing file yet: it gets the present top by the switch.
func topOptions(node, path string) map[string]any {
	cached := func(options map[string]any) map[string]any {
		// As in diskArgs. On both nodes, or QEMU syncs at every stop, in the pause.
		options["cache"] = map[string]any{"no-flush": true}
		options["discard"], options["detect-zeroes"] = "ignore", "off"
		return options
	}
	return cached(map[string]any{
		"driver": "qcow2", "node-name": node, "backing": nil,
		"file": cached(map[string]any{"driver": "file", "node-name": node + "-file", "filename": path, "aio": "threads"}),
	})
}

// command is what switches the disk, at once.
func (s *diskSwitch) command() qmp.Command {
	return qmp.Command{Name: "blockdev-snapshot", Args: map[string]string{"node": s.from, "overlay": s.to}}
}

// mayHave reports whether a command may have been carried out, or be yet, whose error this is: only QEMU's refusal says
// that it was not. A new top that was not switched to after all is empty, so who counts on it loses nothing.
func mayHave(err error) bool { return err == nil || refused(err) != nil }

// dropTop closes a new top that was not switched to.
func (m *machine) dropTop(ctx context.Context, s *diskSwitch) error {
	err := m.monitor.Do(ctx, qmp.Command{Name: "blockdev-del", Args: map[string]string{"node-name": s.to}}, nil)
	if err != nil && !errors.Is(err, qmp.ErrClosed) {
		return fmt.Errorf("close the new disk again: %w", err)
	}
	return nil
}

// topNode is the block node that the guest's disk is on now. It is asked for, not remembered: a later daemon asks too.
func (m *machine) topNode(ctx context.Context) (string, error) {
	var devices []struct {
		Inserted struct {
			Node string `json:"node-name"`
		} `json:"inserted"`
		Device string `json:"qdev"`
	}
	if err := m.monitor.Do(ctx, qmp.Command{Name: "query-block"}, &devices); err != nil {
		return "", err
	}
	for _, d := range devices {
		if strings.Contains(d.Device, "/"+diskDevice) && d.Inserted.Node != "" {
			return d.Inserted.Node, nil
		}
	}
	return "", errors.New("the machine has lost its disk")
}

// pauseContext is for what is done while the machine stands still: the end of the caller's context must not leave it so.
func pauseContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(context.WithoutCancel(ctx), resumeLimit,
		fmt.Errorf("QEMU does not answer for %s", resumeLimit))
}

// answerContext is for what QEMU is asked with the machine running, which takes it milliseconds.
func answerContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, resumeLimit, fmt.Errorf("QEMU does not answer for %s", resumeLimit))
}

// run lets the CPUs run again, unless a user has paused the machine. It has time of its own: a QEMU that took all of the
// pause's to answer carries out what it was told some time, and must be told this, too.
func (m *machine) run(ctx context.Context) error {
	if m.paused {
		return nil
	}
	return m.order(ctx, false)
}

// first is the first error there is.
func first(errs []error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
