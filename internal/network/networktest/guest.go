// Package networktest is what tests of networks stand on: a guest that is a second TCP/IP stack in this process, at the
// other end of a link, and an outside that reaches loopback only and keeps a record. Tests alone may import it.
package networktest

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"forkd.dev/forkd/internal/network"
)

const nic tcpip.NICID = 1

// Pair is a link: the guest's end and the network's.
func Pair(t testing.TB) (guest, host *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, network.LinkBuffer)
	}
	guest, host = os.NewFile(uintptr(fds[0]), "guest"), os.NewFile(uintptr(fds[1]), "host")
	t.Cleanup(func() {
		_ = guest.Close()
		_ = host.Close()
	})
	return guest, host
}

// Guest is a machine with a stack of its own at one end of a link.
type Guest struct {
	Stack *stack.Stack
	link  *os.File
	end   *channel.Endpoint
	stop  context.CancelFunc
	wait  sync.WaitGroup
}

// NewGuest starts one, with the addresses of every guest, until the test is over. It closes the link then.
func NewGuest(t testing.TB, link *os.File) *Guest {
	t.Helper()
	g := &Guest{
		link: link, end: channel.New(1024, network.MTU, ""),
		Stack: stack.New(stack.Options{
			NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
			TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocolCUBIC, udp.NewProtocol},
		}),
	}
	fatal := func(err tcpip.Error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	recovery, linger := tcpip.TCPRecovery(0), tcpip.TCPTimeWaitTimeoutOption(0)
	fatal(g.Stack.SetTransportProtocolOption(tcp.ProtocolNumber, &recovery))
	fatal(g.Stack.SetTransportProtocolOption(tcp.ProtocolNumber, &linger))
	fatal(g.Stack.CreateNIC(nic, g.end))
	v4, v6 := network.GuestAddrs()
	for _, a := range []netip.Addr{v4, v6} {
		fatal(g.Stack.AddProtocolAddress(nic, tcpip.ProtocolAddress{
			Protocol: protocolOf(a), AddressWithPrefix: tcpip.AddrFromSlice(a.AsSlice()).WithPrefix(),
		}, stack.AddressProperties{}))
	}
	g.Stack.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}, {Destination: header.IPv6EmptySubnet, NIC: nic}})
	var ctx context.Context
	ctx, g.stop = context.WithCancel(t.Context())
	g.wait.Go(g.read)
	g.wait.Go(func() { g.write(ctx) })
	t.Cleanup(g.Close)
	return g
}

// Close ends it at once: nobody hears of it.
func (g *Guest) Close() {
	g.stop()
	_ = g.link.Close()
	g.wait.Wait()
	g.Stack.Destroy()
}

func (g *Guest) read() {
	buf := make([]byte, network.FrameSize)
	for {
		n, err := g.link.Read(buf)
		if err != nil {
			return
		}
		if n < network.HeaderSize {
			continue
		}
		protocol := tcpip.NetworkProtocolNumber(binary.BigEndian.Uint16(buf[12:14]))
		if protocol != header.IPv4ProtocolNumber && protocol != header.IPv6ProtocolNumber {
			continue
		}
		payload := buffer.MakeWithView(buffer.NewViewWithData(buf[network.HeaderSize:n]))
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: payload})
		g.end.InjectInbound(protocol, pkt)
		pkt.DecRef()
	}
}

func (g *Guest) write(ctx context.Context) {
	frame := make([]byte, 0, network.FrameSize)
	for {
		pkt := g.end.ReadContext(ctx)
		if pkt == nil {
			return
		}
		frame = Ethernet(frame[:0], uint16(pkt.NetworkProtocolNumber)) //nolint:gosec // 16 bits, by its standard.
		for _, part := range pkt.AsSlices() {
			frame = append(frame, part...)
		}
		pkt.DecRef()
		_, _ = g.link.Write(frame)
	}
}

// Ethernet appends the header of a frame from the guest to the gateway.
func Ethernet(frame []byte, kind uint16) []byte {
	for _, text := range []string{network.GatewayMAC, network.GuestMAC} {
		mac, err := net.ParseMAC(text)
		if err != nil {
			panic(err)
		}
		frame = append(frame, mac...)
	}
	return binary.BigEndian.AppendUint16(frame, kind)
}

func protocolOf(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return ipv4.ProtocolNumber
	}
	return ipv6.ProtocolNumber
}

// DialTCP connects from the guest.
func (g *Guest) DialTCP(ctx context.Context, to string) (*gonet.TCPConn, error) {
	addr, err := netip.ParseAddrPort(to)
	if err != nil {
		return nil, err
	}
	full := tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(addr.Addr().AsSlice()), Port: addr.Port()}
	return gonet.DialContextTCP(ctx, g.Stack, full, protocolOf(addr.Addr()))
}

// DialUDP makes a UDP socket in the guest that is connected to an address.
func (g *Guest) DialUDP(to string) (*gonet.UDPConn, error) {
	addr, err := netip.ParseAddrPort(to)
	if err != nil {
		return nil, err
	}
	full := tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(addr.Addr().AsSlice()), Port: addr.Port()}
	return gonet.DialUDP(g.Stack, nil, &full, protocolOf(addr.Addr()))
}

// Resolver asks the guest's name server.
func (g *Guest) Resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, kind, _ string) (net.Conn, error) {
		server := net.JoinHostPort(network.Gateway4, "53")
		switch kind {
		case "tcp":
			return g.DialTCP(ctx, server)
		case "udp":
			return g.DialUDP(server)
		}
		return nil, fmt.Errorf("a network of kind %q", kind)
	}}
}
