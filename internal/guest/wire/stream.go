package wire

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Kind is the first byte of a frame.
type Kind byte

// Kinds of frame. The lower-case form of a request, message or error is a part of it with more to follow.
const (
	KindRequest   Kind = 'Q' // method, newline, JSON: always the first frame of a call
	KindMessage   Kind = 'M' // JSON
	KindStdin     Kind = 'I' // raw bytes, as the next four
	KindStdout    Kind = 'O'
	KindStderr    Kind = 'E'
	KindPTY       Kind = 'P'
	KindData      Kind = 'D'
	KindHalfClose Kind = 'H' // the sender has no more data; it still reads
	KindError     Kind = 'X' // JSON Error; ends the stream
	KindEnd       Kind = 'Z' // ends the stream well
)

const (
	// MaxPayload is the largest payload of one frame.
	MaxPayload = 64 << 10
	// MaxMessage bounds a request, message or error put together from its parts.
	MaxMessage = 16 << 20

	frameHeader = 5
	partBit     = 0x20 // lower case
)

// Handler serves one call. Request is the JSON after the method name. The context is cancelled when the stream or its
// session is gone. A returned error is sent as an error frame, in which an *Error keeps its code; nil sends an end
// frame. The handler must not use the stream after it returned.
type Handler func(ctx context.Context, s *Stream, request []byte) error

// Handle makes a handler of a function that takes its request decoded.
func Handle[T any](f func(context.Context, *Stream, *T) error) Handler {
	return func(ctx context.Context, s *Stream, request []byte) error {
		req := new(T)
		if err := Decode(request, req); err != nil {
			return Errorf(CodeInvalid, "decode request: %v", err)
		}
		return f(ctx, s, req)
	}
}

// Errorf makes an Error with a code.
func Errorf(code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Stream is one call: frames over a reliable byte stream. Sending is safe for concurrent use, also beside receiving;
// receiving is for one goroutine at a time.
type Stream struct {
	rwc io.ReadWriteCloser

	sendMu  sync.Mutex // guards sendBuf and the order of frames
	sendBuf []byte

	header  [frameHeader]byte
	recvBuf []byte
	end     error // sticky result of Recv

	most     int // bytes of a message; 0: MaxMessage
	budget   *Budget
	heldMu   sync.Mutex
	held     int // of the budget
	released bool

	ahead   chan frame // non-nil in read-ahead mode
	stop    chan struct{}
	stopped sync.Once
}

type frame struct {
	kind    Kind
	payload []byte
	err     error
}

// NewStream wraps a connection, which it owns from then on.
func NewStream(rwc io.ReadWriteCloser) *Stream {
	return &Stream{rwc: rwc, stop: make(chan struct{})}
}

// Send writes one frame, or several when the payload is larger than MaxPayload. It blocks while the peer does not
// read.
func (s *Stream) Send(kind Kind, payload []byte) error {
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	for len(payload) > MaxPayload {
		k := kind
		if kind.joined() {
			k |= partBit
		}
		if err := s.write(k, payload[:MaxPayload]); err != nil {
			return err
		}
		payload = payload[MaxPayload:]
	}
	return s.write(kind, payload)
}

// write sends header and payload in one Write: on a multiplexed connection every Write costs a message.
func (s *Stream) write(kind Kind, payload []byte) error {
	b := append(s.sendBuf[:0], byte(kind), 0, 0, 0, 0)
	binary.BigEndian.PutUint32(b[1:], uint32(len(payload)))
	b = append(b, payload...)
	s.sendBuf = b
	_, err := s.rwc.Write(b)
	return err
}

// SendMessage sends v as JSON.
func (s *Stream) SendMessage(v any) error {
	b, err := Encode(v)
	if err != nil {
		return fmt.Errorf("encode message: %w", err)
	}
	return s.Send(KindMessage, b)
}

// SendRequest is the first frame of a call.
func (s *Stream) SendRequest(method string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", method, err)
	}
	return s.SendRawRequest(method, b)
}

// SendRawRequest is SendRequest with the JSON already made.
func (s *Stream) SendRawRequest(method string, request []byte) error {
	b := make([]byte, 0, len(method)+1+len(request))
	b = append(b, method...)
	b = append(b, '\n')
	b = append(b, request...)
	return s.Send(KindRequest, b)
}

// SendError ends the call with an error.
func (s *Stream) SendError(code, message string) error {
	b, err := json.Marshal(&Error{Code: code, Message: message})
	if err != nil {
		return fmt.Errorf("encode error: %w", err)
	}
	return s.Send(KindError, b)
}

// End ends the call well.
func (s *Stream) End() error { return s.Send(KindEnd, nil) }

// HalfClose says that no more data follows.
func (s *Stream) HalfClose() error { return s.Send(KindHalfClose, nil) }

// Close closes the connection below; the peer's handler is cancelled if it still runs.
func (s *Stream) Close() error {
	s.stopped.Do(func() { close(s.stop) })
	s.release(true)
	return s.rwc.Close()
}

// Recv returns the next frame, with requests, messages and errors put together. The payload is valid until the next
// Recv. After the end frame it returns io.EOF, after an error frame the *Error, after a connection that broke before
// either io.ErrUnexpectedEOF or the connection's error; each of them again when called again.
func (s *Stream) Recv() (Kind, []byte, error) {
	if s.end != nil {
		return 0, nil, s.end
	}
	var f frame
	if s.ahead == nil {
		f = s.read(&s.recvBuf)
	} else {
		select {
		case f = <-s.ahead:
		case <-s.stop:
			f.err = io.ErrClosedPipe
		}
	}
	s.end = f.err
	return f.kind, f.payload, f.err
}

// RecvMessage decodes the next frame, which must be a message, into v.
func (s *Stream) RecvMessage(v any) error {
	kind, payload, err := s.Recv()
	if err != nil {
		return err
	}
	if kind != KindMessage {
		return Errorf(CodeInternal, "unexpected frame %q where a message was due", byte(kind))
	}
	if err := Decode(payload, v); err != nil {
		return fmt.Errorf("decode message: %w", err)
	}
	return nil
}

// Data is an io.Writer whose writes are frames of a kind.
func (s *Stream) Data(kind Kind) io.Writer { return dataWriter{s, kind} }

type dataWriter struct {
	s    *Stream
	kind Kind
}

func (w dataWriter) Write(p []byte) (int, error) {
	if err := w.s.Send(w.kind, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// DataReader reads the payloads of the data frames that follow, up to the half-close (io.EOF) or the end of the
// stream (what Recv returns; an end frame is io.EOF, too).
func (s *Stream) DataReader() io.Reader { return &dataReader{s: s} }

type dataReader struct {
	s    *Stream
	rest []byte
	err  error
}

func (r *dataReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		kind, payload, err := r.s.Recv()
		switch {
		case err != nil:
			r.err = err
		case kind == KindHalfClose:
			r.err = io.EOF
		case kind == KindData:
			r.rest = payload
		default:
			r.err = Errorf(CodeInvalid, "unexpected frame %q among data", byte(kind))
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// StartReadAhead makes later Recv calls take frames from ReadAhead. Call it before the first of them.
func (s *Stream) StartReadAhead() { s.ahead = make(chan frame) }

// ReadAhead reads one frame ahead of the handler until the stream ends, then calls gone: so a handler that is busy
// elsewhere learns that its caller left. The peer is held back by what the handler does not receive.
func (s *Stream) ReadAhead(gone func()) {
	defer gone()
	// Two buffers: while the handler looks at one the other is filled; a completed hand-over frees the first.
	var bufs [2][]byte
	for i := 0; ; i ^= 1 {
		f := s.read(&bufs[i])
		if f.err != nil {
			gone()
		}
		select {
		case s.ahead <- f:
		case <-s.stop:
			return
		}
		if f.err != nil {
			return
		}
	}
}

// read reads one frame into *buf, joining parts.
func (s *Stream) read(buf *[]byte) frame {
	b := (*buf)[:0]
	if s.budget != nil { // what the message before took
		if cap(b) > 4*MaxPayload {
			b, *buf = nil, nil
		}
		s.release(false)
	}
	for {
		if _, err := io.ReadFull(s.rwc, s.header[:]); err != nil {
			return frame{err: unexpected(err)}
		}
		kind := Kind(s.header[0])
		n := int(binary.BigEndian.Uint32(s.header[1:]))
		whole := kind &^ partBit
		part := kind != whole
		switch {
		case !whole.known() || part && !whole.joined():
			return frame{err: Errorf(CodeInvalid, "unknown frame kind %#x", s.header[0])}
		case n > MaxPayload:
			return frame{err: Errorf(CodeInvalid, "frame of %d bytes; at most %d are allowed", n, MaxPayload)}
		}
		if err := s.afford(len(b) + n); err != nil {
			return frame{err: err}
		}
		at := len(b)
		b = grow(b, n)
		*buf = b
		if _, err := io.ReadFull(s.rwc, b[at:]); err != nil {
			return frame{err: unexpected(err)}
		}
		if part {
			continue
		}
		switch whole {
		case KindEnd:
			return frame{err: io.EOF}
		case KindError:
			return frame{err: decodeError(b)}
		case KindMessage:
			if err := s.affordDecoded(b); err != nil {
				return frame{err: err}
			}
			return frame{kind: whole, payload: b}
		default:
			return frame{kind: whole, payload: b}
		}
	}
}

func (k Kind) joined() bool { return k == KindRequest || k == KindMessage || k == KindError }

func (k Kind) known() bool {
	switch k {
	case KindRequest, KindMessage, KindStdin, KindStdout, KindStderr, KindPTY, KindData, KindHalfClose, KindError, KindEnd:
		return true
	default:
		return false
	}
}

// grow lengthens b by n bytes. It doubles what it must move, so a message of many parts is not quadratic.
func grow(b []byte, n int) []byte {
	if need := len(b) + n; need > cap(b) {
		c := make([]byte, len(b), max(need, 2*cap(b), 512))
		copy(c, b)
		b = c
	}
	return b[:len(b)+n]
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func decodeError(b []byte) error {
	e := &Error{}
	if err := Decode(b, e); err != nil || e.Code == "" {
		return Errorf(CodeInternal, "unreadable error from the peer")
	}
	if !connectCode(e.Code) {
		e.Code = CodeInternal
	}
	e.Message = Cut(e.Message, maxErrorText)
	return e
}

// SplitRequest takes the payload of a request frame apart.
func SplitRequest(payload []byte) (method string, request []byte, err error) {
	m, r, ok := bytes.Cut(payload, []byte{'\n'})
	if !ok || len(m) == 0 || len(m) > 128 {
		return "", nil, Errorf(CodeInvalid, "request without a method name")
	}
	return string(m), r, nil
}
