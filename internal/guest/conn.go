// Package guest is the host's side of the agent's protocol: a connection to one machine's agent and typed calls on it.
// It does not know what a machine is: it dials what it is given. The daemon's core imports it. Its tests run the real
// agent's session over sockets, and garbage in its place.
package guest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"forkd.dev/forkd/internal/guest/mux"
	"forkd.dev/forkd/internal/guest/wire"
)

const (
	// repeatPreamble is how often the host knocks: bytes written before the guest has opened its port may be lost.
	repeatPreamble = 50 * time.Millisecond
	// firstPatience is how long a connection may stay unanswered before it is made anew; each further one gets twice as
	// long. A port that missed its opening stays silent for as long as it is left open: seen, rarely, after a daemon had
	// been killed in a capture.
	firstPatience = 500 * time.Millisecond
	// maxStreams are the calls that may be open at a time: a few more than the agent serves at once, so that it is the one
	// who refuses.
	maxStreams = 288
	// maxClockQuestions is more than an agent asks.
	maxClockQuestions = 16
	// maxReply is of a message in the host's own calls, maxMessages what the large messages of a connection's calls take
	// together.
	maxReply    = 1 << 20
	maxMessages = 128 << 20
)

// ErrProtocol says that the agent and this program cannot talk to each other.
var ErrProtocol = errors.New("guest agent's protocol")

// ErrEnded says that a call broke because the connection to the agent has ended: with its machine, mostly.
var ErrEnded = mux.ErrSessionEnd

// Conn is a connection to an agent. All methods are safe for concurrent use.
type Conn struct {
	hello   wire.Hello
	session *mux.Session
	freezes atomic.Uint64 // how often Quiesce was called
	budget  *wire.Budget
}

// Dial connects and returns once the agent has answered with the generation. It knocks until ctx ends, however long the
// guest takes to boot; ctx does not bound the connection afterwards. An earlier connection to the same agent ends.
func Dial(ctx context.Context, dial func(context.Context) (net.Conn, error), generation uint64) (*Conn, error) {
	for patience := firstPatience; ; patience *= 2 {
		attempt, cancel := context.WithTimeout(ctx, patience)
		c, err := open(attempt, dial, func(nc net.Conn) (*Conn, error) { return handshake(nc, generation) })
		tired := attempt.Err() != nil
		cancel()
		if err == nil || !tired {
			return c, err
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("wait for guest agent's answer: %w", context.Cause(ctx))
		}
	}
}

// AwakenFirst connects to a fresh fork and gives it its identity in the same exchange, which spares the fork the work of
// a session before it is awake. The agent must be of protocol version 2 at least and have its port open, as in every
// fork: it is asked once. A refusal by the guest is a *wire.Error. After an error the child must be killed: none of its
// processes has run.
func AwakenFirst(
	ctx context.Context, dial func(context.Context) (net.Conn, error), generation uint64, req *wire.AwakenRequest,
) (*Conn, *wire.AwakenReport, error) {
	c, err := open(ctx, dial, func(nc net.Conn) (*Conn, error) { return awakening(nc, generation, req) })
	if err != nil {
		return nil, nil, err
	}
	return c, c.hello.Awakened, nil
}

func open(ctx context.Context, dial func(context.Context) (net.Conn, error), shake func(net.Conn) (*Conn, error)) (*Conn, error) {
	nc, err := dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect to guest agent: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.SetDeadline(time.Unix(1, 0)) })
	c, err := shake(nc)
	if !stop() && err == nil {
		err = context.Cause(ctx)
		_ = c.Close()
	}
	if err == nil {
		return c, nil
	}
	err = errors.Join(err, nc.Close())
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return nil, fmt.Errorf("wait for guest agent's answer: %w", err)
}

func handshake(nc net.Conn, generation uint64) (*Conn, error) {
	p := wire.Preamble{Version: wire.Version, Generation: generation}
	_, _ = rand.Read(p.Nonce[:]) // never fails
	knock := make(chan error, 1)
	answered := make(chan struct{})
	go func() { knock <- repeat(nc, p.Append(nil), answered) }()

	r := bufio.NewReaderSize(nc, 32<<10)
	b, err := wire.ReadAnswer(r, p.Nonce)
	close(answered)
	if err != nil {
		_ = nc.SetDeadline(time.Unix(1, 0)) // so that a write that blocks ends
	}
	// The last preamble has to be out as a whole before the session's bytes.
	if werr := <-knock; err == nil {
		err = werr
	}
	if err != nil {
		return nil, err
	}
	return begin(nc, generation, r, b)
}

// awakening is the handshake with a request in it.
func awakening(nc net.Conn, generation uint64, req *wire.AwakenRequest) (*Conn, error) {
	identity, err := wire.IdentityFile(req, generation, time.Now())
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", wire.MethodAwaken, err)
	}
	p := wire.Preamble{Version: wire.Version, Awaken: true, Generation: generation}
	_, _ = rand.Read(p.Nonce[:]) // never fails
	// One write, so that the guest has one interrupt.
	var first bytes.Buffer
	first.Write(p.Append(nil))
	if _, err := wire.NewChunkWriter(&first).Write(wire.AppendAwaken(nil, req, identity)); err != nil {
		return nil, err
	}
	if _, err := nc.Write(first.Bytes()); err != nil {
		return nil, err
	}
	r, w := bufio.NewReaderSize(nc, 32<<10), wire.NewChunkWriter(nc)
	for range maxClockQuestions {
		b, err := wire.ReadAnswer(r, p.Nonce)
		if err != nil {
			return nil, err
		}
		if len(b) == 0 { // the agent asks for the time
			if _, err := w.Write(wire.AppendClock(nil, time.Now())); err != nil {
				return nil, err
			}
			continue
		}
		c, err := begin(nc, generation, r, b)
		switch {
		case err != nil:
			return nil, err
		case c.hello.Refusal != nil:
			return nil, errors.Join(c.hello.Refusal, c.Close())
		case c.hello.Awakened == nil:
			return nil, errors.Join(fmt.Errorf("%w: an answer without a report", ErrProtocol), c.Close())
		}
		if err := severed(req, c.hello.Awakened); err != nil {
			return nil, errors.Join(err, c.Close())
		}
		return c, nil
	}
	return nil, fmt.Errorf("%w: more than %d questions for the time", ErrProtocol, maxClockQuestions)
}

// begin starts the session after an answer.
func begin(nc net.Conn, generation uint64, r *bufio.Reader, hello []byte) (*Conn, error) {
	c := &Conn{budget: wire.NewBudget(maxMessages)}
	if err := wire.Decode(hello, &c.hello); err != nil {
		return nil, fmt.Errorf("%w: unreadable hello: %w", ErrProtocol, err)
	}
	tidy(&c.hello)
	if v := c.hello.Version; v > wire.Version || v < wire.Version-1 || v < 1 {
		return nil, fmt.Errorf("%w: agent speaks version %d, this forkd versions %d to %d; build the snapshot again",
			ErrProtocol, v, max(1, wire.Version-1), wire.Version)
	}
	if c.hello.Generation != generation {
		return nil, fmt.Errorf("%w: an answer to connection %d came on connection %d", ErrProtocol, c.hello.Generation, generation)
	}
	c.session = mux.Client(&sessionConn{Conn: nc, r: r, w: wire.NewChunkWriter(nc)}, maxStreams)
	return c, nil
}

// repeat writes the preamble now and then until answered.
func repeat(w io.Writer, preamble []byte, answered <-chan struct{}) error {
	tick := time.NewTicker(repeatPreamble)
	defer tick.Stop()
	for {
		if _, err := w.Write(preamble); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-answered:
			return nil
		}
	}
}

// sessionConn is what follows the handshake: chunks to the guest, plain bytes from it.
type sessionConn struct {
	net.Conn
	r *bufio.Reader
	w *wire.ChunkWriter
}

func (c *sessionConn) Read(p []byte) (int, error)  { return c.r.Read(p) }
func (c *sessionConn) Write(p []byte) (int, error) { return c.w.Write(p) }

// Hello is what the agent said of itself when the connection was made.
func (c *Conn) Hello() wire.Hello { return c.hello }

// Closed is closed when the connection has ended, by either side.
func (c *Conn) Closed() <-chan struct{} { return c.session.Done() }

// Err is why the connection has ended; nil while it has not.
func (c *Conn) Err() error { return c.session.Err() }

// Close ends the connection and all calls on it. Processes in the guest go on.
func (c *Conn) Close() error { return c.session.Close() }

// OpenRaw opens a bare stream, on which the caller itself speaks the frames of one call.
func (c *Conn) OpenRaw(ctx context.Context) (net.Conn, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	s, err := c.session.Open(ctx)
	if err != nil {
		return nil, fmt.Errorf("open stream to guest agent: %w", err)
	}
	return s, nil
}

// Open starts a streaming call. The stream is broken off when ctx ends; the caller closes it.
func (c *Conn) Open(ctx context.Context, method string, in any) (*wire.Stream, error) {
	nc, err := c.OpenRaw(ctx)
	if err != nil {
		return nil, err
	}
	call := &callConn{Conn: nc}
	call.stop = context.AfterFunc(ctx, func() { _ = nc.SetDeadline(time.Unix(1, 0)) })
	s := wire.NewStream(call)
	s.Limit(wire.MaxMessage, c.budget)
	if err := s.SendRequest(method, in); err != nil {
		return nil, errors.Join(fmt.Errorf("call %s: %w", method, err), s.Close())
	}
	return s, nil
}

// callConn forgets the context when it is closed.
type callConn struct {
	net.Conn
	stop func() bool
}

func (c *callConn) Close() error {
	c.stop()
	return c.Conn.Close()
}

// Call makes a call with one reply; out may be nil. A refusal by the guest is a *wire.Error. A ctx without a deadline gets
// one.
func (c *Conn) Call(ctx context.Context, method string, in, out any) error {
	if _, limited := ctx.Deadline(); !limited {
		var cancel context.CancelFunc
		ctx, cancel = within(ctx, anyBound, method)
		defer cancel()
	}
	s, err := c.Open(ctx, method, in)
	if err != nil {
		return err
	}
	defer s.Close()
	s.Limit(maxReply, c.budget)
	if out != nil {
		if err := s.RecvMessage(out); err != nil {
			return callError(ctx, method, err)
		}
	}
	return finish(ctx, method, s)
}

// finish waits for the end of a call.
func finish(ctx context.Context, method string, s *wire.Stream) error {
	switch kind, _, err := s.Recv(); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return callError(ctx, method, err)
	default:
		return fmt.Errorf("call %s: %w: unexpected frame %q at the end", method, ErrProtocol, byte(kind))
	}
}

// callError tells the guest's refusal, which stays what it is, from a call that broke.
func callError(ctx context.Context, method string, err error) error {
	var refusal *wire.Error
	switch {
	case errors.As(err, &refusal):
		return refusal
	case ctx.Err() != nil:
		return fmt.Errorf("call %s: %w", method, context.Cause(ctx))
	case errors.Is(err, io.EOF):
		err = fmt.Errorf("%w: the reply is missing", ErrProtocol)
	}
	return fmt.Errorf("call %s: %w", method, err)
}
