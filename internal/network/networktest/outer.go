package networktest

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"

	"forkd.dev/forkd/internal/network/egress"
)

// Outer is an outside that tests make: names and addresses that stand for ones on loopback. It dials nothing else.
type Outer struct {
	Names map[string][]netip.Addr
	// Hosts are, by "address:port", where on loopback it is.
	Hosts map[string]string
	// Ours are addresses that are to count as the host's.
	Ours []netip.Addr

	mu     sync.Mutex
	dials  []string
	lookup []string
}

// DialContext implements network.Outer.
func (o *Outer) DialContext(ctx context.Context, kind, address string) (net.Conn, error) {
	o.mu.Lock()
	o.dials = append(o.dials, kind+" "+address)
	to, ok := o.Hosts[address]
	o.mu.Unlock()
	if !ok {
		return nil, &net.OpError{Op: "dial", Net: kind, Err: &net.AddrError{Err: "no such host in this test", Addr: address}}
	}
	var d net.Dialer
	return d.DialContext(ctx, kind, to)
}

// Lookup implements network.Outer.
func (o *Outer) Lookup(_ context.Context, name string, qtype uint16) ([]netip.Addr, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lookup = append(o.lookup, name)
	addrs, ok := o.Names[name]
	if !ok {
		return nil, &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}
	}
	return slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return a.Unmap().Is4() != (qtype == egress.TypeA) }), nil
}

// Own implements network.Outer.
func (o *Outer) Own(addr netip.Addr) bool { return slices.Contains(o.Ours, addr) }

// Dials are all attempts so far.
func (o *Outer) Dials() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.dials)
}

// Lookups are the names asked for so far.
func (o *Outer) Lookups() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.lookup)
}
