package network

import (
	"encoding/binary"
	"net/netip"
)

// What becomes of a frame from the guest.
type fate int

const (
	fateDrop   fate = iota // noise that every system makes (multicast listeners, router solicitation): nobody is told
	fatePass               // TCP or UDP, for the stack
	fateRefuse             // recorded as a refused flow, and dropped
	fateARP                // asks for the gateway's Ethernet address
	fateNDP                // the same, over IPv6
	fateEcho               // a ping, of the gateway or of anybody
	fateDHCP               // asks for an address
)

// packet is what the filter needs to know of one frame.
type packet struct {
	fate     fate
	v6       bool
	protocol string         // tcp, udp, icmp, frame: for the record
	from, to netip.AddrPort // ports are 0 where there are none
	reason   string         // of a refusal
	talks    bool           // TCP, UDP or ICMP: somebody outside could have heard it
	network  []byte         // the packet without its Ethernet header, cut to the length that it names
	payload  []byte         // behind the IP header
}

// filter knows which frames are a guest's to send. It keeps no state, and allocates nothing that a guest could grow.
type filter struct {
	guestMAC, gatewayMAC [6]byte
	guest4, guest6       netip.Addr
	gateway4, gateway6   netip.Addr
}

func newFilter() filter {
	f := filter{guestMAC: [6]byte(mac(GuestMAC)), gatewayMAC: [6]byte(mac(GatewayMAC))}
	f.guest4, f.guest6 = GuestAddrs()
	f.gateway4, f.gateway6 = GatewayAddrs()
	return f
}

const (
	typeIPv4 = 0x0800
	typeARP  = 0x0806
	typeIPv6 = 0x86dd

	protoICMP     = 1
	protoIGMP     = 2
	protoTCP      = 6
	protoUDP      = 17
	protoHopByHop = 0
	protoFragment = 44
	protoICMPv6   = 58

	icmpEchoRequest       = 8
	icmpv6EchoRequest     = 128
	icmpv6ListenerQuery   = 130 // to 132: multicast listeners
	icmpv6RouterSolicit   = 133
	icmpv6RouterAdvert    = 134
	icmpv6NeighborSolicit = 135
	icmpv6NeighborAdvert  = 136
	icmpv6Redirect        = 137
	icmpv6ListenerReport2 = 143

	portDHCPServer = 67
	portDHCPClient = 68
)

func refuse(p packet, reason string) packet {
	p.fate, p.reason = fateRefuse, reason
	return p
}

// look decides on one frame, which is the guest's bytes: any length, any content.
func (f *filter) look(frame []byte) packet {
	p := packet{protocol: protocolFrame}
	if len(frame) < HeaderSize {
		return refuse(p, "a frame shorter than its header")
	}
	if [6]byte(frame[6:12]) != f.guestMAC {
		return refuse(p, "spoofed Ethernet address")
	}
	to := [6]byte(frame[0:6])
	if to != f.gatewayMAC && to[0]&1 == 0 {
		return refuse(p, "a frame to an Ethernet address that is not the gateway's")
	}
	p.network = frame[HeaderSize:]
	switch binary.BigEndian.Uint16(frame[12:14]) {
	case typeIPv4:
		return f.ipv4(p)
	case typeIPv6:
		return f.ipv6(p)
	case typeARP:
		return f.arp(p)
	default:
		return refuse(p, "neither IP nor ARP")
	}
}

func (f *filter) arp(p packet) packet {
	b := p.network
	const ethernetIPv4 = 0x0001080006040001 // with operation 1: a request
	if len(b) < 28 || binary.BigEndian.Uint64(b) != ethernetIPv4 {
		return refuse(p, "spoofed ARP: an answer that nobody asked for") // There is nobody whose table it could change.
	}
	sender, target := netip.AddrFrom4([4]byte(b[14:18])), netip.AddrFrom4([4]byte(b[24:28]))
	if [6]byte(b[8:14]) != f.guestMAC || sender != f.guest4 && !sender.IsUnspecified() {
		return refuse(p, "spoofed ARP")
	}
	if target != f.gateway4 {
		return p // Nobody else is there: nobody answers.
	}
	p.fate = fateARP
	return p
}

func (f *filter) ipv4(p packet) packet {
	b := p.network
	if len(b) < 20 || b[0]>>4 != 4 {
		return refuse(p, "no IPv4 packet")
	}
	p.from = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[12:16])), 0)
	p.to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[16:20])), 0)
	length := int(binary.BigEndian.Uint16(b[2:4]))
	if length < 20 || length > len(b) {
		return refuse(p, "an IPv4 packet of another length than it says")
	}
	if b[0]&0xf != 5 {
		if b[9] == protoIGMP {
			return p
		}
		return refuse(p, "IPv4 options (source routing and the like)")
	}
	p.network = b[:length]
	fragment := binary.BigEndian.Uint16(b[6:8])
	later, first := fragment&0x1fff != 0, fragment&0x2000 != 0
	if !later {
		p.payload = p.network[20:]
	}
	if b[9] == protoUDP && f.isDHCP(&p) {
		p.fate = fateDHCP
		return p
	}
	if p.from.Addr() != f.guest4 {
		return refuse(p, "spoofed IPv4 address")
	}
	switch b[9] {
	case protoTCP, protoUDP:
		return f.transport(p, b[9], later)
	case protoICMP:
		p.protocol, p.talks = protocolICMP, true
		switch {
		case later || first:
			return refuse(p, "fragmented ICMP")
		case len(p.payload) < 8 || isError4(p.payload[0]):
			return p // Errors about what it has heard: every conversation it could mean ends here.
		case p.payload[0] != icmpEchoRequest:
			return refuse(p, otherICMP)
		}
		p.fate = fateEcho
		return p
	case protoIGMP:
		return p
	default:
		return refuse(p, "an IP protocol other than TCP, UDP and ICMP")
	}
}

// isDHCP: a guest that asks has no address yet, or asks again from the one it was given.
func (f *filter) isDHCP(p *packet) bool {
	if len(p.payload) < 8 || binary.BigEndian.Uint16(p.payload[2:4]) != portDHCPServer ||
		binary.BigEndian.Uint16(p.payload[0:2]) != portDHCPClient {
		return false
	}
	from, to := p.from.Addr(), p.to.Addr()
	return (from.IsUnspecified() || from == f.guest4) && (to == f.gateway4 || to == broadcast4())
}

func broadcast4() netip.Addr { return netip.AddrFrom4([4]byte{255, 255, 255, 255}) }

func (f *filter) ipv6(p packet) packet {
	b := p.network
	if len(b) < 40 || b[0]>>4 != 6 {
		return refuse(p, "no IPv6 packet")
	}
	p.v6 = true
	p.from = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:24])), 0)
	p.to = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[24:40])), 0)
	length := 40 + int(binary.BigEndian.Uint16(b[4:6]))
	if length > len(b) {
		return refuse(p, "an IPv6 packet of another length than it says")
	}
	p.network = b[:length]
	p.payload = p.network[40:]
	next, later, fragmented := b[6], false, false
	switch next {
	case protoHopByHop:
		// Multicast listeners report in such packets; nothing else that is carried needs them.
		if len(p.payload) >= 16 && p.payload[0] == protoICMPv6 && p.payload[1] == 0 && isListener(p.payload[8]) {
			return p
		}
		return refuse(p, "IPv6 options (source routing and the like)")
	case protoFragment:
		if len(p.payload) < 8 {
			return refuse(p, "a fragment shorter than its header")
		}
		next, fragmented = p.payload[0], true
		later = binary.BigEndian.Uint16(p.payload[2:4])&0xfff8 != 0
		p.payload = p.payload[8:]
	}
	if next == protoICMPv6 {
		return f.icmpv6(p, fragmented)
	}
	if p.from.Addr() != f.guest6 {
		if p.from.Addr().IsLinkLocalUnicast() && p.to.Addr().IsMulticast() {
			return p // What services that announce themselves send from each address of an interface.
		}
		return refuse(p, "spoofed IPv6 address")
	}
	switch next {
	case protoTCP, protoUDP:
		return f.transport(p, next, later)
	case 43, 60, 135, 139, 140, 51, 50:
		return refuse(p, "IPv6 options (source routing and the like)")
	default:
		return refuse(p, "an IP protocol other than TCP, UDP and ICMP")
	}
}

const otherICMP = "ICMP other than pings, which carries bytes or changes routes"

// isError4: unreachable, time exceeded, a bad header.
func isError4(kind byte) bool { return kind == 3 || kind == 11 || kind == 12 }

func isListener(kind byte) bool {
	return kind >= icmpv6ListenerQuery && kind <= icmpv6ListenerQuery+2 || kind == icmpv6ListenerReport2
}

func (f *filter) icmpv6(p packet, fragmented bool) packet {
	p.protocol = protocolICMP
	if fragmented {
		return refuse(p, "fragmented ICMP")
	}
	if len(p.payload) < 8 {
		return p
	}
	kind := p.payload[0]
	switch {
	case isListener(kind), kind == icmpv6RouterSolicit, kind == icmpv6NeighborAdvert:
		return p
	case kind == icmpv6RouterAdvert, kind == icmpv6Redirect:
		return refuse(p, otherICMP)
	case kind == icmpv6NeighborSolicit:
		if len(p.payload) >= 24 && netip.AddrFrom16([16]byte(p.payload[8:24])) == f.gateway6 && !p.from.Addr().IsUnspecified() {
			p.fate = fateNDP
		}
		return p
	case p.from.Addr() != f.guest6:
		return refuse(p, "spoofed IPv6 address")
	}
	p.talks = true
	switch {
	case kind == icmpv6EchoRequest:
		p.fate = fateEcho
	case kind >= 5: // Not an error about what it has heard.
		return refuse(p, otherICMP)
	}
	return p
}

// transport is where TCP and UDP may go as far as a stack is concerned; the policy is asked per flow.
func (f *filter) transport(p packet, proto byte, later bool) packet {
	p.protocol, p.talks = "tcp", true
	header := 20
	if proto == protoUDP {
		p.protocol, header = "udp", 8
	}
	if !later {
		if len(p.payload) < header {
			return refuse(p, "a packet shorter than its header")
		}
		p.from = netip.AddrPortFrom(p.from.Addr(), binary.BigEndian.Uint16(p.payload[0:2]))
		p.to = netip.AddrPortFrom(p.to.Addr(), binary.BigEndian.Uint16(p.payload[2:4]))
	}
	if reason := f.nowhere(p.to.Addr()); reason != "" {
		return refuse(p, reason)
	}
	p.fate = fatePass
	return p
}

// nowhere are addresses to which no stack would carry a packet that comes from outside itself; a policy cannot allow them.
func (f *filter) nowhere(to netip.Addr) string {
	switch {
	case to == f.guest4 || to == f.guest6:
		return "the guest's own address"
	case to.IsLoopback():
		return "a loopback address"
	case to.IsUnspecified():
		return "the unspecified address"
	case to.IsMulticast():
		return "multicast is not carried"
	case to.Is4() && to.As4()[0] >= 240:
		return "broadcast and reserved addresses are not carried"
	case to.Is4() && to.As4()[0] == 0:
		return "a reserved address"
	case to.Is4In6():
		return "an IPv4 address in IPv6's clothes"
	case to.Is6() && to.IsLinkLocalUnicast():
		return "a link-local address"
	}
	return ""
}
