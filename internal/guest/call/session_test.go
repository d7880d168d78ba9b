package call

import (
	"context"
	"io"
	"net"
	"testing"

	"forkd.dev/forkd/internal/guest/wire"
)

func TestSignalNumber(t *testing.T) {
	for text, want := range map[string]int{"TERM": 15, "sigkill": 9, "SIGUSR1": 10, "hup": 1, "64": 64, "1": 1} {
		if got, ok := SignalNumber(text); !ok || got != want {
			t.Errorf("%q: %d, %v; want %d", text, got, ok, want)
		}
	}
	for _, text := range []string{"", "0", "65", "-9", "NOPE", "SIG"} {
		if got, ok := SignalNumber(text); ok {
			t.Errorf("%q: %d", text, got)
		}
	}
}

// guest starts a process for whoever asks.
type guest struct{ conn net.Conn }

func (g guest) Open(_ context.Context, method string, in any) (*wire.Stream, error) {
	s := wire.NewStream(g.conn)
	return s, s.SendRequest(method, in)
}

type broken struct{}

func (broken) Read([]byte) (int, error) { panic("broken") }

// TestGuard: whoever lends a terminal puts it back when what reads from it panics.
func TestGuard(t *testing.T) {
	here, there := net.Pipe()
	defer there.Close()
	s := wire.NewStream(there)
	go func() {
		if _, _, err := s.Recv(); err == nil {
			_ = s.SendMessage(wire.ProcessEvent{Start: &wire.ProcessStart{PID: 1, PTY: true}})
		}
	}()
	seen := make(chan any, 1)
	x := Session{Stdin: broken{}, Output: Output{Stdout: io.Discard}, Guard: func() {
		seen <- recover()
		_ = there.Close()
	}}
	if _, err := Start(t.Context(), guest{here}, wire.StartRequest{PTY: &wire.PTY{}}, x); err == nil {
		t.Error("the call ended well")
	}
	if got := <-seen; got != "broken" {
		t.Errorf("the guard saw %v", got)
	}
}
