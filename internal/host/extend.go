package host

import (
	"fmt"
	"time"

	"forkd.dev/forkd/internal/lineage"
)

// SetTTL gives a sandbox another time to live, from now on; 0: it lives until it is killed. With longer it is never made shorter.
// One that is suspended gets its time when it is awake.
func (h *Host) SetTTL(id string, ttl time.Duration, longer bool) (View, error) {
	if ttl < 0 || ttl > maxTTL {
		return View{}, invalid("ttl is %s; allowed is 0 (until killed) to %s", ttl, maxTTL)
	}
	s, err := h.find(id)
	if err != nil {
		return View{}, err
	}
	if err := h.setTTL(s, ttl, longer); err != nil {
		return View{}, err
	}
	h.record(s)
	return s.view(), nil
}

func (h *Host) setTTL(s *sandbox, ttl time.Duration, longer bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.ended:
		return fmt.Errorf("sandbox %s: %w", s.id, ErrNotFound)
	case s.state == lineage.Suspended:
		return s.explain(fmt.Errorf("%w: it is %s, and its time stands still", lineage.ErrState, s.state))
	}
	var expires time.Time
	if ttl > 0 {
		expires = time.Now().Add(ttl)
	}
	if longer && (s.expires.IsZero() || !expires.IsZero() && s.expires.After(expires)) {
		return nil
	}
	s.expires = expires
	s.extended++
	if s.onEnd != nil {
		s.onEnd.Stop()
		s.onEnd = nil
	}
	h.armEnd(s)
	return nil
}
