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

// statsWindow is how long the work of the CPUs is watched for its percentage.
const statsWindow = 500 * time.Millisecond

func (a *App) stats() *cobra.Command {
	return &cobra.Command{
		Use: "stats ID…", Short: "Show what sandboxes use: CPU, memory, disk, processes", Args: cobra.MinimumNArgs(1),
		Long: "Show what sandboxes use by their own accounting. CPU is the work of all of a sandbox's CPUs during half a second.\n" +
			"What a sandbox costs its host is in: forkd ls",
		ValidArgsFunction: a.completeSandboxes(0),
		RunE: a.verb(func(ctx context.Context, c *client.Client, ids []string) error {
			for _, id := range ids { // the beginning of what is measured
				if _, err := c.Metrics(ctx, id); err != nil {
					return err
				}
			}
			timer := time.NewTimer(statsWindow)
			defer timer.Stop()
			select {
			case <-timer.C:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			list := make(map[string]*api.Metrics, len(ids))
			var rows [][]string
			for _, id := range ids {
				m, err := c.Metrics(ctx, id)
				if err != nil {
					return err
				}
				list[id] = m
				rows = append(rows, statsRow(id, m))
			}
			return a.show(list, func(w io.Writer) error {
				return table(w, "ID | CPU | LOAD | MEMORY | CACHED | DISK | PROCESSES | OOM KILLS | UP", rows)
			})
		}),
	}
}

func statsRow(id string, m *api.Metrics) []string {
	return []string{
		id, fmt.Sprintf("%.0f%% of %d", m.CPUPercent, m.CPUs), fmt.Sprintf("%.2f", m.Load[0]),
		fmt.Sprintf("%s of %s", size(m.MemoryUsedBytes), size(m.MemoryTotalBytes)), size(m.MemoryCachedBytes),
		fmt.Sprintf("%s of %s", size(m.DiskUsedBytes), size(m.DiskTotalBytes)), fmt.Sprint(m.Processes), fmt.Sprint(m.OOMKills),
		(time.Duration(m.UptimeSeconds) * time.Second).String(),
	}
}
