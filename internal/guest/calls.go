package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"forkd.dev/forkd/internal/guest/wire"
)

// Awaken gives a fresh child its identity. After an error the child must be killed: none of its processes has run.
func (c *Conn) Awaken(ctx context.Context, req *wire.AwakenRequest) (*wire.AwakenReport, error) {
	report := &wire.AwakenReport{}
	if err := c.Call(ctx, wire.MethodAwaken, req, report); err != nil {
		return nil, err
	}
	return report, nil
}

// Quiesce freezes the guest's processes. They run again after Awaken.
func (c *Conn) Quiesce(ctx context.Context, req wire.QuiesceRequest) error {
	return c.Call(ctx, wire.MethodQuiesce, req, nil)
}

// Ping returns when the agent has answered.
func (c *Conn) Ping(ctx context.Context) error {
	return c.Call(ctx, wire.MethodPing, struct{}{}, nil)
}

// Pivot ends the build phase: the prepared disk becomes the root.
func (c *Conn) Pivot(ctx context.Context) error {
	return c.Call(ctx, wire.MethodPivot, wire.PivotRequest{}, nil)
}

// PowerOff ends the guest in an orderly way. It returns when the guest has begun; the machine's end follows.
func (c *Conn) PowerOff(ctx context.Context) error {
	return c.Call(ctx, wire.MethodPowerOff, struct{}{}, nil)
}

// Metrics samples the guest's accounting.
func (c *Conn) Metrics(ctx context.Context) (*wire.Metrics, error) {
	m := &wire.Metrics{}
	if err := c.Call(ctx, wire.MethodMetrics, struct{}{}, m); err != nil {
		return nil, err
	}
	return m, nil
}

// Eval runs code in a context and writes what it prints while it runs. A write that fails ends the call.
func (c *Conn) Eval(ctx context.Context, req wire.EvalRequest, stdout, stderr io.Writer) (*wire.EvalResult, error) {
	s, err := c.Open(ctx, wire.MethodContextEval, req)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	message, err := output(ctx, wire.MethodContextEval, s, stdout, stderr)
	if err != nil {
		return nil, err
	}
	result := &wire.EvalResult{}
	if err := json.Unmarshal(message, result); err != nil {
		return nil, fmt.Errorf("call %s: %w", wire.MethodContextEval, err)
	}
	return result, finish(ctx, wire.MethodContextEval, s)
}

// output passes data frames on until a message comes.
func output(ctx context.Context, method string, s *wire.Stream, stdout, stderr io.Writer) ([]byte, error) {
	for {
		kind, payload, err := s.Recv()
		if err != nil {
			return nil, callError(ctx, method, err)
		}
		w := stdout
		switch kind {
		case wire.KindMessage:
			return payload, nil
		case wire.KindStdout, wire.KindPTY:
		case wire.KindStderr:
			w = stderr
		default:
			return nil, fmt.Errorf("call %s: %w: unexpected frame %q", method, ErrProtocol, byte(kind))
		}
		if w == nil {
			continue
		}
		if _, err := w.Write(payload); err != nil {
			return nil, fmt.Errorf("pass on output: %w", err)
		}
	}
}

// Run runs a process to its end. Stdin may be nil; otherwise it is read in the background, and a Read that does not
// return outlives the call. When ctx ends the process goes on in the guest, unless the request has a time limit.
func (c *Conn) Run(ctx context.Context, req wire.StartRequest, stdin io.Reader, stdout, stderr io.Writer) (*wire.ProcessEnd, error) {
	if stdin == nil && req.PTY == nil {
		none := false
		req.Stdin = &none
	}
	s, err := c.Open(ctx, wire.MethodProcessStart, req)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	event := wire.ProcessEvent{}
	if err := s.RecvMessage(&event); err != nil {
		return nil, callError(ctx, wire.MethodProcessStart, err)
	}
	if stdin != nil {
		kind := wire.KindStdin
		if req.PTY != nil {
			kind = wire.KindPTY
		}
		go func() {
			// Errors: the stream's show in Recv below, and a source that fails has no more to give.
			_, _ = io.Copy(s.Data(kind), onlyReader{stdin})
			_ = s.HalfClose()
		}()
	}
	for event.End == nil {
		message, err := output(ctx, wire.MethodProcessStart, s, stdout, stderr)
		if err != nil {
			return nil, err
		}
		event = wire.ProcessEvent{}
		if err := json.Unmarshal(message, &event); err != nil {
			return nil, fmt.Errorf("call %s: %w", wire.MethodProcessStart, err)
		}
	}
	return event.End, finish(ctx, wire.MethodProcessStart, s)
}

// onlyReader hides WriterTo, so that data travels in pieces of io.Copy's buffer.
type onlyReader struct{ io.Reader }

// Extract unpacks a tar stream in the guest.
func (c *Conn) Extract(ctx context.Context, req wire.ExtractRequest, archive io.Reader) error {
	_, err := c.upload(ctx, wire.MethodExtract, req, archive)
	return err
}

// WriteFile writes a file in the guest.
func (c *Conn) WriteFile(ctx context.Context, req wire.WriteRequest, content io.Reader) (*wire.EntryInfo, error) {
	message, err := c.upload(ctx, wire.MethodFileWrite, req, content)
	if err != nil {
		return nil, err
	}
	reply := &wire.EntryReply{}
	if err := json.Unmarshal(message, reply); err != nil {
		return nil, fmt.Errorf("call %s: %w", wire.MethodFileWrite, err)
	}
	return &reply.Entry, nil
}

// upload sends data and returns the last message of the reply. The guest may refuse at any time: its answer is awaited
// beside the sending, which its end makes fail.
func (c *Conn) upload(ctx context.Context, method string, in any, data io.Reader) ([]byte, error) {
	s, err := c.Open(ctx, method, in)
	if err != nil {
		return nil, err
	}
	var message []byte
	reply := make(chan error, 1)
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		for {
			kind, payload, err := s.Recv()
			if err != nil {
				reply <- err
				_ = s.Close()
				return
			}
			if kind == wire.KindMessage {
				message = append(message[:0], payload...)
			}
		}
	}()
	_, copyErr := io.Copy(s.Data(wire.KindData), onlyReader{data})
	if copyErr == nil {
		copyErr = s.HalfClose()
	}
	if copyErr != nil {
		// Not the half-close: the guest must not take what it has for the whole. Its refusal, if that is why sending
		// failed, came before.
		select {
		case err = <-reply:
		default:
			_ = s.Close()
			<-answered
		}
	} else {
		err = <-reply
	}
	var refusal *wire.Error
	switch {
	case errors.As(err, &refusal):
		return nil, refusal
	case copyErr != nil:
		return nil, callError(ctx, method, copyErr)
	case !errors.Is(err, io.EOF):
		return nil, callError(ctx, method, err)
	}
	return message, nil
}

// Archive writes a tar stream of a path in the guest.
func (c *Conn) Archive(ctx context.Context, path string, w io.Writer) error {
	return c.download(ctx, wire.MethodArchive, wire.ArchiveRequest{Path: path}, nil, w)
}

// ReadFile writes a file's content to w. Its entry describes the file as it was when it was opened.
func (c *Conn) ReadFile(ctx context.Context, req wire.ReadRequest, w io.Writer) (*wire.EntryInfo, error) {
	reply := &wire.EntryReply{}
	if err := c.download(ctx, wire.MethodFileRead, req, reply, w); err != nil {
		return nil, err
	}
	return &reply.Entry, nil
}

func (c *Conn) download(ctx context.Context, method string, in, first any, w io.Writer) error {
	s, err := c.Open(ctx, method, in)
	if err != nil {
		return err
	}
	defer s.Close()
	if first != nil {
		if err := s.RecvMessage(first); err != nil {
			return callError(ctx, method, err)
		}
	}
	for {
		kind, payload, err := s.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return callError(ctx, method, err)
		case kind != wire.KindData && kind != wire.KindHalfClose:
			return fmt.Errorf("call %s: %w: unexpected frame %q", method, ErrProtocol, byte(kind))
		}
		if _, err := w.Write(payload); err != nil {
			return fmt.Errorf("pass on data: %w", err)
		}
	}
}
