package httpapi

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/host"
)

const (
	defaultExecTimeout = 30 * time.Second
	maxCaptured        = 16 << 20 // of each output stream in a JSON reply; more is a matter for streams
)

func (s *Server) exec(w http.ResponseWriter, r *http.Request) error {
	return s.runExec(w, r, func(ctx context.Context) (call.Opener, error) { return s.Host.Guest(ctx, r.PathValue("id")) })
}

// runExec runs a command in the guest that find finds.
func (s *Server) runExec(w http.ResponseWriter, r *http.Request, find func(context.Context) (call.Opener, error)) error {
	var req api.ExecRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	start, err := startRequest(req)
	if err != nil {
		return err
	}
	if err := s.noteArgv(r, req.Args...); err != nil {
		return err
	}
	conn, err := find(r.Context())
	if err != nil {
		return err
	}
	var stdin io.Reader
	if req.Stdin != "" {
		stdin = strings.NewReader(req.Stdin)
	}
	if kind := wantsEvents(r); kind != "" {
		return streamExec(r.Context(), &events{w: w, kind: kind}, conn, start, stdin, req, func(err error) error { return s.because(r, err) })
	}
	if req.Base64 {
		return fmt.Errorf("%w: base64 is for streams; send Accept: %s, or %s", host.ErrInvalid, eventStream, jsonLines)
	}
	stdout, stderr := capture{}, capture{}
	end, err := call.Run(r.Context(), conn, start, stdin, call.Output{Stdout: &stdout, Stderr: &stderr}, nil)
	if err != nil {
		return fmt.Errorf("exec %.80q: %w", req.Args[0], err)
	}
	return Reply(w, http.StatusOK, api.ExecResponse{
		Stdout: stdout.text(), Stderr: stderr.text(), ExitCode: end.Code(), Error: end.Problem(),
		TimedOut: end.TimedOut,
	})
}

func startRequest(req api.ExecRequest) (wire.StartRequest, error) {
	if len(req.Args) == 0 || req.Args[0] == "" {
		return wire.StartRequest{}, fmt.Errorf("%w: args is empty; give the command and its arguments", host.ErrInvalid)
	}
	timeout, err := millis("timeout_secs", req.TimeoutSecs, defaultExecTimeout)
	if err != nil {
		return wire.StartRequest{}, err
	}
	stdin := req.Stdin != ""
	out := wire.StartRequest{
		Process: wire.ProcessConfig{Cmd: req.Args[0], Args: req.Args[1:], Envs: req.Env}, Stdin: &stdin, User: req.User,
		TimeoutMS: timeout,
	}
	if req.Cwd != "" {
		out.Process.Cwd = &req.Cwd
	}
	if req.Tag != "" {
		out.Tag = &req.Tag
	}
	return out, nil
}

func millis(field string, secs float64, otherwise time.Duration) (int64, error) {
	if secs == 0 {
		return otherwise.Milliseconds(), nil
	}
	if secs < 0 || math.IsNaN(secs) || secs > maxTimeout.Seconds() {
		return 0, fmt.Errorf("%w: %s is %g; allowed is up to %g", host.ErrInvalid, field, secs, maxTimeout.Seconds())
	}
	return max(1, int64(secs*1000)), nil
}

const maxTimeout = 7 * 24 * time.Hour

func (s *Server) ping(w http.ResponseWriter, r *http.Request) error {
	conn, err := s.Host.Look(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	if err := conn.Ping(r.Context()); err != nil {
		return fmt.Errorf("ping: %w", err)
	}
	return Reply(w, http.StatusOK, api.Pong{Pong: true, Agent: conn.Hello().Agent})
}

// capture keeps the first maxCaptured bytes and counts the rest.
type capture struct {
	buf  bytes.Buffer
	lost int64
}

func (c *capture) Write(p []byte) (int, error) {
	room := min(len(p), maxCaptured-c.buf.Len())
	c.buf.Write(p[:room])
	c.lost += int64(len(p) - room)
	return len(p), nil
}

func (c *capture) text() string {
	text := strings.ToValidUTF8(c.buf.String(), "\uFFFD")
	if c.lost > 0 {
		text += fmt.Sprintf("\n[forkd: %d more bytes were cut]\n", c.lost)
	}
	return text
}

// callProtocol is the name a client upgrades to for one call into the guest.
const callProtocol = "forkd-call/1"

// call passes one call through to the guest's agent: the frames of package wire, both ways, until either side is
// done. The first frame names the method, and only methods that users may call go through.
func (s *Server) call(w http.ResponseWriter, r *http.Request) error {
	if r.Header.Get("Upgrade") != callProtocol {
		return &api.Error{Code: api.CodeInvalid, Message: "this route wants Upgrade: " + callProtocol}
	}
	conn, err := s.Host.Guest(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	below, err := conn.OpenRaw(r.Context())
	if err != nil {
		return fmt.Errorf("open a call: %w", err)
	}
	defer below.Close()
	w.Header().Set("Connection", "Upgrade")
	w.Header().Set("Upgrade", callProtocol)
	w.WriteHeader(http.StatusSwitchingProtocols)
	client, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return fmt.Errorf("take over the connection: %w", err)
	}
	defer client.Close()
	up := readWriter{buffered.Reader, client}

	first := wire.NewStream(nopCloser{up})
	method, body, err := request(first)
	if err != nil {
		return first.SendError(wire.CodeInvalid, err.Error())
	}
	if !allowed(method) {
		return first.SendError(wire.CodeDenied, fmt.Sprintf("method %.60q is not for clients", method))
	}
	if err := s.noteCall(r, method, body); err != nil {
		return first.SendError(wire.CodeUnavailable, err.Error())
	}
	gone := func() { _ = client.Close(); _ = below.Close() }
	stop := watchHangup(client, gone)
	defer stop()
	// A guest that takes nothing keeps nobody; a client that leaves meanwhile is noticed as well.
	_ = below.SetWriteDeadline(time.Now().Add(takeTimeout))
	if err := wire.NewStream(nopCloser{below}).SendRawRequest(method, body); err != nil {
		return first.SendError(wire.CodeUnavailable, "the sandbox's agent is gone, or does not take the request")
	}
	_ = below.SetWriteDeadline(time.Time{})
	pipe(r.Context(), up, below, func() { _ = client.Close() }, func() { _ = below.Close() })
	return nil
}

// takeTimeout is how long a guest may take to accept a request.
const takeTimeout = 30 * time.Second

func request(s *wire.Stream) (method string, body []byte, err error) {
	kind, payload, err := s.Recv()
	if err != nil {
		return "", nil, err
	}
	if kind != wire.KindRequest {
		return "", nil, wire.Errorf(wire.CodeInvalid, "the first frame is no request")
	}
	return wire.SplitRequest(payload)
}

// pipe copies both ways until both are done, and tells the client why if the guest's side breaks off. Half-closes travel as frames inside, so the end of one direction of the
// connection means that its sender is gone: then the other direction has nobody left.
func pipe(ctx context.Context, up, below io.ReadWriter, closeUp, closeBelow func()) {
	stop := context.AfterFunc(ctx, func() { closeUp(); closeBelow() })
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(below, up)
		closeBelow()
	}()
	answer := &answering{w: up}
	_, err := io.Copy(answer, below)
	if answer.open() { // A client that is gone is not told, either.
		_ = wire.NewStream(nopCloser{up}).SendError(wire.CodeUnavailable, brokenOff(err))
	}
	closeUp()
	<-done
}

func brokenOff(err error) string {
	if err == nil {
		return "the sandbox's agent ended the call without an answer"
	}
	return "the call broke off: " + err.Error()
}

// answering passes a guest's frames on to a client, and knows whether the call has had its end.
type answering struct {
	w      io.Writer
	header []byte // of the frame that begins
	left   int    // of its payload
	ended  bool   // by the last frame
}

// open reports whether an error can be said in the guest's place: no frame is cut off, and none was the last.
func (a *answering) open() bool { return !a.ended && a.left == 0 && len(a.header) == 0 }

func (a *answering) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		if a.left > 0 {
			n := min(a.left, len(rest))
			a.left -= n
			rest = rest[n:]
			continue
		}
		a.header = append(a.header, rest[0])
		rest = rest[1:]
		if len(a.header) == frameHeader {
			kind := wire.Kind(a.header[0])
			a.ended = kind == wire.KindEnd || kind == wire.KindError
			a.left = int(binary.BigEndian.Uint32(a.header[1:]))
			a.header = a.header[:0]
		}
	}
	return a.w.Write(p)
}

// frameHeader is a frame's kind and length, as docs/guest-protocol.md has it.
const frameHeader = 5

func allowed(method string) bool {
	switch method {
	case wire.MethodPing, wire.MethodMetrics, wire.MethodExtract, wire.MethodArchive, wire.MethodDial, wire.MethodPorts:
		return true
	}
	for _, prefix := range []string{"process.", "filesystem.", "context."} {
		if strings.HasPrefix(method, prefix) {
			return true
		}
	}
	return false
}

type readWriter struct {
	io.Reader
	io.Writer
}

type nopCloser struct{ io.ReadWriter }

func (nopCloser) Close() error { return nil }
