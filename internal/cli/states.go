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

func (a *App) pause() *cobra.Command {
	return a.change("pause", "Halt sandboxes: their CPUs stand still, their memory stays", (*client.Client).Pause)
}

func (a *App) resume() *cobra.Command {
	return a.change("resume", "Let paused sandboxes run on", (*client.Client).Resume)
}

func (a *App) suspend() *cobra.Command {
	return a.change("suspend", "Write sandboxes to disk and free all their memory; their ids stay", (*client.Client).Suspend)
}

func (a *App) wake() *cobra.Command {
	return a.change("wake", "Let suspended sandboxes run on", (*client.Client).Wake)
}

// change is a verb that takes sandboxes to another state. It prints one object for one sandbox, a list for several.
func (a *App) change(name, short string, to func(*client.Client, context.Context, string) (*api.Sandbox, error)) *cobra.Command {
	return &cobra.Command{
		Use: name + " SANDBOX…", Short: short, Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeSandboxes(0),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			list := []*api.Sandbox{}
			var errs []error
			for _, id := range args {
				s, err := to(c, ctx, id)
				if err != nil {
					errs = append(errs, err)
					continue
				}
				list = append(list, s)
			}
			if err := a.showChanged(list, len(args)); err != nil {
				return err
			}
			return errors.Join(errs...)
		}),
	}
}

func (a *App) showChanged(list []*api.Sandbox, asked int) error {
	text := func(w io.Writer) error {
		for _, s := range list {
			fmt.Fprintf(w, "%s %s\n", s.ID, printable(s.State))
		}
		return nil
	}
	switch {
	case asked > 1:
		return a.show(list, text)
	case len(list) == 1:
		return a.show(list[0], text)
	}
	return nil // the one that was asked for failed, its error says it all
}
