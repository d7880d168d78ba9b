package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/proc"
)

func (a *App) serve() *cobra.Command {
	var verbose, background bool
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon in the foreground",
		Long: "Run the daemon in the foreground, on a unix socket that only its owner may open. Other verbs start one in\n" +
			"the background by themselves. With --bind it serves TCP as well, to those who show a token (forkd token).\n\n" +
			"What a flag sets the environment can, too. More of that: FORKD_ACCELERATOR (auto, tcg, kvm), FORKD_MAX_SANDBOXES,\n" +
			"FORKD_HOT_MAX_BYTES, FORKD_STEP_MAX_BYTES (what finished steps of builds may take that nothing stands on),\n" +
			"FORKD_STORE_MAX_BYTES (what all snapshots may take: the least recently used go).",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report := func(error) {}
			if background {
				report = reporter()
				if err := a.logToFile(); err != nil {
					report(err)
					return err
				}
			}
			err := a.runDaemon(cmd.Context(), verbose, func() { report(nil) })
			if err != nil {
				report(err)
			}
			return err
		},
	}
	a.addSettings(cmd)
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "log every request")
	cmd.Flags().BoolVar(&background, "background", false, "report to the process that started this one")
	_ = cmd.Flags().MarkHidden("background")
	return cmd
}

// maxDaemonLog is where the log of a daemon in the background starts anew, when the daemon starts.
const maxDaemonLog = 16 << 20

// logToFile makes the daemon's log the standard error, so that the runtime's own last words land there too.
func (a *App) logToFile() error {
	home, err := a.layout()
	if err != nil {
		return err
	}
	if info, err := os.Stat(home.DaemonLog()); err == nil && info.Size() > maxDaemonLog {
		if err := os.Rename(home.DaemonLog(), home.DaemonLog()+".old"); err != nil {
			return fmt.Errorf("rotate the daemon's log: %w", err)
		}
	}
	f, err := os.OpenFile(home.DaemonLog(), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open the daemon's log: %w", err)
	}
	defer f.Close()
	if err := unix.Dup3(int(f.Fd()), int(os.Stderr.Fd()), 0); err != nil {
		return fmt.Errorf("open the daemon's log: %w", err)
	}
	a.Err = os.Stderr
	return nil
}

// reporter tells the starting process how it went, once.
func reporter() func(error) {
	pipe := os.NewFile(readyFD, "ready")
	return func(err error) {
		if pipe == nil {
			return
		}
		text := "ok"
		if err != nil {
			text = err.Error()
		}
		_, _ = io.WriteString(pipe, text)
		_ = pipe.Close()
		pipe = nil
	}
}

func (a *App) runDaemon(ctx context.Context, verbose bool, ready func()) error {
	home, err := a.layout()
	if err != nil {
		return err
	}
	level := slog.LevelInfo
	if verbose {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(a.Err, &slog.HandlerOptions{Level: level}))
	return a.Serve(ctx, home, a.settings.over(a.Getenv), log, ready)
}

// daemonStatus is what `daemon status --json` prints.
type daemonStatus struct {
	Running   bool   `json:"running"`
	PID       int    `json:"pid,omitempty"`
	Version   string `json:"version,omitempty"`
	Socket    string `json:"socket"`
	Home      string `json:"home"`
	Sandboxes int    `json:"sandboxes"`

	Address     string `json:"address,omitempty"`
	Fingerprint string `json:"fingerprint,omitempty"`
}

func (a *App) daemon() *cobra.Command {
	cmd := &cobra.Command{
		Use: "daemon", Short: "Start, stop or look at the daemon in the background", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		a.daemonStart(),
		a.daemonStop(),
		&cobra.Command{
			Use: "status", Short: "Say whether it runs; exit code 1 if not", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				st, err := a.status(cmd.Context())
				if err != nil {
					return err
				}
				if err := a.printStatus(st); err != nil {
					return err
				}
				if !st.Running {
					return silentError(exitFailed)
				}
				return nil
			},
		},
	)
	return cmd
}

func (a *App) status(ctx context.Context) (daemonStatus, error) {
	home, err := a.layout()
	if err != nil {
		return daemonStatus{}, err
	}
	st := daemonStatus{Socket: home.Socket, Home: home.Root}
	c, err := client.New("unix://" + home.Socket)
	if err != nil {
		return st, err
	}
	defer c.Close()
	v, err := c.Version(ctx)
	if absent(err) {
		return st, nil
	}
	if err != nil {
		return st, err
	}
	list, err := c.Sandboxes(ctx, nil)
	if err != nil {
		return st, err
	}
	st.Running, st.PID, st.Version, st.Sandboxes = true, v.PID, v.Version, len(list)
	st.Address, st.Fingerprint = v.Address, v.Fingerprint
	return st, nil
}

func (a *App) printStatus(st daemonStatus) error {
	return a.show(st, func(w io.Writer) error {
		if !st.Running {
			_, err := fmt.Fprintf(w, "not running (socket %s)\n", st.Socket)
			return err
		}
		fmt.Fprintf(w, "running: pid %d, version %s, %d sandboxes\nsocket %s\nhome   %s\n", st.PID, st.Version,
			st.Sandboxes, st.Socket, st.Home)
		if st.Address != "" {
			fmt.Fprintf(w, "TCP    %s\n", st.Address)
		}
		if st.Fingerprint != "" {
			fmt.Fprintf(w, "key    %s (for FORKD_FINGERPRINT)\n", st.Fingerprint)
		}
		return nil
	})
}

func (a *App) daemonStart() *cobra.Command {
	cmd := &cobra.Command{
		Use: "start", Short: "Start it, if it is not running", Args: cobra.NoArgs, RunE: a.doDaemonStart,
		Long: "Start the daemon in the background, if it is not running. It sees the environment of this command; see forkd serve.",
	}
	a.addSettings(cmd)
	return cmd
}

func (a *App) doDaemonStart(cmd *cobra.Command, _ []string) error {
	ctx := cmd.Context()
	st, err := a.status(ctx)
	if err != nil {
		return err
	}
	if st.Running && len(a.settings.given()) > 0 {
		return &hinted{
			fmt.Errorf("a daemon is running already (pid %d), and %s counts when one starts", st.PID, strings.Join(a.settings.given(), ", ")),
			"forkd daemon stop, and this again",
		}
	}
	if !st.Running {
		home, err := a.layout()
		if err != nil {
			return err
		}
		if err := a.startDaemon(ctx, home); err != nil {
			return err
		}
		if st, err = a.status(ctx); err != nil {
			return err
		}
	}
	return a.printStatus(st)
}

func (a *App) daemonStop() *cobra.Command {
	var keep, kill bool
	cmd := &cobra.Command{
		Use: "stop", Short: "Stop it; its sandboxes run on, unless --kill", Args: cobra.NoArgs,
		Long: "Stop the daemon. Its sandboxes run on, and the next daemon has them again: for an upgrade, say. With --kill\n" +
			"they end. Snapshots stay in either case.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if keep && kill {
				return usage("--keep and --kill contradict each other")
			}
			return a.stopDaemon(cmd.Context(), kill)
		},
	}
	cmd.Flags().BoolVar(&keep, "keep", false, "leave the sandboxes running (default)")
	cmd.Flags().BoolVar(&kill, "kill", false, "end the sandboxes")
	return cmd
}

func (a *App) stopDaemon(ctx context.Context, kill bool) error {
	st, err := a.status(ctx)
	if err != nil {
		return err
	}
	if !st.Running && kill {
		// Sandboxes of a daemon that is gone may run on: only one that has adopted them can end them.
		if st, err = a.adopter(ctx); err != nil {
			return err
		}
	}
	if !st.Running {
		a.progress("no daemon is running")
		return nil
	}
	signal, done := unix.SIGTERM, "%d sandboxes run on; the next daemon has them"
	if kill {
		signal, done = unix.SIGUSR1, "ended %d sandboxes"
	}
	if err := proc.Terminate(ctx, st.PID, signal); err != nil {
		return fmt.Errorf("stop the daemon (pid %d): %w", st.PID, err)
	}
	if st.Sandboxes > 0 {
		a.progress(done, st.Sandboxes)
	}
	return a.show(daemonStatus{Socket: st.Socket, Home: st.Home}, func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "stopped (pid %d)\n", st.PID)
		return err
	})
}

// adopter starts a daemon if an earlier one of this home has left machines behind.
func (a *App) adopter(ctx context.Context) (daemonStatus, error) {
	home, err := a.layout()
	if err != nil {
		return daemonStatus{}, err
	}
	left, err := os.ReadDir(home.Machines())
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(left) == 0 {
		return daemonStatus{}, nil
	}
	if err != nil {
		return daemonStatus{}, fmt.Errorf("look for sandboxes: %w", err)
	}
	if err := a.startDaemon(ctx, home); err != nil {
		return daemonStatus{}, err
	}
	return a.status(ctx)
}

func (a *App) version() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the versions of this program and of the daemon, if one runs", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			st, err := a.status(cmd.Context())
			if err != nil {
				return err
			}
			v := map[string]any{"version": a.Version, "daemon": st}
			return a.show(v, func(w io.Writer) error {
				fmt.Fprintf(w, "forkd %s\n", a.Version)
				if st.Running {
					fmt.Fprintf(w, "daemon %s (pid %d)\n", st.Version, st.PID)
				}
				return nil
			})
		},
	}
}
