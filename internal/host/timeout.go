package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/lineage"
)

// Action is what is done with a sandbox whose time is over.
type Action string

// Actions.
const (
	ActionKill    Action = "kill"
	ActionPause   Action = "pause"
	ActionSuspend Action = "suspend"
)

// Life is how long a sandbox is let run, and what then.
type Life struct {
	TTL        time.Duration `json:"ttl,omitempty"`         // since its start, or since it was last paused or suspended for it; 0: any
	OnEnd      Action        `json:"on_end,omitempty"`      // of that; "": kill
	Idle       time.Duration `json:"idle,omitempty"`        // without a call into its guest; 0: any
	OnIdle     Action        `json:"on_idle,omitempty"`     // "": suspend
	AutoResume bool          `json:"auto_resume,omitempty"` // a call into its guest resumes or wakes it first
}

const (
	minIdle = time.Second
	// actAgain is when something is tried again that could not be done: a sandbox that is being branched cannot be suspended.
	actAgain = 5 * time.Second
)

func (l Life) check() error {
	for what, a := range map[string]Action{"ttl_action": l.OnEnd, "idle_action": l.OnIdle} {
		switch a {
		case "", ActionKill, ActionPause, ActionSuspend:
		default:
			return invalid("%s is %.40q; there are %s, %s and %s", what, a, ActionKill, ActionPause, ActionSuspend)
		}
	}
	switch {
	case l.Idle != 0 && (l.Idle < minIdle || l.Idle > maxTTL):
		return invalid("idle time is %s; allowed is 0 (any), or %s to %s", l.Idle, minIdle, maxTTL)
	case l.OnIdle != "" && l.Idle == 0:
		return invalid("idle_action is %s, and there is no idle time after which to do it", l.OnIdle)
	}
	return nil
}

// with has defaults filled in.
func (l Life) with(ttl time.Duration) Life {
	l.TTL = ttl
	if l.OnEnd == "" {
		l.OnEnd = ActionKill
	}
	if l.Idle > 0 && l.OnIdle == "" {
		l.OnIdle = ActionSuspend
	}
	return l
}

// ends says whether the end of its time to live ends the sandbox itself.
func (l Life) ends() bool { return l.OnEnd == "" || l.OnEnd == ActionKill }

// arm starts a sandbox's clocks: when it enters the table, and when it runs again.
func (h *Host) arm(s *sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return
	}
	if s.expires.IsZero() && s.life.TTL > 0 && !s.life.ends() {
		s.expires = time.Now().Add(s.life.TTL)
	}
	h.armEnd(s)
	s.used = time.Now()
	h.armIdle(s)
}

// armEnd starts the clock of its time to live, if it does not run. The caller holds the sandbox's mu.
func (h *Host) armEnd(s *sandbox) {
	if s.onEnd != nil || s.expires.IsZero() {
		return
	}
	which := s.extended
	s.onEnd = time.AfterFunc(time.Until(s.expires), func() { h.expire(s.id, which) })
}

// armIdle starts the clock that runs while nobody calls into the guest. The caller holds the sandbox's mu.
func (h *Host) armIdle(s *sandbox) {
	if s.life.Idle == 0 || s.using > 0 || s.ended || s.state != lineage.Running {
		return
	}
	if s.onIdle == nil {
		s.onIdle = time.AfterFunc(s.life.Idle, func() { h.idle(s) })
		return
	}
	s.onIdle.Reset(s.life.Idle)
}

// disarm stops the clocks. The caller holds the sandbox's mu.
func (s *sandbox) disarm() {
	for _, t := range []*time.Timer{s.onEnd, s.onIdle} {
		if t != nil {
			t.Stop()
		}
	}
}

// use notes that somebody calls into the guest until ctx ends.
func (h *Host) use(ctx context.Context, s *sandbox) {
	if s.life.Idle == 0 && !s.life.AutoResume {
		return
	}
	s.mu.Lock()
	s.using++
	if s.onIdle != nil {
		s.onIdle.Stop()
	}
	s.mu.Unlock()
	context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.using--
		s.used = time.Now()
		h.armIdle(s)
	})
}

// idle does what is to be done with a sandbox that nobody calls into.
func (h *Host) idle(s *sandbox) {
	unused := func() bool { return s.using == 0 && s.state == lineage.Running && time.Since(s.used) >= s.life.Idle }
	s.mu.Lock()
	due := unused()
	s.mu.Unlock()
	if due {
		h.act(s, s.life.OnIdle, fmt.Sprintf("nobody used it for %s", s.life.Idle), unused, func() { h.idle(s) })
	}
}

// expire is the end of its time to live, unless it has been given another meanwhile.
func (h *Host) expire(id string, which int) {
	h.mu.Lock()
	s := h.sandboxes[id]
	h.mu.Unlock()
	if s == nil {
		return
	}
	action := s.life.OnEnd
	if action == "" {
		action = ActionKill
	}
	h.act(s, action, "its time to live is over", func() bool { return s.extended == which }, func() { h.expire(id, which) })
}

// act does what is to be done with a sandbox whose time is over, while it still is: still is called with its mu held. What
// cannot be done now is tried again later.
func (h *Host) act(s *sandbox, action Action, reason string, still func() bool, again func()) {
	h.mu.Lock()
	if h.closed || h.sandboxes[s.id] != s {
		h.mu.Unlock()
		return
	}
	h.wait.Add(1)
	h.mu.Unlock()
	defer h.wait.Done()
	var err error
	switch action {
	case ActionKill:
		err = h.endNow(s, reason, still)
	case ActionPause:
		_, err = h.pauseIf(h.life, s, reason, still)
	case ActionSuspend:
		_, err = h.suspendIf(h.life, s, reason, still)
	}
	switch {
	case err == nil:
		h.log.Info("a sandbox's time was over", "sandbox", s.id, "action", action, "reason", reason)
		return
	case errors.Is(err, errUsed), errors.Is(err, ErrNotFound), h.life.Err() != nil, s.is(lineage.Failed):
		return
	}
	if !errors.Is(err, lineage.ErrState) {
		h.log.Warn("a sandbox's time is over, and what is to be done then fails", "sandbox", s.id, "action", action, "error", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		time.AfterFunc(actAgain, again)
	}
}

// errUsed is why nothing was done with a sandbox: it is used again.
var errUsed = errors.New("it is used")

// endNow ends a sandbox whose time is over.
func (h *Host) endNow(s *sandbox, reason string, still func() bool) error {
	h.mu.Lock()
	s.mu.Lock()
	ok := h.sandboxes[s.id] == s && still()
	s.mu.Unlock()
	if ok {
		delete(h.sandboxes, s.id)
	}
	h.mu.Unlock()
	if !ok {
		return errUsed
	}
	err := h.end(s)
	h.tell(events.SandboxEnded, s, reason)
	return err
}

// timeOver notes that a sandbox was paused or suspended for the end of its time to live: it begins anew when it runs again.
func (s *sandbox) timeOver() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.life.TTL == 0 || s.life.ends() {
		return
	}
	s.expires = time.Time{}
	if s.onEnd != nil {
		s.onEnd.Stop()
		s.onEnd = nil
	}
}

// ready lets a sandbox run that is paused or suspended, if it is one that is to run when it is used.
func (h *Host) ready(ctx context.Context, s *sandbox) error {
	for s.life.AutoResume {
		s.mu.Lock()
		state, work, idle := s.state, s.work, s.idle
		s.mu.Unlock()
		if stops := work == lineage.Pausing || work == lineage.Suspending; stops || work != "" && state != lineage.Running {
			select {
			case <-idle:
				continue
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		var err error
		switch state {
		case lineage.Paused:
			_, err = h.Resume(ctx, s.id)
		case lineage.Suspended:
			_, err = h.Wake(ctx, s.id)
		default:
			return nil
		}
		s.mu.Lock()
		lost := s.work != "" || s.state != state // another was quicker
		s.mu.Unlock()
		if err != nil && !(lost && errors.Is(err, lineage.ErrState)) {
			return err
		}
	}
	return nil
}
