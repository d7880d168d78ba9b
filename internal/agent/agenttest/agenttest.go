// Package agenttest calls handlers of the agent's services in tests, over a real socket and as the agent's session
// would. Only tests import it.
package agenttest

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// Call starts a call of a handler and returns the caller's side of its stream. At the end of the test the stream is
// closed and the handler's end awaited.
func Call(t testing.TB, h wire.Handler, request any) *wire.Stream {
	t.Helper()
	body, err := json.Marshal(request)
	if err != nil {
		t.Fatalf("encode request: %v", err)
	}
	here, there := pair(t)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	s := wire.NewStream(there)
	s.StartReadAhead()
	running.Go(func() {
		s.ReadAhead(func() {
			cancel()
			_ = there.SetWriteDeadline(time.Unix(1, 0))
		})
	})
	running.Go(func() {
		defer s.Close()
		defer cancel()
		err := h(ctx, s, body)
		var refusal *wire.Error
		switch {
		case err == nil:
			_ = s.End()
		case errors.As(err, &refusal):
			_ = s.SendError(refusal.Code, refusal.Message)
		default:
			_ = s.SendError(wire.CodeInternal, err.Error())
		}
	})
	t.Cleanup(func() {
		_ = here.Close()
		running.Wait()
	})
	// A handler that hangs must end the test with a message, not with the binary's timeout.
	if err := here.SetDeadline(time.Now().Add(testenv.Timeout(60 * time.Second))); err != nil {
		t.Fatal(err)
	}
	return wire.NewStream(here)
}

func pair(t testing.TB) (a, b net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatalf("socketpair: %v", err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		conns[i], err = net.FileConn(f)
		_ = f.Close()
		if err != nil {
			t.Fatalf("socket: %v", err)
		}
	}
	return conns[0], conns[1]
}

// Unary makes a call, decodes its one message into out and returns its error.
func Unary(t testing.TB, h wire.Handler, request, out any) error {
	t.Helper()
	s := Call(t, h, request)
	for got := false; ; got = true {
		kind, payload, err := s.Recv()
		if errors.Is(err, io.EOF) {
			if !got {
				t.Fatal("the call ended without a reply")
			}
			return nil
		}
		if err != nil {
			return err
		}
		if kind != wire.KindMessage || got {
			t.Fatalf("unexpected frame %q", byte(kind))
		}
		if out != nil {
			if err := json.Unmarshal(payload, out); err != nil {
				t.Fatalf("decode %s: %v", payload, err)
			}
		}
	}
}

// Code is the code of a call's error, "" for none.
func Code(err error) string {
	var e *wire.Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return e.Code
	default:
		return "not a wire error: " + err.Error()
	}
}
