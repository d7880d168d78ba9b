package network

import (
	"encoding/binary"
	"net/netip"
)

// The gateway's own answers, which no stack is needed for: who has its address, pings, addresses for guests that ask for
// one. Each returns a whole frame to the guest, or nil.

func (f *filter) header(kind uint16, size int) []byte {
	frame := make([]byte, HeaderSize, HeaderSize+size)
	copy(frame[0:6], f.guestMAC[:])
	copy(frame[6:12], f.gatewayMAC[:])
	binary.BigEndian.PutUint16(frame[12:14], kind)
	return frame
}

func (f *filter) answerARP(p *packet) []byte {
	frame := f.header(typeARP, 28)
	frame = append(frame, 0, 1, 8, 0, 6, 4, 0, 2)
	frame = append(frame, f.gatewayMAC[:]...)
	frame = append(frame, f.gateway4.AsSlice()...)
	frame = append(frame, f.guestMAC[:]...)
	return append(frame, p.network[14:18]...)
}

func (f *filter) answerNDP(p *packet) []byte {
	body := make([]byte, 32)
	body[0] = 136
	body[4] = 0xe0 // From a router, asked for, overriding what was known.
	copy(body[8:24], f.gateway6.AsSlice())
	body[24], body[25] = 2, 1
	copy(body[26:32], f.gatewayMAC[:])
	return f.icmp6(f.gateway6, p.from.Addr(), body)
}

// answerEcho answers a ping of the gateway.
func (f *filter) answerEcho(p *packet) []byte {
	body := append([]byte(nil), p.payload...)
	body[2], body[3] = 0, 0
	if p.v6 {
		body[0] = 129
		return f.icmp6(p.to.Addr(), p.from.Addr(), body)
	}
	body[0] = 0
	return f.icmp4(p.to.Addr(), p.from.Addr(), body)
}

// prohibited says of a packet that it may not pass, as a router does that was told so: a ping ends at once.
func (f *filter) prohibited(p *packet) []byte {
	if p.v6 {
		quoted := p.network[:min(len(p.network), 1232)]
		body := append(make([]byte, 8), quoted...)
		body[0], body[1] = 1, 1
		return f.icmp6(f.gateway6, p.from.Addr(), body)
	}
	quoted := p.network[:min(len(p.network), 548)]
	body := append(make([]byte, 8), quoted...)
	body[0], body[1] = 3, 13
	return f.icmp4(f.gateway4, p.from.Addr(), body)
}

func (f *filter) icmp4(from, to netip.Addr, body []byte) []byte {
	binary.BigEndian.PutUint16(body[2:4], checksum(0, body))
	return append(f.ip4(from, to, protoICMP, len(body)), body...)
}

func (f *filter) ip4(from, to netip.Addr, proto byte, size int) []byte {
	frame := f.header(typeIPv4, 20+size)
	ip := make([]byte, 20)
	ip[0], ip[8], ip[9] = 0x45, 64, proto
	binary.BigEndian.PutUint16(ip[2:4], uint16(20+size)) //nolint:gosec // bodies are smaller than a frame.
	copy(ip[12:16], from.AsSlice())
	copy(ip[16:20], to.AsSlice())
	binary.BigEndian.PutUint16(ip[10:12], checksum(0, ip))
	return append(frame, ip...)
}

func (f *filter) icmp6(from, to netip.Addr, body []byte) []byte {
	frame := f.header(typeIPv6, 40+len(body))
	ip := make([]byte, 40)
	ip[0], ip[6], ip[7] = 0x60, protoICMPv6, 255
	binary.BigEndian.PutUint16(ip[4:6], uint16(len(body))) //nolint:gosec // bodies are smaller than a frame.
	copy(ip[8:24], from.AsSlice())
	copy(ip[24:40], to.AsSlice())
	sum := sum(0, ip[8:40])
	sum += uint32(len(body)) + protoICMPv6 //nolint:gosec // bodies are smaller than a frame.
	body[2], body[3] = 0, 0
	binary.BigEndian.PutUint16(body[2:4], checksum(sum, body))
	return append(append(frame, ip...), body...)
}

// sum adds up 16-bit words, as the checksums of IP do.
func sum(total uint32, b []byte) uint32 {
	for len(b) >= 2 {
		total += uint32(b[0])<<8 | uint32(b[1])
		b = b[2:]
	}
	if len(b) == 1 {
		total += uint32(b[0]) << 8
	}
	return total
}

func checksum(total uint32, b []byte) uint16 {
	total = sum(total, b)
	for total > 0xffff {
		total = total>>16 + total&0xffff
	}
	return ^uint16(total) //nolint:gosec // folded to 16 bits above.
}

const (
	dhcpMagic    = 0x63825363
	dhcpDiscover = 1
	dhcpOffer    = 2
	dhcpRequest  = 3
	dhcpAck      = 5
	dhcpNak      = 6
	dhcpInform   = 8

	dhcpOptionRequested = 50
	dhcpOptionType      = 53
	dhcpOptionServer    = 54
	dhcpOptionEnd       = 255
)

// answerDHCP gives a guest that does not know its address the only one there is. forkd's own agent never asks.
func (f *filter) answerDHCP(p *packet) []byte {
	if len(p.payload) < 8+240 {
		return nil
	}
	ask := p.payload[8:]
	if ask[0] != 1 || ask[1] != 1 || ask[2] != 6 || binary.BigEndian.Uint32(ask[236:240]) != dhcpMagic {
		return nil
	}
	options := dhcpOptions(ask[240:])
	kind := byte(dhcpAck)
	switch {
	case len(options[dhcpOptionType]) != 1:
		return nil
	case options[dhcpOptionType][0] == dhcpDiscover:
		kind = dhcpOffer
	case options[dhcpOptionType][0] == dhcpInform:
	case options[dhcpOptionType][0] != dhcpRequest:
		return nil
	default:
		if server, ok := options[dhcpOptionServer]; ok && string(server) != string(f.gateway4.AsSlice()) {
			return nil // It took another's offer; there is no other.
		}
		wanted := options[dhcpOptionRequested]
		if len(wanted) != 4 {
			wanted = ask[12:16]
		}
		if string(wanted) != string(f.guest4.AsSlice()) {
			kind = dhcpNak
		}
	}
	return f.dhcp(ask, kind)
}

// dhcpOptions reads the first of each option; a hostile list ends where it stops making sense.
func dhcpOptions(b []byte) map[byte][]byte {
	options := map[byte][]byte{}
	for len(b) >= 2 && b[0] != dhcpOptionEnd {
		if b[0] == 0 {
			b = b[1:]
			continue
		}
		end := 2 + int(b[1])
		if end > len(b) {
			break
		}
		if _, ok := options[b[0]]; !ok {
			options[b[0]] = b[2:end]
		}
		b = b[end:]
	}
	return options
}

func (f *filter) dhcp(ask []byte, kind byte) []byte {
	body := make([]byte, 240, 320)
	body[0], body[1], body[2] = 2, 1, 6
	copy(body[4:8], ask[4:8])
	copy(body[10:12], ask[10:12])
	gateway := f.gateway4.AsSlice()
	if kind != dhcpNak {
		copy(body[16:20], f.guest4.AsSlice())
		copy(body[20:24], gateway)
	}
	copy(body[28:44], ask[28:44])
	binary.BigEndian.PutUint32(body[236:240], dhcpMagic)
	option := func(code byte, value ...byte) {
		body = append(body, code, byte(len(value))) //nolint:gosec // the values below are short.
		body = append(body, value...)
	}
	option(dhcpOptionType, kind)
	option(dhcpOptionServer, gateway...)
	if kind != dhcpNak {
		option(1, 255, 255, 255, 248)
		option(3, gateway...)
		option(6, gateway...)
		option(26, MTU>>8, MTU&0xff)
		option(51, 255, 255, 255, 255) // For ever.
	}
	body = append(body, dhcpOptionEnd)
	for len(body) < 300 {
		body = append(body, 0) // Some clients take nothing shorter.
	}
	// Always broadcast: a guest that asks has no address to be reached at.
	frame := f.ip4(f.gateway4, broadcast4(), protoUDP, 8+len(body))
	copy(frame[0:6], []byte{255, 255, 255, 255, 255, 255})
	udp := make([]byte, 8)
	binary.BigEndian.PutUint16(udp[0:2], portDHCPServer)
	binary.BigEndian.PutUint16(udp[2:4], portDHCPClient)
	binary.BigEndian.PutUint16(udp[4:6], uint16(8+len(body))) //nolint:gosec // 308.
	return append(append(frame, udp...), body...)
}
