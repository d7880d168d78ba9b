package guest_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/mux"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// liar is an agent that says what a test wants. It speaks as much of the protocol as the test asks it to.
type liar struct {
	t        *testing.T
	conn     net.Conn
	receiver *wire.Receiver
	p        wire.Preamble
	request  *wire.AwakenRequest
}

// dial runs script for every connection, from its preamble on. What it returns is the way to the liar; conversations are
// over when the test is.
func dialLiar(t *testing.T, script func(*liar)) func(context.Context) (net.Conn, error) {
	t.Helper()
	var running sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	t.Cleanup(func() {
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		running.Wait()
	})
	return func(context.Context) (net.Conn, error) {
		here, there := net.Pipe()
		mu.Lock()
		conns = append(conns, there)
		mu.Unlock()
		running.Go(func() {
			defer there.Close()
			l := &liar{t: t, conn: there, receiver: wire.NewReceiver(there)}
			var err error
			if l.p, err = l.receiver.Await(); err != nil {
				return
			}
			if l.p.Awaken {
				if l.request, _, err = wire.ReadAwaken(l, nil); err != nil {
					return
				}
			}
			script(l)
		})
		return here, nil
	}
}

func (l *liar) Read(p []byte) (int, error)  { return l.receiver.Read(p) }
func (l *liar) Write(p []byte) (int, error) { return l.conn.Write(p) }

// swallow takes what the host sends and says nothing.
func (l *liar) swallow() { _, _ = io.Copy(io.Discard, l.conn) }

// drain takes what the host sends, beside what the script says.
func (l *liar) drain() { go l.swallow() }

func (l *liar) honest() *wire.Hello {
	h := &wire.Hello{Version: wire.Version, Agent: "liar", Generation: l.p.Generation, Phase: "ready", Features: []string{wire.FeatureThaw}}
	if l.p.Awaken {
		h.Awakened = &wire.AwakenReport{Renewed: []string{"kernel_entropy"}}
	}
	return h
}

func (l *liar) hello(h *wire.Hello) {
	b, err := wire.Encode(h)
	if err != nil {
		l.t.Error(err)
	}
	_, _ = l.conn.Write(wire.AppendAnswer(nil, l.p.Nonce, b))
}

// calls answers the handshake and then every call with answer.
func (l *liar) calls(answer func(method string, raw io.ReadWriter, s *wire.Stream)) {
	l.hello(l.honest())
	var running sync.WaitGroup
	defer running.Wait()
	session := mux.NewServer(l.conn, 1024, func(st *mux.Stream) {
		st.OnGone(st.Abort)
		running.Go(func() {
			s := wire.NewStream(st)
			_, payload, err := s.Recv()
			if err != nil {
				return
			}
			method, _, _ := wire.SplitRequest(payload)
			answer(method, st, s)
			_ = s.Close()
		})
	})
	defer session.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := l.Read(buf)
		if err != nil || session.Feed(buf[:n]) != nil {
			return
		}
	}
}

// patience is what a case may take when nothing bounds it but the caller's own limit.
const patience = 250 * time.Millisecond

// soon runs f with a limit, and fails the test if it takes much longer than that.
func soon(t *testing.T, f func(ctx context.Context) error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	select {
	case err := <-done:
		return err
	case <-time.After(testenv.Timeout(10 * time.Second)):
		t.Fatal("it hangs")
		return nil
	}
}

// unclean reports whether a text could steer a terminal.
func unclean(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool {
		return r < 0x20 && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 || r == 0x202e || r == 0xfffd
	})
}

const steering = "\x1b]0;owned\a\x1b[2J\u009b31m\x7f\u202eevil\r\x00"

// TestLiarHandshake: whatever a guest says at the beginning of a connection, the host ends up with an error soon.
func TestLiarHandshake(t *testing.T) {
	testenv.OncePerRun(t)
	flood := func(l *liar, b []byte) {
		l.drain()
		for {
			if _, err := l.Write(b); err != nil {
				return
			}
		}
	}
	for name, script := range map[string]func(*liar){
		"never answers": func(l *liar) { l.swallow() },
		"takes nothing": func(l *liar) { <-l.t.Context().Done() },
		"closes at once": func(*liar) {
		},
		"garbage without end": func(l *liar) { flood(l, bytes.Repeat([]byte{0xa5}, 64<<10)) },
		"beginnings of answers without end": func(l *liar) {
			flood(l, bytes.Repeat(wire.AppendAnswer(nil, [16]byte{1}, nil), 1000))
		},
		"one byte at a time": func(l *liar) {
			l.drain()
			answer := wire.AppendAnswer(nil, l.p.Nonce, bytes.Repeat([]byte{' '}, wire.MaxHello))
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for _, b := range answer {
				<-tick.C
				if _, err := l.Write([]byte{b}); err != nil {
					return
				}
			}
		},
		"hello of four gigabytes": func(l *liar) {
			l.drain()
			b := wire.AppendAnswer(nil, l.p.Nonce, nil)
			binary.BigEndian.PutUint32(b[len(b)-4:], 1<<32-1)
			_, _ = l.Write(b)
			flood(l, make([]byte, 64<<10))
		},
		"half a hello, then the end": func(l *liar) {
			l.drain()
			b := wire.AppendAnswer(nil, l.p.Nonce, bytes.Repeat([]byte{'{'}, 100))
			_, _ = l.Write(b[:len(b)-50])
		},
		"half a hello, then silence": func(l *liar) {
			b := wire.AppendAnswer(nil, l.p.Nonce, bytes.Repeat([]byte{'{'}, 100))
			_, _ = l.Write(b[:len(b)-50])
			l.swallow()
		},
		"no json": func(l *liar) {
			l.drain()
			_, _ = l.Write(wire.AppendAnswer(nil, l.p.Nonce, []byte("\xff\xfe")))
			l.swallow()
		},
		"deep json": func(l *liar) {
			l.drain()
			_, _ = l.Write(wire.AppendAnswer(nil, l.p.Nonce, bytes.Repeat([]byte("["), wire.MaxHello)))
			l.swallow()
		},
		"version 0":       func(l *liar) { l.drain(); h := l.honest(); h.Version = 0; l.hello(h); l.swallow() },
		"version -1":      func(l *liar) { l.drain(); h := l.honest(); h.Version = -1; l.hello(h); l.swallow() },
		"version 1 << 62": func(l *liar) { l.drain(); h := l.honest(); h.Version = 1 << 62; l.hello(h); l.swallow() },
		"answer to another connection": func(l *liar) {
			l.drain()
			b, _ := wire.Encode(l.honest())
			_, _ = l.Write(wire.AppendAnswer(nil, [16]byte{7}, b))
			l.swallow()
		},
		"another generation": func(l *liar) { l.drain(); h := l.honest(); h.Generation++; l.hello(h); l.swallow() },
	} {
		t.Run(name, func(t *testing.T) {
			dial := dialLiar(t, script)
			err := soon(t, func(ctx context.Context) error {
				c, err := guest.Dial(ctx, dial, 5)
				if err == nil {
					err = errors.Join(errors.New("it believed that"), c.Close())
				}
				return err
			})
			t.Log(err)
			if err == nil || strings.Contains(err.Error(), "believed") || unclean(err.Error()) {
				t.Errorf("got %v", err)
			}
			err = soon(t, func(ctx context.Context) error {
				_, _, err := guest.AwakenFirst(ctx, dial, 5, &wire.AwakenRequest{SandboxID: "sbx"})
				return err
			})
			if err == nil || unclean(err.Error()) {
				t.Errorf("awaken: got %v", err)
			}
		})
	}
}

// TestLiarAwakens: what a child answers that is to take its identity.
func TestLiarAwakens(t *testing.T) {
	for name, c := range map[string]struct {
		script func(*liar)
		want   string
	}{
		"without a report": {func(l *liar) { l.drain(); h := l.honest(); h.Awakened = nil; l.hello(h) }, "without a report"},
		"refuses in colours": {func(l *liar) {
			l.drain()
			h := l.honest()
			h.Refusal = &wire.Error{Code: steering, Message: "no " + steering}
			l.hello(h)
		}, "no evil"},
		"asks for the time without end": {func(l *liar) {
			l.drain()
			for {
				if _, err := l.Write(wire.AppendAnswer(nil, l.p.Nonce, nil)); err != nil {
					return
				}
			}
		}, "questions for the time"},
		"asks for the time and says no more": {func(l *liar) {
			_, _ = l.Write(wire.AppendAnswer(nil, l.p.Nonce, nil))
			l.swallow()
		}, "deadline"},
		"with the answer of another fork": {func(l *liar) {
			l.drain()
			h := l.honest()
			h.Generation = 99
			l.hello(h)
		}, "came on connection"},
	} {
		t.Run(name, func(t *testing.T) {
			err := soon(t, func(ctx context.Context) error {
				_, _, err := guest.AwakenFirst(ctx, dialLiar(t, c.script), 5, &wire.AwakenRequest{SandboxID: "sbx"})
				return err
			})
			if err == nil || !strings.Contains(err.Error(), c.want) || unclean(err.Error()) {
				t.Errorf("got %q", err)
			}
		})
	}
}

// TestLiarReports: what a child says of itself is kept as long as it lives, and shown; so it is bounded and clean.
func TestLiarReports(t *testing.T) {
	many := make([]wire.NotRenewed, 200)
	for i := range many {
		many[i] = wire.NotRenewed{What: steering, Name: steering, Why: "w\nw"}
	}
	conn, report, err := guest.AwakenFirst(t.Context(), dialLiar(t, func(l *liar) {
		h := l.honest()
		h.Agent, h.Features = steering+strings.Repeat("v", 1000), []string{steering}
		h.Awakened = &wire.AwakenReport{Renewed: []string{"a\nb" + steering}, NotRenewed: many}
		l.drain()
		l.hello(h)
		l.swallow()
	}), 5, &wire.AwakenRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	text := fmt.Sprintf("%q %+v", conn.Hello().Agent, *report)
	if unclean(conn.Hello().Agent) || unclean(report.Renewed[0]) || unclean(report.NotRenewed[0].Name) ||
		strings.Contains(report.Renewed[0], "\n") || len(conn.Hello().Agent) > 300 {
		t.Error(text[:500])
	}
}

// part is one frame.
func part(kind byte, payload []byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(payload)))
	return append(b, payload...)
}

// endless writes a prefix and then b again and again, until nobody listens.
func endless(w io.Writer, prefix, b []byte) {
	if _, err := w.Write(prefix); err != nil {
		return
	}
	for {
		if _, err := w.Write(b); err != nil {
			return
		}
	}
}

// list is a list of n equal elements in JSON, after some and before more.
func list(before, element string, n int, after string) []byte {
	var b bytes.Buffer
	b.WriteString(before)
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(element)
	}
	b.WriteString(after)
	return b.Bytes()
}

// lies are what a guest may answer a call with. None may keep a caller beyond its patience, or cost much memory; most are
// an error at once.
func lies() map[string]func(raw io.ReadWriter, s *wire.Stream) {
	full := bytes.Repeat([]byte{'x'}, wire.MaxPayload)
	send := func(b []byte) func(io.ReadWriter, *wire.Stream) {
		return func(raw io.ReadWriter, _ *wire.Stream) { _, _ = raw.Write(b) }
	}
	wait := func(raw io.ReadWriter) { _, _ = io.Copy(io.Discard, raw) }
	return map[string]func(raw io.ReadWriter, s *wire.Stream){
		"never answers":       func(raw io.ReadWriter, _ *wire.Stream) { wait(raw) },
		"ends without a word": func(io.ReadWriter, *wire.Stream) {},
		"half a header":       send([]byte{'M', 0, 0}),
		"half a frame":        send(part('M', []byte("{}"))[:6]),
		"half a frame, then silence": func(raw io.ReadWriter, _ *wire.Stream) {
			_, _ = raw.Write(part('M', []byte("{}"))[:6])
			wait(raw)
		},
		"a frame of four gigabytes": func(raw io.ReadWriter, _ *wire.Stream) {
			endless(raw, []byte{'M', 0xff, 0xff, 0xff, 0xff}, full)
		},
		"an unknown frame":           send(part('?', nil)),
		"a part of what has none":    send(part('o', nil)),
		"garbage without end":        func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, bytes.Repeat([]byte{0xa5}, 1000)) },
		"parts without end":          func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, part('m', full)) },
		"empty parts without end":    func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, part('m', nil)) },
		"messages without end":       func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, part('M', []byte("{}"))) },
		"empty messages without end": func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, part('M', nil)) },
		"empty data without end":     func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, part('D', nil)) },
		"data without end":           func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, part('D', full)) },
		"output without end":         func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, part('O', full)) },
		"errors without end":         func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, part('x', full)) },
		"requests without end":       func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, part('Q', []byte("agent.Ping\n{}"))) },
		"starts without end": func(raw io.ReadWriter, _ *wire.Stream) {
			endless(raw, nil, part('M', []byte(`{"start":{"pid":7}}`)))
		},
		"half-closes without end": func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, part('H', nil)) },
		"no json":                 send(part('M', []byte("\xff\xfe{]"))),
		"another type":            send(part('M', []byte(`[[[1]]]`))),
		"an error in colours":     func(_ io.ReadWriter, s *wire.Stream) { _ = s.SendError(steering, steering) },
		"a long error":            func(_ io.ReadWriter, s *wire.Stream) { _ = s.SendError(wire.CodeInternal, strings.Repeat("e", 10<<20)) },
		"an error without a code": send(part('X', []byte(`{}`))),
		"deep json": func(_ io.ReadWriter, s *wire.Stream) {
			_ = s.Send(wire.KindMessage, bytes.Repeat([]byte("["), 15<<20))
		},
		"deep objects": func(_ io.ReadWriter, s *wire.Stream) {
			_ = s.Send(wire.KindMessage, bytes.Repeat([]byte(`{"a":`), 3<<20))
		},
		"millions of entries": func(_ io.ReadWriter, s *wire.Stream) {
			_ = s.Send(wire.KindMessage, list(`{"entries":[`, "{}", 5<<20, "]}"))
		},
		"millions of processes": func(_ io.ReadWriter, s *wire.Stream) {
			_ = s.Send(wire.KindMessage, list(`{"processes":[`, "{}", 5<<20, "]}"))
		},
		"millions of names": func(_ io.ReadWriter, s *wire.Stream) {
			_ = s.Send(wire.KindMessage, list(`{"renewed":[`, `""`, 5<<20, "]}"))
		},
		"millions of things not renewed": func(_ io.ReadWriter, s *wire.Stream) {
			_ = s.Send(wire.KindMessage, list(`{"notRenewed":[`, "{}", 5<<20, "]}"))
		},
		"a number of a megabyte": func(_ io.ReadWriter, s *wire.Stream) {
			_ = s.Send(wire.KindMessage, []byte(`{"memTotalBytes":`+strings.Repeat("9", 900<<10)+`}`))
		},
	}
}

// callers are the host's calls, as it makes them.
func callers() map[string]func(ctx context.Context, c *guest.Conn) error {
	return map[string]func(ctx context.Context, c *guest.Conn) error{
		"ping":    func(ctx context.Context, c *guest.Conn) error { return c.Ping(ctx) },
		"metrics": func(ctx context.Context, c *guest.Conn) error { _, err := c.Metrics(ctx); return err },
		"awaken": func(ctx context.Context, c *guest.Conn) error {
			_, err := c.Awaken(ctx, &wire.AwakenRequest{})
			return err
		},
		"thaw":     func(ctx context.Context, c *guest.Conn) error { _, err := c.Thaw(ctx, "sbx"); return err },
		"quiesce":  func(ctx context.Context, c *guest.Conn) error { return c.Quiesce(ctx, wire.QuiesceRequest{}) },
		"pivot":    func(ctx context.Context, c *guest.Conn) error { return c.Pivot(ctx) },
		"poweroff": func(ctx context.Context, c *guest.Conn) error { return c.PowerOff(ctx) },
		"run": func(ctx context.Context, c *guest.Conn) error {
			_, err := call.Run(ctx, c, wire.StartRequest{}, nil, call.Output{}, nil)
			return err
		},
		"run with input": func(ctx context.Context, c *guest.Conn) error {
			_, err := call.Run(ctx, c, wire.StartRequest{}, strings.NewReader("x"), call.Output{}, func(uint32) {})
			return err
		},
		"eval": func(ctx context.Context, c *guest.Conn) error {
			_, err := call.Eval(ctx, c, wire.EvalRequest{}, call.Output{})
			return err
		},
		"list": func(ctx context.Context, c *guest.Conn) error {
			return call.Unary(ctx, c, wire.MethodFileList, struct{}{}, &wire.EntriesReply{})
		},
		"processes": func(ctx context.Context, c *guest.Conn) error { _, err := call.Processes(ctx, c); return err },
		"upload": func(ctx context.Context, c *guest.Conn) error {
			return call.Upload(ctx, c, wire.MethodExtract, wire.ExtractRequest{}, zeros{}, nil)
		},
		"download": func(ctx context.Context, c *guest.Conn) error {
			return call.Download(ctx, c, wire.MethodArchive, wire.ArchiveRequest{}, io.Discard)
		},
	}
}

// TestLiarCalls: every lie to every call.
func TestLiarCalls(t *testing.T) {
	testenv.OncePerRun(t)
	for lie, answer := range lies() {
		t.Run(lie, func(t *testing.T) {
			t.Parallel()
			c, err := guest.Dial(t.Context(), dialLiar(t, func(l *liar) {
				l.calls(func(_ string, raw io.ReadWriter, s *wire.Stream) { answer(raw, s) })
			}), 1)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			for name, err := range all(t, c) {
				if err == nil && !harmless(lie, name) {
					t.Errorf("%s: it believed that", name)
				}
				if err != nil && (unclean(err.Error()) || len(err.Error()) > 10<<10) {
					t.Errorf("%s: %.200q", name, err)
				}
			}
			// Whatever a call was answered, the connection has room for the next.
			if isDone(c) {
				return
			}
			if err := soon(t, func(ctx context.Context) error { _, err := c.OpenRaw(ctx); return err }); err != nil {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

// all makes every call at once, and says how each ended.
func all(t *testing.T, c *guest.Conn) map[string]error {
	t.Helper()
	var mu sync.Mutex
	got := map[string]error{}
	_ = soon(t, func(ctx context.Context) error {
		var running sync.WaitGroup
		for name, f := range callers() {
			running.Go(func() {
				err := f(ctx, c)
				mu.Lock()
				defer mu.Unlock()
				got[name] = err
			})
		}
		running.Wait()
		return nil
	})
	return got
}

func isDone(c *guest.Conn) bool {
	select {
	case <-c.Closed():
		return true
	default:
		return false
	}
}

// harmless are answers that may be taken for what they are.
func harmless(lie, call string) bool {
	switch call {
	case "run", "run with input", "eval":
		// A result without anything in it.
		return call == "eval" && (strings.HasPrefix(lie, "messages") || strings.HasPrefix(lie, "starts") || strings.HasPrefix(lie, "a number"))
	}
	return false
}

// TestLiarTakesNothing: a guest that reads not a byte after its hello keeps nobody.
func TestLiarTakesNothing(t *testing.T) {
	c, err := guest.Dial(t.Context(), dialLiar(t, func(l *liar) {
		l.hello(l.honest())
		<-l.t.Context().Done()
	}), 1)
	if err != nil {
		t.Fatal(err)
	}
	for name, err := range all(t, c) {
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if err := soon(t, func(context.Context) error { return c.Close() }); err != nil {
		t.Error(err)
	}
}

// TestLiarCloses: a connection that the guest ends in the middle of calls ends them all.
func TestLiarCloses(t *testing.T) {
	for name, f := range callers() {
		c, err := guest.Dial(t.Context(), dialLiar(t, func(l *liar) {
			l.hello(l.honest())
			_, _ = io.ReadFull(l, make([]byte, 12))
		}), 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := soon(t, func(ctx context.Context) error { return f(ctx, c) }); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: got %v", name, err)
		}
		_ = c.Close()
	}
}

// TestLiarMemory: a hundred callers of one guest that sends each of them all it can cost a bounded amount of memory.
func TestLiarMemory(t *testing.T) {
	testenv.OncePerRun(t)
	const most = 256 << 20
	full := part('m', bytes.Repeat([]byte{'x'}, wire.MaxPayload))
	entries := list(`{"entries":[`, `{"name":"`+strings.Repeat("n", 10)+`"}`, 100<<10, "]}")
	for name, answer := range map[string]func(raw io.ReadWriter, s *wire.Stream){
		"parts without end":          func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, full) },
		"large lists":                func(_ io.ReadWriter, s *wire.Stream) { _ = s.Send(wire.KindMessage, entries) },
		"large messages, never read": func(raw io.ReadWriter, _ *wire.Stream) { endless(raw, nil, part('O', full[5:])) },
	} {
		t.Run(name, func(t *testing.T) {
			c, err := guest.Dial(t.Context(), dialLiar(t, func(l *liar) {
				l.calls(func(_ string, raw io.ReadWriter, s *wire.Stream) { answer(raw, s) })
			}), 1)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			before := heap()
			var peak atomic.Uint64
			stop := make(chan struct{})
			var running sync.WaitGroup
			running.Go(func() {
				tick := time.NewTicker(20 * time.Millisecond)
				defer tick.Stop()
				for {
					peak.Store(max(peak.Load(), heap()))
					select {
					case <-tick.C:
					case <-stop:
						return
					}
				}
			})
			var callers sync.WaitGroup
			for range 100 {
				callers.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
					defer cancel()
					if strings.Contains(name, "never read") {
						s, err := c.Open(ctx, "any", nil)
						if err != nil {
							t.Error(err)
							return
						}
						defer s.Close()
						<-ctx.Done()
						return
					}
					_ = call.Unary(ctx, c, "any", nil, &wire.EntriesReply{})
				})
			}
			callers.Wait()
			close(stop)
			running.Wait()
			cost := int64(peak.Load()) - int64(before)
			t.Logf("peak of the heap: %d MiB more than before", cost>>20)
			if cost > most {
				t.Errorf("a hundred calls cost %d MiB", cost>>20)
			}
		})
	}
}

// heap is what is in use: what nobody needs any more is collected first, however busy the machine is.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
