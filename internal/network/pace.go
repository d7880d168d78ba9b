package network

import (
	"context"
	"sync"
	"time"
)

// pacer spreads bytes over time: each taker waits until those before it are paid for.
type pacer struct {
	rate int64 // bytes a second; 0: no limit

	mu   sync.Mutex
	free time.Time // when the next byte may pass
}

// burst is how far in advance bytes may pass.
const burst = 100 * time.Millisecond

func (p *pacer) take(now time.Time, bytes int) time.Duration {
	if p.rate <= 0 {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if earliest := now.Add(-burst); p.free.Before(earliest) {
		p.free = earliest
	}
	wait := p.free.Sub(now)
	p.free = p.free.Add(time.Duration(float64(bytes) / float64(p.rate) * float64(time.Second)))
	return max(0, wait)
}

// pace waits until so many bytes may pass.
func (n *Network) pace(ctx context.Context, bytes int) error {
	wait := n.pacer.take(time.Now(), bytes)
	if wait == 0 {
		return nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
