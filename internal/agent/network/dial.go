package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/quick"
	"forkd.dev/forkd/internal/guest/wire"
)

const (
	// maxDials connections are open at once: each takes two buffers, and calls of other kinds need their room as well.
	maxDials = 128
	// dialTimeout bounds one attempt to connect: a service that has too many waiting is not waited for long.
	dialTimeout = 10 * time.Second
	dialBuffer  = 16 << 10
)

// dial connects to a service and carries what is said.
func (v *Service) dial(ctx context.Context, s *wire.Stream, req *wire.DialRequest) error {
	if req.Port < 1 || req.Port > 65535 {
		return wire.Errorf(wire.CodeInvalid, "port %d: 1 to 65535 are allowed", req.Port)
	}
	select {
	case v.dials <- struct{}{}:
		defer func() { <-v.dials }()
	default:
		return wire.Errorf(wire.CodeExhausted, "too many connections to services of the machine at once; at most %d are allowed", maxDials)
	}
	c, at, err := connect(ctx, v.addresses, uint16(req.Port))
	if err != nil {
		return err
	}
	defer c.Close()
	// The caller's end of the call is the connection's; it also frees who waits in a read or write.
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := s.SendMessage(wire.DialReply{Address: at.String()}); err != nil {
		return err
	}
	return carry(s, c)
}

// carry ends when both directions have. The service's failure ends both at once.
func carry(s *wire.Stream, c *conn) error {
	down := make(chan error, 1)
	go func() {
		buf := make([]byte, dialBuffer)
		_, err := io.CopyBuffer(struct{ io.Writer }{s.Data(wire.KindData)}, struct{ io.Reader }{c}, buf)
		if err == nil {
			err = s.HalfClose()
		} else {
			_ = c.SetDeadline(time.Unix(1, 0))
		}
		down <- err
	}()
	if err := send(c, s); err != nil && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
		_ = c.SetDeadline(time.Unix(1, 0))
	}
	// A service that takes no more may still have something to say: an answer that refuses an upload.
	if derr := <-down; derr != nil {
		return wire.Errorf(wire.CodeUnavailable, "the connection broke: %v", derr)
	}
	return nil
}

// send writes what the caller sends to the service, up to its half-close.
func send(c *conn, s *wire.Stream) error {
	for {
		kind, payload, err := s.Recv()
		if err != nil {
			return err
		}
		switch kind {
		case wire.KindHalfClose:
			return c.closeWrite()
		case wire.KindData:
		default:
			return wire.Errorf(wire.CodeInvalid, "unexpected frame %q among data", byte(kind))
		}
		if _, err := c.Write(payload); err != nil {
			return err
		}
	}
}

// conn is a socket of a service in the machine. Package net's would bring its resolver along, a third of a megabyte of
// every snapshot.
type conn struct {
	*quick.Conn
	fd int
}

// ownAddresses are those at which a service may listen: most do at one of loopback's, or at all.
func ownAddresses() []netip.Addr {
	return []netip.Addr{
		netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback(), netip.MustParsePrefix(guest4).Addr(), netip.MustParsePrefix(guest6).Addr(),
	}
}

func connect(ctx context.Context, addresses []netip.Addr, port uint16) (*conn, netip.AddrPort, error) {
	var first error
	for _, a := range addresses {
		at := netip.AddrPortFrom(a, port)
		c, err := connectTo(ctx, at)
		if err == nil {
			return c, at, nil
		}
		if ctx.Err() != nil {
			return nil, at, context.Cause(ctx)
		}
		if first == nil {
			first = err
		}
		if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.EADDRNOTAVAIL) && !errors.Is(err, unix.ENETUNREACH) &&
			!errors.Is(err, unix.EAFNOSUPPORT) {
			break
		}
	}
	if errors.Is(first, unix.ECONNREFUSED) {
		return nil, netip.AddrPort{}, wire.Errorf(wire.CodeNotFound, "nothing listens on port %d", port)
	}
	return nil, netip.AddrPort{}, wire.Errorf(wire.CodeUnavailable, "connect to port %d: %v", port, first)
}

func connectTo(ctx context.Context, at netip.AddrPort) (*conn, error) {
	domain, address := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()})
	if at.Addr().Is4() {
		domain, address = unix.AF_INET, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("make a socket: %w", err)
	}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	err = unix.Connect(fd, address)
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return nil, errors.Join(err, unix.Close(fd))
	}
	pending := err != nil
	q, err := quick.NewConn(fd, at.String(), false)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: q, fd: fd}
	if !pending {
		return c, nil
	}
	if err := c.connected(ctx); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// connected waits for the end of the attempt: a service whose queue is full answers later.
func (c *conn) connected(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err := c.Writable()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	errno, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return err
	}
	if errno != 0 {
		return unix.Errno(errno)
	}
	return nil
}

func (c *conn) closeWrite() error {
	err := unix.Shutdown(c.fd, unix.SHUT_WR)
	if errors.Is(err, unix.ENOTCONN) { // the service has closed altogether
		return nil
	}
	return err
}
