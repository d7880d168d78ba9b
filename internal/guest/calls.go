package guest

import (
	"context"
	"fmt"
	"slices"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
)

// How long the host waits for a guest in calls of its own, whatever the caller's patience; docs/guest-protocol.md has the
// whole table. A guest that answers late is loaded or emulated, one that does not answer by then never will.
const (
	callBound   = 30 * time.Second
	settleBound = 5 * time.Minute // it writes what a warm-up left in its page cache
	pivotBound  = 2 * time.Minute
	anyBound    = 5 * time.Minute // of what has no bound of its own
)

// within bounds a call.
func within(ctx context.Context, bound time.Duration, method string) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, bound, &SilentError{Method: method, Waited: bound})
}

// SilentError is a guest that did not answer in time. It is a context.DeadlineExceeded.
type SilentError struct {
	Method string
	Waited time.Duration
}

func (e *SilentError) Error() string {
	return fmt.Sprintf("the guest agent did not answer %s within %s", e.Method, e.Waited)
}

func (e *SilentError) Unwrap() error { return context.DeadlineExceeded }

// Awaken gives a fresh child its identity. After an error the child must be killed: none of its processes has run.
func (c *Conn) Awaken(ctx context.Context, req *wire.AwakenRequest) (*wire.AwakenReport, error) {
	ctx, cancel := within(ctx, callBound, wire.MethodAwaken)
	defer cancel()
	s, err := c.Open(ctx, wire.MethodAwaken, req)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	report := &wire.AwakenReport{}
	if err := tellTime(ctx, wire.MethodAwaken, s, report); err != nil {
		return nil, err
	}
	tidyReport(report)
	return report, severed(req, report)
}

// severed makes sure that an agent did what it was asked for: one that knows no connections reads past the word.
func severed(req *wire.AwakenRequest, report *wire.AwakenReport) error {
	if !req.Sever || slices.Contains(report.Renewed, wire.RenewedConnections) {
		return nil
	}
	return fmt.Errorf("%w: the guest's agent did not sever the connections of the copy; it is too old for a network", ErrProtocol)
}

// tellTime answers the agent's questions for the time until its report comes.
func tellTime(ctx context.Context, method string, s *wire.Stream, report any) error {
	s.Limit(maxReply, nil)
	for range maxClockQuestions {
		kind, payload, err := s.Recv()
		switch {
		case err != nil:
			return callError(ctx, method, err)
		case kind == wire.KindMessage:
			if err := wire.Decode(payload, report); err != nil {
				return fmt.Errorf("call %s: %w", method, err)
			}
			return finish(ctx, method, s)
		case kind != wire.KindData:
			return fmt.Errorf("call %s: %w: unexpected frame %q", method, ErrProtocol, byte(kind))
		}
		if err := s.Send(wire.KindData, wire.AppendClock(nil, time.Now())); err != nil {
			return callError(ctx, method, err)
		}
	}
	return fmt.Errorf("call %s: %w: more than %d questions for the time", method, ErrProtocol, maxClockQuestions)
}

// Quiesce freezes the guest's processes, for a capture. Without Settle the machine is to run on: Thaw must follow,
// whatever this returned, because a freeze may have happened whose confirmation was lost. An agent too old for Thaw is
// not frozen then. Callers exclude each other.
func (c *Conn) Quiesce(ctx context.Context, req wire.QuiesceRequest) error {
	if !req.Settle && !slices.Contains(c.hello.Features, wire.FeatureThaw) {
		return fmt.Errorf("%w: the agent (version %s) of this machine's snapshot cannot let a machine run on that it froze; build the snapshot again",
			ErrProtocol, c.hello.Agent)
	}
	bound := callBound
	if req.Settle {
		bound = settleBound
	}
	ctx, cancel := within(ctx, bound, wire.MethodQuiesce)
	defer cancel()
	req.Freeze = c.freezes.Add(1)
	return c.Call(ctx, wire.MethodQuiesce, req, nil)
}

// Thaw lets the machine run on: it ends the last Quiesce of this connection, or else one that an earlier connection left
// behind, whose caller may be a daemon that died. First it puts the wall clock right, which it also does when nothing is
// frozen: call it after anything that halted the machine. It can be called again. SandboxID is what the machine was
// awakened as: never call it for one that may not have been; the agent refuses if it finds that it is a copy of another.
func (c *Conn) Thaw(ctx context.Context, sandboxID string) (*wire.ThawReport, error) {
	req := wire.ThawRequest{Freeze: c.freezes.Load(), SandboxID: sandboxID, UnixNano: time.Now().UnixNano()}
	ctx, cancel := within(ctx, callBound, wire.MethodThaw)
	defer cancel()
	s, err := c.Open(ctx, wire.MethodThaw, req)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	report := &wire.ThawReport{}
	if err := tellTime(ctx, wire.MethodThaw, s, report); err != nil {
		return nil, err
	}
	return report, nil
}

// Sever ends all connections of the guest that leave its machine. An agent that cannot do that has no network.
func (c *Conn) Sever(ctx context.Context) error {
	if !slices.Contains(c.hello.Features, wire.FeatureNetwork) {
		return nil
	}
	ctx, cancel := within(ctx, callBound, wire.MethodSever)
	defer cancel()
	return c.Call(ctx, wire.MethodSever, struct{}{}, &wire.SeverReply{})
}

// Ping returns when the agent has answered.
func (c *Conn) Ping(ctx context.Context) error {
	ctx, cancel := within(ctx, callBound, wire.MethodPing)
	defer cancel()
	return c.Call(ctx, wire.MethodPing, struct{}{}, nil)
}

// Pivot ends the build phase: the prepared disk becomes the root.
func (c *Conn) Pivot(ctx context.Context) error {
	ctx, cancel := within(ctx, pivotBound, wire.MethodPivot)
	defer cancel()
	return c.Call(ctx, wire.MethodPivot, wire.PivotRequest{}, nil)
}

// PowerOff ends the guest in an orderly way. It returns when the guest has begun; the machine's end follows.
func (c *Conn) PowerOff(ctx context.Context) error {
	ctx, cancel := within(ctx, callBound, wire.MethodPowerOff)
	defer cancel()
	return c.Call(ctx, wire.MethodPowerOff, struct{}{}, nil)
}

// maxUnits is how many units are named that failed.
const maxUnits = 50

// Init starts the image's own init, if it does not run, and returns when it is up.
func (c *Conn) Init(ctx context.Context, name string, timeout time.Duration) (*wire.InitReply, error) {
	ctx, cancel := within(ctx, timeout+callBound, wire.MethodInit)
	defer cancel()
	reply := &wire.InitReply{}
	err := c.Call(ctx, wire.MethodInit, wire.InitRequest{Init: name, TimeoutMS: timeout.Milliseconds()}, reply)
	if err != nil {
		return nil, err
	}
	reply.State, reply.Failed = line(reply.State, maxSaid), said(reply.Failed, maxUnits)
	return reply, nil
}

// Metrics samples the guest's accounting.
func (c *Conn) Metrics(ctx context.Context) (*wire.Metrics, error) {
	ctx, cancel := within(ctx, callBound, wire.MethodMetrics)
	defer cancel()
	m := &wire.Metrics{}
	if err := c.Call(ctx, wire.MethodMetrics, struct{}{}, m); err != nil {
		return nil, err
	}
	return m, nil
}
