package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
)

func (a *App) snapshots() *cobra.Command {
	cmd := &cobra.Command{
		Use: "snapshots", Aliases: []string{"snapshot-ls"}, Short: "List snapshots", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			list, err := c.Snapshots(cmd.Context())
			if err != nil {
				return err
			}
			return a.show(list, func(w io.Writer) error {
				var rows [][]string
				for _, s := range list {
					hot := "cold"
					if s.Hot {
						hot = "hot"
					}
					rows = append(rows, []string{
						s.Tag, s.Recipe, strings.Join(s.Warm, ", "), fmt.Sprint(s.CPUs), size(s.MemoryBytes), size(s.StoredBytes), hot,
						fmt.Sprint(s.Sandboxes), age(s.CreatedAtUnix),
					})
				}
				return table(w, "TAG | RECIPE | WARM | CPUS | MEMORY | STORED | IMAGE | SANDBOXES | AGE", rows)
			})
		},
	}
	return cmd
}

func (a *App) snapshotInfo() *cobra.Command {
	return &cobra.Command{
		Use: "snapshot-info TAG", Short: "Show a snapshot and where it comes from", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			info, err := c.SnapshotInfo(cmd.Context(), args[0])
			if err != nil {
				return a.elsewhere(err, c, args[0])
			}
			return a.show(info, func(w io.Writer) error { return printSnapshot(w, info) })
		},
	}
}

func printSnapshot(w io.Writer, s *api.SnapshotInfo) error {
	rows := [][]string{
		{"id", s.ID},
		{"created", age(s.CreatedAtUnix) + " ago"},
		{"recipe", s.Recipe},
		{"image", s.Image},
		{"warm", strings.Join(s.Warm, ", ")},
		{"machine", fmt.Sprintf("%d cpus, %s of memory", s.CPUs, size(s.MemoryBytes))},
		{"memory", size(s.MemoryOwnBytes) + " of pages"},
		{"disk", size(s.DiskOwnBytes) + " over the image"},
		{"stored", size(s.StoredBytes) + " compressed"},
		{"engine", fmt.Sprintf("%v %v, %v, %v, CPU %v", s.Engine["engine"], s.Engine["version"], s.Engine["accelerator"],
			s.Engine["machine"], s.Engine["cpu_model"])},
		{"kernel", s.Kernel},
		{"booted in", ms(s.BootMS)},
		{"warmed in", ms(s.WarmMS)},
		{"stands on", strings.Join(s.Ancestors, " → ")},
		{"stood on by", strings.Join(s.Dependents, ", ")},
		{"sandboxes", fmt.Sprint(s.Sandboxes)},
	}
	return table(w, "tag | "+s.Tag, rows)
}

func (a *App) rmi() *cobra.Command {
	return &cobra.Command{
		Use: "rmi TAG…", Short: "Remove snapshots", Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			var errs []error
			removed := []string{}
			for _, tag := range args {
				if err := c.RemoveSnapshot(cmd.Context(), tag); err != nil {
					errs = append(errs, a.elsewhere(err, c, tag))
					continue
				}
				removed = append(removed, tag)
			}
			return a.removed(removed, errs)
		},
	}
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
	list := func(cmd *cobra.Command, _ []string) error {
		c, err := a.connect(cmd.Context())
		if err != nil {
			return err
		}
		defer c.Close()
		images, err := c.Images(cmd.Context())
		if err != nil {
			return err
		}
		return a.show(images, func(w io.Writer) error {
			var rows [][]string
			for _, m := range images {
				rows = append(rows, []string{
					m.ID[:min(12, len(m.ID))], m.Name, m.Base, fmt.Sprint(m.Packages), size(m.OwnBytes), size(m.StoredBytes),
					strings.Join(m.Snapshots, ", "), age(m.CreatedAtUnix),
				})
			}
			return table(w, "ID | RECIPE | BASE | PACKAGES | SIZE | STORED | SNAPSHOTS | AGE", rows)
		})
	}
	cmd := &cobra.Command{Use: "images", Short: "List or remove images", Args: cobra.NoArgs, RunE: list}
	cmd.AddCommand(
		&cobra.Command{Use: "ls", Short: "List images", Args: cobra.NoArgs, RunE: list},
		&cobra.Command{
			Use: "rm IMAGE…", Short: "Remove images by id or recipe name", Args: cobra.MinimumNArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				c, err := a.connect(cmd.Context())
				if err != nil {
					return err
				}
				defer c.Close()
				var errs []error
				removed := []string{}
				for _, id := range args {
					if err := c.RemoveImage(cmd.Context(), id); err != nil {
						errs = append(errs, err)
						continue
					}
					removed = append(removed, id)
				}
				return a.removed(removed, errs)
			},
		},
	)
	return cmd
}

func (a *App) tree() *cobra.Command {
	return &cobra.Command{
		Use: "tree", Short: "Show images, snapshots and sandboxes as a family tree", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			nodes, err := c.Tree(cmd.Context())
			if err != nil {
				return err
			}
			return a.show(nodes, func(w io.Writer) error {
				for _, n := range nodes {
					printNode(w, n, "", "")
				}
				return nil
			})
		},
	}
}

func printNode(w io.Writer, n api.TreeNode, first, rest string) {
	state := ""
	if n.State != "" && n.State != "ready" {
		state = ", " + n.State
	}
	fmt.Fprintf(w, "%s%s %s (%s%s)\n", first, n.Kind, printable(n.Name), size(n.OwnBytes), state)
	for i, child := range n.Children {
		if i == len(n.Children)-1 {
			printNode(w, child, rest+"└─ ", rest+"   ")
			continue
		}
		printNode(w, child, rest+"├─ ", rest+"│  ")
	}
}
