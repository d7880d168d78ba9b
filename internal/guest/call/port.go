package call

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
)

// portChunk is what is sent at once: as much as the guest's driver takes.
const portChunk = 32 << 10

// DialPort connects to a service in the guest. Ctx bounds the attempt, not the connection. A guest that listens to nothing
// there is a *wire.Error with CodeNotFound.
func DialPort(ctx context.Context, o Opener, port int) (*PortConn, error) {
	life, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	c, err := dialPort(life, o, port)
	if !stop() && err == nil {
		err = errors.Join(context.Cause(ctx), c.s.Close())
	}
	if err != nil {
		cancel(nil)
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, err
	}
	c.cancel = cancel
	return c, nil
}

func dialPort(ctx context.Context, o Opener, port int) (*PortConn, error) {
	s, err := o.Open(ctx, wire.MethodDial, wire.DialRequest{Port: port})
	if err != nil {
		return nil, err
	}
	var reply wire.DialReply
	if err := s.RecvMessage(&reply); err != nil {
		return nil, errors.Join(fmt.Errorf("connect to port %d: %w", port, err), s.Close())
	}
	return &PortConn{s: s, r: s.DataReader(), address: portAddress(wire.Cut(reply.Address, 64))}, nil
}

// PortConn is a connection to a service in a guest. It has no deadlines: its Close frees who waits.
type PortConn struct {
	s       *wire.Stream
	r       io.Reader
	address portAddress
	cancel  context.CancelCauseFunc
	halfway sync.Once
}

// Read implements net.Conn.
func (c *PortConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// Write implements net.Conn.
func (c *PortConn) Write(p []byte) (int, error) {
	total := 0
	for len(p) > 0 {
		n := min(len(p), portChunk)
		if err := c.s.Send(wire.KindData, p[:n]); err != nil {
			return total, err
		}
		total += n
		p = p[n:]
	}
	return total, nil
}

// CloseWrite tells the service that nothing more comes.
func (c *PortConn) CloseWrite() (err error) {
	c.halfway.Do(func() { err = c.s.HalfClose() })
	return err
}

// Close implements net.Conn.
func (c *PortConn) Close() error {
	c.cancel(net.ErrClosed)
	return c.s.Close()
}

// LocalAddr implements net.Conn.
func (c *PortConn) LocalAddr() net.Addr { return portAddress("") }

// RemoteAddr is the service's address inside the guest.
func (c *PortConn) RemoteAddr() net.Addr { return c.address }

// SetDeadline is not supported.
func (c *PortConn) SetDeadline(time.Time) error { return os.ErrNoDeadline }

// SetReadDeadline is not supported.
func (c *PortConn) SetReadDeadline(time.Time) error { return os.ErrNoDeadline }

// SetWriteDeadline is not supported.
func (c *PortConn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

var _ net.Conn = (*PortConn)(nil)

type portAddress string

func (portAddress) Network() string  { return "tcp" }
func (a portAddress) String() string { return string(a) }
