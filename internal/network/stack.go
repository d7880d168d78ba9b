package network

import (
	"fmt"
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

const nic tcpip.NICID = 1

// Buffers of one TCP connection towards the guest, each way: at most this much of it waits in this process.
const (
	tcpBuffer    = 512 << 10
	tcpBufferMax = 1 << 20
	// Beyond so many connections at once each has less, so that a guest with all that it may open and nobody who reads costs
	// its host some 250 MiB and not a gigabyte.
	tcpMany       = 64
	tcpBufferMany = 64 << 10
)

// newStack makes the stack behind a device. It takes packets to every address there is, as their destination; ICMP never
// reaches it (the filter answers), nor anything that is not TCP or UDP.
func newStack(d *device) (*stack.Stack, error) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocolCUBIC, udp.NewProtocol},
	})
	if err := configure(s, d); err != nil {
		s.Destroy()
		return nil, err
	}
	return s, nil
}

func configure(s *stack.Stack, d *device) error {
	var err tcpip.Error
	set := func(next tcpip.Error) {
		if err == nil {
			err = next
		}
	}
	options := []tcpip.SettableTransportProtocolOption{
		option(tcpip.TCPSACKEnabled(true)),
		// Nothing is lost on the way, only dropped where a guest does not keep up: losses are found by acknowledgements.
		option(tcpip.TCPRecovery(0)),
		option(tcpip.TCPModerateReceiveBufferOption(true)),
		option(tcpip.TCPSendBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: tcpBuffer, Max: tcpBufferMax}),
		option(tcpip.TCPReceiveBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: tcpBuffer, Max: tcpBufferMax}),
		// No packet of an old connection can be under way: what closed need not be remembered for long.
		option(tcpip.TCPTimeWaitTimeoutOption(time.Second)),
		option(tcpip.TCPLingerTimeoutOption(10 * time.Second)),
		option(tcpip.TCPSynRetriesOption(4)),
		// A guest may be paused for long; when it runs again it is to hear of it soon, and not to find its connections gone.
		option(tcpip.TCPMaxRTOOption(4 * time.Second)),
		option(tcpip.TCPMaxRetriesOption(255)),
	}
	for _, o := range options {
		set(s.SetTransportProtocolOption(tcp.ProtocolNumber, o))
	}
	set(s.CreateNIC(nic, d))
	set(s.SetPromiscuousMode(nic, true))
	set(s.SetSpoofing(nic, true))
	v4, v6 := GatewayAddrs()
	for _, addr := range []netip.Addr{v4, v6} {
		set(s.AddProtocolAddress(nic, tcpip.ProtocolAddress{
			Protocol: protocolOf(addr), AddressWithPrefix: address(addr).WithPrefix(),
		}, stack.AddressProperties{}))
	}
	s.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: nic},
		{Destination: header.IPv6EmptySubnet, NIC: nic},
	})
	if err != nil {
		return fmt.Errorf("make a TCP/IP stack: %s", err)
	}
	return nil
}

func option[T any, P interface {
	*T
	tcpip.SettableTransportProtocolOption
}](value T) tcpip.SettableTransportProtocolOption {
	return P(&value)
}

func address(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }

func addrPort(a tcpip.Address, port uint16) netip.AddrPort {
	addr, _ := netip.AddrFromSlice(a.AsSlice())
	return netip.AddrPortFrom(addr, port)
}

func protocolOf(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return ipv4.ProtocolNumber
	}
	return ipv6.ProtocolNumber
}
