package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
)

func (a *App) errIsTerminal() bool {
	f, ok := a.Err.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func (a *App) ps() *cobra.Command {
	var all, quiet bool
	cmd := &cobra.Command{
		Use: "ps [ID]", Short: "List the processes of a sandbox that were started from outside",
		Long: "List the processes that were started by exec, shell or the API and run, in a sandbox or in the one it was\n" +
			"forked from. With --all also those that have ended and can still be asked for: 30 s, or an hour if nobody was\n" +
			"told of their end. Without ID, sandboxes are listed, as by ls.",
		Args: cobra.MaximumNArgs(1), ValidArgsFunction: a.completeSandboxes(1),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			if len(args) == 0 {
				list, err := c.Sandboxes(ctx, nil)
				if err != nil {
					return err
				}
				return a.show(list, func(w io.Writer) error { return printSandboxes(w, list) })
			}
			list, err := c.Processes(ctx, args[0], all)
			if err != nil {
				return err
			}
			return a.show(list, func(w io.Writer) error { return printProcesses(w, list, quiet) })
		}),
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also processes that have ended")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "pids only")
	return cmd
}

func printProcesses(w io.Writer, list []api.Process, quiet bool) error {
	var rows [][]string
	for _, p := range list {
		if quiet {
			fmt.Fprintln(w, p.PID)
			continue
		}
		tty := "no"
		if p.TTY {
			tty = "yes"
		}
		state := "running"
		if !p.Running {
			state = p.Status
		}
		command := printable(strings.ReplaceAll(strings.Join(append([]string{p.Command}, p.Args...), " "), "\n", " "))
		if len(command) > 80 {
			command = strings.ToValidUTF8(command[:80], "") + "…"
		}
		rows = append(rows, []string{
			strconv.FormatUint(uint64(p.PID), 10), printable(p.Tag), printable(p.User), tty, strconv.Itoa(p.Attached),
			(time.Duration(p.AgeMS) * time.Millisecond).Round(time.Second).String(), state, command,
		})
	}
	if quiet {
		return nil
	}
	return table(w, "PID | TAG | USER | TTY | ATTACHED | AGE | STATE | COMMAND", rows)
}

func (a *App) attach() *cobra.Command {
	var interactive, replay bool
	var keys string
	cmd := &cobra.Command{
		Use: "attach ID PID|TAG", Short: "Attach to a process of a sandbox; exit code is the process's",
		Long: "Attach to a process that was started with exec --detach, or left, or inherited from the sandbox or snapshot\n" +
			"that this one was forked from. What it printed while nobody was attached comes first (the newest 256 KiB), then\n" +
			"what it prints. A process with a terminal gets this one; ctrl-p ctrl-q (--detach-keys) leaves it. Any other\n" +
			"process is left by ctrl-c and goes on; its input is standard input with -i. One that ended shortly before still\n" +
			"tells its end.",
		Args: cobra.ExactArgs(2), Annotations: map[string]string{guestCode: "yes"},
		ValidArgsFunction: a.completeProcesses(),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			return a.attachTo(ctx, c, args[0], call.Select(args[1]), interactive, replay, keys)
		}),
	}
	cmd.Flags().BoolVarP(&interactive, "interactive", "i", false, "pass standard input on")
	cmd.Flags().BoolVar(&replay, "replay", false, "begin with all that is kept of its output, also what others got")
	addDetachKeys(cmd, &keys, a.Getenv)
	return cmd
}

func (a *App) attachTo(
	ctx context.Context, c *client.Client, id string, which wire.ProcessSelector, interactive, replay bool, keys string,
) error {
	g := c.Guest(id)
	req := wire.ConnectRequest{Process: which, Replay: replay}
	list, err := call.AllProcesses(ctx, g)
	if err != nil {
		return err
	}
	// The newest of those that run, else of those that ended, as the guest chooses.
	var found *wire.ProcessInfo
	for i, p := range list {
		named := p.PID == which.PID || which.Tag != "" && p.Tag != nil && *p.Tag == which.Tag
		if named && (found == nil || p.End == nil || found.End != nil) {
			found = &list[i]
		}
	}
	if found != nil && found.PTY && found.End == nil && term.IsTerminal(int(a.In.Fd())) {
		return a.onTerminal(ctx, c, id, keys, true, func(ctx context.Context, x call.Session, _ *wire.PTY) (*wire.ProcessEnd, error) {
			return call.Attach(ctx, g, req, x)
		})
	}
	x := call.Session{Output: call.Output{Stdout: a.Out, Stderr: a.Err}}
	if interactive {
		x.Stdin = a.In
	}
	end, err := call.Attach(ctx, g, req, x)
	switch {
	case err == nil:
		return a.exit(end)
	case ctx.Err() != nil:
		return guestExitError(exitInterrupted)
	}
	return a.lost(ctx, c, id, err)
}

func (a *App) signal() *cobra.Command {
	var req api.SignalRequest
	cmd := &cobra.Command{
		Use: "signal ID PID|TAG [SIGNAL]", Short: "Send a signal to a process of a sandbox (TERM unless given)",
		Long: "Send a signal, by name or number, to a process that was started from outside. KILL goes to its process group,\n" +
			"any other to the process alone unless --group or --tree is given.",
		Example: "  forkd signal sbx2abc web\n  forkd signal sbx2abc 412 HUP\n  forkd signal --tree sbx2abc web KILL",
		Args:    cobra.RangeArgs(2, 3), ValidArgsFunction: a.completeProcesses(),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			req.Signal = "TERM"
			if len(args) == 3 {
				req.Signal = args[2]
			}
			if _, ok := call.SignalNumber(req.Signal); !ok {
				return usage("%q is no signal: give a name (TERM, HUP, USR1 …) or a number from 1 to 64", req.Signal)
			}
			return c.Signal(ctx, args[0], args[1], req)
		}),
	}
	cmd.Flags().BoolVar(&req.Group, "group", false, "to its whole process group, as ctrl-c on a terminal")
	cmd.Flags().BoolVar(&req.Tree, "tree", false, "to all of its descendants, those in sessions of their own too, also after its end")
	return cmd
}

// completeProcesses offers sandboxes, then the processes of one.
func (a *App) completeProcesses() completer {
	sandboxes := a.completeSandboxes(1)
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) == 0 {
			return sandboxes(cmd, args, begun)
		}
		return a.complete(2, func(ctx context.Context, c *client.Client) (words []string) {
			list, err := c.Processes(ctx, args[0], false)
			if err != nil {
				return nil
			}
			for _, p := range list {
				words = append(words, fmt.Sprintf("%d\t%s", p.PID, printable(p.Command)))
				if p.Tag != "" {
					words = append(words, printable(p.Tag)+"\t"+printable(p.Command))
				}
			}
			return words
		})(cmd, args, begun)
	}
}
