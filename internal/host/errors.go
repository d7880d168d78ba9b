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
)

// Hint is an error with advice.
type Hint struct {
	Err error
	Try string
}

func (e *Hint) Error() string { return e.Err.Error() }
func (e *Hint) Unwrap() error { return e.Err }

// Console is an error with what the guest printed before it.
type Console struct {
	Err  error
	Tail string
}

func (e *Console) Error() string { return e.Err.Error() }
func (e *Console) Unwrap() error { return e.Err }

func hint(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return &Hint{Err: err, Try: fmt.Sprintf(format, args...)}
}

func withConsole(err error, console []byte) error {
	if err == nil || len(console) == 0 {
		return err
	}
	const most = 8 << 10
	if len(console) > most {
		console = console[len(console)-most:]
	}
	return &Console{Err: err, Tail: string(console)}
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}
