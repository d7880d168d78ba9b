package cli

import (
	"context"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

func (a *App) contexts() *cobra.Command {
	cmd := &cobra.Command{
		Use: "contexts", Short: "List, create and restart the interpreters of a sandbox", Args: a.noVerb,
		Long: "A context is an interpreter of a sandbox that keeps its state between evaluations: Python, a shell, JavaScript or\n" +
			"TypeScript where the image has node, and what else the image has a driver for (docs/contexts.md).",
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		a.contextsList(), a.contextsCreate(),
		a.contextVerb("rm", "End an interpreter", (*client.Client).RemoveContext),
		a.contextVerb("interrupt", "Interrupt what an interpreter evaluates, as ctrl-c does", (*client.Client).InterruptContext),
		a.contextsRestart(),
	)
	return cmd
}

func (a *App) contextsList() *cobra.Command {
	return &cobra.Command{
		Use: "ls ID", Short: "List a sandbox's interpreters", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				list, err := c.Contexts(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				return a.show(list, func(w io.Writer) error {
					var rows [][]string
					for i := range list {
						rows = append(rows, contextRow(&list[i]))
					}
					return table(w, "CONTEXT | LANGUAGE | VERSION | STATE | PID | EVALUATIONS | DIRECTORY", rows)
				})
			})
		},
	}
}

func contextRow(c *api.Context) []string {
	state := "idle"
	switch {
	case !c.Alive:
		state = "ended: " + c.Ended
	case c.Busy:
		state = "busy"
	}
	return []string{c.ID, c.Language, c.Version, state, strconv.Itoa(c.PID), strconv.Itoa(c.Evals), c.Cwd}
}

func (a *App) contextsCreate() *cobra.Command {
	var req api.ContextRequest
	var env []string
	cmd := &cobra.Command{
		Use: "create ID [CONTEXT]", Short: "Start an interpreter, and print its name", Args: cobra.RangeArgs(1, 2),
		Example:           "  forkd contexts create sbx2abc js --language javascript --cwd /srv",
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				req.ID = args[1]
			}
			var err error
			if req.Env, err = pairs("--env", env); err != nil {
				return err
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				made, err := c.CreateContext(cmd.Context(), args[0], req)
				if err != nil {
					return err
				}
				return a.show(made, func(w io.Writer) error {
					_, err := fmt.Fprintln(w, printable(made.ID))
					return err
				})
			})
		},
	}
	cmd.Flags().StringVar(&req.Language, "language", "", "python (the default), shell, javascript, typescript, or one that the image has a driver for")
	cmd.Flags().StringVar(&req.Cwd, "cwd", "", "the directory in which it starts (default: the image's)")
	cmd.Flags().StringVarP(&req.User, "user", "u", "", "the user it runs as (default: the image's)")
	cmd.Flags().StringArrayVarP(&env, "env", "e", nil, "environment variable, KEY=VALUE (repeatable)")
	return cmd
}

func (a *App) contextVerb(verb, short string, do func(c *client.Client, ctx context.Context, id, name string) error) *cobra.Command {
	return &cobra.Command{
		Use: verb + " ID CONTEXT", Short: short, Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withDaemon(cmd.Context(), func(c *client.Client) error { return do(c, cmd.Context(), args[0], args[1]) })
		},
	}
}

func (a *App) contextsRestart() *cobra.Command {
	return &cobra.Command{
		Use: "restart ID CONTEXT", Short: "Start an interpreter anew; its variables are gone", Args: cobra.ExactArgs(2),
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				made, err := c.RestartContext(cmd.Context(), args[0], args[1])
				if err != nil {
					return err
				}
				return a.show(made, func(io.Writer) error { return nil })
			})
		},
	}
}
