package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/layout"
	"forkd.dev/forkd/internal/proc"
)

// connect returns a client of a daemon that answers, starting one if it may.
func (a *App) connect(ctx context.Context) (*client.Client, error) {
	if host := a.Getenv("FORKD_HOST"); host != "" {
		return a.connectTo(ctx, host)
	}
	home, err := a.layout()
	if err != nil {
		return nil, err
	}
	c, err := client.New("unix://" + home.Socket)
	if err != nil {
		return nil, err
	}
	_, err = c.Version(ctx)
	if err == nil || !absent(err) {
		return c, err
	}
	if a.noAutostart {
		return nil, &hinted{err, "forkd daemon start"}
	}
	if err := a.startDaemon(ctx, home); err != nil {
		return nil, err
	}
	return c, nil
}

// connectTo returns a client of the daemon that the environment names.
func (a *App) connectTo(ctx context.Context, host string) (*client.Client, error) {
	c, err := client.Open(client.Config{
		Address: host, Token: strings.TrimSpace(a.Getenv("FORKD_TOKEN")), CA: a.Getenv("FORKD_CA"), Fingerprint: a.Getenv("FORKD_FINGERPRINT"),
	})
	if err != nil {
		return nil, usage("FORKD_HOST: %w", err)
	}
	_, err = c.Version(ctx)
	e, refused := errors.AsType[*api.Error](err)
	switch {
	case err == nil:
		return c, nil
	case errors.Is(err, client.ErrUntrusted):
		return nil, &hinted{err, "FORKD_FINGERPRINT=sha256//…, which forkd daemon status shows where the daemon runs, or FORKD_CA=FILE with its certificate"}
	case refused && e.Code == api.CodeUnauthorized:
		return nil, &hinted{err, "FORKD_TOKEN=…, which an administrator makes where the daemon runs: forkd token create"}
	case refused:
		return nil, err
	}
	return nil, &hinted{err, "start that daemon, or unset FORKD_HOST"}
}

// withDaemon connects, does one thing and closes.
func (a *App) withDaemon(ctx context.Context, do func(c *client.Client) error) error {
	c, err := a.connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	return do(c)
}

// verb is the body of a verb that has nothing to check before it connects.
func (a *App) verb(do func(ctx context.Context, c *client.Client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		return a.withDaemon(cmd.Context(), func(c *client.Client) error { return do(cmd.Context(), c, args) })
	}
}

// absent reports whether there is no daemon, or none any more: one that was killed accepts connections until the kernel
// has taken it down.
func absent(err error) bool {
	return errors.Is(err, client.ErrNoDaemon) || errors.Is(err, client.ErrGone)
}

// readyFD is where a daemon in the background reports: "ok", or its error.
const readyFD = 3

const startTimeout = 60 * time.Second

// errOther means that another process holds the home: a daemon that somebody else is starting, or one that is on its way out.
var errOther = errors.New("already running")

// startDaemon starts a daemon in the background and returns when one answers.
func (a *App) startDaemon(ctx context.Context, home layout.Home) error {
	if err := home.Make(); err != nil {
		return err
	}
	c, err := client.New("unix://" + home.Socket)
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout,
		fmt.Errorf("no daemon answered within %s; its log is %s", startTimeout, home.DaemonLog()))
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := a.launchDaemon(ctx, home)
		if !errors.Is(err, errOther) {
			return err
		}
		if _, err := c.Version(ctx); err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("start a daemon: %w", context.Cause(ctx))
		}
	}
}

// launchDaemon starts one process, which says itself how it went, through a pipe: end of file without a word means that
// it died.
func (a *App) launchDaemon(ctx context.Context, home layout.Home) error {
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("start a daemon: %w", err)
	}
	defer r.Close()
	args := []string{"serve", "--background"}
	if a.home != "" || a.Getenv("FORKD_HOME") != "" {
		args = append([]string{"--home", home.Root}, args...)
	}
	_, err = proc.Start(ctx, &proc.Command{
		Path: a.Self, Args: args, Env: a.settings.environ(os.Environ()), Dir: "/", Files: []*os.File{w},
	})
	_ = w.Close()
	if err != nil {
		return fmt.Errorf("start a daemon: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = r.Close() })
	defer stop()
	word, err := io.ReadAll(r)
	switch {
	case string(word) == "ok":
		return nil
	case strings.Contains(string(word), errOther.Error()):
		return errOther
	case len(word) > 0:
		return fmt.Errorf("start a daemon: %s", word)
	case ctx.Err() != nil:
		return fmt.Errorf("start a daemon: %w", context.Cause(ctx))
	case err != nil:
		return fmt.Errorf("start a daemon: %w", err)
	}
	return fmt.Errorf("start a daemon: it ended at once; its log is %s", home.DaemonLog())
}

// elsewhere adds to an unknown tag which other daemons of this host have it.
func (a *App) elsewhere(err error, c *client.Client, tag string) error {
	e, ok := errors.AsType[*api.Error](err)
	if !ok || e.Code != api.CodeNotFound {
		return err
	}
	home, homeErr := a.layout()
	if homeErr != nil {
		return err
	}
	var lines []string
	for _, ad := range layout.WithTag(layout.Adverts(home), tag, c.Address()) {
		if _, err := url.Parse(ad.Host); err != nil {
			continue
		}
		line := fmt.Sprintf("FORKD_HOST=%s forkd …", ad.Host)
		if ad.UID != os.Getuid() && os.Getuid() != 0 {
			line = "sudo " + line
		}
		lines = append(lines, line)
	}
	if len(lines) == 0 {
		return err
	}
	return &hinted{err, "another daemon of this host has it: " + strings.Join(lines, "\n     or: ")}
}
