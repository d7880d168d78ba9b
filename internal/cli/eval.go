package cli

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
)

func (a *App) eval() *cobra.Command {
	var child, name string
	var timeout time.Duration
	var restart bool
	cmd := &cobra.Command{
		Use: "eval ID CODE", Short: "Evaluate code in a sandbox's warm interpreter, and print what a prompt would print",
		Long: "Evaluate code in a context of a sandbox: the interpreter that was warm when its snapshot was frozen, or a new\n" +
			"one. State stays between calls. CODE of - is read from standard input. Exit code 1 if the code raised.",
		Example: "  forkd eval sbx2abc 'x = numpy.arange(10); x.sum()'\n  forkd eval --child sbx2abc -- 'x.mean()'",
		Args:    cobra.MinimumNArgs(1), ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if child == "" {
				child, args = args[0], args[1:]
			}
			if len(args) == 0 {
				return usage("give the code to evaluate")
			}
			if timeout < 0 {
				return usage("--timeout is %s", timeout)
			}
			code := strings.Join(args, " ")
			if code == "-" {
				text, err := io.ReadAll(a.In)
				if err != nil {
					return fmt.Errorf("read code: %w", err)
				}
				code = string(text)
			}
			req := wire.EvalRequest{Context: name, Code: code, TimeoutMS: timeout.Milliseconds()}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				if restart {
					if err := restartContext(cmd.Context(), c.Guest(child), name); err != nil {
						return err
					}
				}
				return a.evalIn(cmd.Context(), c, child, req)
			})
		},
	}
	cmd.Flags().StringVar(&child, "child", "", "the sandbox, instead of the first argument")
	cmd.Flags().StringVar(&name, "context", "", "the context (default: the one the recipe warmed)")
	cmd.Flags().BoolVar(&restart, "restart", false, "start the context again first; its variables are gone")
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "interrupt the code after this time")
	return cmd
}

// restartContext starts an interpreter anew; one that is alive is removed first, there may be none.
func restartContext(ctx context.Context, g *client.Guest, name string) error {
	_ = call.Unary(ctx, g, wire.MethodContextClose, wire.ContextRequest{ID: name}, nil)
	if err := call.Unary(ctx, g, wire.MethodContextNew, wire.ContextConfig{ID: name, Language: "python"}, nil); err != nil {
		return fmt.Errorf("start the context again: %w", err)
	}
	return nil
}

func (a *App) evalIn(ctx context.Context, c *client.Client, id string, req wire.EvalRequest) error {
	var out call.Output
	if !a.json {
		out = call.Output{Stdout: a.Out, Stderr: a.Err}
	}
	var stdout, stderr strings.Builder
	if a.json {
		out = call.Output{Stdout: &stdout, Stderr: &stderr}
	}
	g := c.Guest(id)
	running, begun, stop := passInterrupt(ctx, func(ctx context.Context, _ uint32) error {
		return call.Unary(ctx, g, wire.MethodContextStop, wire.ContextRequest{ID: req.Context}, nil)
	})
	defer stop()
	begun(0)
	res, err := g.Eval(running, req, out)
	if ctx.Err() != nil && err != nil {
		return guestExitError(exitInterrupted)
	}
	if err != nil {
		return a.lost(ctx, c, id, err)
	}
	if a.json {
		if err := a.show(evalJSON(res, stdout.String(), stderr.String()), nil); err != nil {
			return err
		}
	} else if res.Text != nil {
		fmt.Fprintln(a.Out, *res.Text)
	}
	if res.Error == nil {
		return nil
	}
	if !a.json {
		trace := res.Error.Traceback
		if trace == "" {
			trace = res.Error.Name + ": " + res.Error.Value
		}
		fmt.Fprintln(a.Err, printable(strings.TrimRight(trace, "\n")))
		if res.Error.Name == "ContextKilled" {
			fmt.Fprintf(a.Err, "try: forkd eval --restart %s CODE\n", id)
		}
	}
	return silentError(exitFailed)
}

// evalJSON is a result in the API's words.
func evalJSON(res *wire.EvalResult, stdout, stderr string) api.EvalResponse {
	out := api.EvalResponse{Result: res.Text, Stdout: stdout, Stderr: stderr, MS: res.MS}
	if res.Error != nil {
		text := strings.TrimSuffix(res.Error.Name+": "+res.Error.Value, ": ")
		out.Error, out.Traceback, out.ExitCode = &text, res.Error.Traceback, 1
	}
	return out
}
