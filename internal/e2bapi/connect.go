package e2bapi

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"sync"
	"time"

	"forkd.dev/forkd/api"
)

// Connect's protocol, as far as envd's clients speak it: JSON, uncompressed. A stream is frames of a byte of flags, four of
// length, and a message; the last has flagEnd and how the call went.
const (
	flagCompressed = 1
	flagEnd        = 2

	frameHeader = 5
	maxMessage  = 16 << 20

	streamType = "application/connect+json"
)

// message decodes the request of a unary call.
func message(w http.ResponseWriter, r *http.Request, v any) error {
	if err := wantsType(r, "application/json"); err != nil {
		return err
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxMessage))
	if err != nil {
		return invalid("read the request: %v", err)
	}
	if len(body) == 0 {
		return nil
	}
	return decodeMessage(body, v)
}

func wantsType(r *http.Request, want string) error {
	if kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); kind != want {
		return &api.Error{
			Code:    api.CodeUnacceptable,
			Message: fmt.Sprintf("this is served as %s, and the request is %.80q", want, r.Header.Get("Content-Type")),
		}
	}
	return nil
}

// decodeMessage leaves out what it does not know: clients are newer than servers at times.
func decodeMessage(body []byte, v any) error {
	if err := json.Unmarshal(body, v); err != nil {
		return invalid("the request's JSON: %v", err)
	}
	return nil
}

// frame reads one frame of a request that is a stream.
func frame(body io.Reader) (flags byte, message []byte, err error) {
	var header [frameHeader]byte
	if _, err := io.ReadFull(body, header[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(header[1:])
	if n > maxMessage {
		return 0, nil, invalid("a message of %d bytes; at most %d are taken", n, maxMessage)
	}
	if header[0]&flagCompressed != 0 {
		return 0, nil, &api.Error{Code: api.CodeUnsupported, Message: "the message is compressed, which is not served here"}
	}
	message = make([]byte, n)
	if _, err := io.ReadFull(body, message); err != nil {
		return 0, nil, fmt.Errorf("read a message: %w", err)
	}
	return header[0], message, nil
}

// firstFrame decodes the request of a call whose reply is a stream.
func firstFrame(r *http.Request, v any) error {
	if err := wantsType(r, streamType); err != nil {
		return err
	}
	_, body, err := frame(r.Body)
	if err != nil {
		return invalid("read the request: %v", err)
	}
	return decodeMessage(body, v)
}

// stream is a reply of messages. It is safe for concurrent use.
type stream struct {
	w http.ResponseWriter

	mu    sync.Mutex
	begun bool
	buf   []byte
}

func (s *stream) send(v any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.write(0, v)
}

func (s *stream) write(flags byte, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode a message: %w", err)
	}
	if !s.begun {
		s.begun = true
		s.w.Header().Set("Content-Type", streamType)
		s.w.WriteHeader(http.StatusOK)
	}
	b := append(s.buf[:0], flags, 0, 0, 0, 0)
	binary.BigEndian.PutUint32(b[1:], uint32(len(body)))
	s.buf = append(b, body...)
	if _, err := s.w.Write(s.buf); err != nil {
		return err
	}
	return http.NewResponseController(s.w).Flush()
}

// end is the last message. Whom nobody can tell any more gets none.
func (s *stream) end(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		return s.write(flagEnd, struct{}{})
	}
	return errors.Join(err, s.write(flagEnd, map[string]any{"error": toConnect(err)}))
}

// streaming makes a handler of a call whose reply is a stream. What fails before the first message for want of a sandbox is
// told as the proxy in front of envd would, everything else in the stream.
func streaming(call func(r *http.Request, s *stream) error) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		s := &stream{w: w}
		stop := s.keepAlive(r)
		err := call(r, s)
		stop()
		if r.Context().Err() != nil && !errors.Is(err, context.DeadlineExceeded) { // the client, or its token, is gone
			return errors.Join(err, context.Cause(r.Context()))
		}
		if _, ok := errors.AsType[*edgeError](err); ok && !s.begun {
			return err
		}
		return s.end(err)
	}
}

// defaultPing is how often a stream shows that it stands, unless the client asks for another pace.
const defaultPing = 90 * time.Second

// keepAlive sends signs of life once the stream has begun, until it is stopped, which waits. Where they go among the messages
// depends on the call.
func (s *stream) keepAlive(r *http.Request) (stop func()) {
	interval := defaultPing
	if secs, err := strconv.Atoi(r.Header.Get("Keepalive-Ping-Interval")); err == nil && secs > 0 && secs < 1e6 {
		interval = time.Duration(secs) * time.Second
	}
	var sign any = map[string]any{"event": map[string]any{"keepalive": struct{}{}}}
	if r.URL.Path == "/filesystem.Filesystem/WatchDir" {
		sign = map[string]any{"keepalive": struct{}{}}
	}
	end := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() {
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-end:
				return
			}
			s.mu.Lock()
			if s.begun {
				_ = s.write(0, sign) // a client that is gone is noticed elsewhere
			}
			s.mu.Unlock()
		}
	})
	return func() {
		close(end)
		running.Wait()
	}
}

// timeoutOf is how long the client gives a call; 0: any time.
func timeoutOf(r *http.Request) (time.Duration, error) {
	text := r.Header.Get("Connect-Timeout-Ms")
	if text == "" {
		return 0, nil
	}
	ms, err := strconv.ParseInt(text, 10, 64)
	if err != nil || ms < 0 || ms > int64(time.Duration(1<<62)/time.Millisecond) {
		return 0, invalid("Connect-Timeout-Ms is %.40q", text)
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// bounded is a call's context with the client's time limit.
func bounded(r *http.Request) (context.Context, context.CancelFunc, error) {
	limit, err := timeoutOf(r)
	if err != nil || limit == 0 {
		return r.Context(), func() {}, err
	}
	ctx, cancel := context.WithTimeout(r.Context(), limit)
	return ctx, cancel, nil
}
