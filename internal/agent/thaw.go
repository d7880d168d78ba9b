package agent

import (
	"context"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
)

type sessionKey struct{}

// numbered marks the calls of the next session.
func (a *Agent) numbered(ctx context.Context) context.Context {
	a.sessions++
	return context.WithValue(ctx, sessionKey{}, a.sessions)
}

// sessionNumber tells sessions apart and which is newer.
func sessionNumber(ctx context.Context) uint64 {
	n, _ := ctx.Value(sessionKey{}).(uint64)
	return n
}

// calledOff reports whether a freeze was ended before it began: its caller gave up, and the two calls overtook each
// other.
func (a *Agent) calledOff(by freeze) bool {
	return by.number != 0 && by.session == a.last.session && by.number <= a.last.number
}

// thawCall lets a quiesced machine run on, with its clock put right first.
func (a *Agent) thawCall(ctx context.Context, s *wire.Stream, request []byte) error {
	received := time.Now()
	return a.alone(func(ctx context.Context, s *wire.Stream, request []byte) error {
		return a.thawAt(ctx, received, s, request)
	})(ctx, s, request)
}

func (a *Agent) thawAt(ctx context.Context, received time.Time, s *wire.Stream, request []byte) error {
	var req wire.ThawRequest
	if err := decode(request, &req); err != nil {
		return err
	}
	if a.Phase() != PhaseReady {
		return wire.Errorf(wire.CodePrecondition, "the machine is being built; there is nothing to thaw")
	}
	by := freeze{session: sessionNumber(ctx), number: req.Freeze}
	report := &wire.ThawReport{}
	if by.number != 0 && (by.session > a.last.session || by.session == a.last.session && by.number > a.last.number) {
		a.last = by
	}
	p := a.prepared
	if p != nil {
		if err := a.mayThaw(p.by, by, req.SandboxID); err != nil {
			return err
		}
	}
	// Processes are let run before anything is waited for. What the request says is old by its way here, so it puts the
	// clock forward only; what is left is asked for afterwards.
	clockErr := a.step(time.Unix(0, req.UnixNano).Add(time.Since(received)), 0, report)
	if p != nil {
		if err := a.thaw(); err != nil {
			return fmt.Errorf("thaw processes: %w", err)
		}
		report.Thawed, report.FrozenMS = true, ms(time.Since(p.since))
	}
	if clockErr != nil {
		return clockErr
	}
	now, at, err := askClock(asker(s))
	if err != nil {
		return fmt.Errorf("ask for the time: %w", err)
	}
	if err := a.step(now.Add(time.Since(at)), backwards, report); err != nil {
		return err
	}
	return s.SendMessage(report)
}

// rehearse goes the way of a freeze and thaw to no effect. The first branch of a child would go it on a cold translation
// cache, with processes frozen.
func (a *Agent) rehearse(ctx context.Context) {
	a.cfg.Cgroups.Rehearse(ctx)
	var req wire.ThawRequest
	_ = decode([]byte(`{"freeze":1,"sandboxId":"sb-0123456789","unixNano":1234567890123456789}`), &req)
	_ = a.step(time.Now(), 0, &wire.ThawReport{})
}

// mayThaw tells the machine that was quiesced from a copy of it, whose processes must not run before it is awakened.
// In a copy, too, the connection is a new one and calls of the old may be in flight.
func (a *Agent) mayThaw(frozen, by freeze, sandbox string) error {
	switch {
	case by.session == frozen.session && by.number == frozen.number && by.number != 0:
		return nil
	case by.session <= frozen.session:
		return wire.Errorf(wire.CodePrecondition, "the machine is frozen by another call; end that one")
	case sandbox == "" || sandbox != a.sandbox:
		return wire.Errorf(wire.CodePrecondition,
			"this machine is a frozen copy of %q and was not awakened as %q; call %s, or kill it", a.sandbox, sandbox, wire.MethodAwaken)
	default:
		return nil
	}
}

const (
	// worthAStep is how wrong the clock may be.
	worthAStep = time.Millisecond
	// backwards is how far ahead the clock must be to be put back: programs run that have seen the time.
	backwards = 50 * time.Millisecond
)

// step puts the wall clock to what it should read now. It is put back only from limit on, and never for limit 0.
func (a *Agent) step(now time.Time, limit time.Duration, report *wire.ThawReport) error {
	by := now.Sub(time.Now().Round(0))
	if by < worthAStep && (limit == 0 || by > -limit) {
		return nil
	}
	if err := a.cfg.System.SetClock(now); err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	report.StepMS += ms(by)
	return nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
