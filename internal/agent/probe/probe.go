// Package probe asks a service of the guest whether it answers, for those who wait until it is up: a guest need not have
// a program that could ask. It is not an HTTP client: it sends one request and reads no more than the status. Only the
// agent imports it; its tests run on any Linux.
package probe

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

const (
	// defaultTimeout bounds a probe whose caller gives no limit.
	defaultTimeout = 10 * time.Second
	maxTimeout     = time.Hour
	// maxStatusLine is more than any status line; a service that sends no end of it is no HTTP server.
	maxStatusLine = 4 << 10
	// What of the answer's body is read, and for how long.
	maxDrained = 256 << 10
	drainTime  = 100 * time.Millisecond
)

// Service serves probes.
type Service struct{}

// Handlers are the calls this package serves.
func (Service) Handlers() map[string]wire.Handler {
	return map[string]wire.Handler{wire.MethodProbe: wire.Handle(probe)}
}

func probe(ctx context.Context, s *wire.Stream, req *wire.ProbeRequest) error {
	if strings.ContainsAny(req.Host+req.Path, " \r\n\x00") || !strings.HasPrefix(req.Path, "/") {
		return wire.Errorf(wire.CodeInvalid, "probe %q of %q: not a path and a host of an HTTP request", req.Path, req.Host)
	}
	at, err := netip.ParseAddrPort(req.Address)
	if err != nil {
		return wire.Errorf(wire.CodeInvalid, "probe %q: not an address and a port", req.Address)
	}
	timeout := time.Duration(req.TimeoutMS) * time.Millisecond
	if timeout <= 0 || timeout > maxTimeout {
		timeout = defaultTimeout
	}
	reply := &wire.ProbeReply{}
	if reply.Status, err = get(at, req, time.Now().Add(timeout)); err != nil {
		reply.Problem = err.Error()
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return s.SendMessage(reply)
}

// get sends the request and reads the status. HTTP/1.0: the server ends the connection, and answers in no pieces.
func get(at netip.AddrPort, req *wire.ProbeRequest, deadline time.Time) (int, error) {
	c, err := dial(at, deadline)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	_, err = fmt.Fprintf(c, "GET %s HTTP/1.0\r\nHost: %s\r\nUser-Agent: forkd\r\nAccept: */*\r\nConnection: close\r\n\r\n", req.Path, req.Host)
	if err != nil {
		return 0, err
	}
	line, err := bufio.NewReader(io.LimitReader(c, maxStatusLine)).ReadString('\n')
	if err != nil && line == "" {
		return 0, fmt.Errorf("no answer: %w", err)
	}
	// Closed with something unread the connection would be reset, which servers log as an error.
	c.deadline = time.Now().Add(drainTime)
	_, _ = io.CopyN(io.Discard, c, maxDrained)
	return parseStatus(line)
}

// conn is a socket whose calls block a thread, until the deadline. Package net's would bring its resolver along, a third
// of a megabyte of every snapshot.
type conn struct {
	fd       int
	deadline time.Time
}

func dial(at netip.AddrPort, deadline time.Time) (*conn, error) {
	domain, address := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()})
	if at.Addr().Is4() {
		domain, address = unix.AF_INET, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make a socket: %w", err)
	}
	c := &conn{fd: fd, deadline: deadline}
	if err = c.limit(unix.SO_SNDTIMEO); err == nil {
		err = unix.Connect(fd, address)
	}
	if err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("connect to %s: %w", at, late(err))
	}
	return c, nil
}

// limit gives the next call the time that is left.
func (c *conn) limit(option int) error {
	left := time.Until(c.deadline)
	if left <= 0 {
		return unix.ETIMEDOUT
	}
	tv := unix.NsecToTimeval(max(left.Nanoseconds(), int64(time.Millisecond)))
	return unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, option, &tv)
}

// late: a blocking call whose time is over says that it would block.
func late(err error) error {
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINPROGRESS) {
		return unix.ETIMEDOUT
	}
	return err
}

// again repeats a call that a signal interrupted.
func again(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

func (c *conn) Read(p []byte) (int, error) {
	if err := c.limit(unix.SO_RCVTIMEO); err != nil {
		return 0, err
	}
	n, err := again(func() (int, error) { return unix.Read(c.fd, p) })
	switch {
	case err != nil:
		return 0, late(err)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

func (c *conn) Write(p []byte) (int, error) {
	if err := c.limit(unix.SO_SNDTIMEO); err != nil {
		return 0, err
	}
	// Not write: what a service does that closes early must not be a signal.
	n, err := again(func() (int, error) { return unix.SendmsgN(c.fd, p, nil, nil, unix.MSG_NOSIGNAL) })
	if err != nil {
		return 0, late(err)
	}
	if n < len(p) {
		return n, io.ErrShortWrite
	}
	return n, nil
}

func (c *conn) Close() error { return unix.Close(c.fd) }

// parseStatus reads "HTTP/1.1 200 OK".
func parseStatus(line string) (int, error) {
	version, rest, _ := strings.Cut(strings.TrimRight(line, "\r\n"), " ")
	code, _, _ := strings.Cut(rest, " ")
	status, err := strconv.Atoi(code)
	if !strings.HasPrefix(version, "HTTP/") || err != nil || status < 100 || status > 999 {
		return 0, fmt.Errorf("not an HTTP server: it says %q", line[:min(len(line), 80)])
	}
	return status, nil
}
