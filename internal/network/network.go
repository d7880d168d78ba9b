// Package network is the other end of a guest's only link: a TCP/IP stack in user space, made for one sandbox at its first
// frame, that ends every conversation of the guest here and, where the sandbox's policy allows it, holds one with the
// outside in its stead. Frames of a guest never leave the host; neither does a byte that no rule allows.
//
// It is no daemon (netd runs many Networks in one process), knows no sandboxes, and decides nothing itself: what is allowed
// is egress's, what first bytes say is inspect's. It starts nothing until Run, and Run ends all of it. The host and netd
// may import it.
package network

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/network/nameserver"
	"forkd.dev/forkd/internal/network/pin"
)

// Outer is what lies beyond a Network: the network of the host's programs, loopback and a record of every dial
// for tests.
type Outer interface {
	// DialContext connects to an address (never a name) that the policy allows. network is tcp or udp.
	DialContext(ctx context.Context, network, address string) (net.Conn, error)
	// Lookup finds the addresses of a name that the policy allows; qtype is egress.TypeA or egress.TypeAAAA. A name that
	// does not exist is a *net.DNSError with IsNotFound; one without addresses of this type has none, and no error.
	Lookup(ctx context.Context, name string, qtype uint16) ([]netip.Addr, error)
	// Own tells whether an address is one of this host's, on whatever interface.
	Own(addr netip.Addr) bool
}

// Config is what a Network is made of.
type Config struct {
	Policy egress.Policy
	Outer  Outer
	Limits Limits
	// Pool is what this one shares with the others of the process; nil: it has all it may have.
	Pool *Pool
	// Spent are bytes that count against the policy's budget from an earlier life of the same sandbox.
	Spent int64
	// Closed: frames are dropped until Open(true).
	Closed bool
	// Events, when it is set, hears of each flow as it begins, is refused, and ends, in order. It is called with locks
	// held: it must not wait, nor call the Network. Repeated refusals of one kind are told once a second at most.
	Events func(Flow)
}

// Network is one sandbox's. Its methods may be called at any time, before, while and after Run.
type Network struct {
	outer  Outer
	limits Limits
	filter filter
	flows  *flows
	pins   *pin.Table
	pacer  pacer
	pool   *Pool
	names  *nameserver.Server

	open atomic.Bool

	mu     sync.Mutex // of policy, held while flows are cut
	policy atomic.Pointer[egress.Policy]
}

// New makes a Network that does nothing until Run.
func New(cfg Config) *Network {
	n := &Network{outer: cfg.Outer, limits: cfg.Limits.withDefaults(), filter: newFilter(), pool: cfg.Pool}
	n.flows = newFlows(n.limits, cfg.Spent, cfg.Events)
	policy := cfg.Policy.Clone()
	n.policy.Store(&policy)
	n.flows.budget.Store(policy.BudgetBytes)
	n.open.Store(!cfg.Closed)
	n.pins = pin.New(0)
	n.pacer.rate = n.limits.BytesPerSecond
	n.names = &nameserver.Server{Policy: n.policy.Load, Lookup: n.outer.Lookup, Own: n.outer.Own, Pins: n.pins, Now: time.Now}
	return n
}

// Policy is the one in force.
func (n *Network) Policy() egress.Policy { return n.policy.Load().Clone() }

// SetPolicy replaces the policy, and cuts every open flow that it does not allow.
func (n *Network) SetPolicy(policy egress.Policy) {
	n.mu.Lock()
	defer n.mu.Unlock()
	policy = policy.Clone()
	n.policy.Store(&policy)
	n.flows.setBudget(policy.BudgetBytes)
	n.flows.cut(func(f *flow) string { return n.judge(&policy, f) })
}

// Open lets frames pass, or drops them in both directions: a guest that has not confirmed yet that it is nobody's twin
// must not be heard.
func (n *Network) Open(open bool) { n.open.Store(open) }

// Flows lists those that are open, that were refused, and the last that ended, by ID.
func (n *Network) Flows() []Flow {
	all := n.flows.list()
	slices.SortFunc(all, func(a, b Flow) int { return cmp.Compare(a.ID, b.ID) })
	return all
}

// Totals are the counters.
func (n *Network) Totals() Totals { return n.flows.sums() }
