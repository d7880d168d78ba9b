package network

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip"
	reference "gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// frame4 and frame6 are what an honest guest sends; edit changes it.
func frame4(to string, proto byte, payload []byte, edit func(ip []byte)) []byte {
	f := newFilter()
	frame := append(append(append([]byte{}, f.gatewayMAC[:]...), f.guestMAC[:]...), 8, 0)
	ip := make([]byte, 20+len(payload))
	copy(ip[20:], payload)
	ip[0], ip[8], ip[9] = 0x45, 64, proto
	binary.BigEndian.PutUint16(ip[2:4], uint16(20+len(payload)))
	copy(ip[12:16], f.guest4.AsSlice())
	copy(ip[16:20], netip.MustParseAddr(to).AsSlice())
	if edit != nil {
		edit(ip)
	}
	binary.BigEndian.PutUint16(ip[10:12], 0)
	binary.BigEndian.PutUint16(ip[10:12], ^reference.Checksum(ip[:20], 0))
	return append(frame, ip...)
}

func frame6(to string, next byte, payload []byte, edit func(ip []byte)) []byte {
	f := newFilter()
	frame := append(append(append([]byte{}, f.gatewayMAC[:]...), f.guestMAC[:]...), 0x86, 0xdd)
	ip := make([]byte, 40+len(payload))
	copy(ip[40:], payload)
	ip[0], ip[6], ip[7] = 0x60, next, 64
	binary.BigEndian.PutUint16(ip[4:6], uint16(len(payload)))
	copy(ip[8:24], f.guest6.AsSlice())
	copy(ip[24:40], netip.MustParseAddr(to).AsSlice())
	if edit != nil {
		edit(ip)
	}
	return append(frame, ip...)
}

func ports(from, to uint16, rest ...byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, from)
	return append(binary.BigEndian.AppendUint16(b, to), append(rest, make([]byte, 20)...)...)
}

func arp(sender, target string, edit func([]byte)) []byte {
	f := newFilter()
	frame := append(append(bytes.Repeat([]byte{0xff}, 6), f.guestMAC[:]...), 8, 6, 0, 1, 8, 0, 6, 4, 0, 1)
	frame = append(append(frame, f.guestMAC[:]...), netip.MustParseAddr(sender).AsSlice()...)
	frame = append(append(frame, 0, 0, 0, 0, 0, 0), netip.MustParseAddr(target).AsSlice()...)
	if edit != nil {
		edit(frame)
	}
	return frame
}

func TestFilter(t *testing.T) {
	echo := append([]byte{8, 0, 0, 0, 0, 1, 0, 1}, "ping"...)
	echo6 := append([]byte{128, 0, 0, 0, 0, 1, 0, 1}, "ping"...)
	solicit := append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, netip.MustParseAddr(Gateway6).AsSlice()...)
	edit := func(frame []byte, change func([]byte)) []byte { change(frame); return frame }
	for _, test := range []struct {
		name   string
		frame  []byte
		want   fate
		reason string
	}{
		{"tcp", frame4("1.1.1.1", 6, ports(1, 80), nil), fatePass, ""},
		{"udp", frame4("1.1.1.1", 17, ports(1, 80), nil), fatePass, ""},
		{"tcp6", frame6("2600::1", 6, ports(1, 80), nil), fatePass, ""},
		{"metadata: for the policy", frame4("169.254.169.254", 6, ports(1, 80), nil), fatePass, ""},
		{"ping", frame4("192.0.0.1", 1, echo, nil), fateEcho, ""},
		{"ping of another", frame4("8.8.8.8", 1, echo, nil), fateEcho, ""},
		{"ping6", frame6("2600::1", 58, echo6, nil), fateEcho, ""},
		{"answer to a ping", frame4("8.8.8.8", 1, append([]byte{0}, echo[1:]...), nil), fateRefuse, "ICMP other than"},
		{"arp", arp("192.0.0.2", "192.0.0.1", nil), fateARP, ""},
		{"arp probe", arp("0.0.0.0", "192.0.0.2", nil), fateDrop, ""},
		{"arp for a sibling", arp("192.0.0.2", "192.0.0.3", nil), fateDrop, ""},
		{"arp as the gateway", arp("192.0.0.1", "192.0.0.1", nil), fateRefuse, "spoofed ARP"},
		{"arp with another's MAC", arp("192.0.0.2", "192.0.0.1", func(b []byte) { b[22] ^= 4 }), fateRefuse, "spoofed ARP"},
		{"arp answer", arp("192.0.0.1", "192.0.0.1", func(b []byte) { b[21] = 2 }), fateRefuse, "spoofed ARP"},
		{"ndp", frame6("ff02::1:ff00:1", 58, solicit, nil), fateNDP, ""},
		{"router solicitation", frame6("ff02::2", 58, []byte{133, 0, 0, 0, 0, 0, 0, 0}, nil), fateDrop, ""},
		{"router advertisement", frame6("ff02::1", 58, []byte{134, 0, 0, 0, 0, 0, 0, 0}, nil), fateRefuse, "ICMP other than"},
		{"listener report", frame6("ff02::16", 0, []byte{58, 0, 5, 2, 0, 0, 1, 0, 143, 0, 0, 0, 0, 0, 0, 0}, nil), fateDrop, ""},
		{"igmp with router alert", frame4("224.0.0.22", 2, make([]byte, 12), func(ip []byte) { ip[0] = 0x46 }), fateDrop, ""},
		{"short", []byte{1, 2, 3}, fateRefuse, "shorter"},
		{"empty", nil, fateRefuse, "shorter"},
		{"spoofed MAC", edit(frame4("1.1.1.1", 6, ports(1, 80), nil), func(b []byte) { b[11]++ }), fateRefuse, "spoofed Ethernet"},
		{"sibling's MAC", edit(frame4("1.1.1.1", 6, ports(1, 80), nil), func(b []byte) { b[5]++ }), fateRefuse, "not the gateway's"},
		{"VLAN", edit(frame4("1.1.1.1", 6, ports(1, 80), nil), func(b []byte) { b[12], b[13] = 0x81, 0 }), fateRefuse, "neither IP nor ARP"},
		{"spoofed IP", frame4("1.1.1.1", 6, ports(1, 80), func(ip []byte) { ip[15]++ }), fateRefuse, "spoofed IPv4"},
		{"spoofed IPv6", frame6("2600::1", 6, ports(1, 80), func(ip []byte) { ip[23]++ }), fateRefuse, "spoofed IPv6"},
		{"source routing", frame4("1.1.1.1", 6, append([]byte{131, 7, 4, 10, 0, 0, 1, 0}, ports(1, 80)...), func(ip []byte) { ip[0] = 0x47 }), fateRefuse, "source routing"},
		{"routing header", frame6("2600::1", 43, append([]byte{6, 0, 0, 0, 0, 0, 0, 0}, ports(1, 80)...), nil), fateRefuse, "source routing"},
		{"hop by hop", frame6("2600::1", 0, append([]byte{6, 0, 1, 4, 0, 0, 0, 0}, ports(1, 80)...), nil), fateRefuse, "source routing"},
		{"destination options", frame6("2600::1", 60, append([]byte{6, 0, 1, 4, 0, 0, 0, 0}, ports(1, 80)...), nil), fateRefuse, "source routing"},
		{"first fragment", frame4("1.1.1.1", 17, ports(1, 80), func(ip []byte) { ip[6] = 0x20 }), fatePass, ""},
		{"later fragment", frame4("1.1.1.1", 17, []byte{1}, func(ip []byte) { ip[7] = 9 }), fatePass, ""},
		{"fragment to a sibling's multicast", frame4("224.0.0.251", 17, []byte{1}, func(ip []byte) { ip[7] = 9 }), fateRefuse, "multicast"},
		{"fragmented ping", frame4("192.0.0.1", 1, echo, func(ip []byte) { ip[6] = 0x20 }), fateRefuse, "fragmented ICMP"},
		{"fragmented ping6", frame6("2600::1", 44, append([]byte{58, 0, 0, 1, 0, 0, 0, 1}, echo6...), nil), fateRefuse, "fragmented ICMP"},
		{"fragment6", frame6("2600::1", 44, append([]byte{17, 0, 0, 1, 0, 0, 0, 1}, ports(1, 80)...), nil), fatePass, ""},
		{"fragment6 with options", frame6("2600::1", 44, append([]byte{60, 0, 0, 1, 0, 0, 0, 1}, ports(1, 80)...), nil), fateRefuse, "source routing"},
		{"short fragment6", frame6("2600::1", 44, []byte{17, 0}, nil), fateRefuse, "shorter"},
		{"tiny tcp", frame4("1.1.1.1", 6, []byte{0, 1, 0, 80}, nil), fateRefuse, "shorter"},
		{"longer than it is", frame4("1.1.1.1", 6, ports(1, 80), func(ip []byte) { ip[3] = 200 }), fateRefuse, "another length"},
		{"longer than it is, 6", frame6("2600::1", 6, ports(1, 80), func(ip []byte) { ip[5] = 200 }), fateRefuse, "another length"},
		{"version", frame4("1.1.1.1", 6, ports(1, 80), func(ip []byte) { ip[0] = 0x65 }), fateRefuse, "no IPv4"},
		{"GRE", frame4("1.1.1.1", 47, ports(1, 80), nil), fateRefuse, "other than"},
		{"SCTP", frame6("2600::1", 132, ports(1, 80), nil), fateRefuse, "other than"},
		{"loopback", frame4("127.0.0.1", 6, ports(1, 80), nil), fateRefuse, "loopback"},
		{"loopback6", frame6("::1", 6, ports(1, 80), nil), fateRefuse, "loopback"},
		{"mapped", frame6("::ffff:169.254.169.254", 6, ports(1, 80), nil), fateRefuse, "clothes"},
		{"zero", frame4("0.0.0.0", 6, ports(1, 80), nil), fateRefuse, "unspecified"},
		{"zero net", frame4("0.1.2.3", 6, ports(1, 80), nil), fateRefuse, "reserved"},
		{"multicast", frame4("224.0.0.251", 17, ports(5353, 5353), nil), fateRefuse, "multicast"},
		{"multicast6", frame6("ff02::fb", 17, ports(5353, 5353), nil), fateRefuse, "multicast"},
		{"broadcast", frame4("255.255.255.255", 17, ports(1, 80), nil), fateRefuse, "broadcast"},
		{"link-local6", frame6("fe80::1", 6, ports(1, 80), nil), fateRefuse, "link-local"},
		{"itself", frame4("192.0.0.2", 6, ports(1, 80), nil), fateRefuse, "own address"},
		{"dhcp", frame4("255.255.255.255", 17, ports(68, 67), func(ip []byte) { copy(ip[12:16], []byte{0, 0, 0, 0}) }), fateDHCP, ""},
		{"unspecified source", frame4("1.1.1.1", 17, ports(68, 67), func(ip []byte) { copy(ip[12:16], []byte{0, 0, 0, 0}) }), fateRefuse, "spoofed IPv4"},
	} {
		f := newFilter()
		p := f.look(test.frame)
		if p.fate != test.want || !strings.Contains(p.reason, test.reason) || (p.reason == "") != (test.reason == "") {
			t.Errorf("%s: fate %d, %q", test.name, p.fate, p.reason)
		}
	}
}

// TestAnswers holds the gateway's own frames against the stack's readers of headers.
func TestAnswers(t *testing.T) {
	f := newFilter()
	p := f.look(arp("192.0.0.2", "192.0.0.1", nil))
	reply := header.ARP(f.answerARP(&p)[HeaderSize:])
	if !reply.IsValid() || reply.Op() != header.ARPReply || !bytes.Equal(reply.HardwareAddressSender(), f.gatewayMAC[:]) ||
		!bytes.Equal(reply.ProtocolAddressSender(), f.gateway4.AsSlice()) || !bytes.Equal(reply.ProtocolAddressTarget(), f.guest4.AsSlice()) {
		t.Errorf("ARP: %x", reply)
	}
	for name, frame := range map[string][]byte{
		"echo":       frame4("192.0.0.1", 1, append([]byte{8, 0, 0, 0, 0, 1, 0, 1}, "ping!"...), nil),
		"prohibited": frame4("8.8.8.8", 1, append([]byte{8, 0, 0, 0, 0, 1, 0, 1}, "ping"...), nil),
	} {
		p := f.look(frame)
		answer := f.answerEcho(&p)
		if name == "prohibited" {
			answer = f.prohibited(&p)
		}
		ip := header.IPv4(answer[HeaderSize:])
		if !ip.IsValid(len(ip)) || !ip.IsChecksumValid() || reference.Checksum(ip.Payload(), 0) != 0xffff || address(f.guest4) != ip.DestinationAddress() {
			t.Errorf("%s: %x", name, answer)
		}
	}
	for _, frame := range [][]byte{
		frame6("ff02::1:ff00:1", 58, append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, f.gateway6.AsSlice()...), nil),
		frame6(Gateway6, 58, append([]byte{128, 0, 0, 0, 0, 1, 0, 1}, "ping!"...), nil),
		frame6("2600::1", 58, append([]byte{128, 0, 0, 0, 0, 1, 0, 1}, "ping!"...), nil),
	} {
		p := f.look(frame)
		answer := f.prohibited(&p)
		if p.fate == fateNDP {
			answer = f.answerNDP(&p)
		} else if p.to.Addr() == f.gateway6 {
			answer = f.answerEcho(&p)
		}
		ip := header.IPv6(answer[HeaderSize:])
		icmp := header.ICMPv6(ip.Payload())
		want := header.ICMPv6Checksum(header.ICMPv6ChecksumParams{Header: icmp, Src: ip.SourceAddress(), Dst: ip.DestinationAddress()})
		if !ip.IsValid(len(ip)) || icmp.Checksum() != want || ip.DestinationAddress() != address(f.guest6) {
			t.Errorf("%x: checksum %x, want %x", answer, icmp.Checksum(), want)
		}
	}
}

func TestDHCP(t *testing.T) {
	f := newFilter()
	ask := func(options ...byte) []byte {
		body := make([]byte, 240+len(options))
		copy(body[240:], options)
		body[0], body[1], body[2] = 1, 1, 6
		copy(body[4:8], "xid1")
		copy(body[28:34], f.guestMAC[:])
		binary.BigEndian.PutUint32(body[236:240], dhcpMagic)
		payload := append(ports(68, 67)[:8], body...)
		p := f.look(frame4("255.255.255.255", 17, payload, func(ip []byte) { copy(ip[12:16], []byte{0, 0, 0, 0}) }))
		if p.fate != fateDHCP {
			t.Fatalf("fate %d: %s", p.fate, p.reason)
		}
		return f.answerDHCP(&p)
	}
	for _, test := range []struct {
		name    string
		options []byte
		want    byte
	}{
		{"discover", []byte{53, 1, dhcpDiscover, 255}, dhcpOffer},
		{"request", []byte{0, 0, 53, 1, dhcpRequest, 50, 4, 192, 0, 0, 2, 54, 4, 192, 0, 0, 1, 255}, dhcpAck},
		{"of another address", []byte{53, 1, dhcpRequest, 50, 4, 192, 0, 0, 3, 255}, dhcpNak},
		{"of another's offer", []byte{53, 1, dhcpRequest, 50, 4, 192, 0, 0, 2, 54, 4, 10, 0, 0, 1, 255}, 0},
		{"release", []byte{53, 1, 7, 255}, 0},
		{"nothing", nil, 0},
		{"cut short", []byte{53, 100, 1}, 0},
	} {
		answer := ask(test.options...)
		if test.want == 0 {
			if answer != nil {
				t.Errorf("%s: %x", test.name, answer)
			}
			continue
		}
		ip := header.IPv4(answer[HeaderSize:])
		body := ip.Payload()[8:]
		options := dhcpOptions(body[240:])
		if !ip.IsValid(len(ip)) || !ip.IsChecksumValid() || len(options[53]) != 1 || options[53][0] != test.want || string(body[4:8]) != "xid1" {
			t.Errorf("%s: %v %x", test.name, options, answer)
		}
		if given := tcpip.AddrFrom4Slice(body[16:20]); test.want != dhcpNak && given != address(f.guest4) {
			t.Errorf("%s: %v is given", test.name, given)
		}
	}
}

// FuzzFilter: whatever a frame is, what passes is an IP packet from the guest's own address to one that a stack may carry.
func FuzzFilter(f *testing.F) {
	f.Add(frame4("1.1.1.1", 6, ports(1, 80), nil))
	f.Add(frame6("2600::1", 17, ports(1, 80), nil))
	f.Add(frame6("2600::1", 44, append([]byte{17, 0, 0, 1, 0, 0, 0, 1}, ports(1, 80)...), nil))
	f.Add(arp("192.0.0.2", "192.0.0.1", nil))
	f.Add(frame4("255.255.255.255", 17, append(ports(68, 67)[:8], make([]byte, 260)...), func(ip []byte) { copy(ip[12:16], []byte{0, 0, 0, 0}) }))
	f.Fuzz(func(t *testing.T, frame []byte) {
		filter := newFilter()
		p := filter.look(frame)
		switch p.fate {
		case fateARP:
			_ = filter.answerARP(&p)
		case fateNDP:
			_ = filter.answerNDP(&p)
		case fateEcho:
			_, _ = filter.answerEcho(&p), filter.prohibited(&p)
		case fateDHCP:
			_ = filter.answerDHCP(&p)
		case fateRefuse:
			if p.reason == "" {
				t.Error("refused without a reason")
			}
		case fatePass:
			b := p.network
			switch {
			case !p.talks, filter.nowhere(p.to.Addr()) != "":
				t.Errorf("%+v passes", p)
			case p.v6 && (address(filter.guest6) != header.IPv6(b).SourceAddress() || !header.IPv6(b).IsValid(len(b))):
				t.Errorf("%x passes", b)
			case !p.v6 && (address(filter.guest4) != header.IPv4(b).SourceAddress() || header.IPv4(b).HeaderLength() != 20):
				t.Errorf("%x passes", b)
			}
		case fateDrop:
		}
	})
}
