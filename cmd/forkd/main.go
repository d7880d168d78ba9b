// Command forkd is the command line, the daemon and everything else that runs on the host.
package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"forkd.dev/forkd/internal/cli"
	"forkd.dev/forkd/internal/daemon"
	"forkd.dev/forkd/internal/layout"
)

// version is set by the linker.
var version = "dev"

func main() {
	os.Exit(run())
}

func run() int {
	ctx, hangups, stop := signalled()
	defer stop()
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	app := &cli.App{
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Getenv: os.Getenv, Version: version, Self: self, Name: os.Args[0], Serve: hangups.serve,
		Network: daemon.Netd,
	}
	return app.Main(ctx, os.Args[1:])
}

// hangups are the SIGHUPs that a daemon gets. Every other command ends at one: its terminal is gone.
type hangups struct {
	mu     sync.Mutex
	daemon chan os.Signal // nil: no daemon runs
}

// hangUp reports whether a daemon has been told.
func (h *hangups) hangUp(s os.Signal) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.daemon == nil {
		return false
	}
	select {
	case h.daemon <- s:
	default: // one that has not been heeded yet is enough
	}
	return true
}

// signalled ends its context at the usual signals, and at SIGUSR1 with a cause that has a daemon end its sandboxes, too.
func signalled() (context.Context, *hangups, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ctx, cancel := context.WithCancelCause(ctx)
	end, hup := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGUSR1)
	signal.Notify(hup, syscall.SIGHUP)
	h := &hangups{}
	go func() {
		for {
			select {
			case s := <-hup:
				if !h.hangUp(s) {
					cancel(nil)
				}
			case <-end:
				cancel(daemon.ErrEndSandboxes)
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, h, func() {
		signal.Stop(end)
		signal.Stop(hup)
		cancel(nil)
		stop()
	}
}

// serve is given to the command line as a function: it knows the daemon only through its API otherwise.
func (h *hangups) serve(ctx context.Context, home layout.Home, getenv func(string) string, log *slog.Logger, ready func()) error {
	again := make(chan os.Signal, 1)
	h.mu.Lock()
	h.daemon = again
	h.mu.Unlock()
	cfg := daemon.Config{Home: home, Version: version, Log: log, Hangup: again}
	if err := cfg.FromEnv(getenv); err != nil {
		return err
	}
	return daemon.Run(ctx, cfg, ready)
}
