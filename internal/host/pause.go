package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/lineage"
)

// Pause halts a sandbox's CPUs; its memory stays. Its processes are frozen first: a branch of it has to run the CPUs for a
// moment, and nobody's program may run in that.
func (h *Host) Pause(ctx context.Context, id string) (View, error) {
	s, err := h.find(id)
	if err != nil {
		return View{}, err
	}
	return h.pauseIf(ctx, s, "", func() bool { return true })
}

// pauseIf is to Pause what suspendIf is to Suspend.
func (h *Host) pauseIf(ctx context.Context, s *sandbox, reason string, still func() bool) (View, error) {
	done, err := s.beginIf(ctx, lineage.Pausing, still)
	if err != nil {
		return View{}, err
	}
	defer done("")
	if s.is(lineage.Paused) {
		return s.view().withUsage(), nil
	}
	began := time.Now()
	err = h.pause(ctx, s)
	h.took(TimedPause, "", err, began)
	if err != nil {
		return View{}, fmt.Errorf("pause %s: %w", s.id, s.orEnded(err))
	}
	s.announce(func() { h.tell(events.SandboxPaused, s, reason) })
	done(lineage.Paused)
	s.timeOver()
	h.record(s)
	return s.view().withUsage(), nil
}

func (h *Host) pause(ctx context.Context, s *sandbox) error {
	defer h.hurry(s)()
	conn, err := s.guest(ctx)
	if err != nil {
		return err
	}
	if err := conn.Quiesce(ctx, wire.QuiesceRequest{}); err != nil {
		return errors.Join(fmt.Errorf("freeze its processes: %w", err), s.goAgain(ctx, conn))
	}
	if err := s.setPaused(ctx, true); err != nil {
		return errors.Join(err, s.goAgain(ctx, conn))
	}
	return nil
}

// Resume lets a paused sandbox run on.
func (h *Host) Resume(ctx context.Context, id string) (View, error) {
	s, err := h.find(id)
	if err != nil {
		return View{}, err
	}
	done, err := s.begin(ctx, lineage.Resuming)
	if err != nil {
		return View{}, err
	}
	defer done("")
	if s.is(lineage.Running) {
		return s.view().withUsage(), nil
	}
	began := time.Now()
	err = h.resume(ctx, s)
	h.took(TimedResume, "", err, began)
	if err != nil {
		return View{}, fmt.Errorf("resume %s: %w", s.id, s.orEnded(err))
	}
	h.arm(s)
	h.record(s)
	s.announce(func() { h.tell(events.SandboxResumed, s, "") })
	return s.view().withUsage(), nil
}

func (h *Host) resume(ctx context.Context, s *sandbox) error {
	if err := s.setPaused(ctx, false); err != nil {
		return err
	}
	s.setState(lineage.Running) // so that its agent can be reached
	conn, err := s.guest(ctx)
	if err == nil {
		err = s.goAgain(ctx, conn)
	}
	if err != nil {
		err = errors.Join(err, s.setPaused(context.WithoutCancel(ctx), true))
		s.setState(lineage.Paused)
	}
	return err
}

// setPaused halts the machine's CPUs or lets them run.
func (s *sandbox) setPaused(ctx context.Context, paused bool) error {
	s.mu.Lock()
	machine := s.machine
	s.mu.Unlock()
	p, ok := machine.(engine.Pauser)
	if !ok {
		return fmt.Errorf("%w: its machine cannot be paused", ErrUnsupported)
	}
	return p.SetPaused(ctx, paused)
}

// goAgain is thaw for who does not want to know more.
func (s *sandbox) goAgain(ctx context.Context, conn *guest.Conn) error {
	severed := s.severLost(ctx, conn)
	_, err := s.thaw(ctx, conn)
	return errors.Join(severed, err)
}

func (s *sandbox) is(state lineage.State) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state == state
}

// setState changes the state if it may follow; a failed one stays failed.
func (s *sandbox) setState(next lineage.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state.To(next) == nil {
		s.state = next
	}
}
