package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

func (a *App) doctor() *cobra.Command {
	return &cobra.Command{
		Use: "doctor", Short: "Check what this host offers; exit code 1 if something needed is missing", Args: cobra.NoArgs,
		RunE: a.verb(func(ctx context.Context, c *client.Client, _ []string) error {
			info, err := c.Host(ctx)
			if err != nil {
				return err
			}
			if err := a.show(info, func(w io.Writer) error { return printDoctor(w, info) }); err != nil {
				return err
			}
			if !info.OK {
				return silentError(exitFailed)
			}
			return nil
		}),
	}
}

func printDoctor(w io.Writer, info *api.HostInfo) error {
	fmt.Fprintf(w, "%s, %d × %s, %s of memory, uid %d\n\n", info.Kernel, info.CPUs, info.CPUModel, size(info.MemoryBytes), info.UID)
	for _, c := range info.Checks {
		fmt.Fprintf(w, "%-4s  %-13s  %s\n", c.Status, c.Name, printable(c.Detail))
		if c.Hint != "" {
			fmt.Fprintf(w, "%21stry: %s\n", "", c.Hint)
		}
	}
	return nil
}
