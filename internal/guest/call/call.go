// Package call makes the guest's calls out of wire streams: run a process, evaluate code, move files. It is the same
// for the daemon, which opens streams on its own connection, and for package client, which opens them through the
// daemon; both give it an Opener. It knows no transport.
package call

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
)

// Opener opens a stream for one call and sends its request.
type Opener interface {
	Open(ctx context.Context, method string, in any) (*wire.Stream, error)
}

// Unary makes a call with one message as its reply; out may be nil.
func Unary(ctx context.Context, o Opener, method string, in, out any) error {
	return with(ctx, o, method, in, func(s *wire.Stream) error { return lastMessage(s, method, out) })
}

// with opens a stream, closes it when done or when ctx ends, and reports a cancelled call as ctx's cause.
func with(ctx context.Context, o Opener, method string, in any, use func(*wire.Stream) error) error {
	s, err := o.Open(ctx, method, in)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	defer s.Close()
	if err := use(s); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	return nil
}

// Output is where a process's or evaluation's output goes. A nil writer discards.
type Output struct {
	Stdout, Stderr io.Writer
}

// ErrOutput wraps a failure of the writer that output goes to, as opposed to a failure of the call.
var ErrOutput = errors.New("write output")

func (o Output) write(kind wire.Kind, p []byte) error {
	w := o.Stdout
	switch kind {
	case wire.KindStdout, wire.KindPTY:
	case wire.KindStderr:
		w = o.Stderr
	default:
		return wire.Errorf(wire.CodeInternal, "unexpected frame %q in the guest's output", byte(kind))
	}
	if w == nil {
		return nil
	}
	if _, err := w.Write(p); err != nil {
		return fmt.Errorf("%w: %w", ErrOutput, err)
	}
	return nil
}

// feed copies standard input in the background. Nobody waits for it: its reader may be a terminal, whose read cannot
// be broken off; when the call ends its next write fails and it ends. Guard, which may be nil, is deferred there.
func feed(s *wire.Stream, kind wire.Kind, stdin io.Reader, guard func()) {
	if stdin == nil {
		return
	}
	go func() {
		if guard != nil {
			defer guard()
		}
		if err := send(s, kind, stdin); err == nil && kind == wire.KindStdin {
			_ = s.HalfClose()
		}
	}()
}

func send(s *wire.Stream, kind wire.Kind, r io.Reader) error {
	buf := make([]byte, wire.MaxPayload)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if err := s.Send(kind, buf[:n]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return sourceError{err}
		}
	}
}

// sourceError is a failure of what is sent, not of sending it.
type sourceError struct{ error }

func (e sourceError) Unwrap() error { return e.error }

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Upload makes a call whose request is followed by data, and decodes the last message of its reply into out, which may
// be nil. The guest may refuse at any time: its answer is awaited beside the sending, which its end makes fail. A source
// that fails breaks the call off: the guest must not take what it has for the whole.
func Upload(ctx context.Context, o Opener, method string, in any, data io.Reader, out any) error {
	return with(ctx, o, method, in, func(s *wire.Stream) error {
		reply := make(chan error, 1)
		go func() {
			err := lastMessage(s, method, out)
			reply <- err
			_ = s.Close() // ends a send that nobody takes any more
		}()
		sendErr := send(s, wire.KindData, data)
		if sendErr == nil {
			sendErr = s.HalfClose()
		}
		err := answer(s, reply, sendErr)
		if refusal, ok := errors.AsType[*wire.Error](err); ok {
			return refusal
		}
		return errors.Join(sendErr, err)
	})
}

// refusalPatience is how long a guest that takes no more data may take to say why.
const refusalPatience = 5 * time.Second

// answer waits for a reply after the sending has ended. A guest that refuses sends its answer and closes: the sending may
// fail of that before the answer has been read.
func answer(s *wire.Stream, reply <-chan error, sendErr error) error {
	if sendErr == nil {
		return <-reply
	}
	if _, ok := errors.AsType[sourceError](sendErr); !ok {
		late := time.NewTimer(refusalPatience)
		defer late.Stop()
		select {
		case err := <-reply:
			return err
		case <-late.C:
		}
	}
	_ = s.Close()
	return <-reply
}

// maxReplies is how many messages may come where one is due.
const maxReplies = 16

// lastMessage receives until the end of a call.
func lastMessage(s *wire.Stream, method string, out any) error {
	for replies := 0; ; replies++ {
		kind, payload, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if replies == maxReplies {
			return wire.Errorf(wire.CodeInternal, "the guest answers %s again and again", method)
		}
		if kind != wire.KindMessage || out == nil {
			continue
		}
		if err := wire.Decode(payload, out); err != nil {
			return fmt.Errorf("decode reply of %s: %w", method, err)
		}
	}
}

// Fetch makes a call whose reply is data, and returns it. More than most bytes are an error.
func Fetch(ctx context.Context, o Opener, method string, in any, most int) ([]byte, error) {
	b := bounded{most: most}
	if err := Download(ctx, o, method, in, &b); err != nil {
		return nil, err
	}
	return b.buf, nil
}

// bounded refuses more than it is to keep.
type bounded struct {
	buf  []byte
	most int
}

func (b *bounded) Write(p []byte) (int, error) {
	if len(b.buf)+len(p) > b.most {
		return 0, wire.Errorf(wire.CodeExhausted, "the guest sends more than the %d bytes that are due", b.most)
	}
	b.buf = append(b.buf, p...)
	return len(p), nil
}

// Download makes a call whose reply is data.
func Download(ctx context.Context, o Opener, method string, in any, w io.Writer) error {
	return with(ctx, o, method, in, func(s *wire.Stream) error {
		for others := 0; ; {
			kind, payload, err := s.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			if kind != wire.KindData {
				if others++; others > maxReplies {
					return wire.Errorf(wire.CodeInternal, "the guest sends no data in %s", method)
				}
				continue
			}
			if _, err := w.Write(payload); err != nil {
				return fmt.Errorf("%w: %w", ErrOutput, err)
			}
		}
	})
}
