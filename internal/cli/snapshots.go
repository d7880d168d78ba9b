package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

func (a *App) snapshots() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use: "snapshots", Aliases: []string{"snapshot-ls"}, Short: "List snapshots", Args: cobra.NoArgs,
		Long: "List snapshots. With --all also the steps of builds, which are kept so that the next build goes on from the last that\n" +
			"has not changed. They can be forked and removed like others.",
		RunE: a.verb(func(ctx context.Context, c *client.Client, _ []string) error {
			get := c.Snapshots
			if all {
				get = c.SnapshotsAndSteps
			}
			list, err := get(ctx)
			if err != nil {
				return err
			}
			return a.show(list, func(w io.Writer) error { return printSnapshots(w, list, all) })
		}),
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "list the steps of builds as well")
	return cmd
}

// printSnapshots prints a table. Without steps a parent that is one is no name anybody would know.
func printSnapshots(w io.Writer, list []api.Snapshot, steps bool) error {
	var rows [][]string
	for _, s := range list {
		hot := "cold"
		if s.Hot {
			hot = "hot"
		}
		if strings.HasPrefix(s.Parent, ".") && !steps {
			s.Parent = "(step)"
		}
		rows = append(rows, []string{
			s.Tag, snapshotStatus(s), s.Mode, s.Parent, s.Recipe, strings.Join(s.Warm, ", "), fmt.Sprint(s.CPUs), size(s.MemoryBytes),
			ownShared(s.MemoryOwnBytes, s.MemorySharedBytes), size(s.StoredBytes), hot, fmt.Sprint(s.Sandboxes), age(s.CreatedAtUnix),
		})
	}
	return table(w, "TAG | STATUS | MODE | PARENT | RECIPE | WARM | CPUS | MEMORY | OWN+SHARED | STORED | IMAGE | SANDBOXES | AGE", rows)
}

func snapshotStatus(s api.Snapshot) string {
	switch {
	case s.Error != "":
		return s.Status + ": " + firstLine(s.Error)
	case s.Status == statusWriting:
		return fmt.Sprintf("%s %.0f %%", s.Status, s.Progress*100)
	}
	return s.Status
}

// Statuses of a snapshot in the API.
const (
	statusReady   = "ready"
	statusWriting = "writing"
	statusFailed  = "failed"
)

func (a *App) snapshotInfo() *cobra.Command {
	var wait time.Duration
	var provenance bool
	cmd := &cobra.Command{
		Use: "snapshot-info TAG", Short: "Show a snapshot and where it comes from", Args: cobra.ExactArgs(1),
		Long: "Show a snapshot and where it comes from. With --wait it is shown once it is no longer being written, or after\n" +
			"that time; exit code 1 if it is not ready then. With --provenance all is shown that is known of how it was made: every\n" +
			"snapshot it stands on with recipe, commands, digests and versions, and their images.",
		ValidArgsFunction: a.completeTags(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if wait < 0 {
				return usage("--wait is %s", wait)
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				if provenance {
					return a.doProvenance(cmd.Context(), c, args[0])
				}
				return a.doSnapshotInfo(cmd.Context(), c, args[0], wait)
			})
		},
	}
	cmd.Flags().DurationVar(&wait, "wait", 0, "wait so long for a snapshot that is being written")
	cmd.Flags().BoolVar(&provenance, "provenance", false, "show how it and all it stands on were made")
	cmd.MarkFlagsMutuallyExclusive("wait", "provenance")
	return cmd
}

func (a *App) doSnapshotInfo(ctx context.Context, c *client.Client, tag string, wait time.Duration) error {
	info, err := c.WaitSnapshot(ctx, tag, wait)
	if err != nil {
		return a.elsewhere(err, c, tag)
	}
	if err := a.show(info, func(w io.Writer) error { return printSnapshot(w, info) }); err != nil {
		return err
	}
	switch {
	case wait == 0 || info.Status == statusReady:
		return nil
	case info.Status == statusWriting:
		return &hinted{fmt.Errorf("snapshot %s is still being written after %s", tag, wait), "a longer --wait"}
	}
	return fmt.Errorf("snapshot %s is %s: %s", tag, info.Status, info.Error)
}

func printSnapshot(w io.Writer, s *api.SnapshotInfo) error {
	rows := [][]string{
		{"id", s.ID},
		{"status", snapshotStatus(s.Snapshot)},
		{"created", age(s.CreatedAtUnix) + " ago"},
		{"recipe", s.Recipe},
		{"image", s.Image},
		{"warm", strings.Join(s.Warm, ", ")},
		{"machine", fmt.Sprintf("%d cpus, %s of memory", s.CPUs, size(s.MemoryBytes))},
		{"memory", size(s.MemoryOwnBytes) + " of pages of its own, " + size(s.MemorySharedBytes) + " shared"},
		{"disk", size(s.DiskOwnBytes) + " of its own, " + size(s.DiskSharedBytes) + " shared"},
		{"stored", size(s.StoredBytes) + " compressed"},
		{"engine", fmt.Sprintf("%v %v, %v, %v, CPU %v", s.Engine["engine"], s.Engine["version"], s.Engine["accelerator"],
			s.Engine["machine"], s.Engine["cpu_model"])},
		{"kernel", s.Kernel},
		{"booted in", ms(s.BootMS)},
		{"warmed in", ms(s.WarmMS)},
	}
	rows = append(rows, configRows(s.Config)...)
	rows = append(rows, [][]string{
		{"stands on", strings.Join(s.Ancestors, " → ")},
		{"stood on by", strings.Join(s.Dependents, ", ")},
		{"sandboxes", fmt.Sprint(s.Sandboxes)},
	}...)
	if s.BranchedFrom != "" {
		rows = append(rows, branchRows(&s.Snapshot)...)
	}
	return table(w, "tag | "+s.Tag, rows)
}

// configRows say how an image's programs are started, as far as it says.
func configRows(c *api.ImageConfig) [][]string {
	if c == nil {
		return nil
	}
	list := func(m map[string]string) string {
		var pairs []string
		for k, v := range m {
			pairs = append(pairs, k+"="+v)
		}
		slices.Sort(pairs)
		return strings.Join(pairs, " ")
	}
	var rows [][]string
	for _, row := range [][]string{
		{"user", c.User},
		{"directory", c.WorkDir},
		{"entry point", strings.Join(c.Entrypoint, " ")},
		{"command", strings.Join(c.Cmd, " ")},
		{"environment", list(c.Env)},
		{"ports", strings.Join(c.Ports, " ")},
		{"labels", list(c.Labels)},
	} {
		if row[1] != "" {
			rows = append(rows, row)
		}
	}
	return rows
}

func (a *App) rmi() *cobra.Command {
	var cascade, force bool
	cmd := &cobra.Command{
		Use: "rmi TAG…", Short: "Remove snapshots", Args: cobra.MinimumNArgs(1),
		Long: "Remove snapshots. One that others stand on is removed only with --cascade, together with those, or with --force,\n" +
			"alone: the others then keep what they need of it. Prints the tags that are gone.",
		Example:           "  forkd rmi checkpoint-1\n  forkd rmi --cascade experiment",
		ValidArgsFunction: a.completeTags(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cascade && force {
				return usage("--cascade removes what stands on a snapshot, --force keeps it; give one of them")
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				remove := func(ctx context.Context, tag string) ([]string, error) {
					return []string{tag}, c.RemoveSnapshot(ctx, tag)
				}
				switch {
				case cascade:
					remove = c.RemoveSnapshotCascade
				case force:
					remove = c.RemoveSnapshotForce
				}
				return a.doRemove(cmd.Context(), c, args, remove)
			})
		},
	}
	cmd.Flags().BoolVar(&cascade, "cascade", false, "remove the snapshots that stand on it, too")
	cmd.Flags().BoolVar(&force, "force", false, "remove it alone; snapshots that stand on it keep what they need")
	return cmd
}

func (a *App) doRemove(ctx context.Context, c *client.Client, tags []string,
	remove func(ctx context.Context, tag string) ([]string, error),
) error {
	var errs []error
	removed := []string{}
	for _, tag := range tags {
		if slices.Contains(removed, tag) { // went with one named before it
			continue
		}
		gone, err := remove(ctx, tag)
		if err != nil {
			errs = append(errs, a.elsewhere(err, c, tag))
			continue
		}
		removed = append(removed, gone...)
	}
	return a.removed(removed, errs)
}

// removed prints the names that are gone, then reports what failed.
func (a *App) removed(names []string, errs []error) error {
	err := a.show(names, func(w io.Writer) error {
		for _, name := range names {
			fmt.Fprintln(w, name)
		}
		return nil
	})
	return errors.Join(append([]error{err}, errs...)...)
}

func (a *App) images() *cobra.Command {
	list := a.verb(func(ctx context.Context, c *client.Client, _ []string) error {
		images, err := c.Images(ctx)
		if err != nil {
			return err
		}
		return a.show(images, func(w io.Writer) error { return printImages(w, images) })
	})
	cmd := &cobra.Command{Use: "images", Short: "List or remove images", Args: cobra.NoArgs, RunE: list}
	cmd.AddCommand(
		&cobra.Command{Use: "ls", Short: "List images", Args: cobra.NoArgs, RunE: list},
		&cobra.Command{
			Use: "rm IMAGE…", Short: "Remove images by id or recipe name", Args: cobra.MinimumNArgs(1),
			RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
				var errs []error
				removed := []string{}
				for _, id := range args {
					if err := c.RemoveImage(ctx, id); err != nil {
						errs = append(errs, err)
						continue
					}
					removed = append(removed, id)
				}
				return a.removed(removed, errs)
			}),
		},
	)
	return cmd
}

func printImages(w io.Writer, images []api.Image) error {
	var rows [][]string
	for _, m := range images {
		rows = append(rows, []string{
			m.ID[:min(12, len(m.ID))], m.Name, m.Base, fmt.Sprint(m.Packages), size(m.OwnBytes), size(m.StoredBytes),
			strings.Join(m.Snapshots, ", "), age(m.CreatedAtUnix),
		})
	}
	return table(w, "ID | RECIPE | BASE | PACKAGES | SIZE | STORED | SNAPSHOTS | AGE", rows)
}
