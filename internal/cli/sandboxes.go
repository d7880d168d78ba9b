package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

func (a *App) ls() *cobra.Command {
	var filter client.SandboxFilter
	var quiet bool
	cmd := &cobra.Command{
		Use: "ls", Short: "List sandboxes", Args: cobra.NoArgs,
		RunE: a.verb(func(ctx context.Context, c *client.Client, _ []string) error {
			list, err := c.FilterSandboxes(ctx, filter)
			if err != nil {
				return err
			}
			return a.show(list, func(w io.Writer) error {
				if quiet {
					for _, s := range list {
						fmt.Fprintln(w, s.ID)
					}
					return nil
				}
				return printSandboxes(w, list)
			})
		}),
	}
	cmd.Flags().StringArrayVarP(&filter.Labels, "label", "l", nil, "only those with this label, KEY=VALUE (repeatable)")
	cmd.Flags().StringVar(&filter.State, "state", "", "only those in this state: running, paused, suspended or failed")
	cmd.Flags().StringVar(&filter.Snapshot, "snapshot", "", "only those that were forked from this snapshot")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "ids only")
	return cmd
}

func printSandboxes(w io.Writer, list []api.Sandbox) error {
	var rows [][]string
	for _, s := range list {
		state := s.State
		if s.Reason != "" {
			state += ": " + firstLine(s.Reason)
		}
		expires := ""
		if s.ExpiresAtUnix > 0 {
			expires = "in " + time.Until(time.Unix(s.ExpiresAtUnix, 0)).Round(time.Second).String()
		}
		rows = append(rows, []string{
			s.ID, s.SnapshotTag, fmt.Sprintf("%d/%d", s.Index, s.Count), state, ownShared(s.MemoryOwnBytes, s.MemorySharedBytes),
			ownShared(s.DiskOwnBytes, s.DiskSharedBytes), s.LatestBranch, age(s.CreatedAtUnix), expires, joinLabels(s.Labels),
		})
	}
	return table(w, "ID | SNAPSHOT | INDEX | STATE | MEMORY OWN+SHARED | DISK OWN+SHARED | LATEST BRANCH | AGE | ENDS | LABELS", rows)
}

func ownShared(own, shared int64) string { return size(own) + " + " + size(shared) }

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	if len(line) > 60 {
		return line[:60] + "…"
	}
	return line
}

func joinLabels(m map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, k+"="+m[k])
	}
	return strings.Join(out, ",")
}

func (a *App) inspect() *cobra.Command {
	return &cobra.Command{
		Use: "inspect ID", Short: "Show everything about a sandbox, as JSON", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			s, err := c.Sandbox(ctx, args[0])
			if err != nil {
				return err
			}
			a.json = true
			return a.show(s, nil)
		}),
	}
}

// killFlags choose which sandboxes to end.
type killFlags struct {
	all    bool
	labels []string
	tag    string
}

func (f *killFlags) any() bool { return f.all || len(f.labels) > 0 || f.tag != "" }

func (a *App) kill() *cobra.Command {
	var f killFlags
	cmd := &cobra.Command{
		Use: "kill [ID…]", Short: "End sandboxes", Example: "  forkd kill sbx2abc\n  forkd kill --all",
		ValidArgsFunction: a.completeSandboxes(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.any() == (len(args) > 0) {
				return usage("name sandboxes, or choose them with --all, --tag or --label, but not both")
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error { return a.doKill(cmd.Context(), c, f, args) })
		},
	}
	cmd.Flags().BoolVar(&f.all, "all", false, "all sandboxes")
	cmd.Flags().StringVar(&f.tag, "tag", "", "those forked from this snapshot")
	cmd.Flags().StringArrayVarP(&f.labels, "label", "l", nil, "those with this label, KEY=VALUE (repeatable)")
	a.completeTagFlag(cmd, "tag")
	return cmd
}

func (a *App) doKill(ctx context.Context, c *client.Client, f killFlags, ids []string) error {
	if f.any() {
		list, err := c.Sandboxes(ctx, f.labels)
		if err != nil {
			return err
		}
		for _, s := range list {
			if f.tag == "" || s.SnapshotTag == f.tag {
				ids = append(ids, s.ID)
			}
		}
	}
	var errs []error
	killed := []string{}
	for _, id := range ids {
		if err := c.Kill(ctx, id); err != nil {
			errs = append(errs, err)
			continue
		}
		killed = append(killed, id)
	}
	if len(errs) > 1 {
		errs = []error{errors.Join(errs...)}
	}
	return a.removed(killed, errs)
}
