package cli

import (
	"context"
	"errors"
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

// evalFlags are the options of an evaluation.
type evalFlags struct {
	child, context, language, output string
	env                              []string
	timeout                          time.Duration
	restart                          bool
}

// which is the context that is meant.
func (f *evalFlags) which() wire.ContextRequest {
	return wire.ContextRequest{ID: f.context, Language: f.language}
}

func (a *App) eval() *cobra.Command {
	var f evalFlags
	cmd := &cobra.Command{
		Use: "eval ID CODE", Short: "Evaluate code in a sandbox's warm interpreter, and print what a prompt would print",
		Long: "Evaluate code in a context of a sandbox: the interpreter that was warm when its snapshot was frozen, or a new\n" +
			"one. State stays between calls. CODE of - is read from standard input. Exit code 1 if the code raised, and a\n" +
			"shell's own. Pictures and the like that the code shows are written to the directory given with -o; --json has\n" +
			"everything.",
		Example: "  forkd eval sbx2abc 'x = numpy.arange(10); x.sum()'\n  forkd eval --child sbx2abc -- 'x.mean()'\n" +
			"  forkd eval sbx2abc -o plots -- 'import matplotlib.pyplot as plt; plt.plot([1, 3, 2])'\n" +
			"  forkd eval sbx2abc --language shell -- 'cd /tmp; pwd'",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.runEval(cmd.Context(), f, args) },
	}
	cmd.Flags().StringVar(&f.child, "child", "", "the sandbox, instead of the first argument")
	cmd.Flags().StringVar(&f.context, "context", "", "the context (default: the one the recipe warmed, or the language's)")
	cmd.Flags().StringVar(&f.language, "language", "", "python, shell, javascript, typescript, or one that the image has a driver for")
	cmd.Flags().StringVarP(&f.output, "output", "o", "", "write pictures, HTML and the like that the code shows into this directory")
	cmd.Flags().StringArrayVarP(&f.env, "env", "e", nil, "environment variable for this evaluation, KEY=VALUE (repeatable)")
	cmd.Flags().BoolVar(&f.restart, "restart", false, "start the context again first; its variables are gone")
	cmd.Flags().DurationVar(&f.timeout, "timeout", 0, "interrupt the code after this time")
	return cmd
}

func (a *App) runEval(ctx context.Context, f evalFlags, args []string) error {
	if f.child == "" {
		f.child, args = args[0], args[1:]
	}
	if len(args) == 0 {
		return usage("give the code to evaluate")
	}
	if f.timeout < 0 {
		return usage("--timeout is %s", f.timeout)
	}
	env, err := pairs("--env", f.env)
	if err != nil {
		return err
	}
	code := strings.Join(args, " ")
	if code == "-" {
		text, err := io.ReadAll(a.In)
		if err != nil {
			return fmt.Errorf("read code: %w", err)
		}
		code = string(text)
	}
	req := wire.EvalRequest{Context: f.context, Language: f.language, Code: code, TimeoutMS: f.timeout.Milliseconds(), Env: env}
	return a.withDaemon(ctx, func(c *client.Client) error {
		if f.restart {
			if err := restartContext(ctx, c.Guest(f.child), f.which()); err != nil {
				return err
			}
		}
		return a.evalIn(ctx, c, f, req)
	})
}

// restartContext starts an interpreter anew, or a first one.
func restartContext(ctx context.Context, g *client.Guest, which wire.ContextRequest) error {
	_, err := call.RestartContext(ctx, g, which)
	e, refused := errors.AsType[*wire.Error](err)
	if refused && e.Code == wire.CodeUnimplemented { // by the agent of an older snapshot
		_ = call.RemoveContext(ctx, g, which)
	}
	if refused && (e.Code == wire.CodeNotFound || e.Code == wire.CodeUnimplemented) {
		_, err = call.CreateContext(ctx, g, wire.ContextConfig{ID: which.ID, Language: wire.Language(which.Language)})
	}
	if err != nil {
		return fmt.Errorf("start the context again: %w", err)
	}
	return nil
}

func (a *App) evalIn(ctx context.Context, c *client.Client, f evalFlags, req wire.EvalRequest) error {
	shown := &shownResults{dir: f.output, out: a.Out, note: a.Err}
	out := call.Evaluation{Output: call.Output{Stdout: a.Out, Stderr: a.Err}, Show: shown.show}
	var stdout, stderr strings.Builder
	if a.json {
		out.Output = call.Output{Stdout: &stdout, Stderr: &stderr}
		shown.out, shown.note = nil, nil
	}
	g := c.Guest(f.child)
	running, begun, stop := passInterrupt(ctx, func(ctx context.Context, _ uint32) error {
		return call.InterruptContext(ctx, g, f.which())
	})
	defer stop()
	begun(0)
	res, err := g.Evaluate(running, req, out)
	if ctx.Err() != nil && err != nil {
		return guestExitError(exitInterrupted)
	}
	if err != nil {
		return a.lost(ctx, c, f.child, err)
	}
	if a.json {
		if err := a.show(evalJSON(res, shown.all, stdout.String(), stderr.String()), nil); err != nil {
			return err
		}
	}
	if res.Error == nil {
		return nil
	}
	if res.Error.Name == wire.ErrorExitStatus && res.ExitCode != nil {
		return guestExitError(*res.ExitCode)
	}
	if !a.json {
		a.explainEval(f, res.Error)
	}
	return silentError(exitFailed)
}

func (a *App) explainEval(f evalFlags, e *wire.EvalError) {
	trace := e.Traceback
	if trace == "" {
		trace = strings.TrimSuffix(e.Name+": "+e.Value, ": ")
	}
	fmt.Fprintln(a.Err, printable(strings.TrimRight(trace, "\n")))
	if e.Name == wire.ErrorKilled {
		which := ""
		if f.context != "" {
			which += " --context " + f.context
		}
		if f.language != "" {
			which += " --language " + f.language
		}
		fmt.Fprintf(a.Err, "try: forkd eval --restart%s %s CODE\n", which, f.child)
	}
}

// evalJSON is a result in the API's words.
func evalJSON(res *wire.EvalResult, results []api.Result, stdout, stderr string) api.EvalResponse {
	out := api.EvalResponse{
		Result: res.Text, Stdout: stdout, Stderr: stderr, MS: res.MS, Results: results, ExecutionCount: res.ExecutionCount,
	}
	if res.ExitCode != nil {
		out.ExitCode = *res.ExitCode
	}
	if e := res.Error; e != nil {
		text := strings.TrimSuffix(e.Name+": "+e.Value, ": ")
		out.Error, out.ErrorName, out.ErrorValue, out.Traceback = &text, e.Name, e.Value, e.Traceback
		out.ExitCode = max(1, out.ExitCode)
	}
	return out
}
