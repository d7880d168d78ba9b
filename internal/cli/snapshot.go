package cli

import (
	"strings"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/client"
)

// snapshot is the existing forkd's command line for a branch, and for a root file system made elsewhere.
func (a *App) snapshot() *cobra.Command {
	var f branchFlags
	var from string
	var fs rootfsFlags
	var live, diff, full bool
	cmd := &cobra.Command{
		Use: "snapshot {--from-sandbox SANDBOX | --rootfs FILE -t TAG}", Args: cobra.NoArgs,
		Short: "Capture a running sandbox, or boot a root file system and capture that",
		Long: "Capture a running sandbox (branch, by its published name), or boot a copy of a root file system, a file with ext4 on the\n" +
			"daemon's host, and capture the machine when forkd's agent has answered in it; its own init is not started.",
		Example: "  forkd snapshot --from-sandbox sbx2abc --tag checkpoint-1\n  forkd snapshot --from-sandbox sbx2abc --live --no-wait\n" +
			"  forkd snapshot --rootfs /srv/alpine.ext4 -t alpine",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if fs.given() {
				if flag := changed(cmd, "from-sandbox", "mode", "no-wait", "live", "diff", "full"); flag != "" {
					return usage("--%s is about a sandbox, and --rootfs about a file", flag)
				}
				return a.bootRootfs(cmd.Context(), f.tag, &fs)
			}
			if from == "" {
				return &hinted{
					usage("name the sandbox to capture with --from-sandbox, or a root file system with --rootfs"),
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
	fs.add(cmd)
	cmd.Flags().StringVar(&from, "from-sandbox", "", "the sandbox")
	cmd.Flags().BoolVar(&live, "live", false, "--mode live")
	cmd.Flags().BoolVar(&diff, "diff", false, "--mode diff")
	cmd.Flags().BoolVar(&full, "full", false, "--mode full")
	completeFlag(cmd, "from-sandbox", a.completeSandboxes(0))
	return cmd
}
