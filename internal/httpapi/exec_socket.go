package httpapi

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/host"
)

// execProtocol is what a client may name as its WebSocket's protocol.
const execProtocol = "forkd.exec.v1"

const (
	maxMessage   = 1 << 20 // from the client
	startTimeout = 30 * time.Second
	pingInterval = 30 * time.Second
	// pongTimeout bounds how long a client that takes nothing is waited for. Meanwhile the command may stand still, as its
	// output has nowhere to go.
	pongTimeout = 2 * time.Minute
	killTimeout = 10 * time.Second
	maxQueued   = 64 // messages of input that the guest has not taken yet
)

// Channels of binary messages, as their first byte.
const (
	channelStdin = iota
	channelStdout
	channelStderr
)

var errLeft = errors.New("the client has left")

// execSocket runs a command, or comes to one, over a WebSocket: see api.ExecStart for what is said there.
func (s *Server) execSocket(w http.ResponseWriter, r *http.Request) error {
	if err := wantsSocket(r); err != nil {
		return err
	}
	guest, err := s.Host.Guest(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return s.serveSocket(w, r, guest)
}

func (s *Server) serveSocket(w http.ResponseWriter, r *http.Request, guest call.Opener) error {
	// Pages of any origin may come: what opens the door is a token, which a browser does not send by itself.
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{execProtocol}, InsecureSkipVerify: true})
	if err != nil {
		return err
	}
	defer c.CloseNow() //nolint:errcheck // it may be closed already
	c.SetReadLimit(maxMessage)
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	note := func(argv ...string) error { return s.noteArgv(r, argv...) }
	x := &socket{
		conn: c, guest: guest, note: note, why: func(err error) error { return s.because(r, err) }, leave: cancel,
		started: make(chan struct{}), input: make(chan []byte, maxQueued),
	}
	return x.serve(ctx)
}

// wantsSocket refuses in our own words what is no WebSocket's beginning.
func wantsSocket(r *http.Request) error {
	key, err := base64.StdEncoding.DecodeString(r.Header.Get("Sec-WebSocket-Key"))
	if headerHas(r, "Connection", "upgrade") && headerHas(r, "Upgrade", "websocket") && r.Header.Get("Sec-WebSocket-Version") == "13" &&
		err == nil && len(key) == 16 && r.ProtoAtLeast(1, 1) {
		return nil
	}
	return &api.Error{
		Code: api.CodeInvalid, Message: "this route is a WebSocket (version 13), and the request does not ask for one",
		Hint: "POST is for a command without a WebSocket",
	}
}

func headerHas(r *http.Request, name, word string) bool {
	for part := range strings.SplitSeq(strings.Join(r.Header.Values(name), ","), ",") {
		if strings.EqualFold(strings.TrimSpace(part), word) {
			return true
		}
	}
	return false
}

// socket is one command's WebSocket.
type socket struct {
	conn  *websocket.Conn
	guest call.Opener
	note  func(argv ...string) error // of what is about to be run
	why   func(error) error          // explains what broke a call
	leave context.CancelCauseFunc

	takesInput bool
	input      chan []byte // closed by eof
	eof        sync.Once
	rest       []byte // of a message of input
	ended      bool   // input is; for the reader of messages alone

	started chan struct{}
	pid     uint32 // once it has
}

func (x *socket) serve(ctx context.Context) error {
	start, err := x.first(ctx)
	if err != nil {
		return x.fail(ctx, err)
	}
	run, err := x.plan(start)
	if err == nil {
		err = x.note(start.Args...)
	}
	if err != nil {
		return x.fail(ctx, err)
	}
	var beside sync.WaitGroup
	defer beside.Wait()
	defer x.leave(errLeft) // which ends those beside
	beside.Go(func() { x.listen(ctx) })
	beside.Go(func() { x.ping(ctx) })
	end, err := run(ctx)
	if ctx.Err() != nil {
		x.abandon(ctx, start)
		return nil
	}
	if err != nil {
		return x.fail(ctx, err)
	}
	if err := x.tell(ctx, processExit(end)); err != nil {
		return err
	}
	return x.conn.Close(websocket.StatusNormalClosure, "")
}

// abandon ends a command whose client has left, if that is what the client asked for.
func (x *socket) abandon(ctx context.Context, start *api.ExecStart) {
	select {
	case <-x.started:
	default:
		return
	}
	if !start.KillOnClose {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
	defer cancel()
	which := wire.SendSignalRequest{Process: wire.ProcessSelector{PID: x.pid}, Signal: 9, Tree: true}
	if call.Signal(ctx, x.guest, which) != nil { // a guest without cgroups knows no descendants, but process groups
		which.Tree = false
		_ = call.Signal(ctx, x.guest, which) // it may have ended; nobody is there to be told
	}
}

// first reads what is to be done.
func (x *socket) first(ctx context.Context) (*api.ExecStart, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("%w: no first message within %s", host.ErrInvalid, startTimeout))
	defer cancel()
	kind, text, err := x.conn.Read(ctx)
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", errLeft, err)
	case kind != websocket.MessageText:
		return nil, fmt.Errorf("%w: the first message is binary; it is JSON that says what to run", host.ErrInvalid)
	}
	start := &api.ExecStart{}
	return start, decodeMessage(text, start)
}

func decodeMessage(text []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("%w: message: %s", host.ErrInvalid, strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: message: more than one JSON value", host.ErrInvalid)
	}
	return nil
}

// plan makes the call of what a client asks for.
func (x *socket) plan(start *api.ExecStart) (func(context.Context) (*wire.ProcessEnd, error), error) {
	what := 0
	for _, given := range []bool{len(start.Args) > 0, start.Shell, start.Attach != ""} {
		if given {
			what++
		}
	}
	if what != 1 {
		return nil, fmt.Errorf("%w: give one of args, shell and attach", host.ErrInvalid)
	}
	if start.Attach != "" {
		return x.attach(start)
	}
	if start.Replay || start.Observe {
		return nil, fmt.Errorf("%w: replay and observe are for attach", host.ErrInvalid)
	}
	args := start.Args
	if start.Shell { // what agents run that do not know how to find one
		args = []string{"/bin/sh", "-c", "exec $(command -v bash || echo /bin/sh) -l"}
	}
	req, err := startRequest(api.ExecRequest{
		Args: args, Env: start.Env, Cwd: start.Cwd, User: start.User, Tag: start.Tag, TimeoutSecs: start.TimeoutSecs,
	})
	if err != nil {
		return nil, err
	}
	if start.TimeoutSecs == 0 {
		req.TimeoutMS = 0
	}
	req.Shell = start.Shell
	x.takesInput = start.Stdin || start.TTY != nil
	req.Stdin = &x.takesInput
	if t := start.TTY; t != nil {
		req.PTY = &wire.PTY{Size: wire.PTYSize{Cols: t.Cols, Rows: t.Rows}, Term: t.Term}
		if t.Cols == 0 || t.Rows == 0 {
			req.PTY.Size = wire.PTYSize{Cols: 80, Rows: 24}
		}
	}
	return func(ctx context.Context) (*wire.ProcessEnd, error) {
		return call.Start(ctx, x.guest, req, x.session(ctx))
	}, nil
}

func (x *socket) attach(start *api.ExecStart) (func(context.Context) (*wire.ProcessEnd, error), error) {
	if len(start.Env) > 0 || start.Cwd != "" || start.User != "" || start.Tag != "" || start.TimeoutSecs != 0 || start.TTY != nil {
		return nil, fmt.Errorf("%w: attach is to what runs already; env, cwd, user, tag, timeout_secs and tty are for what is started", host.ErrInvalid)
	}
	x.takesInput = start.Stdin && !start.Observe
	req := wire.ConnectRequest{Process: call.Select(start.Attach), Replay: start.Replay, Observe: start.Observe}
	return func(ctx context.Context) (*wire.ProcessEnd, error) {
		return call.Attach(ctx, x.guest, req, x.session(ctx))
	}, nil
}

func (x *socket) session(ctx context.Context) call.Session {
	s := call.Session{
		Output: call.Output{Stdout: channelWriter{ctx, x.conn, channelStdout}, Stderr: channelWriter{ctx, x.conn, channelStderr}},
		Started: func(p wire.ProcessStart) {
			x.pid = p.PID
			close(x.started)
			_ = x.tell(ctx, api.ExecEvent{Type: "start", PID: p.PID, TTY: p.PTY})
		},
		Lost: func(n int64) { _ = x.tell(ctx, api.ExecEvent{Type: "lost", Bytes: n}) },
	}
	if x.takesInput {
		s.Stdin = inputReader{ctx, x}
	}
	return s
}

// listen obeys a client's messages until it leaves, or the command has ended.
func (x *socket) listen(ctx context.Context) {
	for {
		kind, text, err := x.conn.Read(ctx)
		if err != nil {
			x.leave(errLeft)
			return
		}
		if err := x.obey(ctx, kind, text); err != nil {
			e := toAPI(err)
			if x.tell(ctx, api.ExecEvent{Type: "refused", Code: e.Code, Text: e.Message}) != nil {
				return
			}
		}
	}
}

func (x *socket) obey(ctx context.Context, kind websocket.MessageType, text []byte) error {
	if kind == websocket.MessageBinary {
		if len(text) == 0 || text[0] != channelStdin {
			return fmt.Errorf("%w: a binary message begins with a byte 0 and goes on with input", host.ErrInvalid)
		}
		return x.feed(ctx, text[1:])
	}
	var c api.ExecControl
	if err := decodeMessage(text, &c); err != nil {
		return err
	}
	switch c.Type {
	case "stdin":
		return x.feed(ctx, []byte(c.Text))
	case "eof":
		x.ended = true
		x.eof.Do(func() { close(x.input) })
		return nil
	case "resize", "signal":
	default:
		return fmt.Errorf("%w: type is %.40q; give stdin, eof, resize or signal", host.ErrInvalid, c.Type)
	}
	select {
	case <-x.started:
	case <-ctx.Done():
		return nil
	}
	which := wire.ProcessSelector{PID: x.pid}
	if c.Type == "resize" {
		size := wire.PTYSize{Cols: c.Cols, Rows: c.Rows}
		return call.Unary(ctx, x.guest, wire.MethodProcessUpdate, wire.UpdateRequest{Process: which, PTY: &wire.PTY{Size: size}}, nil)
	}
	number, err := signalNumber(c.Signal)
	if err != nil {
		return err
	}
	return call.Signal(ctx, x.guest, wire.SendSignalRequest{Process: which, Signal: number, Group: c.Group})
}

func (x *socket) feed(ctx context.Context, p []byte) error {
	if !x.takesInput {
		return fmt.Errorf("%w: the command was started without input; set stdin in the first message", host.ErrInvalid)
	}
	if x.ended {
		return fmt.Errorf("%w: the command's input is closed", host.ErrInvalid)
	}
	if len(p) == 0 {
		return nil
	}
	select {
	case x.input <- p:
	case <-ctx.Done():
	}
	return nil
}

// ping finds out that a client is gone which has not said so.
func (x *socket) ping(ctx context.Context) {
	tick := time.NewTicker(pingInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		wait, cancel := context.WithTimeout(ctx, pongTimeout)
		err := x.conn.Ping(wait)
		cancel()
		if err != nil {
			x.leave(errLeft)
			return
		}
	}
}

func (x *socket) tell(ctx context.Context, e api.ExecEvent) error {
	text, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("encode an event: %w", err)
	}
	return x.conn.Write(ctx, websocket.MessageText, text)
}

// fail tells why it goes no further.
func (x *socket) fail(ctx context.Context, err error) error {
	if ctx.Err() != nil || errors.Is(err, errLeft) {
		return nil //nolint:nilerr // nobody is there to be told
	}
	code := websocket.StatusInternalError
	e := callFailed(x.why(err))
	if e.Code == api.CodeInvalid {
		code = websocket.StatusPolicyViolation
	}
	return errors.Join(err, x.tell(ctx, e), x.conn.Close(code, string(e.Code)))
}

// channelWriter sends output.
type channelWriter struct {
	ctx     context.Context //nolint:containedctx // of the one call that it writes for
	conn    *websocket.Conn
	channel byte
}

func (c channelWriter) Write(p []byte) (int, error) {
	if err := c.conn.Write(c.ctx, websocket.MessageBinary, append([]byte{c.channel}, p...)); err != nil {
		return 0, err
	}
	return len(p), nil
}

// inputReader reads what a client sends as input.
type inputReader struct {
	ctx context.Context //nolint:containedctx // of the one call that reads
	x   *socket
}

func (i inputReader) Read(p []byte) (int, error) {
	if len(i.x.rest) == 0 {
		select {
		case next, ok := <-i.x.input:
			if !ok {
				return 0, io.EOF
			}
			i.x.rest = next
		case <-i.ctx.Done():
			return 0, context.Cause(i.ctx)
		}
	}
	n := copy(p, i.x.rest)
	i.x.rest = i.x.rest[n:]
	return n, nil
}
