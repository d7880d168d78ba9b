package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/cli/plot"
)

// benchReport is what `bench fork --json` prints. Times are milliseconds as this client measured them.
type benchReport struct {
	Host        *api.HostInfo `json:"host"`
	Tag         string        `json:"tag"`
	Expression  string        `json:"expression"`
	Single      spread        `json:"single_ms"` // one child: request to its first evaluated expression
	N           int           `json:"n"`
	ForkMS      float64       `json:"fork_ms"`         // n children: request to all awake
	AllMS       float64       `json:"all_answered_ms"` // n children: request to the last one's first evaluated expression
	FirstEval   spread        `json:"first_eval_ms"`   // round trip of each child's first evaluation, all at once
	Eval        spread        `json:"eval_ms"`         // round trip in one child, warm
	Exec        spread        `json:"exec_ms"`         // round trip of /bin/true in one child, warm
	Own         spread        `json:"own_mib"`         // own memory of the n children after one evaluation
	OwnTotal    float64       `json:"own_total_mib"`
	SharedOnce  float64       `json:"shared_once_mib"` // the snapshot's pages, which all children map
	ColdMS      float64       `json:"cold_ms"`         // boot and warm-up in this run; 0 without --cold
	ColdPerFork float64       `json:"cold_to_fork"`    // ratio to the median of single

	Samples forkSamples `json:"samples"`
}

// forkSamples are all that was measured, in order.
type forkSamples struct {
	Single    []float64 `json:"single_ms"`
	FirstEval []float64 `json:"first_eval_ms"`
	Eval      []float64 `json:"eval_ms"`
	Exec      []float64 `json:"exec_ms"`
	Own       []float64 `json:"own_mib"`
}

func (a *App) benchFork() *cobra.Command {
	b := bencher{a: a}
	fork := &cobra.Command{
		Use: "fork", Short: "Measure forks, evaluations and memory, beside the host's facts", Args: cobra.NoArgs,
		Long: "Forks one child many times, then n at once, and reports times to their first answers, round trips and memory.\n" +
			"Nothing is pre-started. With --cold the recipe is booted and warmed anew in the same run, for the ratio.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if b.n < 1 || b.runs < 1 {
				return usage("-n and --runs are at least 1")
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				b.c = c
				return b.run(cmd.Context())
			})
		},
	}
	fork.Flags().StringVar(&b.tag, "tag", quickstartTag, "the snapshot")
	fork.Flags().IntVarP(&b.n, "n", "n", 100, "children at once")
	fork.Flags().IntVar(&b.runs, "runs", 20, "single forks, evaluations and commands")
	fork.Flags().StringVar(&b.code, "code", "int(numpy.arange(10).sum())", "the expression")
	fork.Flags().StringVar(&b.cold, "cold", "", "recipe to boot and warm anew, e.g. python-numpy")
	fork.Flags().StringVar(&b.plot, "plot", "", "draw all samples into this SVG file")
	a.completeTagFlag(fork, "tag")
	return fork
}

type bencher struct {
	a       *App
	c       *client.Client
	tag     string
	n, runs int
	code    string
	cold    string
	plot    string
}

func (b *bencher) run(ctx context.Context) (err error) {
	r := &benchReport{Tag: b.tag, N: b.n, Expression: b.code}
	if r.Host, err = b.c.Host(ctx); err != nil {
		return err
	}
	info, err := b.c.SnapshotInfo(ctx, b.tag)
	if err != nil {
		return b.a.elsewhere(err, b.c, b.tag)
	}
	r.SharedOnce = float64(info.MemoryOwnBytes) / (1 << 20)
	defer func() { err = errors.Join(err, b.cleanUp(context.WithoutCancel(ctx))) }()
	for _, part := range []func(context.Context, *benchReport) error{b.single, b.many, b.coldStart} {
		if err := part(ctx, r); err != nil {
			return err
		}
	}
	if err := b.a.show(r, func(w io.Writer) error { return printBench(w, r) }); err != nil {
		return err
	}
	return b.a.drawTo(b.plot, r.figure())
}

func (b *bencher) cleanUp(ctx context.Context) error { return endBenchmarked(ctx, b.c) }

func (b *bencher) fork(ctx context.Context, n int) ([]api.Sandbox, error) {
	return b.c.Fork(ctx, api.ForkRequest{SnapshotTag: b.tag, N: &n, Labels: benchLabels()})
}

// eval and exec are the API's calls that SDKs make, over a connection that is kept.
func (b *bencher) eval(ctx context.Context, id string) (float64, error) {
	start := time.Now()
	res, err := b.c.Eval(ctx, id, api.EvalRequest{Code: b.code})
	if err != nil {
		return 0, err
	}
	if res.Error != nil {
		return 0, fmt.Errorf("evaluate %q: %s", b.code, *res.Error)
	}
	return since(start), nil
}

func (b *bencher) exec(ctx context.Context, id string) (float64, error) {
	start := time.Now()
	res, err := b.c.Exec(ctx, id, api.ExecRequest{Args: []string{"/bin/true"}})
	if err != nil {
		return 0, err
	}
	if res.ExitCode != 0 {
		return 0, fmt.Errorf("/bin/true: exit code %d", res.ExitCode)
	}
	return since(start), nil
}

// single forks one child again and again, and measures warm round trips in the last one.
func (b *bencher) single(ctx context.Context, r *benchReport) error {
	b.a.progress("forking one child, %d times", b.runs)
	var times, evals, execs []float64
	for i := range b.runs + 1 {
		start := time.Now()
		children, err := b.fork(ctx, 1)
		if err != nil {
			return err
		}
		id := children[0].ID
		if _, err := b.eval(ctx, id); err != nil {
			return err
		}
		if i > 0 { // the first makes the image hot
			times = append(times, since(start))
		}
		if i == b.runs {
			for range b.runs {
				e, err := b.eval(ctx, id)
				if err != nil {
					return err
				}
				x, err := b.exec(ctx, id)
				if err != nil {
					return err
				}
				evals, execs = append(evals, e), append(execs, x)
			}
		}
		if err := b.c.Kill(ctx, id); err != nil {
			return err
		}
	}
	r.Single, r.Eval, r.Exec = spreadOf(times), spreadOf(evals), spreadOf(execs)
	r.Samples.Single, r.Samples.Eval, r.Samples.Exec = times, evals, execs
	return nil
}

// many forks n at once and evaluates in all of them at once.
func (b *bencher) many(ctx context.Context, r *benchReport) error {
	b.a.progress("forking %d children at once", b.n)
	start := time.Now()
	children, err := b.fork(ctx, b.n)
	if err != nil {
		return err
	}
	r.ForkMS = since(start)
	times, errs := make([]float64, len(children)), make([]error, len(children))
	var wg sync.WaitGroup
	for i, s := range children {
		wg.Go(func() { times[i], errs[i] = b.eval(ctx, s.ID) })
	}
	wg.Wait()
	r.AllMS = since(start)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	r.FirstEval, r.Samples.FirstEval = spreadOf(times), times
	list, err := b.c.Sandboxes(ctx, []string{benchLabel + "=yes"})
	if err != nil {
		return err
	}
	var own []float64
	for _, s := range list {
		mib := float64(s.MemoryOwnBytes) / (1 << 20)
		own = append(own, mib)
		r.OwnTotal += mib
	}
	r.Own, r.Samples.Own = spreadOf(own), own
	return nil
}

// coldStart boots and warms the recipe anew under a tag of its own: what a child would cost without forks.
func (b *bencher) coldStart(ctx context.Context, r *benchReport) error {
	if b.cold == "" {
		return nil
	}
	if err := b.cleanUp(ctx); err != nil {
		return err
	}
	dir, file, err := openRecipe(b.cold)
	if err != nil {
		return err
	}
	const tag = "forkd-bench-cold"
	snap, err := b.a.doBuild(ctx, b.c, dir, file, client.BuildOptions{Tag: tag, Replace: true})
	if err != nil {
		return err
	}
	info, err := b.c.SnapshotInfo(ctx, snap.Tag)
	if err != nil {
		return err
	}
	r.ColdMS = info.BootMS + info.WarmMS
	r.ColdPerFork = r.ColdMS / r.Single.P50
	return b.c.RemoveSnapshot(ctx, tag)
}

func printBench(w io.Writer, r *benchReport) error {
	line := func(name, unit string, s spread) []string {
		f := func(v float64) string { return fmt.Sprintf("%.1f", v) }
		return []string{name + " (" + unit + ")", fmt.Sprint(s.Runs), f(s.Min), f(s.P50), f(s.P90), f(s.Max)}
	}
	fmt.Fprintf(w, "%s, snapshot %s\n\n", hostLine(r.Host), r.Tag)
	err := table(w, "WHAT | RUNS | MIN | P50 | P90 | MAX", [][]string{
		line("one child, request to first answer", "ms", r.Single),
		line("evaluation, warm", "ms", r.Eval),
		line("exec of /bin/true, warm", "ms", r.Exec),
		line(fmt.Sprintf("first evaluation in each of %d at once", r.N), "ms", r.FirstEval),
		line("own memory of a child", "MiB", r.Own),
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\n%d children: awake after %.0f ms, all answered after %.0f ms; own memory %.0f MiB together, shared once %.0f MiB\n",
		r.N, r.ForkMS, r.AllMS, r.OwnTotal, r.SharedOnce)
	if r.ColdMS > 0 {
		fmt.Fprintf(w, "cold boot and warm-up in this run: %.0f ms, %.0f times one fork\n", r.ColdMS, r.ColdPerFork)
	}
	return nil
}

func (r *benchReport) figure() *plot.Figure {
	return &plot.Figure{
		Title: "forkd bench fork", Notes: []string{hostLine(r.Host), fmt.Sprintf("snapshot %s, expression %s", r.Tag, r.Expression)},
		Panels: []plot.Panel{
			{Title: "time", Unit: "ms", Rows: []plot.Row{
				{Label: "one child, to first answer", Values: r.Samples.Single},
				{Label: "evaluation, warm", Values: r.Samples.Eval},
				{Label: "exec of /bin/true, warm", Values: r.Samples.Exec},
				{Label: fmt.Sprintf("first evaluation, %d at once", r.N), Values: r.Samples.FirstEval},
			}},
			{Title: "own memory of a child", Unit: "MiB", Rows: []plot.Row{{Label: "after one evaluation", Values: r.Samples.Own}}},
		},
	}
}
