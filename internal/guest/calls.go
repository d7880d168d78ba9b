package guest

import (
	"context"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
)

// Awaken gives a fresh child its identity. After an error the child must be killed: none of its processes has run.
func (c *Conn) Awaken(ctx context.Context, req *wire.AwakenRequest) (*wire.AwakenReport, error) {
	s, err := c.Open(ctx, wire.MethodAwaken, req)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	report := &wire.AwakenReport{}
	for {
		kind, payload, err := s.Recv()
		switch {
		case err != nil:
			return nil, callError(ctx, wire.MethodAwaken, err)
		case kind == wire.KindMessage:
			if err := wire.Decode(payload, report); err != nil {
				return nil, fmt.Errorf("call %s: %w", wire.MethodAwaken, err)
			}
			return report, finish(ctx, wire.MethodAwaken, s)
		case kind != wire.KindData:
			return nil, fmt.Errorf("call %s: %w: unexpected frame %q", wire.MethodAwaken, ErrProtocol, byte(kind))
		}
		// The agent asks for the time.
		if err := s.Send(wire.KindData, wire.AppendClock(nil, time.Now())); err != nil {
			return nil, callError(ctx, wire.MethodAwaken, err)
		}
	}
}

// Quiesce freezes the guest's processes. They run again after Awaken.
func (c *Conn) Quiesce(ctx context.Context, req wire.QuiesceRequest) error {
	return c.Call(ctx, wire.MethodQuiesce, req, nil)
}

// Ping returns when the agent has answered.
func (c *Conn) Ping(ctx context.Context) error {
	return c.Call(ctx, wire.MethodPing, struct{}{}, nil)
}

// Pivot ends the build phase: the prepared disk becomes the root.
func (c *Conn) Pivot(ctx context.Context) error {
	return c.Call(ctx, wire.MethodPivot, wire.PivotRequest{}, nil)
}

// PowerOff ends the guest in an orderly way. It returns when the guest has begun; the machine's end follows.
func (c *Conn) PowerOff(ctx context.Context) error {
	return c.Call(ctx, wire.MethodPowerOff, struct{}{}, nil)
}

// Metrics samples the guest's accounting.
func (c *Conn) Metrics(ctx context.Context) (*wire.Metrics, error) {
	m := &wire.Metrics{}
	if err := c.Call(ctx, wire.MethodMetrics, struct{}{}, m); err != nil {
		return nil, err
	}
	return m, nil
}
