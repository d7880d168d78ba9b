package host

import (
	"context"
	"fmt"
	"io"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/lineage"
)

// FollowLogs copies the newest part of a sandbox's console to w, and what is printed from then on, until its machine or
// ctx ends. A reader that is slower than the guest misses what is printed meanwhile beyond what is kept.
func (h *Host) FollowLogs(ctx context.Context, id string, w io.Writer) error {
	s, err := h.find(id)
	if err != nil {
		return err
	}
	s.mu.Lock()
	machine, kept := s.machine, s.console
	over := s.state == lineage.Failed || machine == nil
	s.mu.Unlock()
	if over {
		_, err := w.Write(kept)
		return err
	}
	teller, ok := machine.(engine.Teller)
	if !ok {
		return fmt.Errorf("%w: this engine's consoles cannot be followed", ErrUnsupported)
	}
	for at, done := int64(0), false; ; {
		text, next, more := teller.ConsoleFrom(at)
		if len(text) > 0 || at == 0 {
			if _, err := w.Write(text); err != nil {
				return err
			}
		}
		at = next
		if done {
			return nil
		}
		select {
		case <-more:
		case <-machine.Done():
			done = true // what it printed last
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
