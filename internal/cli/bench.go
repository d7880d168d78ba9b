package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/cli/plot"
)

// spread sums a sample up.
type spread struct {
	Runs  int     `json:"runs"`
	First float64 `json:"first"` // in the order of measuring
	Min   float64 `json:"min"`
	P50   float64 `json:"p50"`
	P90   float64 `json:"p90"`
	P99   float64 `json:"p99"`
	Max   float64 `json:"max"`
}

func spreadOf(v []float64) spread {
	if len(v) == 0 {
		return spread{}
	}
	sorted := slices.Sorted(slices.Values(v))
	return spread{
		Runs: len(v), First: v[0], Min: sorted[0], P50: plot.Percentile(sorted, 0.5), P90: plot.Percentile(sorted, 0.9),
		P99: plot.Percentile(sorted, 0.99), Max: sorted[len(sorted)-1],
	}
}

func (a *App) bench() *cobra.Command {
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure this host", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.benchFork(), a.benchBranch(), a.benchNetwork())
	return cmd
}

// benchLabel marks what a benchmark made, so that nothing else is removed after it.
const benchLabel = "forkd.bench"

func benchLabels() map[string]string { return map[string]string{benchLabel: "yes"} }

// endBenchmarked ends the sandboxes of a benchmark, of this one or of one that was killed.
func endBenchmarked(ctx context.Context, c *client.Client) error {
	list, err := c.Sandboxes(ctx, []string{benchLabel + "=yes"})
	if err != nil {
		return err
	}
	for _, s := range list {
		if killErr := c.Kill(ctx, s.ID); killErr != nil && !isCode(killErr, api.CodeNotFound) {
			err = errors.Join(err, killErr)
		}
	}
	return err
}

func isCode(err error, code api.Code) bool {
	e, ok := errors.AsType[*api.Error](err)
	return ok && e.Code == code
}

// hostLine is what figures without it are worth nothing.
func hostLine(h *api.HostInfo) string {
	load := make([]string, len(h.LoadAverage))
	for i, l := range h.LoadAverage {
		load[i] = fmt.Sprintf("%.2f", l)
	}
	return fmt.Sprintf("%s, %d × %s, %v %v under %v, store on %s, load %s", h.Kernel, h.CPUs, h.CPUModel, engineFact(h, "engine"),
		engineFact(h, "version"), engineFact(h, "accelerator"), h.StoreFilesystem, strings.Join(load, " "))
}

func engineFact(h *api.HostInfo, key string) any {
	if f, ok := h.Engine["format"].(map[string]any); ok {
		return f[key]
	}
	return "?"
}

// drawTo writes a figure to a file, if one is asked for.
func (a *App) drawTo(path string, f *plot.Figure) error {
	if path == "" {
		return nil
	}
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("draw: %w", err)
	}
	if err := errors.Join(f.Write(file), file.Close()); err != nil {
		return err
	}
	a.progress("drawn: %s", path)
	return nil
}
