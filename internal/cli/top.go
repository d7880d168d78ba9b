package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

// topWindow is how long rates are watched where there is one picture only.
const topWindow = time.Second

// topFlags are what `top` is told.
type topFlags struct {
	interval time.Duration
	sort     string
	labels   []string
}

func (a *App) top() *cobra.Command {
	f := topFlags{}
	cmd := &cobra.Command{
		Use: "top", Short: "Show what sandboxes cost the host, live", Args: cobra.NoArgs,
		Long: "Show what sandboxes cost the host: 100% of CPU is one of its processors at work; memory that a sandbox has for\n" +
			"itself, and that it shares with others; what it has written to its disk; what it reads from and writes to storage.\n" +
			"What a sandbox uses by its own accounting is in: forkd stats\n\n" +
			"Keys: q quits; c m d i t a s n sort by CPU, memory, disk, io, CPU time, age, snapshot, id; the same again, or r, the\n" +
			"other way round; space looks at once. Where standard output is no terminal it prints one table, of a second.",
		Example: "  forkd top --sort memory\n  forkd top --json -l team=search",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.interval < 100*time.Millisecond || f.interval > time.Hour {
				return usage("--interval is %s: give 100ms to 1h", f.interval)
			}
			if _, ok := topOrders()[f.sort]; !ok {
				return usage("--sort is %q: give one of %s", f.sort, strings.Join(topOrderNames(), ", "))
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error { return a.doTop(cmd.Context(), c, f) })
		},
	}
	cmd.Flags().DurationVarP(&f.interval, "interval", "d", 2*time.Second, "how often to look")
	cmd.Flags().StringVar(&f.sort, "sort", "cpu", "by what: "+strings.Join(topOrderNames(), ", "))
	cmd.Flags().StringArrayVarP(&f.labels, "label", "l", nil, "only sandboxes with this label, KEY=VALUE (repeatable)")
	completeWords(cmd, "sort", topOrderNames()...)
	return cmd
}

// topRow is a sandbox's usage with what it was between two looks.
type topRow struct {
	api.Usage

	CPUPercent              float64 `json:"cpu_percent"` // 100: one of the host's processors
	IOReadBytesPerSecond    float64 `json:"io_read_bytes_per_second"`
	IOWrittenBytesPerSecond float64 `json:"io_written_bytes_per_second"`
}

// topRows are sandboxes with their rates since the look before. One that was not there then has those since its fork.
func topRows(before, now []api.Usage) []topRow {
	known := map[string]api.Usage{}
	for _, u := range before {
		known[u.ID] = u
	}
	rows := make([]topRow, 0, len(now))
	for _, u := range now {
		row := topRow{Usage: u}
		old, ok := known[u.ID]
		took := u.TimestampUnix - old.TimestampUnix
		if !ok {
			old, took = api.Usage{}, u.AgeSeconds
		}
		if took > 0 {
			row.CPUPercent = max(0, 100*(u.CPUSeconds-old.CPUSeconds)/took)
			row.IOReadBytesPerSecond = max(0, float64(u.IOReadBytes-old.IOReadBytes)/took)
			row.IOWrittenBytesPerSecond = max(0, float64(u.IOWrittenBytes-old.IOWrittenBytes)/took)
		}
		rows = append(rows, row)
	}
	return rows
}

// topOrders are what rows can be sorted by; numbers the greatest first.
func topOrders() map[string]func(a, b topRow) int {
	return map[string]func(a, b topRow) int{
		"cpu":    func(a, b topRow) int { return cmp.Compare(b.CPUPercent, a.CPUPercent) },
		"memory": func(a, b topRow) int { return cmp.Compare(b.MemoryOwnBytes, a.MemoryOwnBytes) },
		"disk":   func(a, b topRow) int { return cmp.Compare(b.DiskOwnBytes, a.DiskOwnBytes) },
		"io": func(a, b topRow) int {
			return cmp.Compare(b.IOReadBytesPerSecond+b.IOWrittenBytesPerSecond, a.IOReadBytesPerSecond+a.IOWrittenBytesPerSecond)
		},
		"time":     func(a, b topRow) int { return cmp.Compare(b.CPUSeconds, a.CPUSeconds) },
		"age":      func(a, b topRow) int { return cmp.Compare(b.AgeSeconds, a.AgeSeconds) },
		"snapshot": func(a, b topRow) int { return cmp.Compare(a.SnapshotTag, b.SnapshotTag) },
		"id":       func(a, b topRow) int { return cmp.Compare(a.ID, b.ID) },
	}
}

func topOrderNames() []string {
	return []string{"cpu", "memory", "disk", "io", "time", "age", "snapshot", "id"}
}

// topKeys are the keys that sort.
func topKeys() map[byte]string {
	return map[byte]string{'c': "cpu", 'm': "memory", 'd': "disk", 'i': "io", 't': "time", 'a': "age", 's': "snapshot", 'n': "id"}
}

func sortRows(rows []topRow, by string, reverse bool) {
	order := topOrders()[by]
	slices.SortFunc(rows, func(a, b topRow) int {
		c := order(a, b)
		if reverse {
			c = -c
		}
		return cmp.Or(c, cmp.Compare(a.ID, b.ID))
	})
}

func topTable(w io.Writer, rows []topRow) error {
	var cells [][]string
	for _, r := range rows {
		cells = append(cells, []string{
			r.ID, r.SnapshotTag, r.State, fmt.Sprintf("%.1f%%", r.CPUPercent), ownShared(r.MemoryOwnBytes, r.MemorySharedBytes),
			size(r.DiskOwnBytes), size(int64(r.IOReadBytesPerSecond)) + "/s", size(int64(r.IOWrittenBytesPerSecond)) + "/s",
			cpuTime(r.CPUSeconds), time.Duration(r.AgeSeconds * float64(time.Second)).Truncate(time.Second).String(), joinLabels(r.Labels),
		})
	}
	return table(w, "ID | SNAPSHOT | STATE | CPU | MEMORY OWN+SHARED | DISK | READ | WRITTEN | CPU TIME | AGE | LABELS", cells)
}

// cpuTime is minutes and seconds, as others' top has it.
func cpuTime(seconds float64) string {
	return fmt.Sprintf("%d:%05.2f", int(seconds)/60, seconds-float64(int(seconds)/60*60))
}

func (a *App) doTop(ctx context.Context, c *client.Client, f topFlags) error {
	out, ok := a.Out.(*os.File)
	if a.json || !ok || !term.IsTerminal(int(out.Fd())) || a.In == nil || !term.IsTerminal(int(a.In.Fd())) {
		return a.topOnce(ctx, c, f)
	}
	t := &topScreen{terminal: &terminal{in: a.In, out: a.Out}, c: c, flags: f}
	return t.run(ctx)
}

// topOnce looks twice and prints one picture.
func (a *App) topOnce(ctx context.Context, c *client.Client, f topFlags) error {
	before, err := c.Usages(ctx, f.labels)
	if err != nil {
		return err
	}
	timer := time.NewTimer(topWindow)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	now, err := c.Usages(ctx, f.labels)
	if err != nil {
		return err
	}
	rows := topRows(before, now)
	sortRows(rows, f.sort, false)
	return a.show(rows, func(w io.Writer) error { return topTable(w, rows) })
}

// topScreen is a picture that is drawn again and again, until a key ends it.
type topScreen struct {
	*terminal

	c       *client.Client
	flags   topFlags
	reverse bool
	before  []api.Usage
	rows    []topRow
	err     error // of the last look; the daemon may come back
}

// fullScreen is another screen than the shell's, without a cursor.
const fullScreen = "\x1b[?1049h\x1b[?25l"

func (t *topScreen) run(ctx context.Context) error {
	if err := t.raw(); err != nil {
		return err
	}
	if _, err := io.WriteString(t.out, fullScreen); err != nil {
		t.restore()
		return err
	}
	var once sync.Once
	leave := func() {
		once.Do(func() {
			_, _ = io.WriteString(t.out, "\x1b[?25h\x1b[?1049l")
			t.restore()
		})
	}
	defer leave()
	keys := make(chan byte)
	// It ends with the program: nothing wakes who waits for a key.
	go func() {
		var b [1]byte
		for {
			if n, err := t.in.Read(b[:]); n == 0 || err != nil {
				close(keys)
				return
			}
			keys <- b[0]
		}
	}()
	sized := make(chan os.Signal, 1)
	signal.Notify(sized, syscall.SIGWINCH)
	defer signal.Stop(sized)
	tick := time.NewTicker(t.flags.interval)
	defer tick.Stop()
	t.look(ctx)
	for {
		if err := t.draw(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-sized:
		case <-tick.C:
			t.look(ctx)
		case key, ok := <-keys:
			if !ok || key == 'q' || key == 'Q' || key == 3 || key == 4 { // or ctrl-c, ctrl-d
				return nil
			}
			t.press(ctx, key)
		}
	}
}

// press does what a key asks for.
func (t *topScreen) press(ctx context.Context, key byte) {
	by, ok := topKeys()[key]
	switch {
	case key == ' ':
		t.look(ctx)
	case key == 'r' || ok && by == t.flags.sort:
		t.reverse = !t.reverse
	case ok:
		t.flags.sort, t.reverse = by, false
	}
}

// lookLimit is how long a daemon may take to answer before the picture says so.
const lookLimit = 5 * time.Second

func (t *topScreen) look(ctx context.Context) {
	ctx, cancel := context.WithTimeoutCause(ctx, lookLimit, fmt.Errorf("the daemon did not answer within %s", lookLimit))
	defer cancel()
	now, err := t.c.Usages(ctx, t.flags.labels)
	if t.err = err; err != nil {
		return
	}
	t.rows, t.before = topRows(t.before, now), now
}

func (t *topScreen) draw() error {
	width, height, err := term.GetSize(int(t.in.Fd()))
	if err != nil || width <= 0 || height <= 0 {
		width, height = 80, 24
	}
	sortRows(t.rows, t.flags.sort, t.reverse)
	_, err = io.WriteString(t.out, t.picture(width, height))
	return err
}

// picture is the screen's content.
func (t *topScreen) picture(width, height int) string {
	var own, disk int64
	var cpu float64
	states := map[string]int{}
	for _, r := range t.rows {
		own, disk, cpu = own+r.MemoryOwnBytes, disk+r.DiskOwnBytes, cpu+r.CPUPercent
		states[r.State]++
	}
	counts := []string{fmt.Sprintf("%d sandboxes", len(t.rows))}
	for _, s := range []string{"running", "paused", "suspended", "failed"} {
		if states[s] > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", states[s], s))
		}
	}
	head := fmt.Sprintf("%s   CPU %.0f%%   own memory %s   own disk %s", strings.Join(counts, ", "), cpu, size(own), size(disk))
	order := "by " + t.flags.sort
	if t.reverse {
		order += ", the other way round"
	}
	lines := []string{head, order + "   (q quits, c m d i t a s n sort, r reverses)"}
	if t.err != nil {
		lines[1] = oneLine(t.err.Error())
	}
	var b strings.Builder
	_ = topTable(&b, t.rows)
	lines = append(lines, strings.Split(strings.TrimRight(b.String(), "\n"), "\n")...)
	var out strings.Builder
	out.WriteString("\x1b[H")
	for i, line := range lines[:min(len(lines), height)] {
		if r := []rune(line); len(r) > width {
			line = string(r[:width])
		}
		if i == 2 {
			line = "\x1b[7m" + line + "\x1b[0m"
		}
		if i > 0 {
			out.WriteString("\r\n")
		}
		out.WriteString(line + "\x1b[K")
	}
	out.WriteString("\x1b[J")
	return out.String()
}
