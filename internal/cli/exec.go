package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
)

// execFlags are those of exec, run and shell.
type execFlags struct {
	stdin   bool
	tty     bool
	env     []string
	cwd     string
	user    string
	timeout time.Duration
}

func (f *execFlags) add(cmd *cobra.Command, env bool) {
	if env {
		cmd.Flags().StringArrayVarP(&f.env, "env", "e", nil, "environment variable, KEY=VALUE (repeatable)")
	}
	f.addWho(cmd)
	cmd.Flags().DurationVar(&f.timeout, "timeout", 0, "kill the command after this time")
	cmd.Flags().BoolVarP(&f.stdin, "interactive", "i", false, "pass standard input on")
	cmd.Flags().BoolVarP(&f.tty, "tty", "t", false, "give the command a terminal")
}

// addWho adds the flags that shell has, too.
func (f *execFlags) addWho(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&f.cwd, "workdir", "w", "", "working directory")
	cmd.Flags().StringVar(&f.cwd, "cwd", "", "the same")
	cmd.Flags().StringVarP(&f.user, "user", "u", "", "user to run as: name or number, or user:group")
	_ = cmd.Flags().MarkHidden("cwd")
}

func (f *execFlags) request(argv []string) (wire.StartRequest, error) {
	envs, err := pairs("--env", f.env)
	if err != nil {
		return wire.StartRequest{}, err
	}
	if f.timeout < 0 {
		return wire.StartRequest{}, usage("--timeout is %s", f.timeout)
	}
	req := wire.StartRequest{
		Process: wire.ProcessConfig{Cmd: argv[0], Args: argv[1:], Envs: envs}, Stdin: &f.stdin, User: f.user,
		TimeoutMS: f.timeout.Milliseconds(),
	}
	if f.cwd != "" {
		req.Process.Cwd = &f.cwd
	}
	if f.tty {
		req.Stdin = nil
	}
	return req, nil
}

func (a *App) exec() *cobra.Command {
	var f execFlags
	var detach bool
	var tag, keys string
	cmd := &cobra.Command{
		Use: "exec ID -- COMMAND [ARG…]", Short: "Run a command in a sandbox; exit code is the command's",
		Long: "Run a command in a sandbox. Its output streams, its exit code becomes this program's; 128 and the signal's\n" +
			"number if a signal ended it, 125 if forkd itself failed. With --detach it is left to itself and its pid printed:\n" +
			"see forkd ps, attach, logs and signal.",
		Example: "  forkd exec sbx2abc -- python3 -c 'print(1+1)'\n  tar c . | forkd exec -i sbx2abc -- tar x -C /srv\n" +
			"  forkd exec -d --tag web sbx2abc -- python3 -m http.server",
		Args: cobra.MinimumNArgs(2), Annotations: map[string]string{guestCode: "yes"},
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			req, err := f.request(args[1:])
			if err != nil {
				return err
			}
			if tag != "" {
				req.Tag = &tag
			}
			if detach {
				return a.launch(ctx, c, args[0], req, f)
			}
			return a.runIn(ctx, c, args[0], f, req, keys)
		}),
	}
	f.add(cmd, true)
	cmd.Flags().BoolVarP(&detach, "detach", "d", false, "leave the command running and print its pid")
	cmd.Flags().StringVar(&tag, "tag", "", "a name for the process, for ps, attach, logs and signal")
	addDetachKeys(cmd, &keys, a.Getenv)
	return cmd
}

// launch starts a command and leaves it to itself. With -i its input stays open, for whoever attaches.
func (a *App) launch(ctx context.Context, c *client.Client, id string, req wire.StartRequest, f execFlags) error {
	if f.tty {
		req.PTY = &wire.PTY{Term: a.Getenv("TERM")}
	}
	start, err := call.Launch(ctx, c.Guest(id), req)
	if err != nil {
		return err
	}
	return a.show(map[string]any{"sandbox": id, "pid": start.PID, "tag": req.Tag}, func(w io.Writer) error {
		_, err := fmt.Fprintln(w, start.PID)
		return err
	})
}

// runIn runs a command with this program's standard streams, and returns its exit code as an error.
func (a *App) runIn(ctx context.Context, c *client.Client, id string, f execFlags, req wire.StartRequest, keys string) error {
	g := c.Guest(id)
	if f.tty {
		return a.onTerminal(ctx, c, id, keys, false, func(ctx context.Context, x call.Session, pty *wire.PTY) (*wire.ProcessEnd, error) {
			req.PTY = pty
			return call.Start(ctx, g, req, x)
		})
	}
	running, begun, stop := passInterrupt(ctx, func(ctx context.Context, pid uint32) error {
		return call.Signal(ctx, g, wire.SendSignalRequest{Process: wire.ProcessSelector{PID: pid}, Signal: int(syscall.SIGINT), Group: true})
	})
	defer stop()
	var stdin io.Reader
	if f.stdin {
		stdin = a.In
	}
	out := call.Output{Stdout: a.Out, Stderr: a.Err}
	var stdout, stderr strings.Builder
	if a.json {
		out = call.Output{Stdout: &stdout, Stderr: &stderr}
	}
	end, err := g.Run(running, req, stdin, out, begun)
	if ctx.Err() != nil && err != nil {
		return guestExitError(exitInterrupted)
	}
	if err != nil {
		return a.lost(ctx, c, id, err)
	}
	if a.json {
		err := a.show(api.ExecResponse{
			Stdout: stdout.String(), Stderr: stderr.String(), ExitCode: end.Code(), Error: end.Problem(),
			TimedOut: end.TimedOut,
		}, nil)
		if err != nil {
			return err
		}
	}
	return a.exit(end)
}

// exit is a process's exit code as an error; what else went wrong with it is said.
func (a *App) exit(end *wire.ProcessEnd) error {
	if problem := end.Problem(); problem != "" && !a.json {
		a.progress("forkd: %s", printable(problem))
	}
	if code := end.Code(); code != 0 {
		return guestExitError(code)
	}
	return nil
}

// exitInterrupted is what a shell reports of a program that ctrl-c ended.
const exitInterrupted = 128 + int(syscall.SIGINT)

// graceAfterInterrupt is how long what runs in the guest may take to end by itself after ctrl-c.
const graceAfterInterrupt = 5 * time.Second

// passInterrupt makes a context that outlives ctrl-c: what has started by then in the guest is told of it, and may end
// by itself and say how.
func passInterrupt(ctx context.Context, tell func(ctx context.Context, pid uint32) error) (
	running context.Context, started func(pid uint32), stop func(),
) {
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	pids := make(chan uint32, 1)
	forget := context.AfterFunc(ctx, func() {
		defer cancel()
		limited, done := context.WithTimeout(running, graceAfterInterrupt)
		defer done()
		select {
		case pid := <-pids:
			if tell(limited, pid) == nil {
				<-limited.Done()
			}
		case <-limited.Done():
		}
	})
	return running, func(pid uint32) { pids <- pid }, func() { forget(); cancel() }
}

// lost explains a call that broke off by what became of its sandbox, if that is the reason.
func (a *App) lost(ctx context.Context, c *client.Client, id string, err error) error {
	refusal, refused := errors.AsType[*wire.Error](err)
	broke := refused && refusal.Code == wire.CodeUnavailable || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
	if !broke {
		return err
	}
	s, getErr := c.Sandbox(context.WithoutCancel(ctx), id)
	if e, ok := errors.AsType[*api.Error](getErr); ok && e.Code == api.CodeNotFound {
		return fmt.Errorf("sandbox %s was ended while the command ran", id)
	}
	if getErr == nil && s.Reason != "" {
		return &hinted{fmt.Errorf("sandbox %s %s while the command ran: %s", id, s.State, s.Reason), "forkd logs " + id}
	}
	return err
}

func (a *App) run() *cobra.Command {
	var f execFlags
	var ff forkFlags
	var keep bool
	cmd := &cobra.Command{
		Use: "run SNAPSHOT [-- COMMAND [ARG…]]", Short: "Fork one child, run a command in it, end it; exit code is the command's",
		Long: "Fork one child, run a command in it, end it; exit code is the command's. Without a command, what the snapshot's\n" +
			"image says: its entry point and command.",
		ValidArgsFunction: a.completeTags(1),
		Example:           "  forkd run python-numpy -- python3 -c 'import numpy; print(numpy.__version__)'",
		Args:              cobra.MinimumNArgs(1), Annotations: map[string]string{guestCode: "yes"},
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := ff.request(args[0], 1)
			if err != nil {
				return err
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				argv := args[1:]
				if len(argv) == 0 {
					if argv, err = a.imageCommand(cmd.Context(), c, args[0]); err != nil {
						return err
					}
				}
				return a.forkAndRun(cmd.Context(), c, req, argv, f, keep)
			})
		},
	}
	ff.add(cmd)
	f.add(cmd, false)
	cmd.Flags().BoolVar(&keep, "keep", false, "keep the child and print its id on standard error")
	return cmd
}

// imageCommand is what a snapshot's image runs when nothing else is asked for.
func (a *App) imageCommand(ctx context.Context, c *client.Client, tag string) ([]string, error) {
	info, err := c.SnapshotInfo(ctx, tag)
	if err != nil {
		return nil, a.elsewhere(err, c, tag)
	}
	if info.Config != nil && len(info.Config.Entrypoint)+len(info.Config.Cmd) > 0 {
		return slices.Concat(info.Config.Entrypoint, info.Config.Cmd), nil
	}
	return nil, usage("the image of %s has no entry point and no command; give one: forkd run %s -- COMMAND", tag, tag)
}

func (a *App) forkAndRun(ctx context.Context, c *client.Client, req api.ForkRequest, argv []string, f execFlags, keep bool) (err error) {
	children, err := c.Fork(ctx, req)
	if err != nil {
		return a.elsewhere(err, c, req.SnapshotTag)
	}
	if children[0].Error != nil {
		return children[0].Error
	}
	id := children[0].ID
	if keep {
		a.progress("kept: %s", id)
	} else {
		defer func() {
			if killErr := c.Kill(context.WithoutCancel(ctx), id); killErr != nil {
				err = errors.Join(err, killErr)
			}
		}()
	}
	start, err := f.request(argv)
	if err != nil {
		return err
	}
	return a.runIn(ctx, c, id, f, start, a.Getenv(envDetachKeys))
}
