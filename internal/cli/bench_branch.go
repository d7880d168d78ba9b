package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/cli/plot"
)

// branchReport is what `bench branch --json` prints.
type branchReport struct {
	Host      *api.HostInfo   `json:"host"`       // before
	LoadAfter []float64       `json:"load_after"` // load averages at the end
	Tag       string          `json:"tag"`
	MemoryMiB int             `json:"memory_mib"` // of the machine
	UsedMiB   int             `json:"used_mib"`   // written by a process of the source before it was branched
	HeldMiB   int             `json:"held_mib"`   // in use by the parent already, shared by its children
	WriterMiB float64         `json:"writer_mib_s"`
	Runs      int             `json:"runs"`
	Series    []*branchSeries `json:"series"`
}

// branchSeries are branches of one child in one mode under one load. Times are in ms.
type branchSeries struct {
	Mode  string `json:"mode"`
	Load  string `json:"load"`            // idle or writer
	Error string `json:"error,omitempty"` // why there is nothing, or no more

	// Branches that were refused because the guest's processes did not stop in time; each was asked for again.
	Refused int `json:"refused"`

	Call        spread  `json:"call_ms"`         // the API call that returns when the source runs again
	Running     spread  `json:"running_ms"`      // as the daemon saw it: request to the source's running again, preparation included
	Ready       spread  `json:"ready_ms"`        // request to ready, compared and durable
	Pause       spread  `json:"pause_ms"`        // the machine stood still, as the daemon saw it
	Frozen      spread  `json:"frozen_ms"`       // its processes did, likewise
	Client      spread  `json:"client_gap_ms"`   // longest time without an answer to a client that pings without pause
	Ticker      spread  `json:"ticker_gap_ms"`   // longest gap of a process in the guest that wakes every ms
	ClientQuiet spread  `json:"client_quiet_ms"` // the same, in windows without a branch
	TickerQuiet spread  `json:"ticker_quiet_ms"` //
	AfterCopy   spread  `json:"after_copy_ms"`   // end of the copy of memory to the first answer of the first child of the branch
	ChildAnswer spread  `json:"child_answer_ms"` // request to fork, sent when the source runs again, to that answer
	Sixth       float64 `json:"sixth_to_first"`  // client's gap of the sixth branch in a row to that of the first

	Samples  []branchSample `json:"samples"` // in order, the first is the first branch of the child
	Quiet    []quietSample  `json:"quiet"`
	Children []childSample  `json:"children"`
}

type branchSample struct {
	CallMS      float64 `json:"call_ms"`
	RunningMS   float64 `json:"running_ms"`
	ReadyMS     float64 `json:"ready_ms"`
	SetupMS     float64 `json:"setup_ms"`
	PauseMS     float64 `json:"pause_ms"`
	FrozenMS    float64 `json:"frozen_ms"`
	CopyMS      float64 `json:"copy_ms"`
	WriteMS     float64 `json:"write_ms"`
	ClientGapMS float64 `json:"client_gap_ms"`
	TickerGapMS float64 `json:"ticker_gap_ms"`
	WrittenMiB  float64 `json:"written_mib"` // by the writer, from the request until ready
	MemoryMiB   float64 `json:"memory_own_mib"`
	DiskMiB     float64 `json:"disk_own_mib"`
	StoredMiB   float64 `json:"stored_mib"`
}

type quietSample struct {
	ClientGapMS float64 `json:"client_gap_ms"`
	TickerGapMS float64 `json:"ticker_gap_ms"`
	Ticks       float64 `json:"ticks"`
}

type childSample struct {
	CopyMS    float64 `json:"copy_ms"`
	AnswerMS  float64 `json:"answer_ms"`
	AfterCopy float64 `json:"after_copy_ms"`
}

const (
	loadIdle   = "idle"
	loadWriter = "writer"
	modeAll    = "all"
)

// branchBench is one run of `bench branch`.
type branchBench struct {
	a      *App
	c      *client.Client
	mode   string
	runs   int
	forks  int
	memory int
	used   int
	held   int
	writer float64
	plot   string
}

func (a *App) benchBranch() *cobra.Command {
	b := branchBench{a: a}
	cmd := &cobra.Command{
		Use: "branch", Short: "Measure branches as the guest and its client feel them, beside the host's facts", Args: cobra.NoArgs,
		Long: "Forks a child of a parent it builds once, fills memory in it, and branches it again and again while a client pings it\n" +
			"without pause and a process in it wakes every millisecond: idle, then with a process that rewrites that memory. For\n" +
			"some more branches the first answer of a child is timed. What it makes is removed, but for the parent.",
		Example: "  forkd bench branch --mode live --json > live.json\n  forkd bench branch --used 16 --held 1024 --plot branch.svg",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := b.check(); err != nil {
				return err
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				b.c = c
				return b.run(cmd.Context())
			})
		},
	}
	cmd.Flags().StringVar(&b.mode, "mode", modeAll, "live, diff, full or all")
	cmd.Flags().IntVar(&b.runs, "runs", 50, "branches of each series")
	cmd.Flags().IntVar(&b.forks, "forks", 10, "branches more of each series, with a child whose first answer is timed")
	cmd.Flags().IntVar(&b.memory, "memory", 1536, "memory of the machine, in MiB")
	cmd.Flags().IntVar(&b.used, "used", 1024, "memory that a process of the child fills, in MiB: the child's own pages")
	cmd.Flags().IntVar(&b.held, "held", 0, "memory that the parent has in use, in MiB: pages its children share")
	cmd.Flags().Float64Var(&b.writer, "writer", 100, "what the writer rewrites, in MiB/s; 0: idle only")
	cmd.Flags().StringVar(&b.plot, "plot", "", "draw all samples into this SVG file")
	completeWords(cmd, "mode", modeLive, modeDiff, modeFull, modeAll)
	return cmd
}

// spareMiB is what the guest needs for itself.
const spareMiB = 192

func (b *branchBench) check() error {
	switch b.mode {
	case modeLive, modeDiff, modeFull, modeAll:
	default:
		return usage("--mode %q: give live, diff, full or all", b.mode)
	}
	switch {
	case b.runs < 1 || b.forks < 0:
		return usage("--runs is at least 1, --forks not negative")
	case b.used < 0 || b.held < 0 || b.writer < 0:
		return usage("--used, --held and --writer are not negative")
	case b.memory < b.used+b.held+spareMiB:
		return usage("--memory %d is too little for %d MiB in use: the guest needs %d MiB for itself", b.memory, b.used+b.held, spareMiB)
	}
	return nil
}

func (b *branchBench) run(ctx context.Context) (err error) {
	r := &branchReport{MemoryMiB: b.memory, UsedMiB: b.used, HeldMiB: b.held, WriterMiB: b.writer, Runs: b.runs}
	if err := endBenchmarked(ctx, b.c); err != nil {
		return err
	}
	if r.Tag, err = b.parent(ctx); err != nil {
		return err
	}
	if r.Host, err = b.c.Host(ctx); err != nil {
		return err
	}
	err = b.measure(ctx, r)
	if after, hostErr := b.c.Host(ctx); hostErr == nil {
		r.LoadAfter = after.LoadAverage
	}
	// What was measured before something failed is shown as well.
	showErr := b.a.show(r, func(w io.Writer) error { return printBranches(w, r) })
	return errors.Join(err, showErr, b.a.drawTo(b.plot, r.figure()))
}

func (b *branchBench) measure(ctx context.Context, r *branchReport) error {
	modes := []string{b.mode}
	if b.mode == modeAll {
		modes = []string{modeLive, modeDiff, modeFull}
	}
	for _, mode := range modes {
		for _, rate := range slices.Compact([]float64{0, b.writer}) {
			s := newSeries(mode, rate)
			r.Series = append(r.Series, s)
			err := b.series(ctx, r.Tag, s, rate)
			s.sum()
			if err == nil {
				continue
			}
			s.Error = err.Error()
			// A mode this host has not is a result where all were asked for; it is never replaced by another one.
			if b.mode != modeAll || !isCode(err, api.CodeIncompatible) && !isCode(err, api.CodeUnsupported) {
				return fmt.Errorf("%s: %w", s.name(), err)
			}
			b.a.progress("%s: %s", s.name(), printable(s.Error))
		}
	}
	return nil
}

func newSeries(mode string, rate float64) *branchSeries {
	s := &branchSeries{Mode: mode, Load: loadIdle, Samples: []branchSample{}, Quiet: []quietSample{}, Children: []childSample{}}
	if rate > 0 {
		s.Load = loadWriter
	}
	return s
}

func (s *branchSeries) name() string { return s.Mode + ", " + s.Load }

// parentRecipe is a Python with so much of its memory in use. Name and packages are those of python-numpy, so that both
// stand on one image.
const parentRecipe = `name: python-numpy
base: debian:bookworm
packages:
  - python3
  - python3-numpy
machine:
  cpus: 1
  memory: %dMiB
  disk: 8GiB
warmup:
  context: python
  timeout: 15m
  code: |
    import numpy
    held = [numpy.random.default_rng(i).integers(0, 1 << 63, 1 << 17, dtype=numpy.uint64) for i in range(%d)]
`

// parent builds the snapshot that sources are forked from, unless it is there.
func (b *branchBench) parent(ctx context.Context) (string, error) {
	tag := fmt.Sprintf("forkd-bench-%d-%d", b.memory, b.held)
	_, err := b.c.SnapshotInfo(ctx, tag)
	if err == nil || !isCode(err, api.CodeNotFound) {
		return tag, err
	}
	b.a.progress("building the parent %s, once", tag)
	recipe := fmt.Appendf(nil, parentRecipe, b.memory, b.held)
	_, err = b.a.buildText(ctx, b.c, nil, "recipe.yaml", recipe, client.BuildOptions{Tag: tag})
	return tag, err
}

// series measures one mode under one load, on a child of its own.
func (b *branchBench) series(ctx context.Context, tag string, s *branchSeries, rate float64) (err error) {
	one := 1
	children, err := b.c.Fork(ctx, api.ForkRequest{SnapshotTag: tag, N: &one, Labels: benchLabels()})
	if err != nil {
		return err
	}
	id := children[0].ID
	defer func() { err = errors.Join(err, b.remove(context.WithoutCancel(ctx), id)) }()
	b.a.progress("%s: filling %d MiB in %s", s.name(), b.used, id)
	l, err := startLoad(ctx, b.c, id, b.used, rate)
	if err != nil {
		return err
	}
	defer l.end()
	if err := b.quiet(ctx, s, l); err != nil {
		return err
	}
	b.a.progress("%s: branching %d times", s.name(), b.runs)
	for range b.runs {
		if err := b.again(s, func() error { return b.branch(ctx, s, l, id) }); err != nil {
			return err
		}
	}
	for range b.forks {
		if err := b.again(s, func() error { return b.child(ctx, s, id) }); err != nil {
			return err
		}
	}
	return nil
}

// maxRefused is how often a series may be told that the guest's processes did not stop in time.
const maxRefused = 20

// again does one measurement. On a busy host the guest's processes may not stop in time; the source runs on then, as it
// is meant to, and the branch is asked for once more. The report says how often.
func (b *branchBench) again(s *branchSeries, do func() error) error {
	for {
		err := do()
		if !isCode(err, api.CodeTimeout) || s.Refused == maxRefused {
			return err
		}
		s.Refused++
		b.a.progress("%s: refused, once more: %s", s.name(), printable(err.Error()))
	}
}

const (
	quietWarmup  = 4 // windows that do not count: emulated code runs slowly for the first time
	quietWindows = 20
	quietWindow  = 500 * time.Millisecond
)

// quiet measures what the load feels without any branch: the least that can be measured with one.
func (b *branchBench) quiet(ctx context.Context, s *branchSeries, l *load) error {
	tick := time.NewTicker(quietWindow)
	defer tick.Stop()
	for i := range quietWarmup + quietWindows {
		w, err := l.open()
		if err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := l.shut(ctx, w, time.Now()); err != nil {
			return err
		}
		if i < quietWarmup {
			continue
		}
		s.Quiet = append(s.Quiet, quietSample{w.clientGap, w.tickerGap, w.ticks})
	}
	return nil
}

// writeTimeout is how long a branch may take to become ready.
const writeTimeout = 10 * time.Minute

func (b *branchBench) branch(ctx context.Context, s *branchSeries, l *load, id string) error {
	w, err := l.open()
	if err != nil {
		return err
	}
	no := false
	start := time.Now()
	snap, err := b.c.Branch(ctx, id, api.BranchRequest{Mode: s.Mode, Wait: &no})
	if err != nil {
		return err
	}
	called := since(start)
	info, err := b.ready(ctx, snap.Tag, s.Mode)
	if err != nil {
		return err
	}
	end := time.Now()
	if err := l.shut(ctx, w, end); err != nil {
		return err
	}
	s.Samples = append(s.Samples, branchSample{
		CallMS: called, RunningMS: info.SetupMS + info.FrozenMS, ReadyMS: float64(end.Sub(start).Microseconds()) / 1000,
		SetupMS: info.SetupMS, PauseMS: info.PauseMS, FrozenMS: info.FrozenMS, CopyMS: info.CopyMS, WriteMS: info.WriteMS,
		ClientGapMS: w.clientGap, TickerGapMS: w.tickerGap, WrittenMiB: w.written, MemoryMiB: mebi(info.MemoryOwnBytes),
		DiskMiB: mebi(info.DiskOwnBytes), StoredMiB: mebi(info.StoredBytes),
	})
	return nil
}

func mebi(bytes int64) float64 { return float64(bytes) / (1 << 20) }

// ready waits for a branch and makes sure that it is what was asked for.
func (b *branchBench) ready(ctx context.Context, tag, mode string) (*api.SnapshotInfo, error) {
	info, err := b.c.WaitSnapshot(ctx, tag, writeTimeout)
	switch {
	case err != nil:
		return nil, err
	case info.Status != statusReady:
		return nil, fmt.Errorf("branch %s is %s after %s: %s", tag, info.Status, writeTimeout, info.Error)
	case info.Mode != mode:
		return nil, fmt.Errorf("branch %s was taken in mode %s, asked for was %s", tag, info.Mode, mode)
	}
	return info, nil
}

// child times the first answer of the first child of a branch that is still being copied.
func (b *branchBench) child(ctx context.Context, s *branchSeries, id string) error {
	no, one := false, 1
	snap, err := b.c.Branch(ctx, id, api.BranchRequest{Mode: s.Mode, Wait: &no})
	if err != nil {
		return err
	}
	start := time.Now()
	children, err := b.c.Fork(ctx, api.ForkRequest{SnapshotTag: snap.Tag, N: &one, Labels: benchLabels()})
	if err != nil {
		return err
	}
	res, err := b.c.Eval(ctx, children[0].ID, api.EvalRequest{Code: "6 * 7"})
	if err != nil {
		return err
	}
	if res.Result == nil || *res.Result != "42" {
		return fmt.Errorf("a child of %s did not answer 6 * 7 with 42", snap.Tag)
	}
	answer := since(start)
	info, err := b.ready(ctx, snap.Tag, s.Mode)
	if err != nil {
		return err
	}
	s.Children = append(s.Children, childSample{CopyMS: info.CopyMS, AnswerMS: answer, AfterCopy: answer - info.CopyMS})
	return b.c.Kill(ctx, children[0].ID)
}

// remove ends the source of a series with its grandchildren, and removes its branches.
func (b *branchBench) remove(ctx context.Context, id string) error {
	if err := endBenchmarked(ctx, b.c); err != nil {
		return err
	}
	list, err := b.c.Snapshots(ctx)
	if err != nil {
		return err
	}
	ours := map[string]bool{}
	for _, s := range list {
		ours[s.Tag] = s.BranchedFrom == id
	}
	for _, s := range list {
		if !ours[s.Tag] || ours[s.Parent] { // goes with the one it stands on
			continue
		}
		if s.Status == statusWriting {
			if _, waitErr := b.c.WaitSnapshot(ctx, s.Tag, writeTimeout); waitErr != nil {
				err = errors.Join(err, waitErr)
			}
		}
		if _, removeErr := b.c.RemoveSnapshotCascade(ctx, s.Tag); removeErr != nil && !isCode(removeErr, api.CodeNotFound) {
			err = errors.Join(err, removeErr)
		}
	}
	return err
}

// column is one of the samples' values.
func column[T any](samples []T, value func(T) float64) []float64 {
	out := make([]float64, len(samples))
	for i, s := range samples {
		out[i] = value(s)
	}
	return out
}

func (s *branchSeries) sum() {
	of := func(value func(branchSample) float64) spread { return spreadOf(column(s.Samples, value)) }
	s.Call = of(func(b branchSample) float64 { return b.CallMS })
	s.Running = of(func(b branchSample) float64 { return b.RunningMS })
	s.Ready = of(func(b branchSample) float64 { return b.ReadyMS })
	s.Pause = of(func(b branchSample) float64 { return b.PauseMS })
	s.Frozen = of(func(b branchSample) float64 { return b.FrozenMS })
	s.Client = of(func(b branchSample) float64 { return b.ClientGapMS })
	s.Ticker = of(func(b branchSample) float64 { return b.TickerGapMS })
	s.ClientQuiet = spreadOf(column(s.Quiet, func(q quietSample) float64 { return q.ClientGapMS }))
	s.TickerQuiet = spreadOf(column(s.Quiet, func(q quietSample) float64 { return q.TickerGapMS }))
	s.ChildAnswer = spreadOf(column(s.Children, func(c childSample) float64 { return c.AnswerMS }))
	s.AfterCopy = spreadOf(column(s.Children, func(c childSample) float64 { return c.AfterCopy }))
	const sixth = 5
	if len(s.Samples) > sixth && s.Samples[0].ClientGapMS > 0 {
		s.Sixth = s.Samples[sixth].ClientGapMS / s.Samples[0].ClientGapMS
	}
}

func printBranches(w io.Writer, r *branchReport) error {
	fmt.Fprintf(w, "%s\n", hostLine(r.Host))
	fmt.Fprintf(w, "machine of %d MiB; in use %d MiB of the child's own, %d MiB of its parent's; the writer rewrites %g MiB/s\n",
		r.MemoryMiB, r.UsedMiB, r.HeldMiB, r.WriterMiB)
	for _, s := range r.Series {
		fmt.Fprintf(w, "\n%s\n", s.name())
		if s.Error != "" {
			fmt.Fprintf(w, "%s\n", printable(s.Error))
		}
		if len(s.Samples) == 0 {
			continue
		}
		var rows [][]string
		for _, line := range []struct {
			what string
			s    spread
		}{
			{"client: longest time without an answer", s.Client},
			{"… without a branch", s.ClientQuiet},
			{"guest's process: longest gap", s.Ticker},
			{"… without a branch", s.TickerQuiet},
			{"pause, by the daemon", s.Pause},
			{"processes frozen, by the daemon", s.Frozen},
			{"API call (--no-wait)", s.Call},
			{"request to running again, by the daemon", s.Running},
			{"request to ready", s.Ready},
			{"end of the copy to a child's first answer", s.AfterCopy},
			{"fork to a child's first answer", s.ChildAnswer},
		} {
			f := func(v float64) string { return fmt.Sprintf("%.1f", v) }
			rows = append(rows, []string{
				line.what, fmt.Sprint(line.s.Runs), f(line.s.First), f(line.s.P50), f(line.s.P90), f(line.s.P99), f(line.s.Max),
			})
		}
		if err := table(w, "MS | RUNS | FIRST | P50 | P90 | P99 | MAX", rows); err != nil {
			return err
		}
		fmt.Fprintf(w, "a layer: %s of memory (p50), %s stored; the client's gap of the sixth branch is %.2f times the first's; %d refused\n",
			p50MiB(s.Samples, func(b branchSample) float64 { return b.MemoryMiB }),
			p50MiB(s.Samples, func(b branchSample) float64 { return b.StoredMiB }), s.Sixth, s.Refused)
	}
	return nil
}

func p50MiB(samples []branchSample, value func(branchSample) float64) string {
	return fmt.Sprintf("%.1f MiB", spreadOf(column(samples, value)).P50)
}

// quietRows are what is felt without any branch, of all modes: it does not depend on them.
func (r *branchReport) quietRows(value func(quietSample) float64) []plot.Row {
	var rows []plot.Row
	for _, name := range []string{loadIdle, loadWriter} {
		row := plot.Row{Label: "no branch, " + name}
		for _, s := range r.Series {
			if s.Load == name {
				row.Values = append(row.Values, column(s.Quiet, value)...)
			}
		}
		if len(row.Values) > 0 {
			rows = append(rows, row)
		}
	}
	return rows
}

func (r *branchReport) figure() *plot.Figure {
	f := &plot.Figure{Title: "forkd bench branch", Notes: []string{
		hostLine(r.Host),
		fmt.Sprintf("machine of %d MiB; in use %d MiB of the child's own, %d MiB of its parent's; writer %g MiB/s", r.MemoryMiB,
			r.UsedMiB, r.HeldMiB, r.WriterMiB),
	}}
	for _, p := range []struct {
		title string
		value func(branchSample) float64
		quiet func(quietSample) float64 // nil: there is no such thing without a branch
	}{
		{
			"client: longest time without an answer, over a branch", func(b branchSample) float64 { return b.ClientGapMS },
			func(q quietSample) float64 { return q.ClientGapMS },
		},
		{
			"process in the guest: longest gap, over a branch", func(b branchSample) float64 { return b.TickerGapMS },
			func(q quietSample) float64 { return q.TickerGapMS },
		},
		{"pause, by the daemon", func(b branchSample) float64 { return b.PauseMS }, nil},
		{"API call (--no-wait)", func(b branchSample) float64 { return b.CallMS }, nil},
		{"request to ready", func(b branchSample) float64 { return b.ReadyMS }, nil},
	} {
		panel := plot.Panel{Title: p.title, Unit: "ms"}
		if p.quiet != nil {
			panel.Rows = r.quietRows(p.quiet)
		}
		for _, s := range r.Series {
			if len(s.Samples) > 0 {
				panel.Rows = append(panel.Rows, plot.Row{Label: s.name(), Values: column(s.Samples, p.value)})
			}
		}
		f.Panels = append(f.Panels, panel)
	}
	answers := plot.Panel{Title: "end of the copy to a child's first answer", Unit: "ms"}
	for _, s := range r.Series {
		if len(s.Children) > 0 {
			answers.Rows = append(answers.Rows, plot.Row{
				Label: s.name(), Values: column(s.Children, func(c childSample) float64 { return c.AfterCopy }),
			})
		}
	}
	if len(answers.Rows) > 0 {
		f.Panels = append(f.Panels, answers)
	}
	return f
}
