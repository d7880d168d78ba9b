package cli

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

func (a *App) gc() *cobra.Command {
	var req api.GCRequest
	var older, most string
	cmd := &cobra.Command{
		Use: "gc [--dry-run]", Short: "Remove what nothing needs any more, and snapshots by age, number or size", Args: cobra.NoArgs,
		Long: "Remove layers that nothing needs any more, and what pulls have left that were broken off. With --older-than or --keep-last\n" +
			"snapshots go, too: those that were not used for so long and are not among the newest of their recipe, as far as each was given.\n" +
			"With --max the least recently used go until the store takes no more. What is pinned (forkd pin), has sandboxes, or has\n" +
			"something on it that stays is never removed. --dry-run only says what would go.",
		Example: "  forkd gc --dry-run\n  forkd gc --older-than 30d --keep-last 3 --images\n  forkd gc --max 100GiB",
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if older != "" {
				d, err := parseAge(older)
				if err != nil {
					return err
				}
				req.OlderThanSeconds = d.Seconds()
			}
			if most != "" {
				if req.MaxBytes, err = parseSize(most); err != nil {
					return usage("--max: %w", err)
				}
			}
			if req.KeepLast < 0 {
				return usage("--keep-last is %d", req.KeepLast)
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				res, err := c.GC(cmd.Context(), req)
				if err != nil {
					return err
				}
				if err := a.show(res, func(w io.Writer) error { return printGC(w, res, req.DryRun) }); err != nil {
					return err
				}
				return a.sumGC(res, req.DryRun)
			})
		},
	}
	f := cmd.Flags()
	f.BoolVar(&req.DryRun, "dry-run", false, "only say what would go")
	f.StringVar(&older, "older-than", "", "snapshots that were not used for so long, such as 30d or 12h")
	f.IntVar(&req.KeepLast, "keep-last", 0, "keep so many of each recipe, the newest")
	f.StringVar(&most, "max", "", "what the store may take, such as 100GiB")
	f.BoolVar(&req.Images, "images", false, "images on which no snapshot stands, too")
	return cmd
}

// parseAge reads a duration, or a number of days.
func parseAge(s string) (time.Duration, error) {
	if days, ok := strings.CutSuffix(s, "d"); ok {
		n, err := strconv.ParseFloat(days, 64)
		if err == nil && n > 0 && n < 36500 {
			return time.Duration(n * 24 * float64(time.Hour)), nil
		}
	}
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 {
		return 0, usage("--older-than %q: give it like 30d or 12h", s)
	}
	return d, nil
}

func printGC(w io.Writer, res *api.GCReply, dry bool) error {
	var rows [][]string
	for _, i := range res.Items {
		what := "would go"
		switch {
		case i.Removed:
			what = "removed"
		case i.Error != nil:
			what = "not removed: " + firstLine(i.Error.Message)
		case !dry:
			what = "not removed"
		}
		rows = append(rows, []string{i.Kind, i.Name, age(i.LastUsedUnix), firstLine(i.Why), what})
	}
	for _, tag := range slices.Sorted(maps.Keys(res.Kept)) {
		rows = append(rows, []string{"snapshot", tag, "", firstLine(res.Kept[tag]), "stays"})
	}
	if len(rows) == 0 {
		return nil
	}
	return table(w, "KIND | NAME | USED | WHY | WHAT", rows)
}

func (a *App) sumGC(res *api.GCReply, dry bool) error {
	if dry {
		a.progress("%s would be freed; the store takes %s then", size(res.FreedBytes), size(res.LeftBytes))
		return nil
	}
	a.progress("%s freed; the store takes %s", size(res.FreedBytes), size(res.LeftBytes))
	for _, i := range res.Items {
		if i.Error != nil {
			return fmt.Errorf("%s %s: %w", i.Kind, i.Name, i.Error)
		}
	}
	return nil
}

func (a *App) pin() *cobra.Command {
	return a.pinVerb("pin", "Keep snapshots from being removed by forkd gc, forkd rmi and all else", true)
}

func (a *App) unpin() *cobra.Command {
	return a.pinVerb("unpin", "Let snapshots be removed again", false)
}

func (a *App) pinVerb(verb, short string, on bool) *cobra.Command {
	return &cobra.Command{
		Use: verb + " SNAPSHOT…", Short: short, Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeTags(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				for _, tag := range args {
					snap, err := c.Pin(cmd.Context(), tag, on)
					if err != nil {
						return a.elsewhere(err, c, tag)
					}
					if err := a.show(snap, func(w io.Writer) error { _, err := fmt.Fprintln(w, snap.Tag); return err }); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
}
