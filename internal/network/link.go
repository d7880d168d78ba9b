package network

import (
	"net"
	"net/netip"
)

// What a link looks like from both sides. It is the same in every sandbox, each of which is alone on its link, so that a
// fork renumbers nothing; the guest's agent and the engine's command line name the same values.
const (
	// MTU is what the guest's interface is told (virtio-net's host_mtu): one datagram of the link carries one frame, and
	// the fewer of them, the fewer system calls a byte costs.
	MTU = 65520
	// HeaderSize is an Ethernet header without tags.
	HeaderSize = 14
	// FrameSize is the largest frame of either direction.
	FrameSize = MTU + HeaderSize
	// LinkBuffer is the socket buffer that either end of a link asks for.
	LinkBuffer = 1 << 20

	// GuestMAC and GatewayMAC are addresses that no manufacturer gave ("fork" in them).
	GuestMAC   = "02:66:6b:64:00:02"
	GatewayMAC = "02:66:6b:64:00:01"
	// Guest4 and Guest6 are the guest's addresses with their prefixes, Gateway4 and Gateway6 the only other host there:
	// router and name server.
	Guest4   = "192.0.0.2/29"
	Guest6   = "fd66:6f72:6b64::2/64"
	Gateway4 = "192.0.0.1"
	Gateway6 = "fd66:6f72:6b64::1"
	// DNSPort is where the gateway answers names, over UDP and TCP.
	DNSPort = 53
)

// GuestAddrs are the two addresses from which a guest may send.
func GuestAddrs() (v4, v6 netip.Addr) {
	return netip.MustParsePrefix(Guest4).Addr(), netip.MustParsePrefix(Guest6).Addr()
}

// GatewayAddrs are the two addresses of the only neighbour that a guest has.
func GatewayAddrs() (v4, v6 netip.Addr) {
	return netip.MustParseAddr(Gateway4), netip.MustParseAddr(Gateway6)
}

// mac is one of the constants above.
func mac(text string) net.HardwareAddr {
	addr, err := net.ParseMAC(text)
	if err != nil {
		panic(err) // A constant of this file.
	}
	return addr
}
