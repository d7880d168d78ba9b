package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/proc"
	"forkd.dev/forkd/internal/undo"
)

// Links are how machines get to their networks. Who moves the frames is a process of its own (internal/network/netd), so that
// what a guest sends is never read by this one.
type Links interface {
	// Attach makes a link and returns both ends, the machine's and a copy of the other, for the caller to close. It waits for
	// nobody: the other end is handed over as soon as somebody takes it. Nothing passes until Open. spent counts against the
	// policy's budget.
	Attach(id string, policy egress.Policy, spent int64) (machine, peer *os.File, err error)
	// Open lets frames pass.
	Open(ctx context.Context, id string) error
	// Detach ends a link. Who has none is no error.
	Detach(id string)
	// Adopt goes on with the links of an earlier daemon's machines, as far as they are there, and ends all others. lost are
	// those whose flows are gone.
	Adopt(ctx context.Context, machines map[string]network.Attached) (lost []string, err error)
	// Pins are the names of addresses that a guest was given; Pin has another know them, before it is let send anything. Neither
	// waits long.
	Pins(ctx context.Context, id string) ([]network.Pin, error)
	Pin(id string, pins []network.Pin)
	// State says how the process is that holds the links.
	State() network.State
	// Leave gives the links up for a later daemon. With none left, the process that holds them ends.
	Leave(ctx context.Context) error
}

func (noNetworks) Attach(string, egress.Policy, int64) (machine, peer *os.File, err error) {
	return nil, nil, nil
}

func (noNetworks) Open(context.Context, string) error { return nil }

func (noNetworks) Detach(string) {}

func (noNetworks) Adopt(context.Context, map[string]network.Attached) ([]string, error) {
	return nil, nil
}

func (noNetworks) Pins(context.Context, string) ([]network.Pin, error) { return nil, nil }

func (noNetworks) Pin(string, []network.Pin) {}

func (noNetworks) State() network.State { return network.State{} }

func (noNetworks) Leave(context.Context) error { return nil }

// attach gives a machine that is about to start its link, and takes it back if that fails. It takes no time: who moves the
// frames hears of it beside the machine's start. done closes what the machine has copies of then.
func (h *Host) attach(s *sandbox, spec *engine.Spec, u *undo.Stack) (done func(), err error) {
	s.mu.Lock()
	policy, spent := s.egress.Clone(), s.netSpent.Sent+s.netSpent.Received
	s.mu.Unlock()
	spec.Link, spec.Peer, err = h.cfg.Networks.Attach(s.id, policy, spent)
	if errors.Is(err, network.ErrFull) {
		err = fmt.Errorf("%w: %w", ErrExhausted, err)
	}
	if err != nil {
		return nil, fmt.Errorf("attach network: %w", err)
	}
	u.Add(func() { h.cfg.Networks.Detach(s.id) })
	h.givePins(s)
	return func() {
		_ = spec.Link.Close()
		_ = spec.Peer.Close()
	}, nil
}

// connect lets frames pass: the machine has confirmed who it is.
func (h *Host) connect(ctx context.Context, s *sandbox) error {
	if err := h.cfg.Networks.Open(ctx, s.id); err != nil {
		return fmt.Errorf("open network: %w", err)
	}
	return nil
}

// hasTalked says whether a guest may have connections that leave its machine: whether it has sent anything that could
// begin one since it was known to have none. What cannot be told counts as yes. It notes which names the guest knows, too.
func (h *Host) hasTalked(ctx context.Context, s *sandbox) bool {
	all, err := h.cfg.Networks.Totals(ctx)
	if err == nil && all[s.id].Questions > 0 || h.pins.get(s.id) != nil {
		h.notePins(ctx, s)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.talked = s.talked || err != nil || all[s.id].Talked
	return s.talked
}

// spentNetwork is what a sandbox's networks carried before this one.
func (h *Host) spentNetwork(s *sandbox) network.Totals {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.netSpent
}

// adoptLinks goes on with the networks of adopted machines. What had been lost of them was reset.
func (h *Host) adoptLinks(ctx context.Context, adopted []*adoption) error {
	machines := map[string]network.Attached{}
	for _, a := range adopted {
		machines[a.record.ID] = network.Attached{
			Link: a.peer, Policy: a.record.Egress, Spent: a.record.NetSpent.Sent + a.record.NetSpent.Received,
		}
	}
	lost, err := h.cfg.Networks.Adopt(ctx, machines)
	for _, a := range adopted {
		if slices.Contains(lost, a.record.ID) {
			a.record.Talked = true // What the one before saw is not known any more.
			a.lost = true
		}
	}
	if len(lost) > 0 {
		h.events.Emit(events.Event{Type: events.NetworkRestarted, Reason: "it had ended while no daemon ran"})
	}
	return err
}

// networkCheck looks at the process that moves the frames of sandboxes.
func (h *Host) networkCheck() Check {
	st := h.cfg.Networks.State()
	switch {
	case st.PID != 0:
		detail := fmt.Sprintf("process %d has the networks of %d machines", st.PID, st.Links)
		if layers, err := proc.Observed(st.PID); err == nil {
			// The kernel does not show it, but the process is started with it wherever there is any.
			if there, _ := proc.ConfinementAvailable(); there {
				layers = append(layers, proc.LayerLandlock)
				slices.Sort(layers)
			}
			detail += ", confined by " + strings.Join(layers, ", ")
		}
		return Check{"network", Pass, detail, ""}
	case st.Error != nil:
		return Check{
			"network", Fail, fmt.Sprintf("the process of the sandboxes' networks does not run: %v", st.Error),
			"sandboxes run on without a network; see the daemon's log",
		}
	}
	return Check{"network", Skip, "no machine has needed one yet", ""}
}

// NetworkRestarted is called when the process that moves the frames has died and before another has the links of these sandboxes,
// with the policies that they had; their flows are gone.
func (h *Host) NetworkRestarted(ids []string, reason string) {
	h.mu.Lock()
	var hit []*sandbox
	for id, s := range h.sandboxes {
		if slices.Contains(ids, id) {
			hit = append(hit, s)
		}
	}
	h.mu.Unlock()
	for _, s := range hit {
		s.mu.Lock()
		s.talked = true // What the one before saw is not known any more.
		s.lost++
		s.mu.Unlock()
	}
	h.events.Emit(events.Event{Type: events.NetworkRestarted, Reason: reason})
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return
	}
	h.wait.Go(func() { // Networks wait for the caller.
		for _, s := range hit {
			h.record(s)
			h.severLater(s)
		}
	})
}

// mayTalk says whether a sandbox's machine may have connections that leave it.
func (s *sandbox) mayTalk() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.talked
}

// severLost has a guest end its connections, if their other ends are gone: whoever only listens on one would wait for ever.
func (s *sandbox) severLost(ctx context.Context, conn *guest.Conn) error {
	s.mu.Lock()
	lost := s.lost
	s.mu.Unlock()
	if lost == 0 {
		return nil
	}
	if err := conn.Sever(ctx); err != nil {
		return fmt.Errorf("end the connections whose other ends are gone: %w", err)
	}
	s.mu.Lock()
	if s.lost == lost { // or it happened again meanwhile
		s.lost = 0
	}
	s.mu.Unlock()
	return nil
}

// severLater does that beside the caller. A guest that cannot be asked now, because it is paused, is when it is resumed.
func (h *Host) severLater(s *sandbox) {
	if !s.is(lineage.Running) {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return
	}
	h.wait.Go(func() {
		ctx, cancel := context.WithTimeout(h.life, h.cfg.Patience)
		defer cancel()
		conn, err := s.guest(ctx)
		if err == nil {
			err = s.severLost(ctx, conn)
		}
		if err != nil {
			h.log.Warn("tell a guest that its network began anew", "sandbox", s.id, "error", err)
		}
	})
}
