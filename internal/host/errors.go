package host

import (
	"errors"
	"fmt"
)

// Kinds of failure the edges tell apart. engine.ErrUnavailable, engine.ErrIncompatible, layer.ErrCorrupt,
// store.ErrCorrupt, store.ErrExists, lineage.ErrName and lineage.ErrState may be wrapped as well.
var (
	ErrInvalid     = errors.New("invalid request")
	ErrNotFound    = errors.New("not found")
	ErrBusy        = errors.New("busy")
	ErrExhausted   = errors.New("not enough resources")
	ErrUnsupported = errors.New("not supported")
	ErrClosed      = errors.New("the daemon is stopping")
	ErrWarmup      = errors.New("warm-up failed")
	ErrStep        = errors.New("the command failed") // of a build
)

// HintError is an error with advice.
type HintError struct {
	Err error
	Try string
}

func (e *HintError) Error() string { return e.Err.Error() }
func (e *HintError) Unwrap() error { return e.Err }

// ConsoleError is an error with what the guest printed before it.
type ConsoleError struct {
	Err  error
	Tail string
}

func (e *ConsoleError) Error() string { return e.Err.Error() }
func (e *ConsoleError) Unwrap() error { return e.Err }

func hint(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return &HintError{Err: err, Try: fmt.Sprintf(format, args...)}
}

func withConsole(err error, console []byte) error {
	if err == nil || len(console) == 0 {
		return err
	}
	const most = 8 << 10
	if len(console) > most {
		console = console[len(console)-most:]
	}
	return &ConsoleError{Err: err, Tail: string(console)}
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}
