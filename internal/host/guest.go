package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/lineage"
)

// answerTimeout bounds the wait for the agent of a running sandbox when it has to be connected to anew.
const answerTimeout = 30 * time.Second

// stallTimeout is how long a guest may take nothing of what it is sent while a machine is built: it may have a slow disk to
// write to, and be emulated.
const stallTimeout = 5 * time.Minute

// steadily bounds the waiting for a guest that is sent what r has: not the whole, which may be large, and whose source may
// be slow, but each piece.
func steadily(ctx context.Context, r io.Reader) (context.Context, io.Reader, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(stallTimeout, func() {
		cancel(fmt.Errorf("%w: the guest took nothing for %s", context.DeadlineExceeded, stallTimeout))
	})
	timer.Stop()
	return ctx, &steadyReader{r, timer}, func() { timer.Stop(); cancel(nil) }
}

// steadyReader lets the timer run while its reader is busy with what it has got.
type steadyReader struct {
	r     io.Reader
	timer *time.Timer
}

func (s *steadyReader) Read(p []byte) (int, error) {
	s.timer.Stop()
	defer s.timer.Reset(stallTimeout)
	return s.r.Read(p)
}

// Because explains a failure of a call into a sandbox by the sandbox's end, if that is what it was: what is seen first is only that
// a connection broke.
func (h *Host) Because(id string, err error) error {
	s, findErr := h.find(id)
	if errors.Is(findErr, ErrNotFound) {
		return fmt.Errorf("sandbox %s: %w: it was ended meanwhile: %w", id, lineage.ErrState, err)
	}
	if findErr != nil {
		return err
	}
	s.mu.Lock()
	machine := s.machine
	s.mu.Unlock()
	if machine == nil {
		return err
	}
	if dead := deathOr(machine, err); errors.Is(dead, engine.ErrDead) {
		return hint(fmt.Errorf("sandbox %s: %w: it is %s: %w", s.id, lineage.ErrState, lineage.Failed, dead),
			"see its console with: forkd logs %s", s.id)
	}
	return err
}

// Guest is the way into a sandbox: processes, files, contexts. The connection is shared; the caller does not close
// it. It breaks when the machine ends. Until ctx ends the sandbox counts as used.
func (h *Host) Guest(ctx context.Context, id string) (*guest.Conn, error) {
	s, err := h.find(id)
	if err != nil {
		return nil, err
	}
	h.use(ctx, s)
	if err := h.ready(ctx, s); err != nil {
		return nil, err
	}
	return h.reachGuest(ctx, s)
}

// Look is Guest for who only wants to know how it is: that is no use, and wakes nothing.
func (h *Host) Look(ctx context.Context, id string) (*guest.Conn, error) {
	s, err := h.find(id)
	if err != nil {
		return nil, err
	}
	return h.reachGuest(ctx, s)
}

func (h *Host) reachGuest(ctx context.Context, s *sandbox) (*guest.Conn, error) {
	broken := s.broken()
	conn, err := s.guest(ctx)
	if err == nil && broken != nil {
		h.log.Warn("connection to a guest made anew", "sandbox", s.id, "error", broken)
	}
	return conn, err
}
