package cli

import (
	"strings"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/client"
)

// snapshot is the existing forkd's command line for a branch.
func (a *App) snapshot() *cobra.Command {
	var f branchFlags
	var from string
	var live, diff, full bool
	cmd := &cobra.Command{
		Use: "snapshot --from-sandbox SANDBOX", Short: "Capture a running sandbox: branch, by its published name", Args: cobra.NoArgs,
		Example: "  forkd snapshot --from-sandbox sbx2abc --tag checkpoint-1\n  forkd snapshot --from-sandbox sbx2abc --live --no-wait",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if from == "" {
				return &hinted{
					usage("name the sandbox to capture with --from-sandbox"),
					"forkd snapshot --from-sandbox SANDBOX, or build one from a recipe with: forkd build RECIPE -t TAG",
				}
			}
			var words []string
			if cmd.Flags().Changed("mode") {
				words = []string{f.mode}
			}
			for _, word := range []struct {
				set  bool
				mode string
			}{{live, modeLive}, {diff, modeDiff}, {full, modeFull}} {
				if word.set {
					words = append(words, word.mode)
				}
			}
			if len(words) > 1 {
				return usage("the mode is named more than once: %s", strings.Join(words, ", "))
			}
			if len(words) == 1 {
				f.mode = words[0]
			}
			req, err := f.request()
			if err != nil {
				return err
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				return a.doBranch(cmd.Context(), c, from, req, f.quiet)
			})
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&from, "from-sandbox", "", "the sandbox")
	cmd.Flags().BoolVar(&live, "live", false, "--mode live")
	cmd.Flags().BoolVar(&diff, "diff", false, "--mode diff")
	cmd.Flags().BoolVar(&full, "full", false, "--mode full")
	completeFlag(cmd, "from-sandbox", a.completeSandboxes(0))
	return cmd
}
