package call

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

// Started is told the pid of a process that runs now.
type Started func(pid uint32)

// Session is how a caller takes part in a process.
type Session struct {
	Stdin   io.Reader // nil: none
	Output  Output
	Started func(wire.ProcessStart) // may be nil
	Lost    func(bytes int64)       // told of output that is missing; may be nil
	Guard   func()                  // deferred where Stdin is read, which may have to see a panic; may be nil
}

// Select names a process as people do: by its pid, or by its tag.
func Select(name string) wire.ProcessSelector {
	if pid, err := strconv.ParseUint(name, 10, 32); err == nil {
		return wire.ProcessSelector{PID: uint32(pid)}
	}
	return wire.ProcessSelector{Tag: name}
}

// Run starts a process, feeds it stdin (nil: none), and returns how it ended. Standard input is read in the background,
// and a Read that does not return outlives the call. When ctx ends the process goes on in the guest, unless the request
// has a time limit.
func Run(ctx context.Context, o Opener, req wire.StartRequest, stdin io.Reader, out Output, started Started) (*wire.ProcessEnd, error) {
	return Start(ctx, o, req, Session{Stdin: stdin, Output: out, Started: started.told()})
}

func (f Started) told() func(wire.ProcessStart) {
	if f == nil {
		return nil
	}
	return func(s wire.ProcessStart) { f(s.PID) }
}

// Start is Run with all that a session has.
func Start(ctx context.Context, o Opener, req wire.StartRequest, x Session) (*wire.ProcessEnd, error) {
	if x.Stdin == nil && req.PTY == nil {
		none := false
		req.Stdin = &none
	}
	ctx, cancel := limited(ctx, req.TimeoutMS)
	defer cancel()
	end, err := x.follow(ctx, o, wire.MethodProcessStart, req)
	if end == nil && err == nil {
		err = io.ErrUnexpectedEOF
	}
	return end, err
}

// Launch starts a process and leaves it alone; it can be attached to later. Its standard input is closed unless the
// request says otherwise.
func Launch(ctx context.Context, o Opener, req wire.StartRequest) (wire.ProcessStart, error) {
	req.Detach = true
	var start wire.ProcessStart
	err := with(ctx, o, wire.MethodProcessStart, req, func(s *wire.Stream) error {
		var e wire.ProcessEvent
		if err := s.RecvMessage(&e); err != nil {
			return unexpected(err)
		}
		if e.Start == nil {
			return wire.Errorf(wire.CodeInternal, "the guest does not say what it started")
		}
		start = *e.Start
		return nil
	})
	return start, err
}

// Attach takes part in a process that somebody else started, or that was running when the sandbox's snapshot was taken,
// and returns how it ended. First comes what it printed while nobody was attached, as far as that was kept. Stdin is fed
// to it if given, and its end then closes the process's; a terminal has no such end. When ctx ends the process goes on.
// With NoWait it returns nil when the process goes on.
func Attach(ctx context.Context, o Opener, req wire.ConnectRequest, x Session) (*wire.ProcessEnd, error) {
	end, err := x.follow(ctx, o, wire.MethodProcessConnect, req)
	if end == nil && err == nil && !req.NoWait {
		err = io.ErrUnexpectedEOF
	}
	return end, err
}

// Processes lists those that were started through the agent and run.
func Processes(ctx context.Context, o Opener) ([]wire.ProcessInfo, error) {
	return list(ctx, o, wire.ListRequest{})
}

// AllProcesses lists also those that have ended and are still known.
func AllProcesses(ctx context.Context, o Opener) ([]wire.ProcessInfo, error) {
	return list(ctx, o, wire.ListRequest{Ended: true})
}

func list(ctx context.Context, o Opener, req wire.ListRequest) ([]wire.ProcessInfo, error) {
	var list wire.ProcessList
	if err := Unary(ctx, o, wire.MethodProcessList, req, &list); err != nil {
		return nil, err
	}
	return list.Processes, nil
}

// SignalNumber is the number of a signal as people name it: TERM, sigterm, 15.
func SignalNumber(text string) (n int, ok bool) {
	if n, err := strconv.Atoi(text); err == nil && n >= 1 && n <= 64 {
		return n, true
	}
	n = int(unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(text), "SIG")))
	return n, n != 0
}

// Signal sends a signal to a process.
func Signal(ctx context.Context, o Opener, req wire.SendSignalRequest) error {
	var reply wire.SendSignalReply
	if err := Unary(ctx, o, wire.MethodProcessSendSignal, req, &reply); err != nil {
		return err
	}
	if req.Tree && !reply.Tree {
		return wire.Errorf(wire.CodeUnimplemented,
			"the agent of this sandbox's snapshot is too old to find a process's descendants, and signalled the process alone; build the snapshot again")
	}
	return nil
}

// follow returns nil without an error when the call ended and the process did not.
func (x *Session) follow(ctx context.Context, o Opener, method string, in any) (end *wire.ProcessEnd, err error) {
	err = with(ctx, o, method, in, func(s *wire.Stream) error {
		begun := false
		for {
			kind, payload, err := s.Recv()
			switch {
			case errors.Is(err, io.EOF) && begun:
				return nil
			case err != nil:
				return unexpected(err)
			}
			if kind != wire.KindMessage {
				if err := x.Output.write(kind, payload); err != nil {
					return err
				}
				continue
			}
			var e wire.ProcessEvent
			if err := wire.Decode(payload, &e); err != nil {
				return fmt.Errorf("decode process event: %w", err)
			}
			switch {
			case e.End != nil:
				end = e.End
				return nil
			case e.Lost > 0 && x.Lost != nil:
				x.Lost(e.Lost)
			case e.Start != nil && begun:
				return wire.Errorf(wire.CodeInternal, "the guest says that one process started twice")
			case e.Start != nil:
				begun = true
				if x.Started != nil {
					x.Started(*e.Start)
				}
				input := wire.KindStdin
				if e.Start.PTY {
					input = wire.KindPTY
				}
				feed(s, input, x.Stdin, x.Guard)
			}
		}
	})
	return end, err
}
