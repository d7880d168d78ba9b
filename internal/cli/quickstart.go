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
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/recipes"
)

const (
	quickstartTag   = "python-numpy"
	quickstartLabel = "forkd.quickstart"
	quickstartN     = 10
)

// quickstartReport is what `quickstart --json` prints.
type quickstartReport struct {
	Host     *api.HostInfo     `json:"host"`
	Snapshot *api.SnapshotInfo `json:"snapshot"`
	Built    bool              `json:"built"`
	ForkMS   float64           `json:"fork_ms"`  // request to all children awake
	AllMS    float64           `json:"all_ms"`   // request to the last child's answer
	TotalMS  float64           `json:"total_ms"` // the whole command
	Children []quickstartChild `json:"children"`
	Kept     string            `json:"kept"`
}

type quickstartChild struct {
	ID         string           `json:"id"`
	Index      int              `json:"index"`
	ReadyMS    float64          `json:"ready_ms"`  // request to awake
	AnswerMS   float64          `json:"answer_ms"` // request to the first evaluated expression
	EvalMS     float64          `json:"eval_ms"`   // that evaluation's round trip
	OwnBytes   int64            `json:"own_bytes"` // its own memory, VM process included
	Expression string           `json:"expression"`
	Result     string           `json:"result"`
	Report     *api.CloneReport `json:"clone_report"`
}

// expressions are what the children evaluate, a different one each.
func expressions() []string {
	return []string{
		"int(numpy.arange(10).sum())",
		"float(numpy.linspace(0, 1, 5).mean())",
		"numpy.eye(3).tolist()",
		"int(numpy.prod(numpy.arange(1, 11)))",
		"numpy.sort([3, 1, 2]).tolist()",
		"float(numpy.sqrt(2))",
		"numpy.fft.fft([1, 0, 0, 0]).real.tolist()",
		"float(numpy.linalg.det([[2, 0], [0, 3]]))",
		"numpy.cumsum([1, 2, 3, 4]).tolist()",
		"int(numpy.random.randint(1_000_000))",
	}
}

func (a *App) quickstart() *cobra.Command {
	var templates bool
	cmd := &cobra.Command{
		Use: "quickstart", Short: "From nothing to ten warm forks: check, build, fork, evaluate",
		Long: "Checks the host, builds the default parent (Debian, Python, numpy) if it is not there, forks ten children of\n" +
			"it, evaluates a different expression in each, keeps one and ends the rest. May be run again and again.\n" +
			"With --e2b it then builds what E2B's clients start when they name no template, if it is not there: base and\n" +
			"code-interpreter-v1. Interrupted, it goes on from what is there when it is run again.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			begin := time.Now() // a daemon that has to be started is part of it
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				if err := a.doQuickstart(cmd.Context(), c, begin); err != nil || !templates {
					return err
				}
				return a.ensureTemplates(cmd.Context(), c)
			})
		},
	}
	cmd.Flags().BoolVar(&templates, "e2b", false, "then build the templates of E2B's clients: two images, minutes without KVM, once")
	return cmd
}

// e2bTemplates are what E2B's clients start when they are told nothing. Recipes of these names come with forkd.
func e2bTemplates() []string { return []string{"base", "code-interpreter-v1"} }

// ensureTemplates builds those of E2B's clients' templates that are not there, or not of this version's machines.
func (a *App) ensureTemplates(ctx context.Context, c *client.Client) error {
	for _, tag := range e2bTemplates() {
		err := tryFork(ctx, c, tag)
		e, ok := errors.AsType[*api.Error](err)
		switch {
		case err == nil:
			a.progress("template %s of E2B's clients is there", tag)
			continue
		case !ok || e.Code != api.CodeNotFound && e.Code != api.CodeIncompatible:
			return fmt.Errorf("template %s: %w", tag, err)
		}
		dir, found := recipes.Find(tag)
		if !found {
			return fmt.Errorf("recipe %s is missing from this program", tag)
		}
		a.progress("building template %s for E2B's clients, once: packages to download, minutes without KVM. Interrupt it if you need none:\n"+
			"%s build %s -t %s does the same later", tag, a.Name, tag, tag)
		begin := time.Now()
		opts := client.BuildOptions{Tag: tag, Replace: e.Code == api.CodeIncompatible}
		info, err := a.doBuild(ctx, c, dir, "recipe.yaml", opts)
		if err != nil {
			return err
		}
		a.progress("template %s is ready after %s, %s on disk", tag, time.Since(begin).Round(time.Second), size(info.StoredBytes+imageBytes(ctx, c, tag)))
	}
	a.progress("E2B's clients: eval \"$(%s env e2b)\"", a.Name)
	return nil
}

// imageBytes is what the image of a snapshot takes.
func imageBytes(ctx context.Context, c *client.Client, tag string) int64 {
	images, err := c.Images(ctx)
	if err != nil {
		return 0 // what was built is there all the same
	}
	for _, i := range images {
		if slices.Contains(i.Snapshots, tag) {
			return i.StoredBytes
		}
	}
	return 0
}

// tryFork makes a child and ends it.
func tryFork(ctx context.Context, c *client.Client, tag string) error {
	one := 1
	children, err := c.Fork(ctx, api.ForkRequest{SnapshotTag: tag, N: &one, Labels: map[string]string{quickstartLabel: "template"}})
	if err != nil {
		return err
	}
	for _, s := range children {
		err = errors.Join(err, c.Kill(ctx, s.ID))
	}
	return err
}

func (a *App) doQuickstart(ctx context.Context, c *client.Client, begin time.Time) (err error) {
	report := &quickstartReport{}
	if report.Host, err = a.checkHost(ctx, c); err != nil {
		return err
	}
	if report.Built, err = a.ensureParent(ctx, c); err != nil {
		return err
	}
	if err := endOld(ctx, c); err != nil {
		return err
	}
	err = a.forkTen(ctx, c, report)
	if e, ok := errors.AsType[*api.Error](err); ok && e.Code == api.CodeIncompatible && !report.Built {
		// Made on another host, or by a version whose machines were others: what a first run would do helps.
		a.progress("%s", printable(e.Message))
		if err := a.buildParent(ctx, c, true); err != nil {
			return err
		}
		report.Built = true
		err = a.forkTen(ctx, c, report)
	}
	if err != nil {
		return err
	}
	if report.Snapshot, err = c.SnapshotInfo(ctx, quickstartTag); err != nil {
		return err
	}
	report.TotalMS = since(begin)
	return a.show(report, func(w io.Writer) error { return printQuickstart(w, a.Name, report) })
}

func (a *App) checkHost(ctx context.Context, c *client.Client) (*api.HostInfo, error) {
	a.progress("checking the host")
	info, err := c.Host(ctx)
	if err != nil {
		return nil, err
	}
	for _, check := range info.Checks {
		if check.Status == "fail" {
			return nil, &hinted{fmt.Errorf("%s: %s", check.Name, check.Detail), check.Hint}
		}
		if check.Status == "warn" {
			a.progress("  %s: %s", check.Name, printable(check.Detail))
		}
	}
	return info, nil
}

func (a *App) ensureParent(ctx context.Context, c *client.Client) (built bool, err error) {
	_, err = c.SnapshotInfo(ctx, quickstartTag)
	if err == nil {
		a.progress("snapshot %s is there", quickstartTag)
		return false, nil
	}
	if e, ok := errors.AsType[*api.Error](err); !ok || e.Code != api.CodeNotFound {
		return false, err
	}
	return true, a.buildParent(ctx, c, false)
}

func (a *App) buildParent(ctx context.Context, c *client.Client, replace bool) error {
	a.progress("building %s; this takes a few minutes, once", quickstartTag)
	dir, ok := recipes.Find(quickstartTag)
	if !ok {
		return fmt.Errorf("recipe %s is missing from this program", quickstartTag)
	}
	_, err := a.doBuild(ctx, c, dir, "recipe.yaml", client.BuildOptions{Tag: quickstartTag, Replace: replace})
	return err
}

// endOld ends the child an earlier quickstart kept.
func endOld(ctx context.Context, c *client.Client) error {
	old, err := c.Sandboxes(ctx, []string{quickstartLabel + "=yes"})
	if err != nil {
		return err
	}
	for _, s := range old {
		if err := c.Kill(ctx, s.ID); err != nil {
			return err
		}
	}
	return nil
}

func since(t time.Time) float64 { return float64(time.Since(t).Microseconds()) / 1000 }

func (a *App) forkTen(ctx context.Context, c *client.Client, report *quickstartReport) error {
	a.progress("forking %d children", quickstartN)
	n := quickstartN
	start := time.Now()
	children, err := c.Fork(ctx, api.ForkRequest{
		SnapshotTag: quickstartTag, N: &n, Labels: map[string]string{quickstartLabel: "yes"},
	})
	if err != nil {
		return err
	}
	report.ForkMS = since(start)
	for i, s := range children {
		q := quickstartChild{ID: s.ID, Index: s.Index, ReadyMS: s.ReadyMS, Expression: expressions()[i], Report: s.CloneReport}
		evalStart := time.Now()
		res, err := c.Guest(s.ID).Eval(ctx, wire.EvalRequest{Code: q.Expression}, call.Output{})
		if err != nil {
			return fmt.Errorf("evaluate in %s: %w", s.ID, err)
		}
		q.EvalMS, q.AnswerMS = since(evalStart), since(start)
		if res.Error != nil {
			return fmt.Errorf("evaluate in %s: %s: %s", s.ID, res.Error.Name, res.Error.Value)
		}
		q.Result = *res.Text
		report.Children = append(report.Children, q)
	}
	report.AllMS = since(start)
	for i, s := range children {
		if info, err := c.Sandbox(ctx, s.ID); err == nil {
			report.Children[i].OwnBytes = info.MemoryOwnBytes
		}
		if i == 0 {
			report.Kept = s.ID
			continue
		}
		if err := c.Kill(ctx, s.ID); err != nil {
			return err
		}
	}
	return nil
}

func printQuickstart(w io.Writer, name string, r *quickstartReport) error {
	var rows [][]string
	for _, q := range r.Children {
		renewed := fmt.Sprintf("%d things", len(q.Report.Renewed))
		if n := len(q.Report.NotRenewed); n > 0 {
			renewed += fmt.Sprintf(", %d not", n)
		}
		rows = append(rows, []string{
			fmt.Sprint(q.Index), q.ID, ms(q.ReadyMS), ms(q.EvalMS), size(q.OwnBytes), renewed, q.Expression, q.Result,
		})
	}
	if err := table(w, "# | SANDBOX | AWAKE AFTER | FIRST EVAL | OWN MEMORY | RENEWED | EXPRESSION | RESULT", rows); err != nil {
		return err
	}
	first := r.Children[0]
	fmt.Fprintf(w, "\n%d children awake after %.0f ms, the last answer after %.0f ms; a cold boot with this warm-up took %.1f s.\n",
		len(r.Children), r.ForkMS, r.AllMS, (r.Snapshot.BootMS+r.Snapshot.WarmMS)/1000)
	fmt.Fprintf(w, "Renewed in each: ")
	for i, name := range first.Report.Renewed {
		if i > 0 {
			fmt.Fprint(w, ", ")
		}
		fmt.Fprint(w, printable(name))
	}
	fmt.Fprintln(w, ".")
	for _, n := range first.Report.NotRenewed {
		fmt.Fprintf(w, "Not renewed: %s %s: %s.\n", printable(n.What), printable(n.Name), printable(n.Why))
	}
	fmt.Fprintf(w, "\nKept: %s. Try next:\n", r.Kept)
	for _, next := range []string{
		"eval " + r.Kept + " 'x = numpy.arange(10); x.sum()'", "shell " + r.Kept, "fork " + quickstartTag + " -n 3", "ls", "kill --all",
	} {
		fmt.Fprintf(w, "  %s %s\n", name, next)
	}
	return nil
}
