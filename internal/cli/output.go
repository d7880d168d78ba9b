package cli

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// table prints rows under a heading, in columns.
func table(w io.Writer, heading string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, strings.ReplaceAll(heading, " | ", "\t"))
	for _, row := range rows {
		for i, cell := range row {
			// A cell is one line, whatever a guest has put in it.
			if row[i] = oneLine(cell); row[i] == "" {
				row[i] = "-"
			}
		}
		fmt.Fprintln(t, strings.Join(row, "\t"))
	}
	return t.Flush()
}

// oneLine is printable text without line feeds and tabs, which would move what follows it.
func oneLine(s string) string {
	return strings.NewReplacer("\n", "⏎", "\t", " ").Replace(strings.TrimRight(printable(s), "\n"))
}

func size(n int64) string {
	const unit = 1024
	switch {
	case n == 0:
		return "0"
	case n < unit*unit:
		return fmt.Sprintf("%.1f KiB", float64(n)/unit)
	case n < unit*unit*unit:
		return fmt.Sprintf("%.1f MiB", float64(n)/unit/unit)
	}
	return fmt.Sprintf("%.1f GiB", float64(n)/unit/unit/unit)
}

func age(unix int64) string {
	if unix == 0 {
		return ""
	}
	d := time.Since(time.Unix(unix, 0))
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

func ms(v float64) string { return fmt.Sprintf("%.1f ms", v) }
