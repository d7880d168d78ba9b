package cli

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
)

func (a *App) ls() *cobra.Command {
	var labels []string
	var quiet bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"ps"}, Short: "List sandboxes", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			list, err := c.Sandboxes(cmd.Context(), labels)
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
		},
	}
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "only those with this label, KEY=VALUE (repeatable)")
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
			s.ID, s.SnapshotTag, fmt.Sprintf("%d/%d", s.Index, s.Count), state, size(s.MemoryOwnBytes), age(s.CreatedAtUnix),
			expires, joinLabels(s.Labels),
		})
	}
	return table(w, "ID | SNAPSHOT | INDEX | STATE | OWN MEMORY | AGE | ENDS | LABELS", rows)
}

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
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			s, err := c.Sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			a.json = true
			return a.show(s, nil)
		},
	}
}

func (a *App) logs() *cobra.Command {
	return &cobra.Command{
		Use: "logs ID", Short: "Print the newest part of a sandbox's console", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			text, err := c.Logs(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.show(map[string]string{"console": string(text)}, func(w io.Writer) error {
				_, err := io.WriteString(w, printable(string(text)))
				return err
			})
		},
	}
}

func (a *App) kill() *cobra.Command {
	var all bool
	var labels []string
	var tag string
	cmd := &cobra.Command{
		Use: "kill [ID…]", Short: "End sandboxes", Example: "  forkd kill sbx2abc\n  forkd kill --all",
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			pick := all || len(labels) > 0 || tag != ""
			if pick == (len(args) > 0) {
				return usage("name sandboxes, or choose them with --all, --tag or --label, but not both")
			}
			c, err := a.connect(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			if pick {
				list, err := c.Sandboxes(ctx, labels)
				if err != nil {
					return err
				}
				for _, s := range list {
					if tag == "" || s.SnapshotTag == tag {
						args = append(args, s.ID)
					}
				}
			}
			var errs []error
			killed := []string{}
			for _, id := range args {
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
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "all sandboxes")
	cmd.Flags().StringVar(&tag, "tag", "", "those forked from this snapshot")
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "those with this label, KEY=VALUE (repeatable)")
	return cmd
}
