package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// answer makes an agent that answers a connection's preamble with change made to an honest hello, and goes on with then.
func answer(t *testing.T, change func(*wire.Hello), then func(net.Conn)) func(net.Conn) {
	t.Helper()
	return func(conn net.Conn) {
		port := &guestPort{conn, wire.NewReceiver(conn)}
		p, err := port.r.Await()
		if err != nil {
			return
		}
		if p.Awaken {
			if _, _, err := wire.ReadAwaken(port, nil); err != nil {
				return
			}
		}
		hello := wire.Hello{
			Version: wire.Version, Generation: p.Generation, Phase: "ready", Features: []string{wire.FeatureThaw},
			Awakened: &wire.AwakenReport{Renewed: []string{"kernel_entropy"}},
		}
		change(&hello)
		b, err := json.Marshal(hello)
		if err != nil {
			t.Error(err)
		}
		if _, err := conn.Write(wire.AppendAnswer(nil, p.Nonce, b)); err == nil && then != nil {
			then(conn)
		}
	}
}

// TestLiarIsNoChild: of a fork whose agent lies when it is to be awakened nothing is left.
func TestLiarIsNoChild(t *testing.T) {
	testenv.OncePerRun(t)
	for name, lie := range map[string]func(net.Conn){
		"closes":             func(net.Conn) {},
		"garbage, then ends": func(c net.Conn) { _, _ = c.Write(make([]byte, 1<<20)) },
		"another version":    answer(t, func(h *wire.Hello) { h.Version = 77 }, nil),
		"another generation": answer(t, func(h *wire.Hello) { h.Generation += 3 }, nil),
		"no report":          answer(t, func(h *wire.Hello) { h.Awakened = nil }, nil),
		"a refusal":          answer(t, func(h *wire.Hello) { h.Refusal = &wire.Error{Code: "x", Message: "\x1b[2Jno"} }, nil),
	} {
		t.Run(name, func(t *testing.T) {
			e := newFakeEngine()
			e.lie = lie
			h := fakeHost(t, e, nil)
			results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 2})
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range results {
				if r.Err == nil || strings.Contains(r.Err.Error(), "\x1b") {
					t.Errorf("got %v", r.Err)
				}
			}
			if e.living() != 0 || len(h.Sandboxes(nil)) != 0 || h.hotUsers() != 0 {
				t.Errorf("%d machines, %d sandboxes, %d users of the image are left", e.living(), len(h.Sandboxes(nil)), h.hotUsers())
			}
		})
	}
}

// TestDeafSandbox: a sandbox whose agent takes nothing after its awakening keeps no caller, and can be ended.
func TestDeafSandbox(t *testing.T) {
	e := newFakeEngine()
	e.lie = answer(t, func(*wire.Hello) {}, func(c net.Conn) {
		one := make([]byte, 1)
		for { // it would take years to read what it is sent
			if _, err := c.Read(one); err != nil {
				return
			}
			select {
			case <-t.Context().Done():
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	h := fakeHost(t, e, nil)
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
	if err != nil || results[0].Err != nil {
		t.Fatal(err, results)
	}
	id := results[0].Sandbox.ID
	for name, call := range map[string]func(ctx context.Context) error{
		"ping": func(ctx context.Context) error {
			conn, err := h.Guest(ctx, id)
			if err != nil {
				return err
			}
			return conn.Ping(ctx)
		},
		"metrics": func(ctx context.Context) error {
			conn, err := h.Guest(ctx, id)
			if err != nil {
				return err
			}
			_, err = conn.Metrics(ctx)
			return err
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
	start := time.Now()
	if err := h.Kill(t.Context(), id); err != nil || time.Since(start) > testenv.Timeout(5*time.Second) {
		t.Errorf("to end it took %s: %v", time.Since(start), err)
	}
}

// TestBrokenConnection: a guest that breaks the protocol loses its connection and gets a new one, and the log says why.
func TestBrokenConnection(t *testing.T) {
	e := newFakeEngine()
	var connections atomic.Int32
	e.lie = answer(t, func(*wire.Hello) {}, func(c net.Conn) {
		if connections.Add(1) == 1 {
			_, _ = c.Write(bytes.Repeat([]byte{0xff}, 12))
		}
		_, _ = io.Copy(io.Discard, c)
	})
	var log bytes.Buffer
	h := fakeHost(t, e, func(cfg *Config) { cfg.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
	if err != nil || results[0].Err != nil {
		t.Fatal(err, results)
	}
	id := results[0].Sandbox.ID
	s, err := h.find(id)
	if err != nil {
		t.Fatal(err)
	}
	<-s.conn.Closed()
	if conn, err := h.Guest(t.Context(), id); err != nil || conn.Err() != nil {
		t.Fatalf("no new connection: %v", err)
	}
	if text := log.String(); !strings.Contains(text, "made anew") || !strings.Contains(text, "broke the multiplexer's protocol") {
		t.Errorf("the log says %q", text)
	}
}

// TestSteadily: the clock runs while the guest is busy with a piece, not while there is none for it.
func TestSteadily(t *testing.T) {
	ctx, r, stop := steadily(t.Context(), strings.NewReader("piece"))
	defer stop()
	if _, err := io.ReadAll(r); err != nil || ctx.Err() != nil {
		t.Fatal(err, ctx.Err())
	}
	s, ok := r.(*steadyReader)
	if !ok {
		t.Fatalf("%T", r)
	}
	s.timer.Reset(time.Millisecond) // as after stallTimeout
	<-ctx.Done()
	if !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		t.Fatal(context.Cause(ctx))
	}
}
