package httpapi

import (
	"fmt"
	"math"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
)

// bounds adds a request's bounds to what is forked.
func bounds(spec *host.ForkSpec, b api.Bounds) error {
	if l := b.Limits; l != nil {
		spec.Limits = host.Limits{
			MemoryBytes: l.MemoryBytes, CPUs: l.CPUs, IOBytes: l.IOBytesPerSecond, IORequests: l.IORequestsPerSecond, PIDs: l.PIDs,
		}
	}
	if err := secondsOK("idle_seconds", b.IdleSeconds); err != nil {
		return err
	}
	spec.Life = host.Life{
		OnEnd: host.Action(b.TTLAction), Idle: seconds(b.IdleSeconds), OnIdle: host.Action(b.IdleAction), AutoResume: b.AutoResume,
	}
	return nil
}

// secondsOK refuses what a Duration cannot hold: it would wrap around.
func secondsOK(field string, s float64) error {
	if s < 0 || s > math.MaxInt64/2/float64(time.Second) || math.IsNaN(s) {
		return fmt.Errorf("%w: %s is %g", host.ErrInvalid, field, s)
	}
	return nil
}

func boundsOf(v host.View) api.Bounds {
	b := api.Bounds{
		IdleSeconds: v.Life.Idle.Seconds(), IdleAction: string(v.Life.OnIdle), AutoResume: v.Life.AutoResume,
	}
	if v.Life.TTL > 0 {
		b.TTLAction = string(v.Life.OnEnd)
	}
	if l := v.Limits; l != (host.Limits{}) {
		b.Limits = &api.Limits{
			MemoryBytes: l.MemoryBytes, CPUs: l.CPUs, IOBytesPerSecond: l.IOBytes, IORequestsPerSecond: l.IORequests, PIDs: l.PIDs,
		}
	}
	return b
}
