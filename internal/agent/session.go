package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"forkd.dev/forkd/internal/guest/mux"
	"forkd.dev/forkd/internal/guest/wire"
)

// maxCalls bounds the calls of one session.
const maxCalls = 256

// Serve answers connections on port until reading it fails; that error is returned. Port is never closed here. One
// session is alive at a time: a new preamble ends the one before, whose handlers are cancelled and not waited for.
//
// All that arrives is read here, by one goroutine: a fork wakes up in its read, with no other on the way to the first
// answer.
func (a *Agent) Serve(ctx context.Context, port io.ReadWriter) error {
	c := &channel{port: port, receiver: wire.NewReceiver(port)}
	for {
		p, err := c.receiver.Await()
		if err != nil {
			return err
		}
		a.generation.Store(p.Generation)
		conn := c.begin()
		ctx := a.numbered(ctx)
		err = a.greet(ctx, c.receiver, conn, &p)
		if err == nil {
			err = a.session(ctx, c.receiver, conn)
		}
		if !errors.Is(err, wire.ErrTakeover) && !errors.Is(err, wire.ErrLost) {
			return err
		}
	}
}

// greet answers a preamble.
func (a *Agent) greet(ctx context.Context, r *wire.Receiver, conn *sessionConn, p *wire.Preamble) error {
	hello := &wire.Hello{
		Version:    wire.Version,
		Agent:      a.cfg.Version,
		Features:   []string{wire.FeatureThaw, wire.FeatureSteps, wire.FeatureFiles, wire.FeatureInit, wire.FeatureNetwork},
		Generation: p.Generation,
		BootID:     a.bootID,
		Phase:      a.Phase(),
	}
	if p.Awaken {
		if err := a.awakenFirst(ctx, r, conn, p, hello); err != nil {
			return err
		}
	}
	b, err := wire.Encode(hello)
	if err != nil {
		return err
	}
	_, err = conn.Write(wire.AppendAnswer(nil, p.Nonce, b))
	return err
}

// session takes calls until the channel has something else to say; that is returned.
func (a *Agent) session(ctx context.Context, r *wire.Receiver, conn *sessionConn) error {
	var active atomic.Int32
	session := mux.NewServer(conn, 2*maxCalls, func(st *mux.Stream) {
		ctx, cancel := context.WithCancelCause(ctx)
		st.OnGone(func() {
			cancel(errGone)
			// Nobody reads what the handler writes any more; a write that waits for room would wait for ever.
			st.Abort()
		})
		many := active.Add(1) > maxCalls
		a.run(func() {
			defer cancel(nil)
			if many {
				s := wire.NewStream(st)
				_ = s.SendError(wire.CodeExhausted, "too many calls at once; at most 256 are allowed on one connection")
				_ = s.Close()
			} else {
				a.serveStream(ctx, st)
			}
			active.Add(-1)
		})
	})
	defer session.Close()
	var buf [8 << 10]byte
	for {
		n, err := r.Read(buf[:])
		if err != nil {
			_ = conn.Close()
			return err
		}
		if session.Feed(buf[:n]) != nil {
			// Only a new preamble can help.
			_ = conn.Close()
			return wire.ErrLost
		}
	}
}

// serveStream reads one request, runs its handler and answers.
func (a *Agent) serveStream(ctx context.Context, st *mux.Stream) {
	if a.cfg.Begin != nil {
		a.cfg.Begin()
	}
	s := wire.NewStream(st)
	h, request, err := a.request(s)
	if err == nil {
		err = a.call(ctx, h, s, request)
	}
	reply(s, err)
}

var errGone = errors.New("the caller is gone")

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

// call runs a handler.
func (a *Agent) call(ctx context.Context, h wire.Handler, s *wire.Stream, request []byte) error {
	return a.guard(func() error { return h(ctx, s, request) })
}

// guard runs f; its panic ends the call, not the machine.
func (a *Agent) guard(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			fmt.Fprintf(a.cfg.Console, "forkd-agent: panic: %v\n%s", r, debug.Stack())
			err = wire.Errorf(wire.CodeInternal, "the guest agent has a bug: %v; its console has the details", r)
		}
	}()
	return f()
}

// reply ends the call. Errors of sending say that nobody listens.
func reply(s *wire.Stream, err error) {
	if err == nil {
		_ = s.End()
	} else {
		e := refusal(err)
		_ = s.SendError(e.Code, e.Message)
	}
	_ = s.Close()
}

// refusal is an error as the host is told it.
func refusal(err error) *wire.Error {
	if e, ok := errors.AsType[*wire.Error](err); ok {
		return e
	}
	return &wire.Error{Code: wire.CodeInternal, Message: err.Error()}
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
	port     io.ReadWriter
	receiver *wire.Receiver // Serve's alone

	writeMu sync.Mutex // keeps an old session's bytes out of the next
	current *sessionConn
}

// begin makes the sending side of a new session; earlier ones write nothing from then on.
func (c *channel) begin() *sessionConn {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	c.current = &sessionConn{channel: c}
	return c.current
}

// sessionConn is the channel's sending side for the length of a session.
type sessionConn struct {
	channel *channel
	closed  atomic.Bool
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
