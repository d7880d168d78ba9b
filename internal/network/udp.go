package network

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/network/inspect"
)

const (
	// udpIdle is how long an exchange may be silent before it is over.
	udpIdle = 60 * time.Second
	// udpMax is the largest payload of UDP.
	udpMax = 65507
)

func (n *Network) isGateway(addr netip.Addr) bool {
	return addr == n.filter.gateway4 || addr == n.filter.gateway6
}

// udpFlow begins an exchange with its first datagram; it is called from where frames are read and does not wait. False: the
// guest is told that nobody listens.
func (r *run) udpFlow(request *udp.ForwarderRequest) bool {
	id := request.ID()
	is := Flow{
		Protocol: egress.UDP, Guest: addrPort(id.RemoteAddress, id.RemotePort), To: addrPort(id.LocalAddress, id.LocalPort),
	}
	if r.isGateway(is.To.Addr()) {
		is.Reason = "the gateway answers for names only"
		r.flows.refuse(is)
		return false
	}
	ctx, cancel := context.WithCancel(r.ctx)
	open, byName := r.admit(is, cancel)
	if open == nil {
		cancel()
		return false
	}
	var queue waiter.Queue
	ep, err := request.CreateEndpoint(&queue)
	if err != nil {
		cancel()
		r.flows.end(open, "", "towards the guest: "+err.String())
		return false
	}
	e := &exchange{run: r, flow: open, guest: gonet.NewUDPConn(&queue, ep), idle: udpIdle, byName: byName}
	if !r.spawn(func() {
		defer cancel()
		err := e.hold(ctx)
		var no *refusedError
		if errors.As(err, &no) {
			r.flows.end(open, VerdictRefused, no.reason)
			return
		}
		r.flows.end(open, "", plain(err))
	}) {
		cancel()
		_ = e.guest.Close()
	}
	return true
}

// exchange is one pair of addresses that talk UDP.
type exchange struct {
	*run
	flow   *flow
	guest  *gonet.UDPConn
	outer  net.Conn
	idle   time.Duration
	byName bool         // its address is allowed for a name only: QUIC would hide another
	last   atomic.Int64 // when anything was moved, in nanoseconds of the wall
}

func (e *exchange) hold(ctx context.Context) error {
	defer func() { _ = e.guest.Close() }()
	outer, err := e.run.outer.DialContext(ctx, "udp", e.flow.To.String())
	if err != nil {
		return err
	}
	e.outer = outer
	stop := context.AfterFunc(ctx, e.hush)
	defer stop()
	defer func() { _ = outer.Close() }()
	e.last.Store(time.Now().UnixNano())
	up := make(chan error, 1)
	if !e.spawn(func() {
		err := e.move(ctx, e.guest, outer, func(b []byte) error {
			if e.byName && inspect.QUIC(b) {
				return &refusedError{reason: "QUIC hides its server's name, and its address is allowed only for a name"}
			}
			return e.count(len(b), 0)
		})
		e.hush()
		up <- err
	}) {
		return nil
	}
	err = e.move(ctx, outer, e.guest, func(b []byte) error { return e.count(0, len(b)) })
	e.hush()
	return errors.Join(err, <-up)
}

// hush wakes both directions, which find that it is over.
func (e *exchange) hush() {
	past := time.Unix(1, 0)
	e.last.Store(0)
	_ = e.guest.SetReadDeadline(past)
	_ = e.outer.SetReadDeadline(past)
}

// move carries datagrams one way until both have been silent for too long, or something fails.
func (e *exchange) move(ctx context.Context, from, to net.Conn, look func([]byte) error) error {
	for ctx.Err() == nil {
		last := e.last.Load()
		if last == 0 || time.Since(time.Unix(0, last)) >= e.idle {
			return nil
		}
		_ = from.SetReadDeadline(time.Unix(0, last).Add(e.idle))
		if e.last.Load() == 0 {
			return nil // Hushed meanwhile: the deadline was one of the past.
		}
		buf := chunks.Get().(*[]byte) //nolint:forcetypeassert // the pool holds nothing else.
		n, err := from.Read(*buf)
		if err == nil {
			e.last.CompareAndSwap(last, time.Now().UnixNano())
			err = e.pass(ctx, to, (*buf)[:n], look)
		}
		release(buf)
		var timeout net.Error
		switch {
		case err == nil, errors.As(err, &timeout) && timeout.Timeout():
		case errors.Is(err, unix.EMSGSIZE), errors.Is(err, unix.ENOBUFS):
			// Lost, as datagrams are.
		default:
			return err
		}
	}
	return nil
}

func (e *exchange) pass(ctx context.Context, to net.Conn, b []byte, look func([]byte) error) error {
	if err := look(b); err != nil {
		return err
	}
	if err := e.pace(ctx, len(b)); err != nil {
		return err
	}
	_, err := to.Write(b)
	return err
}

func (e *exchange) count(sent, received int) error {
	if !e.flows.count(e.flow, sent, received) {
		return context.Canceled // The budget: all flows are being cut.
	}
	return nil
}
