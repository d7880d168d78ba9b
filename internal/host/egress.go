package host

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
)

// ErrWider means that more was asked to be reachable than whoever asks may give.
var ErrWider = egress.ErrWider

// EgressView is what a sandbox may reach, and what it has come to.
type EgressView struct {
	Policy egress.Policy
	Totals network.Totals
}

// Egress says what a sandbox may reach.
func (h *Host) Egress(ctx context.Context, id string) (EgressView, error) {
	s, err := h.find(id)
	if err != nil {
		return EgressView{}, err
	}
	return h.egressView(ctx, s), nil
}

func (h *Host) egressView(ctx context.Context, s *sandbox) EgressView {
	return EgressView{Policy: s.policy(), Totals: h.networkTotals(ctx, s)}
}

// policy is what the sandbox may reach now.
func (s *sandbox) policy() egress.Policy {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.egress.Clone()
}

// SetEgress changes what a sandbox may reach, from now on and for its branches. What it may not reach any more is cut before
// this returns. Without mayWiden it can only become less.
func (h *Host) SetEgress(ctx context.Context, id string, change func(egress.Policy) (egress.Policy, error), mayWiden bool) (EgressView, error) {
	s, err := h.find(id)
	if err != nil {
		return EgressView{}, err
	}
	s.policing.Lock() // Two changes at once would each undo the other's.
	defer s.policing.Unlock()
	old := s.policy()
	policy, err := change(old.Clone())
	if err == nil {
		policy, err = checkEgress(policy)
	}
	if err == nil && !mayWiden {
		err = narrower(&policy, &old)
	}
	if err == nil {
		err = s.change(func() error { return nil })
	}
	if err == nil {
		err = h.cfg.Networks.SetPolicy(ctx, s.id, policy)
	}
	if err == nil {
		err = s.change(func() error {
			s.egress = policy
			return nil
		})
		if err != nil { // What has it suspended meanwhile may fail, and then its network stays.
			_ = h.cfg.Networks.SetPolicy(context.WithoutCancel(ctx), s.id, old)
		}
	}
	if err != nil {
		return EgressView{}, fmt.Errorf("egress of sandbox %s: %w", s.id, err)
	}
	h.tell(events.SandboxEgress, s, describePolicy(policy))
	if err := h.remember(s); err != nil {
		return EgressView{}, err
	}
	return h.egressView(ctx, s), nil
}

// change does something to what is written down of a sandbox, with its mu held, unless it is suspended or about to be: what it
// was then is on disk, and a later daemon would go on with that.
func (s *sandbox) change(do func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.reachableLocked(); err != nil {
		return err
	}
	if s.work == lineage.Suspending {
		return s.explain(fmt.Errorf("%w: it is being suspended", lineage.ErrState))
	}
	return do()
}

// reachable says whether a sandbox has a network.
func (s *sandbox) reachable() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reachableLocked()
}

func (s *sandbox) reachableLocked() error {
	switch {
	case s.ended:
		return ErrNotFound
	case s.state != lineage.Running && s.state != lineage.Paused:
		return s.explain(fmt.Errorf("%w: it is %s and has no network", lineage.ErrState, s.state))
	}
	return nil
}

// checkEgress is a policy as it is kept, if it can be meant.
func checkEgress(p egress.Policy) (egress.Policy, error) {
	if p.Preset == egress.None {
		p.Preset = ""
	}
	if err := p.Validate(); err != nil {
		return p, invalid("%s", err)
	}
	return p, nil
}

// narrower refuses what allows more than another does.
func narrower(child, parent *egress.Policy) error {
	err := egress.Narrower(child, parent)
	switch {
	case errors.Is(err, egress.ErrWider):
		return hint(err, "this needs scope admin (or manage, where the daemon is started with FORKD_EGRESS_WIDEN=manage)")
	case err != nil:
		return invalid("%s", err)
	}
	return nil
}

// egressFor is what the children of a snapshot may reach: what is asked for, else what the snapshot says. Without a preset
// rules are added to the snapshot's. Without mayWiden what is denied there stays denied, and its budget stays.
func egressFor(asked *egress.Policy, parent egress.Policy, mayWiden bool) (egress.Policy, error) {
	if asked == nil {
		return parent.Clone(), nil
	}
	policy := asked.Clone()
	if policy.Preset == "" {
		policy = parent.Clone()
		policy.Allow = addRules(policy.Allow, asked.Allow)
		policy.Deny = addRules(policy.Deny, asked.Deny)
		if asked.BudgetBytes != 0 {
			policy.BudgetBytes = asked.BudgetBytes
		}
	}
	policy, err := checkEgress(policy)
	if err != nil || mayWiden {
		return policy, err
	}
	policy = egress.Merge(&policy, &parent)
	return policy, narrower(&policy, &parent)
}

// SnapshotEgress is what a snapshot says of its children; nothing if there is none.
func (h *Host) SnapshotEgress(tag string) egress.Policy {
	h.mu.Lock()
	defer h.mu.Unlock()
	m, w, err := h.forkableLocked(tag)
	if err == nil && w != nil {
		m = w.m
	}
	return m.Egress.Clone()
}

// addRules adds those that are not there.
func addRules(rules, more []egress.Rule) []egress.Rule {
	for _, r := range more {
		if !slices.ContainsFunc(rules, func(have egress.Rule) bool { return have.String() == r.String() }) {
			rules = append(rules, r)
		}
	}
	return rules
}

// describePolicy is a policy in a line.
func describePolicy(p egress.Policy) string {
	text := p.Preset
	if text == "" {
		text = egress.None
	}
	if n := len(p.Allow); n > 0 {
		text += fmt.Sprintf(", %d more allowed", n)
	}
	if n := len(p.Deny); n > 0 {
		text += fmt.Sprintf(", %d denied", n)
	}
	if p.BudgetBytes > 0 {
		text += fmt.Sprintf(", budget of %d bytes", p.BudgetBytes)
	}
	return text
}

// network is what a build says of networks; nil: nothing.
func (b *build) network() *image.Network {
	if b.recipe == nil { // a machine that is there is only gone on with
		return nil
	}
	return b.recipe.Network
}

// commandNetwork is what the commands and the warm-up of a build may reach; base is what the children of what it stands on may.
func (b *build) commandNetwork(base egress.Policy) egress.Policy {
	if n := b.network(); n != nil {
		return n.Build.Clone()
	}
	return base.Clone()
}

// sandboxNetwork is what the children of what is built may reach.
func (b *build) sandboxNetwork(base egress.Policy) egress.Policy {
	if n := b.network(); n != nil {
		return n.Sandboxes.Clone()
	}
	return base.Clone()
}

// checkNetwork refuses networks that whoever builds may not give.
func (b *build) checkNetwork(base egress.Policy) error {
	if b.network() == nil || b.spec.MayWiden {
		return nil
	}
	for _, p := range []egress.Policy{b.commandNetwork(base), b.sandboxNetwork(base)} {
		if err := narrower(&p, &base); err != nil {
			return fmt.Errorf("network: %w", err)
		}
	}
	return nil
}

// networkKey is the key of a machine whose steps may reach something else than what it stands on.
func (b *build) networkKey(at string, base egress.Policy) string {
	of := b.commandNetwork(base)
	if reflect.DeepEqual(of, base) {
		return at
	}
	return stepKey(at, "network", of)
}
