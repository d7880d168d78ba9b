package cli

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

func (a *App) workspace() *cobra.Command {
	cmd := &cobra.Command{
		Use: "workspace", Short: "Sandboxes with a name: create, suspend when nobody works in them, resume as the same machine",
		Long: "A workspace is a sandbox with a name that outlives it. Suspended it takes no memory; resumed it is the same machine,\n" +
			"with its processes, files and ids. Verbs that take a sandbox take a workspace's name as well.",
		Example: "  forkd workspace create work --snapshot python-numpy\n  forkd exec work -- uname -n\n" +
			"  forkd workspace suspend work\n  forkd workspace resume work",
		Args: a.noSubVerb,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		a.createWorkspace(), a.listWorkspaces(),
		a.changeWorkspaces("suspend", "Write workspaces to disk and free all their memory", (*client.Client).SuspendWorkspace),
		a.changeWorkspaces("resume", "Let suspended workspaces run on", (*client.Client).ResumeWorkspace),
		a.deleteWorkspaces(),
	)
	return cmd
}

func (a *App) noSubVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return &hinted{usage("unknown command %q", "workspace "+args[0]), cmd.CommandPath() + " --help"}
}

func (a *App) createWorkspace() *cobra.Command {
	var req api.WorkspaceRequest
	var labels, env []string
	var limits boundFlags
	var egress egressFlags
	cmd := &cobra.Command{
		Use: "create NAME --snapshot TAG", Short: "Fork a sandbox and give it a name", Args: cobra.ExactArgs(1),
		Example: "  forkd workspace create work --snapshot python-numpy --idle 30m --auto-resume",
		RunE: func(cmd *cobra.Command, args []string) error {
			if req.SnapshotTag == "" {
				return usage("name the snapshot it is made of with --snapshot; list them with: forkd snapshots")
			}
			var err error
			if req.Labels, err = pairs("--label", labels); err != nil {
				return err
			}
			if req.Env, err = pairs("--env", env); err != nil {
				return err
			}
			if req.Bounds, err = limits.bounds(); err != nil {
				return err
			}
			if req.Egress, err = egress.policy(); err != nil {
				return err
			}
			req.Name = args[0]
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				w, err := c.CreateWorkspace(cmd.Context(), req)
				if err != nil {
					return err
				}
				for _, warning := range w.Warnings {
					a.progress("%s", printable(warning))
				}
				return a.showWorkspace(w)
			})
		},
	}
	cmd.Flags().StringVar(&req.SnapshotTag, "snapshot", "", "the snapshot to fork")
	a.completeTagFlag(cmd, "snapshot")
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "label of its sandbox, KEY=VALUE (repeatable)")
	cmd.Flags().StringArrayVarP(&env, "env", "e", nil, "environment variable of its sandbox, KEY=VALUE (repeatable)")
	cmd.Flags().BoolVar(&req.PerChildNetns, "per-child-netns", false, "accepted; every sandbox is isolated")
	limits.add(cmd)
	egress.add(cmd)
	return cmd
}

func (a *App) showWorkspace(w *api.Workspace) error {
	return a.show(w, func(out io.Writer) error {
		_, err := fmt.Fprintf(out, "%s %s %s\n", w.Name, w.Status, w.SandboxID)
		return err
	})
}

func (a *App) listWorkspaces() *cobra.Command {
	return &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List workspaces", Args: cobra.NoArgs,
		RunE: a.verb(func(ctx context.Context, c *client.Client, _ []string) error {
			list, err := c.Workspaces(ctx)
			if err != nil {
				return err
			}
			return a.show(list, func(out io.Writer) error {
				var rows [][]string
				for _, w := range list {
					status := w.Status
					if w.Reason != "" {
						status += ": " + firstLine(w.Reason)
					}
					rows = append(rows, []string{w.Name, status, w.SourceSnapshotTag, w.SandboxID, age(w.CreatedAtUnix), age(w.LastActiveUnix)})
				}
				return table(out, "NAME | STATUS | SNAPSHOT | SANDBOX | AGE | LAST ACTIVE", rows)
			})
		}),
	}
}

func (a *App) changeWorkspaces(name, short string,
	to func(*client.Client, context.Context, string) (*api.Workspace, error),
) *cobra.Command {
	cmd := &cobra.Command{
		Use: name + " NAME…", Short: short, Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeWorkspaces(),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			var errs []error
			for _, arg := range args {
				w, err := to(c, ctx, arg)
				if err == nil {
					err = a.showWorkspace(w)
				}
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		}),
	}
	if name == "suspend" {
		cmd.Flags().Bool("diff", false, "accepted; only what has changed is stored anyway")
	}
	return cmd
}

func (a *App) deleteWorkspaces() *cobra.Command {
	return &cobra.Command{
		Use: "delete NAME…", Aliases: []string{"rm"}, Short: "End workspaces and their sandboxes, with all that is in them",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeWorkspaces(),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			var errs []error
			removed := []string{}
			for _, name := range args {
				if err := c.RemoveWorkspace(ctx, name); err != nil {
					errs = append(errs, err)
					continue
				}
				removed = append(removed, name)
			}
			return a.removed(removed, errs)
		}),
	}
}

// completeWorkspaces offers the names of workspaces.
func (a *App) completeWorkspaces() completer {
	return a.complete(0, func(ctx context.Context, c *client.Client) (words []string) {
		list, err := c.Workspaces(ctx)
		if err != nil {
			return nil
		}
		for _, w := range list {
			words = append(words, w.Name+"\t"+w.Status+", of "+w.SourceSnapshotTag)
		}
		return words
	})
}
