package guest_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/agent"
	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// port plays the virtio-serial port: the agent's end stays open while hosts come and go; the newest host counts.
type port struct {
	path string
	ln   net.Listener

	mu      sync.Mutex
	host    net.Conn
	changed chan struct{}
	closed  bool
}

func newPort(t *testing.T) *port {
	t.Helper()
	p := &port{path: filepath.Join(t.TempDir(), "port"), changed: make(chan struct{})}
	var err error
	if p.ln, err = (&net.ListenConfig{}).Listen(t.Context(), "unix", p.path); err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, err := p.ln.Accept()
			p.mu.Lock()
			if p.host != nil {
				_ = p.host.Close()
			}
			p.host, p.closed = c, err != nil
			close(p.changed)
			p.changed = make(chan struct{})
			p.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return p
}

func (p *port) close() { _ = p.ln.Close() }

// use calls f with hosts until one succeeds.
func (p *port) use(f func(net.Conn) (int, error)) (int, error) {
	for {
		p.mu.Lock()
		host, changed, closed := p.host, p.changed, p.closed
		p.mu.Unlock()
		if closed {
			return 0, io.EOF
		}
		if host != nil {
			if n, err := f(host); n > 0 || err == nil {
				return n, nil
			}
		}
		<-changed
	}
}

func (p *port) Read(b []byte) (int, error) {
	return p.use(func(c net.Conn) (int, error) { return c.Read(b) })
}

func (p *port) Write(b []byte) (int, error) {
	return p.use(func(c net.Conn) (int, error) { return c.Write(b) })
}

func (p *port) dial(ctx context.Context) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", p.path)
}

// service is what the tests call.
type service struct{ cancelled chan<- struct{} }

func (s service) Handlers() map[string]wire.Handler {
	cancelled := s.cancelled
	return map[string]wire.Handler{
		"test.Echo": func(_ context.Context, s *wire.Stream, request []byte) error {
			return s.Send(wire.KindMessage, request)
		},
		"test.Copy": func(_ context.Context, s *wire.Stream, _ []byte) error {
			_, err := io.Copy(s.Data(wire.KindData), s.DataReader())
			return err
		},
		"test.Refuse": func(context.Context, *wire.Stream, []byte) error {
			return wire.Errorf(wire.CodeExists, "it is there")
		},
		"test.Fail":  func(context.Context, *wire.Stream, []byte) error { return io.ErrNoProgress },
		"test.Panic": func(context.Context, *wire.Stream, []byte) error { panic("ouch") },
		"test.Wait": func(ctx context.Context, _ *wire.Stream, _ []byte) error {
			<-ctx.Done()
			cancelled <- struct{}{}
			return context.Cause(ctx)
		},
		"test.Flood": func(_ context.Context, s *wire.Stream, _ []byte) error {
			for {
				if err := s.Send(wire.KindStdout, make([]byte, wire.MaxPayload)); err != nil {
					cancelled <- struct{}{}
					return err
				}
			}
		},
	}
}

type harness struct {
	*port
	agent     *agent.Agent
	cancelled chan struct{}
	console   *bytes.Buffer
}

func start(t *testing.T) *harness {
	t.Helper()
	h := &harness{port: newPort(t), cancelled: make(chan struct{}, 1000), console: &bytes.Buffer{}}
	h.agent = agent.New(agent.Config{
		Version: "test", Phase: agent.PhaseReady, Console: h.console,
		Reaper: reap.New(), Accounts: account.New("/", account.Defaults{}),
		Services: []agent.Service{service{h.cancelled}},
	}, "boot")
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = h.agent.Serve(t.Context(), h.port)
	}()
	t.Cleanup(func() {
		h.close()
		<-done
	})
	return h
}

func (h *harness) connect(t *testing.T, generation uint64) *guest.Conn {
	t.Helper()
	c, err := guest.Dial(t.Context(), h.dial, generation)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func echo(t *testing.T, c *guest.Conn, in string) {
	t.Helper()
	var out string
	if err := c.Call(t.Context(), "test.Echo", in, &out); err != nil || out != in {
		t.Fatalf("got %d bytes, %v", len(out), err)
	}
}

func TestHello(t *testing.T) {
	c := start(t).connect(t, 42)
	want := wire.Hello{Version: wire.Version, Agent: "test", Features: c.Hello().Features, Generation: 42, BootID: "boot", Phase: "ready"}
	if diff := cmp.Diff(want, c.Hello()); diff != "" {
		t.Fatal(diff)
	}
	if !slices.Contains(c.Hello().Features, wire.FeatureThaw) {
		t.Fatalf("features: %q", c.Hello().Features)
	}
	echo(t, c, "hi")
	echo(t, c, strings.Repeat("large ", 100_000))
}

func TestErrors(t *testing.T) {
	h := start(t)
	c := h.connect(t, 1)
	for method, want := range map[string]wire.Error{
		"test.Refuse": {Code: wire.CodeExists, Message: "it is there"},
		"test.Fail":   {Code: wire.CodeInternal, Message: io.ErrNoProgress.Error()},
		"test.Panic":  {Code: wire.CodeInternal, Message: "the guest agent has a bug: ouch; its console has the details"},
		"no.Such":     {Code: wire.CodeUnimplemented, Message: `this guest's agent (version test) has no method "no.Such"`},
	} {
		var got *wire.Error
		if err := c.Call(t.Context(), method, nil, nil); !errors.As(err, &got) || *got != want {
			t.Errorf("%s: got %v", method, err)
		}
	}
	if !strings.Contains(h.console.String(), "ouch") {
		t.Error("the panic is not on the console")
	}
	echo(t, c, "still there")
}

// The machine outlives its connections, and a fork answers in the middle of its parent's: whatever the host was
// sending when the connection broke, the next one works.
func TestConnectionCutAnywhere(t *testing.T) {
	h := start(t)
	for generation := range 60 {
		c := h.connect(t, uint64(generation))
		if c.Hello().Generation != uint64(generation) {
			t.Fatalf("got generation %d", c.Hello().Generation)
		}
		echo(t, c, "before")
		// A second host that dies after some bytes of a call.
		raw, err := guest.Dial(t.Context(), func(ctx context.Context) (net.Conn, error) {
			nc, err := h.dial(ctx)
			return &cut{Conn: nc, left: 49 + generation*3}, err
		}, 1000)
		if err == nil {
			_ = raw.Call(t.Context(), "test.Echo", "cut off in the middle of it", nil)
		}
	}
	echo(t, h.connect(t, 99), "after")
}

// cut breaks a connection after some bytes written.
type cut struct {
	net.Conn
	left int
}

func (c *cut) Write(b []byte) (int, error) {
	n := min(len(b), c.left)
	c.left -= n
	m, err := c.Conn.Write(b[:n])
	if err == nil && n < len(b) {
		err = errors.Join(io.ErrShortWrite, c.Close())
	}
	return m, err
}

func TestGarbageBeforeThePreamble(t *testing.T) {
	h := start(t)
	for i, garbage := range []string{"\xf9forkd", strings.Repeat("\x00", 1000), rand.Text(), string(wire.AppendAnswer(nil, [16]byte{1}, nil))} {
		c, err := guest.Dial(t.Context(), func(ctx context.Context) (net.Conn, error) {
			nc, err := h.dial(ctx)
			if err == nil {
				_, err = nc.Write([]byte(garbage))
			}
			return nc, err
		}, uint64(i))
		if err != nil {
			t.Fatal(err)
		}
		echo(t, c, "works")
	}
}

func TestTakeoverEndsTheOldSession(t *testing.T) {
	h := start(t)
	first := h.connect(t, 1)
	waiting := make(chan error, 1)
	s, err := first.Open(t.Context(), "test.Wait", nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _, err := s.Recv()
		waiting <- err
	}()
	echo(t, first, "the call before has arrived, too")
	second := h.connect(t, 2)
	<-h.cancelled
	if err := <-waiting; err == nil {
		t.Fatal("the old call ended well")
	}
	<-first.Closed()
	echo(t, second, "new")
}

// A user's file may contain the bytes of a preamble, wherever the pieces of the transfer fall.
func TestUploadThatLooksLikeAPreamble(t *testing.T) {
	h := start(t)
	c := h.connect(t, 1)
	trap := (&wire.Preamble{Version: 1, Nonce: [16]byte{9}, Generation: 9}).Append(nil)
	for i := range 3 * len(trap) {
		data := append(bytes.Repeat([]byte{'.'}, 32<<10-i), bytes.Repeat(trap, 5)...)
		if got := roundTrip(t, c, data); !bytes.Equal(got, data) {
			t.Fatalf("offset %d: %d of %d bytes came back", i, len(got), len(data))
		}
	}
}

func roundTrip(t *testing.T, c *guest.Conn, data []byte) []byte {
	t.Helper()
	s, err := c.Open(t.Context(), "test.Copy", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	go func() {
		_, _ = s.Data(wire.KindData).Write(data)
		_ = s.HalfClose()
	}()
	got, err := io.ReadAll(s.DataReader())
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func TestALotOfData(t *testing.T) {
	testenv.OncePerRun(t)
	const size = 256 << 20
	c := start(t).connect(t, 1)
	s, err := c.Open(t.Context(), "test.Copy", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	go func() {
		_, _ = io.CopyN(s.Data(wire.KindData), zeros{}, size)
		_ = s.HalfClose()
	}()
	if n, err := io.Copy(io.Discard, s.DataReader()); err != nil || n != size {
		t.Fatalf("%d bytes, %v", n, err)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

func TestManyCallsAtOnce(t *testing.T) {
	c := start(t).connect(t, 1)
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			var out int
			if err := c.Call(t.Context(), "test.Echo", 7, &out); err != nil || out != 7 {
				t.Errorf("got %d, %v", out, err)
			}
		})
	}
	wg.Wait()
}

func TestTooManyCallsAreRefused(t *testing.T) {
	h := start(t)
	c := h.connect(t, 1)
	var open []*wire.Stream
	for range 256 {
		s, err := c.Open(t.Context(), "test.Wait", nil)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, s)
	}
	var refusal *wire.Error
	if err := c.Call(t.Context(), "test.Echo", 1, nil); !errors.As(err, &refusal) || refusal.Code != wire.CodeExhausted {
		t.Fatalf("got %v", err)
	}
	for _, s := range open {
		_ = s.Close()
	}
	for range open {
		<-h.cancelled
	}
}

// A caller that leaves cancels the handler, be it waiting or writing.
func TestCallerLeaves(t *testing.T) {
	h := start(t)
	c := h.connect(t, 1)
	for _, method := range []string{"test.Wait", "test.Flood"} {
		ctx, cancel := context.WithCancel(t.Context())
		s, err := c.Open(ctx, method, nil)
		if err != nil {
			t.Fatal(err)
		}
		echo(t, c, "it has begun")
		cancel()
		for err == nil {
			_, _, err = s.Recv()
		}
		_ = s.Close()
		<-h.cancelled
	}
	echo(t, c, "fine")
}

func TestCallIsBoundedByItsContext(t *testing.T) {
	h := start(t)
	c := h.connect(t, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := c.Call(ctx, "test.Wait", nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
}

func TestDialIsBoundedByItsContext(t *testing.T) {
	p := newPort(t) // nobody answers
	t.Cleanup(p.close)
	ctx, cancel := context.WithTimeout(t.Context(), 120*time.Millisecond)
	defer cancel()
	if _, err := guest.Dial(ctx, p.dial, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
}

// TestSilentConnectionIsMadeAnew: one that is never answered costs a moment, not the caller's patience.
func TestSilentConnectionIsMadeAnew(t *testing.T) {
	h := start(t)
	silent := 2
	c, err := guest.Dial(t.Context(), func(ctx context.Context) (net.Conn, error) {
		if silent == 0 {
			return h.dial(ctx)
		}
		silent--
		ours, theirs := net.Pipe()
		go func() {
			_, _ = io.Copy(io.Discard, theirs)
			_ = theirs.Close()
		}()
		return ours, nil
	}, 7)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	echo(t, c, "at the third attempt")
}

func TestUploadOfABrokenSource(t *testing.T) {
	c := start(t).connect(t, 1)
	broken := io.MultiReader(strings.NewReader("half"), iotest.ErrReader(io.ErrNoProgress))
	if err := call.Upload(t.Context(), c, wire.MethodExtract, wire.ExtractRequest{Path: t.TempDir()}, broken, nil); !errors.Is(err, io.ErrNoProgress) {
		t.Fatalf("got %v", err)
	}
	var refusal *wire.Error
	if err := call.Upload(t.Context(), c, wire.MethodExtract, wire.ExtractRequest{Path: "relative"}, zeros{}, nil); !errors.As(err, &refusal) || refusal.Code != wire.CodeInvalid {
		t.Fatalf("got %v", err)
	}
}

// hostile answers the handshake and then sends what it likes.
func hostile(t *testing.T, hello, after string) (*guest.Conn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	return guest.Dial(ctx, func(context.Context) (net.Conn, error) {
		here, there := net.Pipe()
		go func() {
			p, err := wire.NewReceiver(there).Await()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(io.Discard, there) }()
			_, _ = there.Write(wire.AppendAnswer(nil, p.Nonce, []byte(hello)))
			_, _ = there.Write([]byte(after))
		}()
		t.Cleanup(func() { _ = there.Close() })
		return here, nil
	}, 1)
}

func TestHostileGuest(t *testing.T) {
	good, err := json.Marshal(wire.Hello{Version: wire.Version, Generation: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, hello := range []string{"", "{}", "[", `{"version":99}`, `{"version":-1}`} {
		if c, err := hostile(t, hello, ""); !errors.Is(err, guest.ErrProtocol) {
			t.Errorf("hello %q: got %v, %v", hello, c, err)
		}
	}
	frame := func(kind, flags byte, id, n byte) string {
		return string([]byte{0, kind, 0, flags, 0, 0, 0, id, 0, 0, 0, n})
	}
	for name, after := range map[string]string{
		"ping":            frame(2, 1, 0, 1),
		"ping answer":     frame(2, 2, 0, 1),
		"opens a stream":  frame(1, 1, 2, 0),
		"unknown type":    frame(9, 0, 1, 0),
		"unknown version": "\x09" + frame(0, 0, 1, 0)[1:],
		"go away, broken": frame(3, 0, 0, 1),
	} {
		c, err := hostile(t, string(good), after)
		if err != nil {
			t.Fatal(err)
		}
		<-c.Closed()
		if err := c.Ping(t.Context()); err == nil {
			t.Errorf("%s: a call succeeded", name)
		}
	}
}

func FuzzHostileGuest(f *testing.F) {
	f.Add([]byte("\x00\x01\x00\x02\x00\x00\x00\x01\x00\x00\x00\x00"))
	f.Add([]byte("\x00\x00\x00\x02\x00\x00\x00\x01\x00\x00\x00\x05Z\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, after []byte) {
		c, err := hostile(t, `{"version":1,"generation":1}`, string(after))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_ = c.Ping(ctx)
		_ = c.Close()
	})
}
