package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

// forkFlags are those of every verb that forks.
type forkFlags struct {
	ttl    time.Duration
	labels []string
	env    []string
	cpus   int
	memory string
	bounds boundFlags
	egress egressFlags
}

func (f *forkFlags) add(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&f.ttl, "ttl", 0, "end each child after this time, e.g. 10m (0: when killed)")
	cmd.Flags().StringArrayVarP(&f.labels, "label", "l", nil, "label of each child, KEY=VALUE (repeatable)")
	cmd.Flags().StringArrayVarP(&f.env, "env", "e", nil, "environment variable of each child, KEY=VALUE (repeatable)")
	cmd.Flags().IntVar(&f.cpus, "cpus", 0, "must be the snapshot's: a fork has the machine of its snapshot")
	cmd.Flags().StringVar(&f.memory, "memory", "", "must be the snapshot's, e.g. 512MiB")
	f.bounds.add(cmd)
	f.egress.add(cmd)
}

func (f *forkFlags) request(tag string, n int) (api.ForkRequest, error) {
	req := api.ForkRequest{SnapshotTag: tag, N: &n, TTLSeconds: f.ttl.Seconds(), CPUs: f.cpus, Partial: true}
	var err error
	if req.Bounds, err = f.bounds.bounds(); err != nil {
		return req, err
	}
	if req.Egress, err = f.egress.policy(); err != nil {
		return req, err
	}
	if req.Labels, err = pairs("--label", f.labels); err != nil {
		return req, err
	}
	if req.Env, err = pairs("--env", f.env); err != nil {
		return req, err
	}
	if f.memory != "" {
		if req.MemoryBytes, err = parseSize(f.memory); err != nil {
			return req, usage("--memory: %w", err)
		}
	}
	return req, nil
}

func pairs(flag string, list []string) (map[string]string, error) {
	if len(list) == 0 {
		return nil, nil
	}
	m := make(map[string]string, len(list))
	for _, kv := range list {
		k, v, ok := strings.Cut(kv, "=")
		if !ok || k == "" {
			return nil, usage("%s %q: give KEY=VALUE", flag, kv)
		}
		m[k] = v
	}
	return m, nil
}

// parseSize reads 512MiB, 2GiB, 512M, 2G or a number of bytes.
func parseSize(s string) (int64, error) {
	number, unit := s, int64(1)
	for _, u := range []struct {
		suffix string
		bytes  int64
	}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"K", 1 << 10}, {"M", 1 << 20}, {"G", 1 << 30}} {
		if rest, ok := strings.CutSuffix(s, u.suffix); ok {
			number, unit = rest, u.bytes
			break
		}
	}
	n, err := strconv.ParseInt(strings.TrimSpace(number), 10, 64)
	if err != nil || n <= 0 || n > (1<<62)/unit {
		return 0, fmt.Errorf("%q is no size; give for example 512MiB or 2GiB", s)
	}
	return n * unit, nil
}

func (a *App) fork() *cobra.Command {
	var f forkFlags
	var tag string
	var n int
	var netns, live bool
	cmd := &cobra.Command{
		Use: "fork [TAG] [-n N]", Short: "Fork children from a snapshot", Args: cobra.MaximumNArgs(1),
		Long: "Fork children from a snapshot. Each is a machine of its own: memory, disk, entropy, clock, host name, ids.\n" +
			"Prints one line a child; exit code 1 if any failed.",
		Example:           "  forkd fork python-numpy -n 3\n  forkd fork --tag python-numpy --ttl 10m --label job=7 --env TOKEN=x",
		ValidArgsFunction: a.completeTags(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				if tag != "" {
					return usage("the snapshot is named twice: %q and --tag %q", args[0], tag)
				}
				tag = args[0]
			}
			if tag == "" {
				return usage("name the snapshot to fork; list them with: forkd snapshots")
			}
			req, err := f.request(tag, n)
			if err != nil {
				return err
			}
			req.PerChildNetns, req.LiveFork = netns, live
			return a.withDaemon(cmd.Context(), func(c *client.Client) error { return a.doFork(cmd.Context(), c, req) })
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&tag, "tag", "", "the snapshot to fork")
	a.completeTagFlag(cmd, "tag")
	cmd.Flags().IntVarP(&n, "n", "n", 1, "how many children")
	cmd.Flags().BoolVar(&netns, "per-child-netns", false, "accepted; every child is isolated")
	cmd.Flags().BoolVar(&live, "live-fork", false, "accepted; every child can be branched live")
	return cmd
}

func (a *App) doFork(ctx context.Context, c *client.Client, req api.ForkRequest) error {
	children, err := c.Fork(ctx, req)
	if err != nil {
		return a.elsewhere(err, c, req.SnapshotTag)
	}
	if a.json {
		if err := a.show(children, nil); err != nil {
			return err
		}
	}
	return a.reportChildren(children)
}

// reportChildren prints the ids of those that live, unless they have been shown as JSON, and the errors of the others.
func (a *App) reportChildren(children []api.Sandbox) error {
	var first *api.Error
	failed, slowest, waited := 0, 0.0, 0.0
	for _, s := range children {
		slowest, waited = max(slowest, s.ReadyMS), max(waited, s.WaitedMS)
		if s.Error == nil {
			if !a.json {
				fmt.Fprintln(a.Out, s.ID)
			}
			continue
		}
		failed++
		if first == nil {
			first = s.Error
		}
		a.progress("child %d: %s", s.Index, printable(s.Error.Message))
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d children failed; the first: %w", failed, len(children), first)
	}
	if a.json {
		return nil
	}
	for _, w := range children[0].Warnings { // the same of all
		a.progress("%s", printable(w))
	}
	if waited > 0 {
		a.progress("waited %.0f ms of it for the snapshot, which was still being written", waited)
	}
	a.progress("%d ready in %.0f ms", len(children), slowest)
	return nil
}
