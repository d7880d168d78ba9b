package escapetest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
)

const (
	guest4, guest6 = "192.0.0.2", "fd66:6f72:6b64::2"
	// GuestMAC is a guest's Ethernet address.
	GuestMAC   = "02:66:6b:64:00:02"
	guestMAC   = "\x02\x66\x6b\x64\x00\x02"
	gatewayMAC = "\x02\x66\x6b\x64\x00\x01"
	otherMAC   = "\x02\x66\x6b\x64\x00\x09"
)

// errSent: there is nothing to wait for; the record has to tell.
var errSent = errors.New("sent")

// send puts frames on the link.
func send(frames ...[]byte) func(context.Context, Guest) (string, error) {
	return func(_ context.Context, g Guest) (string, error) {
		for _, f := range frames {
			if err := g.Send(f); err != nil {
				return "", err
			}
		}
		return "", errSent
	}
}

// Sent tells whether an attempt's error says only that it was made.
func Sent(err error) bool { return errors.Is(err, errSent) }

func ethernet(to, from string, kind uint16, payload []byte) []byte {
	return slices.Concat([]byte(to), []byte(from), binary.BigEndian.AppendUint16(nil, kind), payload)
}

func frame(packet []byte) []byte  { return ethernet(gatewayMAC, guestMAC, 0x0800, packet) }
func frame6(packet []byte) []byte { return ethernet(gatewayMAC, guestMAC, 0x86dd, packet) }

func addr(text string) []byte { return netip.MustParseAddr(text).AsSlice() }

func checksum(parts ...[]byte) uint16 {
	var sum uint32
	b := slices.Concat(parts...)
	if len(b)%2 == 1 {
		b = append(b, 0)
	}
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

func ip4(protocol byte, from, to string, payload []byte) []byte {
	return ip4Header(protocol, from, to, 0, nil, payload)
}

// ip4Header makes a packet with a fragment field and options.
func ip4Header(protocol byte, from, to string, fragment uint16, options, payload []byte) []byte {
	h := make([]byte, 20+len(options))
	h[0] = 0x40 | byte(len(h)/4)
	binary.BigEndian.PutUint16(h[2:], uint16(len(h)+len(payload)))
	h[5] = 7
	binary.BigEndian.PutUint16(h[6:], fragment)
	h[8], h[9] = 64, protocol
	copy(h[12:], addr(from))
	copy(h[16:], addr(to))
	copy(h[20:], options)
	binary.BigEndian.PutUint16(h[10:], checksum(h))
	return slices.Concat(h, payload)
}

func ip6(next byte, from, to string, payload []byte) []byte {
	h := make([]byte, 40)
	h[0], h[6], h[7] = 0x60, next, 64
	binary.BigEndian.PutUint16(h[4:], uint16(len(payload)))
	copy(h[8:], as16(from))
	copy(h[24:], as16(to))
	return slices.Concat(h, payload)
}

func as16(text string) []byte {
	b := netip.MustParseAddr(text).As16()
	return b[:]
}

// pseudo is what checksums of TCP, UDP and ICMPv6 cover beyond the packet.
func pseudo(from, to string, protocol byte, size int) []byte {
	return slices.Concat(addr(from), addr(to), binary.BigEndian.AppendUint32(nil, uint32(size)), []byte{0, 0, 0, protocol})
}

func tcpSYN(from, to string, port uint16) []byte {
	b := make([]byte, 20)
	binary.BigEndian.PutUint16(b[0:], 40001)
	binary.BigEndian.PutUint16(b[2:], port)
	binary.BigEndian.PutUint32(b[4:], 1)
	b[12], b[13] = 5<<4, 2
	binary.BigEndian.PutUint16(b[14:], 1024)
	binary.BigEndian.PutUint16(b[16:], checksum(pseudo(from, to, 6, len(b)), b))
	return b
}

func udpPacket(from, to string, port uint16, say string) []byte {
	b := make([]byte, 8, 8+len(say))
	binary.BigEndian.PutUint16(b[0:], 40002)
	binary.BigEndian.PutUint16(b[2:], port)
	binary.BigEndian.PutUint16(b[4:], uint16(8+len(say)))
	b = append(b, say...)
	binary.BigEndian.PutUint16(b[6:], checksum(pseudo(from, to, 17, len(b)), b))
	return b
}

func sendUDP(to string, port uint16, say string) func(context.Context, Guest) (string, error) {
	return send(frame(ip4(17, guest4, to, udpPacket(guest4, to, port, say))))
}

func icmp4(kind byte, body string) []byte {
	b := append([]byte{kind, 0, 0, 0, 0, 1, 0, 1}, body...)
	binary.BigEndian.PutUint16(b[2:], checksum(b))
	return b
}

func icmp6(to string, kind byte, body string) []byte {
	b := append([]byte{kind, 0, 0, 0, 0, 1, 0, 1}, body...)
	binary.BigEndian.PutUint16(b[2:], checksum(pseudo(guest6, to, 58, len(b)), b))
	return b
}

func pings() []Attempt {
	ping := func(name, to string, kind byte, reason string) Attempt {
		return Attempt{
			Name: name, Protocol: "icmp", To: to + ":0", Reason: reason,
			Try: send(frame(ip4(1, guest4, to, icmp4(kind, "a tunnel in pings")))),
		}
	}
	return []Attempt{
		ping("a ping", "8.8.8.8", 8, "pings do not leave"),
		ping("a ping of an allowed server", Allowed4, 8, "pings do not leave"),
		ping("a tunnel in answers to pings", "8.8.4.4", 0, "ICMP"),
		ping("a tunnel in timestamps", "1.1.1.1", 13, "ICMP"),
		ping("a redirection of the gateway's routes", gateway4, 5, "ICMP"),
		{
			Name: "a ping, IPv6", Protocol: "icmp", To: "[2001:4860:4860::8888]:0", Reason: "pings do not leave",
			Try: send(frame6(ip6(58, guest6, "2001:4860:4860::8888", icmp6("2001:4860:4860::8888", 128, "a tunnel in pings")))),
		},
		{
			Name: "a tunnel in answers to pings, IPv6", Protocol: "icmp", To: "[2001:4860:4860::8844]:0", Reason: "ICMP",
			Try: send(frame6(ip6(58, guest6, "2001:4860:4860::8844", icmp6("2001:4860:4860::8844", 129, "a tunnel in pings")))),
		},
		{
			Name: "a ping in fragments", Protocol: "icmp", To: "9.9.9.9:0", Reason: "fragmented ICMP",
			Try: send(frame(ip4Header(1, guest4, "9.9.9.9", 0x2000, nil, icmp4(8, "12345678")))),
		},
		{
			Name: "a ping from another's address", Protocol: "frame", To: "8.8.8.8:0", Reason: "spoofed IPv4",
			Try: send(frame(ip4(1, "192.0.0.3", "8.8.8.8", icmp4(8, "x")))),
		},
	}
}

func otherProtocols() []Attempt {
	inner := ip4(6, guest4, Evil4, tcpSYN(guest4, Evil4, 80))
	in := func(name string, protocol byte, payload []byte) Attempt {
		return Attempt{
			Name: name, Protocol: "frame", To: Evil4 + ":0", Reason: "an IP protocol other than",
			Try: send(frame(ip4(protocol, guest4, Evil4, payload))),
		}
	}
	return []Attempt{
		in("IP in IP", 4, inner),
		in("IPv6 in IP", 41, ip6(6, guest6, Evil6, tcpSYN(guest6, Evil6, 80))),
		in("GRE", 47, slices.Concat([]byte{0, 0, 8, 0}, inner)),
		in("ESP", 50, make([]byte, 40)),
		in("SCTP", 132, make([]byte, 40)),
		in("UDP-Lite", 136, make([]byte, 16)),
		in("a protocol of nobody's", 253, []byte("hello")),
		{
			Name: "IP in IPv6", Protocol: "frame", To: "[" + Evil6 + "]:0", Reason: "an IP protocol other than",
			Try: send(frame6(ip6(4, guest6, Evil6, inner))),
		},
	}
}

func frames() []Attempt {
	syn := tcpSYN(guest4, Evil4, 81)
	option := func(kind byte) []byte { return slices.Concat([]byte{kind, 7, 4}, addr(Evil4), []byte{0}) }
	udp := udpPacket(guest4, Evil4, 82, string(bytes.Repeat([]byte("x"), 64)))
	routed := slices.Concat([]byte{6, 2, 0, 1, 0, 0, 0, 0}, as16(Evil6), tcpSYN(guest6, Allowed6, 81))
	arp := func(operation byte, mac, ip string) []byte {
		return slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, operation}, []byte(mac), addr(ip), make([]byte, 6), addr(gateway4))
	}
	bare := func(name, reason string, frames ...[]byte) Attempt {
		return Attempt{Name: name, Protocol: "frame", Reason: reason, Try: send(frames...)}
	}
	to := func(a Attempt, protocol, to string) Attempt {
		a.Protocol, a.To = protocol, to
		return a
	}
	const options = "options (source routing"
	return []Attempt{
		to(bare("loose source routing", options, frame(ip4Header(6, guest4, Allowed4, 0, option(131), syn))), "frame", Allowed4+":0"),
		to(bare("strict source routing", options, frame(ip4Header(6, guest4, Allowed6to4, 0, option(137), syn))), "frame", Allowed6to4+":0"),
		to(bare("a recorded route", options, frame(ip4Header(17, guest4, "8.8.8.8", 0, option(7), udp))), "frame", "8.8.8.8:0"),
		to(bare("an IPv6 routing header", options, frame6(ip6(43, guest6, Allowed6, routed))), "frame", "["+Allowed6+"]:0"),
		to(bare("IPv6 destination options", options, frame6(ip6(60, guest6, Evil6, slices.Concat([]byte{6, 0, 1, 4, 0, 0, 0, 0}, tcpSYN(guest6, Evil6, 81))))), "frame", "["+Evil6+"]:0"),
		to(bare("IPv6 hop-by-hop options", options, frame6(ip6(0, guest6, "2a00::1", slices.Concat([]byte{6, 0, 1, 4, 0, 0, 0, 0}, tcpSYN(guest6, "2a00::1", 81))))), "frame", "[2a00::1]:0"),
		to(bare("fragments", noRule,
			frame(ip4Header(17, guest4, Evil4, 0x2000, nil, udp[:40])), frame(ip4Header(17, guest4, Evil4, 40/8, nil, udp[40:]))), "udp", Evil4+":82"),
		to(bare("a fragment too short for its ports", "shorter than its header", frame(ip4Header(6, guest4, "1.0.0.1", 0x2000, nil, syn[:8]))), "tcp", "1.0.0.1:0"),
		to(bare("fragments to metadata", metadataIs,
			frame(ip4Header(17, guest4, "169.254.169.254", 0x2000, nil, udpPacket(guest4, "169.254.169.254", 83, "12345678")[:8])),
			frame(ip4Header(17, guest4, "169.254.169.254", 1, nil, []byte("12345678")))), "udp", "169.254.169.254:83"),
		to(bare("IPv6 fragments", noRule,
			frame6(ip6(44, guest6, Evil6, slices.Concat([]byte{17, 0, 0, 1, 0, 0, 0, 9}, udpPacket(guest6, Evil6, 84, "12345678")[:8]))),
			frame6(ip6(44, guest6, Evil6, slices.Concat([]byte{17, 0, 0, 8, 0, 0, 0, 9}, []byte("12345678"))))), "udp", "["+Evil6+"]:84"),
		to(bare("another's IPv4 address", "spoofed IPv4", frame(ip4(6, "10.9.9.9", Evil4, tcpSYN("10.9.9.9", Evil4, 80)))), "frame", Evil4+":0"),
		to(bare("the gateway's IPv4 address", "spoofed IPv4", frame(ip4(17, gateway4, "8.8.8.8", udpPacket(gateway4, "8.8.8.8", 53, "x")))), "frame", "8.8.8.8:0"),
		to(bare("loopback's address as the sender's", "spoofed IPv4", frame(ip4(6, "127.0.0.1", "1.1.1.1", tcpSYN("127.0.0.1", "1.1.1.1", 80)))), "frame", "1.1.1.1:0"),
		to(bare("a sibling's IPv6 address", "spoofed IPv6", frame6(ip6(6, "fd66:6f72:6b64::3", Evil6, tcpSYN("fd66:6f72:6b64::3", Evil6, 80)))), "frame", "["+Evil6+"]:0"),
		bare("another's Ethernet address", "spoofed Ethernet", ethernet(gatewayMAC, otherMAC, 0x0800, ip4(6, guest4, Evil4, syn))),
		bare("the gateway's Ethernet address", "spoofed Ethernet", ethernet(gatewayMAC, gatewayMAC, 0x0800, ip4(6, guest4, Evil4, syn))),
		bare("a frame to a sibling", "not the gateway's", ethernet(otherMAC, guestMAC, 0x0800, ip4(6, guest4, Evil4, syn))),
		bare("ARP as the gateway", "spoofed ARP", ethernet("\xff\xff\xff\xff\xff\xff", guestMAC, 0x0806, arp(2, guestMAC, gateway4))),
		bare("ARP for a sibling's address", "spoofed ARP", ethernet("\xff\xff\xff\xff\xff\xff", guestMAC, 0x0806, arp(1, guestMAC, "192.0.0.3"))),
		bare("ARP with another's Ethernet address", "spoofed ARP", ethernet(gatewayMAC, guestMAC, 0x0806, arp(1, otherMAC, guest4))),
		to(bare("an advertisement as the router", "ICMP", frame6(ip6(58, guest6, "ff02::1", icmp6("ff02::1", 134, string(make([]byte, 8)))))), "icmp", "[ff02::1]:0"),
		to(bare("a redirection, IPv6", "ICMP", frame6(ip6(58, guest6, guest6, icmp6(guest6, 137, string(make([]byte, 32)))))), "icmp", "["+guest6+"]:0"),
		bare("a tagged frame", "neither IP nor ARP", ethernet(gatewayMAC, guestMAC, 0x8100, slices.Concat([]byte{0, 1, 8, 0}, ip4(6, guest4, Evil4, syn)))),
		bare("a frame of another protocol", "neither IP nor ARP", ethernet(gatewayMAC, guestMAC, 0x88cc, []byte("hello"))),
		bare("an IPv4 packet of another version", "no IPv4 packet", frame(append([]byte{0x65}, ip4(6, guest4, Evil4, syn)[1:]...))),
		to(bare("an IPv4 packet that says it is longer", "another length", frame(ip4(6, guest4, "4.4.4.4", syn)[:30])), "frame", "4.4.4.4:0"),
		to(bare("an IPv6 packet that says it is longer", "another length", frame6(ip6(6, guest6, "2a00::4", tcpSYN(guest6, "2a00::4", 80))[:50])), "frame", "[2a00::4]:0"),
	}
}

// Allowed6to4 is another address of an allowed server's network, which no name has.
const Allowed6to4 = "93.184.216.36"

// hello is a client hello's record.
func hello(name string, extensions ...[]byte) []byte {
	all := extension(0, nameList(name))
	for _, e := range extensions {
		all = append(all, e...)
	}
	body := slices.Concat([]byte{3, 3}, make([]byte, 32), []byte{0}, []byte{0, 2, 0x13, 1}, []byte{1, 0}, prefixed(2, all))
	return record(22, slices.Concat([]byte{1}, prefixed(3, body)))
}

func nameList(name string) []byte {
	return prefixed(2, slices.Concat([]byte{0}, prefixed(2, []byte(name))))
}

func extension(kind uint16, body []byte) []byte {
	return slices.Concat(binary.BigEndian.AppendUint16(nil, kind), prefixed(2, body))
}

func prefixed(size int, b []byte) []byte {
	length := binary.BigEndian.AppendUint32(nil, uint32(len(b)))
	return slices.Concat(length[4-size:], b)
}

func record(kind byte, payload []byte) []byte {
	return slices.Concat([]byte{kind, 3, 1}, prefixed(2, payload))
}

// pieces makes records of n bytes of one record.
func pieces(one []byte, n int) string {
	var out []byte
	for part := range slices.Chunk(one[5:], n) {
		out = append(out, record(one[0], part)...)
	}
	return string(out)
}

// quic is a datagram that begins a connection.
func quic() string {
	return string(slices.Concat([]byte{0xc3, 0, 0, 0, 1, 8}, bytes.Repeat([]byte{7}, 1300)))
}
