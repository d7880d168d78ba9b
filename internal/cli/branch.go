package cli

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

const (
	modeAuto = "auto"
	modeLive = "live"
	modeDiff = "diff"
	modeFull = "full"
)

// branchFlags are those of every verb that branches.
type branchFlags struct {
	tag    string
	mode   string
	noWait bool
	quiet  bool

	n      int
	labels []string
	env    []string
	ttl    time.Duration
	bounds boundFlags
	egress egressFlags
}

func (f *branchFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&f.tag, "tag", "t", "", "name of the snapshot (default: branch-ID-TIME)")
	cmd.Flags().StringVar(&f.mode, "mode", modeAuto, "auto: live where this host can, else diff; live: the pause does not grow with\n"+
		"what was written; diff: copies the sandbox's own pages in the pause; full: stands on no other snapshot")
	cmd.Flags().BoolVar(&f.noWait, "no-wait", false, "return when the sandbox runs again; the snapshot is still being written then")
	cmd.Flags().BoolVarP(&f.quiet, "quiet", "q", false, "print the tag and the children's ids only")
	completeWords(cmd, "mode", modeAuto, modeLive, modeDiff, modeFull)
}

func (f *branchFlags) addChildren(cmd *cobra.Command) {
	cmd.Flags().IntVarP(&f.n, "n", "n", 0, "fork so many children of it at once")
	cmd.Flags().DurationVar(&f.ttl, "ttl", 0, "end each child after this time, e.g. 10m (0: when killed)")
	cmd.Flags().StringArrayVarP(&f.labels, "label", "l", nil, "label of each child, KEY=VALUE (repeatable)")
	cmd.Flags().StringArrayVarP(&f.env, "env", "e", nil, "environment variable of each child, KEY=VALUE (repeatable)")
	f.bounds.add(cmd)
	f.egress.add(cmd)
}

func (f *branchFlags) request() (api.BranchRequest, error) {
	wait := !f.noWait
	req := api.BranchRequest{Tag: f.tag, Mode: f.mode, Wait: &wait, N: f.n, TTLSeconds: f.ttl.Seconds()}
	switch f.mode {
	case modeAuto, modeLive, modeDiff, modeFull:
	default:
		return req, usage("--mode %q: give auto, live, diff or full", f.mode)
	}
	if f.n < 0 || f.ttl < 0 {
		return req, usage("-n and --ttl are not negative")
	}
	var err error
	if req.Egress, err = f.egress.policy(); err != nil {
		return req, err
	}
	if f.n == 0 && (f.ttl > 0 || len(f.labels) > 0 || len(f.env) > 0 || f.bounds.given() || req.Egress != nil) {
		return req, usage("--ttl, --label, --env, limits, idle times and egress are of children; say how many with -n")
	}
	if req.Bounds, err = f.bounds.bounds(); err != nil {
		return req, err
	}
	if req.Labels, err = pairs("--label", f.labels); err != nil {
		return req, err
	}
	req.Env, err = pairs("--env", f.env)
	return req, err
}

func (a *App) branch() *cobra.Command {
	var f branchFlags
	cmd := &cobra.Command{
		Use: "branch SANDBOX [-t TAG]", Short: "Capture a running sandbox as a snapshot, while it runs on", Args: cobra.ExactArgs(1),
		Long: "Capture memory, devices and disk of one instant of a sandbox as a snapshot; the sandbox runs on. The snapshot holds\n" +
			"what changed since the sandbox's last branch, or since it was forked. With -n children of it are forked at once;\n" +
			"exit code 1 if any of them failed.",
		Example: "  forkd branch sbx2abc -t checkpoint-1\n  forkd branch sbx2abc --mode live --no-wait\n" +
			"  forkd branch sbx2abc -n 3 --ttl 10m",
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := f.request()
			if err != nil {
				return err
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				return a.doBranch(cmd.Context(), c, args[0], req, f.quiet)
			})
		},
	}
	f.add(cmd)
	f.addChildren(cmd)
	return cmd
}

func (a *App) doBranch(ctx context.Context, c *client.Client, id string, req api.BranchRequest, quiet bool) error {
	snap, err := c.Branch(ctx, id, req)
	if err != nil {
		return err
	}
	err = a.show(snap, func(w io.Writer) error {
		if !quiet {
			return printBranch(w, snap)
		}
		_, err := fmt.Fprintln(w, snap.Tag)
		return err
	})
	if err != nil {
		return err
	}
	if snap.Status == statusWriting && !a.json {
		a.progress("%s is still being written; wait for it with: forkd snapshot-info %s --wait 1m", snap.Tag, snap.Tag)
	}
	if len(snap.Children) == 0 {
		return nil
	}
	return a.reportChildren(snap.Children)
}

func printBranch(w io.Writer, s *api.Snapshot) error {
	rows := [][]string{{"status", snapshotStatus(*s)}}
	rows = append(rows, branchRows(s)...)
	if s.Status != statusWriting {
		rows = append(rows, [][]string{
			{"memory", size(s.MemoryOwnBytes) + " of its own, " + size(s.MemorySharedBytes) + " shared"},
			{"disk", size(s.DiskOwnBytes) + " of its own, " + size(s.DiskSharedBytes) + " shared"},
			{"stored", size(s.StoredBytes) + " compressed"},
		}...)
	}
	return table(w, "tag | "+s.Tag, rows)
}

// branchRows say how a snapshot was made of a sandbox.
func branchRows(s *api.Snapshot) [][]string {
	mode := s.Mode
	if s.ModeReason != "" {
		mode += ": " + s.ModeReason
	}
	rows := [][]string{
		{"branched from", s.BranchedFrom},
		{"mode", mode},
		{"pause", ms(s.PauseMS) + ", its processes " + ms(s.FrozenMS)},
		{"parent", s.Parent},
	}
	if s.Status == statusReady {
		rows = append(rows, []string{"prepared, copied, written in", ms(s.SetupMS) + ", " + ms(s.CopyMS) + ", " + ms(s.WriteMS)})
	}
	return rows
}
