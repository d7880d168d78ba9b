package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"

	"forkd.dev/forkd/internal/guest/mux"
	"forkd.dev/forkd/internal/guest/wire"
)

// maxStreams bounds the calls of one session.
const maxStreams = 256

// Serve answers connections on port until reading it fails; that error is returned. Port is never closed here. One
// session is alive at a time: a new preamble ends the one before, whose handlers are cancelled and not waited for.
func (a *Agent) Serve(ctx context.Context, port io.ReadWriter) error {
	c := &channel{port: port, receiver: wire.NewReceiver(port)}
	for {
		p, err := c.await()
		if err != nil {
			return err
		}
		a.generation.Store(p.Generation)
		conn := c.begin()
		if err := a.answer(conn, &p); err != nil {
			return err
		}
		session, err := mux.Server(conn, maxStreams)
		if err != nil {
			return err
		}
		a.serveSession(a.numbered(ctx), session)
	}
}

func (a *Agent) answer(conn *sessionConn, p *wire.Preamble) error {
	hello, err := wire.Encode(&wire.Hello{
		Version:    wire.Version,
		Agent:      a.cfg.Version,
		Features:   []string{wire.FeatureThaw},
		Generation: p.Generation,
		BootID:     a.bootID,
		Phase:      a.Phase(),
	})
	if err != nil {
		return err
	}
	_, err = conn.Write(wire.AppendAnswer(nil, p.Nonce, hello))
	return err
}

// serveSession accepts calls until the session ends.
func (a *Agent) serveSession(ctx context.Context, session *yamux.Session) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(errGone)
	var active atomic.Int32
	for {
		stream, err := session.AcceptStream()
		if err != nil {
			return
		}
		if active.Add(1) > maxStreams {
			active.Add(-1)
			s := wire.NewStream(stream)
			_ = s.SendError(wire.CodeExhausted, "too many calls at once; at most 256 are allowed on one connection")
			_ = s.Close()
			continue
		}
		go func() {
			defer active.Add(-1)
			a.serveStream(ctx, stream)
		}()
	}
}

var errGone = errors.New("the caller is gone")

// serveStream reads one request, runs its handler beside the reading of what follows, and answers.
func (a *Agent) serveStream(ctx context.Context, conn *yamux.Stream) {
	s := wire.NewStream(conn)
	h, request, err := a.request(s)
	if err != nil {
		reply(s, err)
		return
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s.StartReadAhead()
	done := make(chan struct{})
	go func() {
		defer close(done)
		reply(s, a.call(ctx, h, s, request))
	}()
	s.ReadAhead(func() {
		cancel(errGone)
		// Nobody reads what the handler writes any more; a write that waits for room would wait for ever.
		_ = conn.SetWriteDeadline(time.Unix(1, 0))
	})
	<-done
}

func (a *Agent) request(s *wire.Stream) (wire.Handler, []byte, error) {
	kind, payload, err := s.Recv()
	if err != nil {
		return nil, nil, err
	}
	if kind != wire.KindRequest {
		return nil, nil, wire.Errorf(wire.CodeInvalid, "a call begins with a request, not with a frame %q", byte(kind))
	}
	method, request, err := wire.SplitRequest(payload)
	if err != nil {
		return nil, nil, err
	}
	h := a.handlers[method]
	if h == nil {
		return nil, nil, wire.Errorf(wire.CodeUnimplemented, "this guest's agent (version %s) has no method %q", a.cfg.Version, method)
	}
	return h, request, nil
}

// call runs a handler; its panic ends the call, not the machine.
func (a *Agent) call(ctx context.Context, h wire.Handler, s *wire.Stream, request []byte) (err error) {
	defer func() {
		if r := recover(); r != nil {
			fmt.Fprintf(a.cfg.Console, "forkd-agent: panic: %v\n%s", r, debug.Stack())
			err = wire.Errorf(wire.CodeInternal, "the guest agent has a bug: %v; its console has the details", r)
		}
	}()
	return h(ctx, s, request)
}

// reply ends the call. Errors of sending say that nobody listens.
func reply(s *wire.Stream, err error) {
	var refusal *wire.Error
	switch {
	case err == nil:
		_ = s.End()
	case errors.As(err, &refusal):
		_ = s.SendError(refusal.Code, refusal.Message)
	default:
		_ = s.SendError(wire.CodeInternal, err.Error())
	}
	_ = s.Close()
}

// decode reads a request's JSON.
func decode(request []byte, v any) error {
	if err := wire.Decode(request, v); err != nil {
		return wire.Errorf(wire.CodeInvalid, "unreadable request: %v", err)
	}
	return nil
}

// channel is the port with its one current session.
type channel struct {
	port io.ReadWriter

	readMu   sync.Mutex // held while reading: an old session may still be at it when the next begins
	receiver *wire.Receiver

	writeMu sync.Mutex // keeps an old session's bytes out of the next
	current *sessionConn
}

func (c *channel) await() (wire.Preamble, error) {
	c.readMu.Lock()
	defer c.readMu.Unlock()
	return c.receiver.Await()
}

// begin makes the connection of a new session; earlier ones write nothing from then on.
func (c *channel) begin() *sessionConn {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	c.current = &sessionConn{channel: c}
	return c.current
}

// sessionConn is the channel for the length of a session.
type sessionConn struct {
	channel *channel
	closed  atomic.Bool
}

func (s *sessionConn) Read(p []byte) (int, error) {
	c := s.channel
	c.readMu.Lock()
	defer c.readMu.Unlock()
	if s.closed.Load() {
		return 0, io.EOF
	}
	n, err := c.receiver.Read(p)
	if err != nil {
		s.closed.Store(true)
	}
	return n, err
}

func (s *sessionConn) Write(p []byte) (int, error) {
	c := s.channel
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	if c.current != s || s.closed.Load() {
		return 0, io.ErrClosedPipe
	}
	return c.port.Write(p)
}

// Close ends the session, not the channel.
func (s *sessionConn) Close() error {
	s.closed.Store(true)
	return nil
}
