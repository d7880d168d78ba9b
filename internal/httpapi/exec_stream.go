package httpapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
)

// execStream sends a command's events as they come, and in between signs of life: what is in front of the daemon must not
// take a silent command for a dead one.
type execStream struct {
	mu     sync.Mutex
	out    *events
	base64 bool
}

// streamExec runs a command. Errors before it has started are answered as such, later ones as why explains them.
func streamExec(
	ctx context.Context, out *events, o call.Opener, start wire.StartRequest, stdin io.Reader, req api.ExecRequest, why func(error) error,
) error {
	x := &execStream{out: out, base64: req.Base64}
	stdout, stderr := x.output("stdout"), x.output("stderr")
	stop := x.keepAlive(ctx)
	end, err := call.Start(ctx, o, start, call.Session{
		Stdin:   stdin,
		Output:  call.Output{Stdout: stdout, Stderr: stderr},
		Started: func(s wire.ProcessStart) { _ = x.send(api.ExecEvent{Type: "start", PID: s.PID, TTY: s.PTY}) },
		Lost:    func(n int64) { _ = x.send(api.ExecEvent{Type: "lost", Bytes: n}) },
	})
	stop()
	if err != nil {
		err = fmt.Errorf("exec %.80q: %w", req.Args[0], err)
		if !out.begun {
			return err
		}
	}
	if flush := errors.Join(stdout.Flush(), stderr.Flush()); flush != nil {
		return flush
	}
	if err != nil {
		return errors.Join(err, x.send(callFailed(why(err))))
	}
	return x.send(processExit(end))
}

func processExit(end *wire.ProcessEnd) api.ExecEvent {
	code := end.Code()
	return api.ExecEvent{
		Type: "exit", ExitCode: &code, Signal: end.Signal, Status: end.Status, TimedOut: end.TimedOut, Error: end.Problem(),
	}
}

func callFailed(err error) api.ExecEvent {
	e := toAPI(err)
	return api.ExecEvent{Type: "error", Code: e.Code, Text: e.Message}
}

func (x *execStream) send(e api.ExecEvent) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.out.write("", e.Type, e)
}

// keepAlive says until it is stopped, which waits, that the line stands.
func (x *execStream) keepAlive(ctx context.Context) (stop func()) {
	return every(keepAlive, func() (more bool) {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.out.begun {
			_ = x.out.keepAlive()
		}
		return ctx.Err() == nil
	})
}

// flusher takes output.
type flusher interface {
	io.Writer
	Flush() error
}

func (x *execStream) output(kind string) flusher {
	if x.base64 {
		return &dataWriter{x, kind}
	}
	return &call.Text{Pass: func(text string) error {
		return x.send(api.ExecEvent{Type: kind, Text: text, Timestamp: time.Now().UnixNano()})
	}}
}

// dataWriter sends output that need not be text.
type dataWriter struct {
	x    *execStream
	kind string
}

func (d *dataWriter) Write(p []byte) (int, error) {
	if err := d.x.send(api.ExecEvent{Type: d.kind, Data: p, Timestamp: time.Now().UnixNano()}); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (d *dataWriter) Flush() error { return nil }
