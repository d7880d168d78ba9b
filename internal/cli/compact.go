package cli

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/client"
)

func (a *App) compact() *cobra.Command {
	var to string
	cmd := &cobra.Command{
		Use: "compact SNAPSHOT -t TAG", Short: "Make a snapshot of the same content that stands on no other", Args: cobra.ExactArgs(1),
		Example: "  forkd compact checkpoint-9 -t base-2", ValidArgsFunction: a.completeTags(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if to == "" {
				return usage("name the new snapshot with -t TAG")
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				snap, err := c.Compact(cmd.Context(), args[0], to)
				if err != nil {
					return a.elsewhere(err, c, args[0])
				}
				return a.show(snap, func(w io.Writer) error {
					_, err := fmt.Fprintln(w, snap.Tag)
					return err
				})
			})
		},
	}
	cmd.Flags().StringVarP(&to, "tag", "t", "", "name of the new snapshot")
	return cmd
}
