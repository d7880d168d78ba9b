// Command forkd is the command line, the daemon and everything else that runs on the host.
package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
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
	ctx, stop := signalled()
	defer stop()
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	app := &cli.App{
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Getenv: os.Getenv, Version: version, Self: self, Name: os.Args[0], Serve: serve,
	}
	return app.Main(ctx, os.Args[1:])
}

// signalled ends its context at the usual signals, and at SIGUSR1 with a cause that has a daemon end its sandboxes, too.
func signalled() (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	ctx, cancel := context.WithCancelCause(ctx)
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGUSR1)
	go func() {
		select {
		case <-end:
			cancel(daemon.ErrEndSandboxes)
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(end)
		cancel(nil)
		stop()
	}
}

// serve is given to the command line as a function: it knows the daemon only through its API otherwise.
func serve(ctx context.Context, home layout.Home, getenv func(string) string, log *slog.Logger, ready func()) error {
	cfg := daemon.Config{Home: home, Version: version, Log: log}
	if err := cfg.FromEnv(getenv); err != nil {
		return err
	}
	return daemon.Run(ctx, cfg, ready)
}
