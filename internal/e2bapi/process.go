package e2bapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/httpapi"
)

// processEvent is a message of Start and Connect.
type processEvent struct {
	Event struct {
		Start *eventStart `json:"start,omitempty"`
		Data  *eventData  `json:"data,omitempty"`
		End   *eventEnd   `json:"end,omitempty"`
	} `json:"event"`
}

type eventStart struct {
	PID uint32 `json:"pid"`
}

type eventData struct {
	Stdout []byte `json:"stdout,omitempty"`
	Stderr []byte `json:"stderr,omitempty"`
	PTY    []byte `json:"pty,omitempty"`
}

type eventEnd struct {
	ExitCode int     `json:"exitCode"`
	Exited   bool    `json:"exited"`
	Status   string  `json:"status"`
	Error    *string `json:"error,omitempty"`
}

// startRequest has envd's fields alone: the guest knows more, which are not E2B's to give.
type startRequest struct {
	Process wire.ProcessConfig `json:"process"`
	PTY     *pty               `json:"pty"`
	Tag     *string            `json:"tag"`
	Stdin   *bool              `json:"stdin"`
}

type pty struct {
	Size wire.PTYSize `json:"size"`
}

func (p *pty) wire() *wire.PTY {
	if p == nil {
		return nil
	}
	return &wire.PTY{Size: p.Size}
}

type selector struct {
	Process wire.ProcessSelector `json:"process"`
}

// startProcess runs a process. It goes on when the client leaves, and is killed by the client's time limit.
func (s *Server) startProcess(r *http.Request, out *stream) error {
	var req startRequest
	if err := firstFrame(r, &req); err != nil {
		return err
	}
	limit, err := timeoutOf(r)
	if err != nil {
		return err
	}
	if err := s.API.NoteCall(r, wire.MethodProcessStart, append([]string{req.Process.Cmd}, req.Process.Args...)...); err != nil {
		return err
	}
	conn, err := s.guest(r.Context(), r)
	if err != nil {
		return err
	}
	ctx, cancel := r.Context(), func() {}
	if limit > 0 {
		// The guest keeps the limit; this is for one that does not.
		ctx, cancel = context.WithTimeout(ctx, limit+limitGrace)
	}
	defer cancel()
	end, err := s.follow(ctx, conn, wire.MethodProcessStart, wire.StartRequest{
		Process: req.Process, PTY: req.PTY.wire(), Tag: req.Tag, Stdin: req.Stdin, User: userOf(r), TimeoutMS: limit.Milliseconds(),
	}, out)
	switch {
	case err != nil:
		return err
	case end.TimedOut:
		return wire.Errorf(wire.CodeDeadline, "the process was killed: it took longer than %s", limit)
	}
	return out.send(ended(end))
}

// limitGrace is how long after a time limit the guest's word is awaited.
const limitGrace = 15 * time.Second

// connectProcess takes part in a process that runs, or has ended not long ago. The client's time limit is of its listening.
func (s *Server) connectProcess(r *http.Request, out *stream) error {
	var req selector
	if err := firstFrame(r, &req); err != nil {
		return err
	}
	if err := s.API.NoteCall(r, wire.MethodProcessConnect); err != nil {
		return err
	}
	ctx, cancel, err := bounded(r)
	if err != nil {
		return err
	}
	defer cancel()
	conn, err := s.guest(ctx, r)
	if err != nil {
		return err
	}
	end, err := s.follow(ctx, conn, wire.MethodProcessConnect, wire.ConnectRequest{Process: req.Process}, out)
	if err != nil {
		return err
	}
	return out.send(ended(end))
}

func ended(end *wire.ProcessEnd) processEvent {
	var e processEvent
	e.Event.End = &eventEnd{ExitCode: end.ExitCode, Exited: end.Exited, Status: end.Status}
	switch {
	case end.Error != "":
		e.Event.End.Error = &end.Error
	case end.ExitCode != 0: // as Go's Wait has it
		e.Event.End.Error = &end.Status
	}
	return e
}

// follow passes a process's output on until its end.
func (s *Server) follow(ctx context.Context, o call.Opener, method string, in any, out *stream) (*wire.ProcessEnd, error) {
	up, err := o.Open(ctx, method, in)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = up.Close() })
	defer stop()
	defer up.Close()
	for started := false; ; {
		kind, payload, err := up.Recv()
		switch {
		case err != nil && ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case errors.Is(err, io.EOF):
			return nil, wire.Errorf(wire.CodeUnavailable, "the guest does not say how the process ended")
		case err != nil:
			return nil, err
		}
		var e processEvent
		if kind == wire.KindMessage {
			var told wire.ProcessEvent
			if err := wire.Decode(payload, &told); err != nil {
				return nil, err
			}
			switch {
			case told.End != nil:
				return told.End, nil
			case told.Start == nil || started: // what a client was too slow for: envd has no word for it
				continue
			}
			started = true
			e.Event.Start = &eventStart{PID: told.Start.PID}
		} else if e.Event.Data = dataOf(kind, payload); e.Event.Data == nil {
			return nil, wire.Errorf(wire.CodeInternal, "unexpected frame %q in the guest's output", byte(kind))
		}
		if err := out.send(e); err != nil {
			return nil, fmt.Errorf("%w: %w", call.ErrOutput, err)
		}
	}
}

func dataOf(kind wire.Kind, payload []byte) *eventData {
	switch kind {
	case wire.KindStdout:
		return &eventData{Stdout: payload}
	case wire.KindStderr:
		return &eventData{Stderr: payload}
	case wire.KindPTY:
		return &eventData{PTY: payload}
	default:
		return nil
	}
}

func (s *Server) listProcesses(w http.ResponseWriter, r *http.Request) error {
	if err := message(w, r, &struct{}{}); err != nil {
		return err
	}
	var list wire.ProcessList
	if err := s.unary(r, wire.MethodProcessList, wire.ListRequest{}, &list); err != nil {
		return err
	}
	type info struct {
		Config wire.ProcessConfig `json:"config"`
		PID    uint32             `json:"pid"`
		Tag    *string            `json:"tag,omitempty"`
	}
	out := struct {
		Processes []info `json:"processes"`
	}{[]info{}}
	for _, p := range list.Processes {
		out.Processes = append(out.Processes, info{p.Config, p.PID, p.Tag})
	}
	return httpapi.Reply(w, http.StatusOK, out)
}

// done replies to a call that has nothing to tell.
func done(w http.ResponseWriter, err error) error {
	if err != nil {
		return err
	}
	return httpapi.Reply(w, http.StatusOK, struct{}{})
}

func (s *Server) updateProcess(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		selector

		PTY *pty `json:"pty"`
	}
	if err := message(w, r, &req); err != nil {
		return err
	}
	return done(w, s.unary(r, wire.MethodProcessUpdate, wire.UpdateRequest{Process: req.Process, PTY: req.PTY.wire()}, nil))
}

type input struct {
	Stdin []byte `json:"stdin"`
	PTY   []byte `json:"pty"`
}

func (s *Server) sendInput(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		selector

		Input input `json:"input"`
	}
	if err := message(w, r, &req); err != nil {
		return err
	}
	return done(w, s.unary(r, wire.MethodProcessSendInput, wire.SendInputRequest{
		Process: req.Process, Stdin: req.Input.Stdin, PTY: req.Input.PTY,
	}, nil))
}

// signal is envd's, by name or number.
type signal int

func (s *signal) UnmarshalJSON(text []byte) error {
	switch string(bytes.Trim(text, `"`)) {
	case "SIGNAL_SIGKILL", "9":
		*s = 9
	case "SIGNAL_SIGTERM", "15":
		*s = 15
	default:
		*s = 0 // which the guest refuses as envd does
	}
	return nil
}

func (s *Server) sendSignal(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		selector

		Signal signal `json:"signal"`
	}
	if err := message(w, r, &req); err != nil {
		return err
	}
	return done(w, s.unary(r, wire.MethodProcessSendSignal, wire.SendSignalRequest{Process: req.Process, Signal: int(req.Signal)}, nil))
}

func (s *Server) closeStdin(w http.ResponseWriter, r *http.Request) error {
	var req selector
	if err := message(w, r, &req); err != nil {
		return err
	}
	return done(w, s.unary(r, wire.MethodProcessCloseStdin, wire.CloseStdinRequest(req), nil))
}

// streamInput passes on a stream of input. Its end is not the process's input's.
func (s *Server) streamInput(r *http.Request, out *stream) error {
	if err := wantsType(r, streamType); err != nil {
		return err
	}
	_ = http.NewResponseController(out.w).EnableFullDuplex() // a client may hear of what is wrong before it has said everything
	var first struct {
		Start *selector `json:"start"`
	}
	_, text, err := frame(r.Body)
	if err != nil {
		return invalid("read the request: %v", err)
	}
	if err := decodeMessage(text, &first); err != nil {
		return err
	}
	if first.Start == nil {
		return invalid("the first message of StreamInput has no start")
	}
	conn, err := s.guest(r.Context(), r)
	if err != nil {
		return err
	}
	up, err := conn.Open(r.Context(), wire.MethodProcessInput, wire.StreamInputRequest{Process: first.Start.Process})
	if err != nil {
		return err
	}
	defer up.Close()
	stop := context.AfterFunc(r.Context(), func() { _ = up.Close() })
	defer stop()
	if err := passInput(r.Body, up); err != nil {
		return err
	}
	return out.send(struct{}{})
}

// errNotTaken is of input that the guest does not take: it says why itself.
var errNotTaken = errors.New("the guest takes no input")

// passInput passes on what a client sends until that ends, and returns when the guest has said what it makes of it. What is
// wrong with the client's messages the guest cannot know: it would wait for more.
func passInput(body io.Reader, up *wire.Stream) error {
	refused := make(chan error, 1)
	go func() {
		for {
			if _, _, err := up.Recv(); err != nil {
				refused <- err
				return
			}
		}
	}()
	err := (&inputFrames{r: body}).pass(up)
	if err == nil {
		if err = up.HalfClose(); err != nil {
			err = fmt.Errorf("%w: %w", errNotTaken, err)
		}
	}
	if err != nil && !errors.Is(err, errNotTaken) {
		_ = up.Close()
		<-refused //nolint:errcheck // It only says that the stream was closed.
		return err
	}
	if answer := <-refused; !errors.Is(answer, io.EOF) {
		return answer
	}
	return err
}

// inputFrames are the messages of a StreamInput after the first.
type inputFrames struct{ r io.Reader }

func (f *inputFrames) pass(up *wire.Stream) error {
	for {
		flags, text, err := frame(f.r)
		if errors.Is(err, io.EOF) || err == nil && flags&flagEnd != 0 {
			return nil
		}
		if err != nil {
			return err
		}
		var m struct {
			Data *struct {
				Input input `json:"input"`
			} `json:"data"`
		}
		if err := json.Unmarshal(text, &m); err != nil {
			return invalid("the request's JSON: %v", err)
		}
		if m.Data == nil { // a sign of life
			continue
		}
		kind, data := wire.KindStdin, m.Data.Input.Stdin
		if m.Data.Input.PTY != nil {
			kind, data = wire.KindPTY, m.Data.Input.PTY
		}
		if err := up.Send(kind, data); err != nil {
			return fmt.Errorf("%w: %w", errNotTaken, err)
		}
	}
}
