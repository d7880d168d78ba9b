package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

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
	cmd.Flags().StringVarP(&f.cwd, "workdir", "w", "", "working directory")
	cmd.Flags().StringVarP(&f.user, "user", "u", "", "user to run as")
	cmd.Flags().DurationVar(&f.timeout, "timeout", 0, "kill the command after this time")
	cmd.Flags().BoolVarP(&f.stdin, "interactive", "i", false, "pass standard input on")
	cmd.Flags().BoolVarP(&f.tty, "tty", "t", false, "give the command a terminal")
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
	return req, nil
}

func (a *App) exec() *cobra.Command {
	var f execFlags
	cmd := &cobra.Command{
		Use: "exec ID -- COMMAND [ARG…]", Short: "Run a command in a sandbox; exit code is the command's",
		Long: "Run a command in a sandbox. Its output streams, its exit code becomes this program's; 128 and the signal's\n" +
			"number if a signal ended it, 125 if forkd itself failed.",
		Example: "  forkd exec sbx2abc -- python3 -c 'print(1+1)'\n  tar c . | forkd exec -i sbx2abc -- tar x -C /srv",
		Args:    cobra.MinimumNArgs(2), Annotations: map[string]string{guestCode: "yes"},
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			return a.runIn(ctx, c, args[0], f, args[1:])
		}),
	}
	f.add(cmd, true)
	return cmd
}

func (a *App) shell() *cobra.Command {
	f := execFlags{stdin: true, tty: true}
	cmd := &cobra.Command{
		Use: "shell ID", Short: "Open a shell in a sandbox", Args: cobra.ExactArgs(1),
		Annotations:       map[string]string{guestCode: "yes"},
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			if !term.IsTerminal(int(a.In.Fd())) {
				f.tty = false
			}
			// The best shell there is; every image with a shell has the last.
			script := "exec $(command -v bash || echo /bin/sh) -l"
			if f.tty {
				script = "exec $(command -v bash || echo /bin/sh) -il"
			}
			return a.runIn(ctx, c, args[0], f, []string{"/bin/sh", "-c", script})
		}),
	}
	cmd.Flags().StringVarP(&f.cwd, "workdir", "w", "", "working directory")
	cmd.Flags().StringVarP(&f.user, "user", "u", "", "user to run as")
	return cmd
}

// runIn runs a command with this program's standard streams, and returns its exit code as an error.
func (a *App) runIn(ctx context.Context, c *client.Client, id string, f execFlags, argv []string) error {
	req, err := f.request(argv)
	if err != nil {
		return err
	}
	var stdin io.Reader
	if f.stdin {
		stdin = a.In
	}
	var started call.Started
	if f.tty {
		restore, resize, err := a.terminal(ctx, c.Guest(id), &req)
		if err != nil {
			return err
		}
		defer restore()
		started = resize
		if stdin == nil {
			stdin = a.In
		}
	}
	g := c.Guest(id)
	running, begun, stop := passInterrupt(ctx, func(ctx context.Context, pid uint32) error {
		return call.Unary(ctx, g, wire.MethodProcessSendSignal, wire.SendSignalRequest{
			Process: wire.ProcessSelector{PID: pid}, Signal: int(syscall.SIGINT), Group: true,
		}, nil)
	})
	defer stop()
	out := call.Output{Stdout: a.Out, Stderr: a.Err}
	var stdout, stderr strings.Builder
	if a.json {
		out = call.Output{Stdout: &stdout, Stderr: &stderr}
	}
	end, err := g.Run(running, req, stdin, out, func(pid uint32) {
		begun(pid)
		if started != nil {
			started(pid)
		}
	})
	if ctx.Err() != nil && err != nil {
		return guestExitError(exitInterrupted)
	}
	if err != nil {
		return a.lost(ctx, c, id, err)
	}
	if a.json {
		err := a.show(api.ExecResponse{
			Stdout: stdout.String(), Stderr: stderr.String(), ExitCode: end.Code(), Error: end.Problem(),
		}, nil)
		if err != nil {
			return err
		}
	} else if problem := end.Problem(); problem != "" {
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
	if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, syscall.ECONNRESET) {
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

// terminal makes this program's terminal raw and asks for one of its size in the guest.
func (a *App) terminal(ctx context.Context, g *client.Guest, req *wire.StartRequest) (restore func(), started call.Started, err error) {
	fd := int(a.In.Fd())
	if !term.IsTerminal(fd) {
		return nil, nil, usage("--tty wants a terminal as standard input")
	}
	pty := func() *wire.PTY {
		cols, rows, err := term.GetSize(fd)
		if err != nil {
			cols, rows = 80, 24
		}
		return &wire.PTY{Size: wire.PTYSize{Cols: uint32(cols), Rows: uint32(rows)}}
	}
	req.PTY = pty()
	if req.Process.Envs == nil {
		req.Process.Envs = map[string]string{}
	}
	if name := a.Getenv("TERM"); name != "" && req.Process.Envs["TERM"] == "" {
		req.Process.Envs["TERM"] = name
	}
	old, err := term.MakeRaw(fd)
	if err != nil {
		return nil, nil, fmt.Errorf("prepare the terminal: %w", err)
	}
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	restore = func() {
		signal.Stop(resized)
		close(resized)
		_ = term.Restore(fd, old)
	}
	started = func(pid uint32) {
		go func() {
			for range resized {
				// A size that does not arrive spoils nothing but the picture.
				_ = call.Unary(ctx, g, wire.MethodProcessUpdate, wire.UpdateRequest{Process: wire.ProcessSelector{PID: pid}, PTY: pty()}, nil)
			}
		}()
	}
	return restore, started, nil
}

func (a *App) run() *cobra.Command {
	var f execFlags
	var ff forkFlags
	var keep bool
	cmd := &cobra.Command{
		Use: "run SNAPSHOT -- COMMAND [ARG…]", Short: "Fork one child, run a command in it, end it; exit code is the command's",
		ValidArgsFunction: a.completeTags(1),
		Example:           "  forkd run python-numpy -- python3 -c 'import numpy; print(numpy.__version__)'",
		Args:              cobra.MinimumNArgs(2), Annotations: map[string]string{guestCode: "yes"},
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := ff.request(args[0], 1)
			if err != nil {
				return err
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				return a.forkAndRun(cmd.Context(), c, req, args[1:], f, keep)
			})
		},
	}
	ff.add(cmd)
	f.add(cmd, false)
	cmd.Flags().BoolVar(&keep, "keep", false, "keep the child and print its id on standard error")
	return cmd
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
	return a.runIn(ctx, c, id, f, argv)
}
