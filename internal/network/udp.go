package network

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/network/inspect"
)

const (
	// udpIdle is how long an exchange may be silent before it is over.
	udpIdle = 60 * time.Second
	// maxDatagram is the longest.
	maxDatagram = 64 << 10
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
	guest := newGuestEnd(ep, &queue)
	// A datagram is never cut, so what is in hand stays as it is.
	shrink := func(buffer int) {
		guest.ep.SocketOptions().SetReceiveBufferSize(int64(max(buffer, 2*maxDatagram)), true)
	}
	if buffer := r.flows.keeps(open, shrink); buffer < tcpBufferMax {
		shrink(buffer)
	}
	e := &exchange{run: r, flow: open, guest: guest, idle: udpIdle, byName: byName}
	if !r.spawn(func() {
		defer cancel()
		err := e.hold(ctx)
		if no, ok := errors.AsType[*refusedError](err); ok {
			r.flows.end(open, VerdictRefused, no.reason)
			return
		}
		r.flows.end(open, "", plain(err))
	}) {
		cancel()
		e.guest.close()
	}
	return true
}

// exchange is one pair of addresses that talk UDP.
type exchange struct {
	*run
	flow   *flow
	guest  *guestEnd
	outer  net.Conn
	out    *sink
	idle   time.Duration
	byName bool         // its server's name matters: QUIC would hide it
	last   atomic.Int64 // when anything was moved, in nanoseconds of the wall
}

func (e *exchange) hold(ctx context.Context) error {
	defer e.guest.close()
	outer, err := e.run.outer.DialContext(ctx, "udp", e.flow.To.String())
	if err != nil {
		return err
	}
	defer func() { _ = outer.Close() }()
	e.outer, e.out = outer, newSink(outer)
	e.last.Store(time.Now().UnixNano())
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = outer.Close() })
	defer stop()
	up := make(chan error, 1)
	if !e.spawn(func() {
		defer cancel()
		up <- e.up(ctx)
	}) {
		return nil
	}
	err = e.down(ctx)
	cancel()
	return errors.Join(<-up, err)
}

// left is how much longer the exchange may be silent.
func (e *exchange) left() time.Duration {
	return e.idle - time.Since(time.Unix(0, e.last.Load()))
}

// up carries datagrams outward until both directions have been silent for too long, or something fails.
func (e *exchange) up(ctx context.Context) error {
	for ctx.Err() == nil {
		left := e.left()
		if left <= 0 {
			return nil
		}
		buf, n, err := e.guest.read(ctx, left)
		if err == nil {
			if e.byName && inspect.QUIC((*buf)[:n]) {
				err = &refusedError{reason: "QUIC hides its server's name, and rules allow or deny names here"}
			} else {
				err = e.pass(ctx, n, 0, func() error { return e.out.write((*buf)[:n]) })
			}
		}
		release(buf)
		if err != nil && !lost(err) {
			return err
		}
	}
	return nil
}

// down carries them to the guest.
func (e *exchange) down(ctx context.Context) error {
	from := newSource(e.outer)
	for ctx.Err() == nil {
		left := e.left()
		if left <= 0 {
			return nil
		}
		_ = e.outer.SetReadDeadline(time.Now().Add(left))
		buf, n, err := from.read()
		if err == nil {
			err = e.pass(ctx, 0, n, func() error { return e.guest.writeDatagram((*buf)[:n]) })
		}
		release(buf)
		if err != nil && !lost(err) {
			return err
		}
	}
	return nil
}

// lost is an error that costs a datagram at most, or none: time passed.
func lost(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.ENOBUFS)
}

// pass counts a datagram, and writes it when it may pass.
func (e *exchange) pass(ctx context.Context, sent, received int, write func() error) error {
	e.last.Store(time.Now().UnixNano())
	if !e.flows.count(e.flow, sent, received) {
		return context.Canceled // The budget: all flows are being cut.
	}
	if err := e.pace(ctx, sent+received); err != nil {
		return err
	}
	return write()
}
