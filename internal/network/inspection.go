package network

import (
	"errors"
	"slices"
	"time"

	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/network/inspect"
)

// patience is how long bytes may be held back that could still turn out to name a server.
const patience = 3 * time.Second

// refusedError ends a flow whose bytes are not allowed.
type refusedError struct{ reason string }

func (e *refusedError) Error() string { return e.reason }

// inspection holds back what a guest sends until it is known which server it is for, and that the policy allows it.
type inspection struct {
	*inspect.Scanner
}

func newInspection(n *Network, open *flow) *inspection {
	return &inspection{inspect.NewScanner(func(found inspect.Finding) error { return n.found(open, found) })}
}

// found asks the policy, as it is now, about what a flow's bytes say.
func (n *Network) found(open *flow, found inspect.Finding) error {
	to := n.destination(open)
	for {
		policy := n.policy.Load()
		v := verdict(policy, to, found)
		n.flows.said(open, found, v.Rule)
		if !v.Allow {
			return &refusedError{reason: v.Reason}
		}
		if n.policy.Load() == policy {
			return nil
		}
		// A policy that came meanwhile may have judged this flow without knowing what it says now.
	}
}

// destination is where a flow goes, with the names that the guest has looked up since and was given its address for.
func (n *Network) destination(f *flow) egress.Destination {
	to := f.destination
	to.Names = append(slices.Clone(to.Names), n.pins.Names(to.AddrPort.Addr(), time.Now())...)
	return to
}

// verdict is a policy's about what a flow's bytes say.
func verdict(policy *egress.Policy, to egress.Destination, found inspect.Finding) egress.Verdict {
	switch {
	case found.Hidden:
		return policy.Hidden(to)
	case found.Kind == inspect.Opaque:
		return policy.Opaque(to)
	default:
		return policy.Server(to, found.Name)
	}
}

// take returns what may leave now.
func (i *inspection) take(b []byte) ([]byte, error) { return i.judged(i.Scan(b)) }

// end returns what may leave although nothing more came.
func (i *inspection) end() ([]byte, error) { return i.judged(i.End()) }

func (i *inspection) judged(pass []byte, err error) ([]byte, error) {
	if errors.Is(err, inspect.ErrMalformed) {
		err = &refusedError{reason: err.Error()}
	}
	return pass, err
}

// wait is how long the next bytes may take; 0: for ever.
func (i *inspection) wait() time.Duration {
	if i != nil && i.Holding() {
		return patience
	}
	return 0
}
