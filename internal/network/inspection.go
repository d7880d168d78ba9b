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
	to := open.destination
	// The guest may have looked up another name of this address since.
	to.Names = append(slices.Clone(to.Names), n.pins.Names(to.AddrPort.Addr(), time.Now())...)
	policy := n.policy.Load()
	var v egress.Verdict
	switch {
	case found.Hidden:
		v = policy.Hidden(to)
	case found.Kind == inspect.Opaque:
		v = policy.Opaque(to)
	default:
		v = policy.Server(to, found.Name)
	}
	if !v.Allow {
		n.flows.named(open, found.Name, v.Rule)
		return &refusedError{reason: v.Reason}
	}
	n.flows.named(open, found.Name, v.Rule)
	return nil
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
