package cli

import "github.com/spf13/cobra"

// netd is for the daemon alone, which gives it what it needs as descriptors.
func (a *App) netd() *cobra.Command {
	var staged bool
	cmd := &cobra.Command{
		Use: "netd", Short: "Run the networks of the sandboxes, for the daemon", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.Network(cmd.Context(), staged) },
	}
	cmd.Flags().BoolVar(&staged, "outer", false, "the outside is that of a test")
	return cmd
}
