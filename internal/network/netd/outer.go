package netd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/network/egress"
)

// Stage stands for the outside in tests (`forkd netd --outer FILE`): names and addresses whose hosts are on loopback, and a
// record of all that was asked for. Nothing else is dialled.
type Stage struct {
	Names map[string][]netip.Addr `json:"names"`
	// Hosts are, by "address:port", where that is on loopback.
	Hosts map[string]netip.AddrPort `json:"hosts"`
	// Own are addresses that count as this host's.
	Own []netip.Addr `json:"own"`
	// Log is the path of a file that gets a line of JSON for each dial and look-up (StageEvent).
	Log string `json:"log"`
}

// StageEvent is a line of a stage's log.
type StageEvent struct {
	Time    time.Time `json:"time"`
	What    string    `json:"what"`    // "dial" or "lookup"
	Network string    `json:"network"` // "tcp" or "udp"; of a look-up "A" or "AAAA"
	Name    string    `json:"name"`    // that was asked for: an address and port, or a name
	To      string    `json:"to"`      // where that led; empty: nowhere
}

// ParseStage reads one. A host that is not on loopback is an error.
func ParseStage(text []byte) (*Stage, error) {
	s := &Stage{}
	if err := json.Unmarshal(text, s); err != nil {
		return nil, fmt.Errorf("read the outside of tests: %w", err)
	}
	for at, to := range s.Hosts {
		if !to.Addr().IsLoopback() {
			return nil, fmt.Errorf("the outside of tests: %s leads to %s, which is not on loopback", at, to)
		}
	}
	return s, nil
}

// stage plays a Stage.
type stage struct {
	Stage
	mu  sync.Mutex
	log io.Writer
}

func (s *stage) note(what, network, name, to string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	line, err := json.Marshal(StageEvent{time.Now(), what, network, name, to})
	if err == nil && s.log != nil {
		_, _ = s.log.Write(append(line, '\n'))
	}
}

func (s *stage) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	to, ok := s.Hosts[address]
	if !ok {
		s.note("dial", network, address, "")
		return nil, &net.OpError{Op: "dial", Net: network, Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	}
	s.note("dial", network, address, to.String())
	var d net.Dialer
	return d.DialContext(ctx, network, to.String())
}

func (s *stage) Lookup(_ context.Context, name string, qtype uint16) ([]netip.Addr, error) {
	kind := "AAAA"
	if qtype == egress.TypeA {
		kind = "A"
	}
	addrs, ok := s.Names[strings.TrimSuffix(name, ".")]
	if !ok {
		s.note("lookup", kind, name, "")
		return nil, &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}
	}
	found := ofType(addrs, qtype)
	s.note("lookup", kind, name, fmt.Sprint(found))
	return found, nil
}

func (s *stage) Own(addr netip.Addr) bool { return slices.Contains(s.Stage.Own, addr) }

func ofType(addrs []netip.Addr, qtype uint16) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return a.Unmap().Is4() != (qtype == egress.TypeA) })
}

// world is what lies beyond this host, as its programs reach it.
type world struct {
	dialer   net.Dialer
	resolver net.Resolver

	addrs func() ([]net.Addr, error) // of this host

	mu   sync.Mutex
	own  []netip.Addr
	asOf time.Time
}

// ownFor is how long the host's addresses are remembered.
const ownFor = 5 * time.Second

func newWorld() *world {
	return &world{
		dialer: net.Dialer{Timeout: 30 * time.Second}, resolver: net.Resolver{PreferGo: true}, addrs: net.InterfaceAddrs,
	}
}

func (w *world) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if _, err := netip.ParseAddrPort(address); err != nil { // It would be looked up, past the policy.
		return nil, errors.New("only addresses are dialled")
	}
	return w.dialer.DialContext(ctx, network, address)
}

func (w *world) Lookup(ctx context.Context, name string, qtype uint16) ([]netip.Addr, error) {
	// With its dot, or the host's search list would be tried, too. Both types are asked for: the resolver does not say
	// whether a name without addresses of one type exists.
	addrs, err := w.resolver.LookupNetIP(ctx, "ip", strings.TrimSuffix(name, ".")+".")
	if err != nil {
		return nil, err
	}
	return ofType(addrs, qtype), nil
}

// Own takes every address for this host's while it cannot tell: a guest may be why no descriptor is left to ask with.
func (w *world) Own(addr netip.Addr) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now := time.Now(); now.Sub(w.asOf) > ownFor {
		addrs, err := w.addrs()
		if err != nil {
			return true
		}
		w.own, w.asOf = w.own[:0], now
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err != nil {
				w.asOf = time.Time{}
				return true
			}
			w.own = append(w.own, p.Addr().Unmap())
		}
	}
	return slices.Contains(w.own, addr.Unmap().WithZone(""))
}
