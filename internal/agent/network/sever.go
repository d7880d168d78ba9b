package network

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Severer ends connections. It is made when the machine boots: a fork finds its sockets open.
type Severer struct {
	mu            sync.Mutex
	sockets, path *netlink
	v6            bool
	err           error // why there are none
}

// NewSeverer opens what it needs. That it could not is told when it is used.
func NewSeverer() *Severer {
	_, err := os.Stat("/proc/sys/net/ipv6")
	s := &Severer{v6: err == nil}
	if s.sockets, s.err = openNetlink(unix.NETLINK_SOCK_DIAG); s.err != nil {
		return s
	}
	s.path, s.err = openNetlink(unix.NETLINK_ROUTE)
	return s
}

// Sever ends all connections that leave the machine, of TCP and connected sockets of UDP, and returns how many there were.
// Who waits for one has an error at once (ECONNABORTED). Listeners, and what stays inside the machine, go on. The kernel
// would tell the other side of each TCP connection that it is reset: that is the parent's, so nothing leads out meanwhile.
func (s *Severer) Sever() (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return 0, fmt.Errorf("sever connections: %w", s.err)
	}
	n, err := s.sever()
	if err != nil {
		return n, fmt.Errorf("sever connections: %w", err)
	}
	return n, nil
}

func (s *Severer) sever() (n int, err error) {
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		for _, p := range []struct {
			protocol byte
			states   uint32
		}{{unix.IPPROTO_TCP, talking}, {unix.IPPROTO_UDP, established}} {
			var found []socket
			err := s.sockets.sockets(family, p.protocol, p.states, func(c *socket) {
				if c.leaves() {
					found = append(found, *c)
				}
			})
			if err != nil {
				return n, err
			}
			n += len(found)
			if err := s.end(p.protocol, found); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// end destroys sockets of a protocol. The dead ends stand in the way of connections of either family: a socket of IPv6 may
// use IPv4.
func (s *Severer) end(protocol byte, list []socket) (err error) {
	if len(list) == 0 {
		return nil
	}
	if protocol == unix.IPPROTO_TCP {
		if err := s.path.do(s.deadEnds(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE)); err != nil {
			return fmt.Errorf("close the way out: %w", err)
		}
		defer func() {
			b := s.deadEnds(unix.RTM_DELROUTE, 0)
			b.gone = true
			if openErr := s.path.do(b); openErr != nil {
				err = errors.Join(err, fmt.Errorf("open the way out again: %w", openErr))
			}
		}()
	}
	for len(list) > 0 {
		k := min(len(list), maxBatch)
		b := &batch{gone: true}
		for i := range list[:k] {
			b.destroy(protocol, &list[i])
		}
		if err := s.sockets.do(b); err != nil {
			return err
		}
		list = list[k:]
	}
	return nil
}

// deadEnds are routes that are better than ours and lead nowhere. They also make connections look for their way again.
func (s *Severer) deadEnds(kind, flags uint16) *batch {
	b := &batch{}
	for _, r := range []route{
		{metric: 1},
		{metric: 1, to: host(gateway4)},
		{metric: 1, v6: true},
		{metric: 1, to: host(gateway6), v6: true},
	} {
		if r.v6 && !s.v6 {
			continue
		}
		b.begin(kind, flags|unix.NLM_F_ACK)
		b.route(r)
		b.end()
	}
	return b
}

func host(text string) netip.Prefix {
	a := netip.MustParseAddr(text)
	return netip.PrefixFrom(a, a.BitLen())
}
