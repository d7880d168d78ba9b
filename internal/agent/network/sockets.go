package network

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Kinds of message of the kernel's list of sockets (linux/sock_diag.h).
const (
	listSockets   = 20
	destroySocket = 21
)

// States of a socket (net/tcp_states.h), as bits.
const (
	established = 1 << 1
	synSent     = 1 << 2
	synReceived = 1 << 3
	finWait1    = 1 << 4
	finWait2    = 1 << 5
	closeWait   = 1 << 8
	lastAck     = 1 << 9
	listening   = 1 << 10
	closing     = 1 << 11
	halfOpen    = 1 << 12
	// talking are those of a TCP connection. One in TIME_WAIT only answers, and cannot be ended.
	talking = established | synSent | synReceived | finWait1 | finWait2 | closeWait | lastAck | closing | halfOpen
)

const (
	socketIDSize = 48 // struct inet_diag_sockid
	// socketSize is struct inet_diag_msg.
	socketSize = 4 + socketIDSize + 20
)

// socket is one of the list.
type socket struct {
	family        byte
	id            [socketIDSize]byte
	local, remote netip.AddrPort
	inode         uint32
}

func parseSocket(b []byte) (socket, bool) {
	if len(b) < socketSize {
		return socket{}, false
	}
	s := socket{family: b[0], id: [socketIDSize]byte(b[4:])}
	if s.family != unix.AF_INET && s.family != unix.AF_INET6 {
		return s, false
	}
	s.local = netip.AddrPortFrom(address(s.family, b[8:]), binary.BigEndian.Uint16(b[4:]))
	s.remote = netip.AddrPortFrom(address(s.family, b[24:]), binary.BigEndian.Uint16(b[6:]))
	s.inode = order.Uint32(b[socketSize-4:])
	return s, true
}

// address is one of IPv4 also where a socket of IPv6 uses that.
func address(family byte, b []byte) netip.Addr {
	if family == unix.AF_INET {
		return netip.AddrFrom4([4]byte(b))
	}
	return netip.AddrFrom16([16]byte(b)).Unmap()
}

// leaves reports whether what is sent leaves the machine. To an address of its own it comes from the same.
func (s *socket) leaves() bool {
	to := s.remote.Addr()
	return !to.IsUnspecified() && !to.IsLoopback() && to != s.local.Addr()
}

// sockets calls f with those of a protocol and family that are in one of the states.
func (n *netlink) sockets(family, protocol byte, states uint32, f func(s *socket)) error {
	b := &batch{}
	b.begin(listSockets, unix.NLM_F_DUMP)
	b.u8(family, protocol, 0, 0)
	b.u32(states)
	b.b = append(b.b, make([]byte, socketIDSize)...)
	b.end()
	err := n.list(b, func(body []byte) {
		if s, ok := parseSocket(body); ok {
			f(&s)
		}
	})
	if err != nil {
		return fmt.Errorf("list sockets: %w", err)
	}
	return nil
}

// destroy asks for a socket's end: whoever waits for it has an error at once.
func (b *batch) destroy(protocol byte, s *socket) {
	b.begin(destroySocket, unix.NLM_F_ACK)
	b.u8(s.family, protocol, 0, 0)
	b.u32(0)
	b.b = append(b.b, s.id[:]...)
	b.end()
}
