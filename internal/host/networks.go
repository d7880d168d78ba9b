package host

import (
	"context"
	"fmt"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
)

// Networks are the networks of sandboxes, wherever they are run; by the ids of their sandboxes.
type Networks interface {
	Links
	// SetPolicy says what one may reach from now on. What it may not reach any more is cut when this returns.
	SetPolicy(ctx context.Context, id string, policy egress.Policy) error
	// Flows are those that one is known by: open, refused, and the last that ended; by their ids.
	Flows(ctx context.Context, id string) ([]network.Flow, error)
	// Watch calls each for the flows of one as they begin, are refused and end, until ctx ends, its network does (nil), or each
	// returns an error, which is returned. begun is called when no later flow is missed.
	Watch(ctx context.Context, id string, begun func(), each func(network.Flow) error) error
	// Totals are the counters of all of them.
	Totals(ctx context.Context) (map[string]network.Totals, error)
	// TotalsOf are those of one, if they are known. It does not wait long.
	TotalsOf(ctx context.Context, id string) (totals network.Totals, ok bool)
}

// noNetworks is a host without any.
type noNetworks struct{}

var errNoNetworks = fmt.Errorf("%w: sandboxes of this daemon have no networks", ErrUnsupported)

func (noNetworks) SetPolicy(context.Context, string, egress.Policy) error { return errNoNetworks }

func (noNetworks) Flows(context.Context, string) ([]network.Flow, error) { return nil, errNoNetworks }

func (noNetworks) Watch(context.Context, string, func(), func(network.Flow) error) error {
	return errNoNetworks
}

func (noNetworks) Totals(context.Context) (map[string]network.Totals, error) { return nil, nil }

func (noNetworks) TotalsOf(context.Context, string) (network.Totals, bool) {
	return network.Totals{}, false
}

// Flows are the flows of a sandbox that are known: open ones, refused ones, and the last that ended.
func (h *Host) Flows(ctx context.Context, id string) ([]network.Flow, error) {
	s, err := h.find(id)
	if err != nil {
		return nil, err
	}
	if err := s.reachable(); err != nil {
		return nil, err
	}
	return h.cfg.Networks.Flows(ctx, s.id)
}

// WatchFlows is Networks.Watch of a sandbox.
func (h *Host) WatchFlows(ctx context.Context, id string, begun func(), each func(network.Flow) error) error {
	s, err := h.find(id)
	if err != nil {
		return err
	}
	if err := s.reachable(); err != nil {
		return err
	}
	return h.cfg.Networks.Watch(ctx, s.id, begun, each)
}

// networkTotals are what a sandbox's network has come to.
func (h *Host) networkTotals(ctx context.Context, s *sandbox) network.Totals {
	h.counting.Lock()
	defer h.counting.Unlock()
	now, known := h.allTotals(ctx)[s.id]
	return h.carried(s, now, known)
}

// count is how many flows of sandboxes are open, and what all networks have carried, those of sandboxes that ended among them.
func (h *Host) count(sandboxes []*sandbox) (open int, sum network.Totals) {
	h.counting.Lock()
	defer h.counting.Unlock()
	networks := h.allTotals(h.life)
	for _, s := range sandboxes {
		now, known := networks[s.id]
		open += h.carried(s, now, known).Open
	}
	return open, h.carriedSum
}

// lastTotals notes what a sandbox's network had carried when it ended: nobody can ask for it any more.
func (h *Host) lastTotals(s *sandbox) {
	h.counting.Lock()
	defer h.counting.Unlock()
	now, known := h.cfg.Networks.TotalsOf(h.life, s.id)
	h.carried(s, now, known)
}

// allTotals are what all networks have come to.
func (h *Host) allTotals(ctx context.Context) map[string]network.Totals {
	all, err := h.cfg.Networks.Totals(ctx)
	if err != nil {
		h.log.Warn("ask what networks have carried", "error", err)
	}
	return all
}

// carried notes what a sandbox's network has carried so far, and adds what those carried that it had before. It never gets
// less: of a network that is gone it is what was seen last. The caller has held counting since before it asked.
func (h *Host) carried(s *sandbox, now network.Totals, known bool) network.Totals {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := addTotals(s.netSpent, s.net)
	if !known {
		return before
	}
	if now.Flows < s.net.Flows || now.Sent < s.net.Sent || now.Received < s.net.Received || now.FramesIn < s.net.FramesIn {
		s.netSpent = before // another network: it was restarted, or the sandbox was suspended
		s.net = network.Totals{}
	}
	s.net = now
	sum := addTotals(s.netSpent, s.net)
	h.carriedSum = addTotals(h.carriedSum, subTotals(sum, before))
	sum.Open = now.Open
	return sum
}

// addTotals adds the counters.
func addTotals(a, b network.Totals) network.Totals {
	return network.Totals{
		Talked: a.Talked || b.Talked, Flows: a.Flows + b.Flows, Refused: a.Refused + b.Refused, Lost: a.Lost + b.Lost, Cut: a.Cut + b.Cut,
		Questions: a.Questions + b.Questions, Sent: a.Sent + b.Sent, Received: a.Received + b.Received, FramesIn: a.FramesIn + b.FramesIn,
		FramesOut: a.FramesOut + b.FramesOut, FramesDropped: a.FramesDropped + b.FramesDropped, FramesRefused: a.FramesRefused + b.FramesRefused,
	}
}

// subTotals is what has come to b since it was a.
func subTotals(b, a network.Totals) network.Totals {
	return network.Totals{
		Flows: b.Flows - a.Flows, Refused: b.Refused - a.Refused, Lost: b.Lost - a.Lost, Cut: b.Cut - a.Cut, Questions: b.Questions - a.Questions,
		Sent: b.Sent - a.Sent, Received: b.Received - a.Received, FramesIn: b.FramesIn - a.FramesIn, FramesOut: b.FramesOut - a.FramesOut,
		FramesDropped: b.FramesDropped - a.FramesDropped, FramesRefused: b.FramesRefused - a.FramesRefused,
	}
}
