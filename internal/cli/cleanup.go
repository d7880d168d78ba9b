package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

func (a *App) cleanup() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "cleanup [--yes]", Short: "Show what crashes and failures have left, and with --yes remove it", Args: cobra.NoArgs,
		Long: "Show what crashes and failures have left: processes and directories of machines that are no sandbox's, VM processes whose\n" +
			"home was removed under them, old temporary files, failed sandboxes and snapshots, stale workspaces, records that cannot be\n" +
			"read. Without --yes nothing is changed. Records that cannot be read are never removed: they may be of a newer forkd.",
		RunE: a.verb(func(ctx context.Context, c *client.Client, _ []string) error {
			find := c.Leftovers
			if yes {
				find = c.Cleanup
			}
			list, err := find(ctx)
			if err != nil {
				return err
			}
			if err := a.show(list, func(w io.Writer) error { return printLeftovers(w, list) }); err != nil {
				return err
			}
			return a.sumLeftovers(list, yes)
		}),
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "remove it")
	return cmd
}

func printLeftovers(w io.Writer, list []api.Leftover) error {
	if len(list) == 0 {
		return nil
	}
	var rows [][]string
	for _, l := range list {
		what := "to be removed"
		switch {
		case l.Removed:
			what = "removed"
		case l.Kept:
			what = "kept: " + l.Hint
		case l.Error != nil:
			what = "not removed: " + firstLine(l.Error.Message)
		}
		rows = append(rows, []string{l.Kind, l.Name, size(l.Bytes), firstLine(l.Detail), what})
	}
	return table(w, "KIND | NAME | SIZE | DETAIL | WHAT", rows)
}

func (a *App) sumLeftovers(list []api.Leftover, yes bool) error {
	removable, kept := 0, 0
	var failed error
	for _, l := range list {
		switch {
		case l.Kept:
			kept++
		case l.Error != nil && failed == nil:
			failed = fmt.Errorf("%s %s: %w", l.Kind, l.Name, l.Error)
		default:
			removable++
		}
	}
	switch {
	case failed != nil:
		return failed
	case removable == 0 && kept == 0:
		a.progress("nothing is left over")
	case removable == 0:
		a.progress("nothing to remove")
	case yes:
		a.progress("removed %d", removable)
	default:
		a.progress("%d would be removed; do it with: forkd cleanup --yes", removable)
	}
	return nil
}
