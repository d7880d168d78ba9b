package network

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"forkd.dev/forkd/internal/network/nameserver"
)

const (
	// lookupTimeout is how long the host may take to find a name.
	lookupTimeout = 10 * time.Second
	// namesIdle is how long a connection to the name server may say nothing.
	namesIdle = 30 * time.Second
	// maxTCPMessage is the largest message over TCP.
	maxTCPMessage = 65535
)

// serveNames answers on the gateway's UDP port, for both families.
func (r *run) serveNames() error {
	for _, addr := range []netip.Addr{r.filter.gateway4, r.filter.gateway6} {
		local := tcpip.FullAddress{NIC: nic, Addr: address(addr), Port: DNSPort}
		conn, err := gonet.DialUDP(r.stack, &local, nil, protocolOf(addr))
		if err != nil {
			return err
		}
		to := netip.AddrPortFrom(addr, DNSPort)
		stop := context.AfterFunc(r.ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
		if !r.spawn(func() {
			defer func() { _ = conn.Close() }()
			defer stop()
			r.namesOverUDP(conn, to)
		}) {
			stop()
			_ = conn.Close()
		}
	}
	return nil
}

func (r *run) namesOverUDP(conn *gonet.UDPConn, to netip.AddrPort) {
	buf := make([]byte, 4096)
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			if r.ctx.Err() != nil {
				return
			}
			continue
		}
		select {
		case r.asking <- struct{}{}:
		default:
			continue
		}
		message := append([]byte(nil), buf[:n]...)
		if !r.spawn(func() {
			defer func() { <-r.asking }()
			guest := from.(*net.UDPAddr).AddrPort() //nolint:forcetypeassert // a UDP connection's.
			if reply := r.answer(message, guest, to, 0); reply != nil {
				_, _ = conn.WriteTo(reply, from)
			}
		}) {
			<-r.asking
			return
		}
	}
}

// namesOverTCP answers one connection's questions, one after the other.
func (r *run) namesOverTCP(request *tcp.ForwarderRequest) {
	id := request.ID()
	c := &conversation{run: r}
	c.ctx, c.cancel = context.WithCancel(r.ctx)
	defer c.cancel()
	select {
	case r.asking <- struct{}{}:
	default:
		request.Complete(true)
		return
	}
	defer func() { <-r.asking }()
	guest, err := c.answer(request)
	if err != nil {
		return
	}
	c.guest = guest
	stop := context.AfterFunc(c.ctx, c.cut)
	defer stop()
	defer guest.close()
	from, to := addrPort(id.RemoteAddress, id.RemotePort), addrPort(id.LocalAddress, id.LocalPort)
	conn := gonet.NewTCPConn(guest.queue, guest.ep)
	for {
		_ = conn.SetDeadline(time.Now().Add(namesIdle))
		message, err := readMessage(conn)
		if err != nil {
			if errors.Is(err, io.EOF) {
				c.bye()
				return
			}
			guest.ep.Abort()
			return
		}
		reply := r.answer(message, from, to, maxTCPMessage)
		if reply == nil {
			guest.ep.Abort()
			return
		}
		framed := binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(reply)), uint16(len(reply))) //nolint:gosec // at most maxTCPMessage.
		if _, err := conn.Write(append(framed, reply...)); err != nil {
			return
		}
	}
}

// bye ends the connection with the guest well, if that takes what it was sent.
func (c *conversation) bye() {
	ctx, cancel := context.WithTimeout(c.ctx, namesIdle)
	defer cancel()
	_ = c.guest.closeWrite()
	if c.guest.settle(ctx); !c.guest.settled() {
		c.guest.ep.Abort()
	}
}

func readMessage(from io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(from, size[:]); err != nil {
		return nil, err
	}
	message := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err := io.ReadFull(from, message)
	return message, err
}

// answer answers one question, within the limits, and records it.
func (r *run) answer(message []byte, guest, to netip.AddrPort, size int) []byte {
	if reason := r.flows.ask(); reason != "" {
		r.flows.refuse(Flow{Protocol: protocolDNS, Guest: guest, To: to, Reason: reason})
		return nil
	}
	ctx, cancel := context.WithTimeout(r.ctx, lookupTimeout)
	defer cancel()
	started := time.Now()
	reply, question := r.names.Answer(ctx, message, size)
	r.flows.asked(questionFlow(question, Flow{
		Started: started, Protocol: protocolDNS, Guest: guest, To: to, Sent: int64(len(message)), Received: int64(len(reply)),
	}))
	r.flows.pay(int64(len(message)) + int64(len(reply)))
	return reply
}

func questionFlow(q nameserver.Question, is Flow) Flow {
	is.Name, is.Rule, is.Reason = q.Name, q.Verdict.Rule, q.Verdict.Reason
	is.Verdict = VerdictRefused
	if q.Verdict.Allow {
		is.Verdict, is.Reason = VerdictAllowed, plain(q.Err)
	}
	return is
}
