package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/client"
)

// completeTimeout is how long a shell's user may be kept waiting at the tab key.
const completeTimeout = 2 * time.Second

// completer is what cobra asks for the words that may come next.
type completer = func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective)

// completeSandboxes offers the ids of sandboxes for the first n arguments (0: for all).
func (a *App) completeSandboxes(n int) completer {
	return a.complete(n, func(ctx context.Context, c *client.Client) (words []string) {
		list, err := c.Sandboxes(ctx, nil)
		if err != nil {
			return nil
		}
		for _, s := range list {
			words = append(words, s.ID+"\t"+s.State+", of "+s.SnapshotTag)
		}
		return words
	})
}

// completeTags offers the tags of snapshots for the first n arguments (0: for all).
func (a *App) completeTags(n int) completer {
	return a.complete(n, func(ctx context.Context, c *client.Client) (words []string) {
		list, err := c.Snapshots(ctx)
		if err != nil {
			return nil
		}
		for _, s := range list {
			words = append(words, s.Tag+"\t"+s.Status)
		}
		return words
	})
}

// complete asks a daemon that is there already: looking for words starts none.
func (a *App) complete(n int, list func(ctx context.Context, c *client.Client) []string) completer {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if n > 0 && len(args) >= n {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		a.noAutostart = true
		ctx, cancel := context.WithTimeout(cmd.Context(), completeTimeout)
		defer cancel()
		var words []string
		err := a.withDaemon(ctx, func(c *client.Client) error {
			words = list(ctx, c)
			return nil
		})
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return words, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeTagFlag offers tags after a flag.
func (a *App) completeTagFlag(cmd *cobra.Command, flag string) {
	completeFlag(cmd, flag, a.completeTags(0))
}

// completeWords offers fixed words after a flag.
func completeWords(cmd *cobra.Command, flag string, words ...string) {
	completeFlag(cmd, flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

func completeFlag(cmd *cobra.Command, flag string, f completer) {
	if err := cmd.RegisterFlagCompletionFunc(flag, f); err != nil {
		panic(err) // the flag does not exist: a mistake in this program
	}
}
