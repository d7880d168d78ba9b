package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

func (a *App) events() *cobra.Command {
	var opts client.EventOptions
	var since string
	tail := -1
	cmd := &cobra.Command{
		Use: "events", Short: "Print what has happened to sandboxes, snapshots and builds, and what happens", Args: cobra.NoArgs,
		Long: "Print what the daemon has told since it started, the oldest first: some thousands of events are kept. With -f go on\n" +
			"with what happens, also when another daemon takes over. Who reads too slowly is told how many events are missing.\n" +
			"With --json one object a line.\n\n" +
			"Types: sandbox.forked, .adopted, .paused, .resumed, .suspended, .woken, .egress (it may reach\n" +
			"something else), .failed, .ended; snapshot.created, .ready, .failed, .removed; build.started, .finished; network.restarted;\n" +
			"daemon.started, .stopping; events.lost.",
		Example: "  forkd events -f -n 0\n  forkd events --type sandbox.failed --type sandbox.ended\n  forkd events --json --since 1796012345678901",
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case tail < -1:
				return usage("--tail is %d", tail)
			case tail >= 0 && since != "":
				return usage("--tail and --since contradict each other")
			case tail >= 0:
				opts.Tail = &tail
			case since != "":
				n, err := strconv.ParseUint(since, 10, 64)
				if err != nil {
					return usage("--since is %q: give the sequence of an event, as --json prints it", since)
				}
				opts.Since = &n
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error { return a.doEvents(cmd.Context(), c, opts) })
		},
	}
	cmd.Flags().BoolVarP(&opts.Follow, "follow", "f", false, "go on with what happens, until it is interrupted")
	cmd.Flags().IntVarP(&tail, "tail", "n", -1, "only so many of those there are")
	cmd.Flags().StringVar(&since, "since", "", "only those after this sequence")
	cmd.Flags().StringArrayVar(&opts.Types, "type", nil, "only these, such as sandbox.failed, or sandbox for all of sandboxes (repeatable)")
	cmd.Flags().StringArrayVar(&opts.Sandboxes, "sandbox", nil, "only those of this sandbox, by its whole id (repeatable)")
	cmd.Flags().StringArrayVar(&opts.Snapshots, "snapshot", nil, "only those of this snapshot and of sandboxes forked from it (repeatable)")
	a.completeTagFlag(cmd, "snapshot")
	completeFlag(cmd, "sandbox", a.completeSandboxes(0))
	completeWords(cmd, "type", "sandbox", "snapshot", "build", "daemon", "sandbox.failed", "sandbox.ended", "sandbox.port_opened", "snapshot.ready", "snapshot.failed")
	return cmd
}

func (a *App) doEvents(ctx context.Context, c *client.Client, opts client.EventOptions) error {
	for {
		err := a.printEvents(ctx, c, &opts)
		switch {
		case !opts.Follow:
			return err
		case !absent(err):
			return unlessDone(ctx, err)
		}
		opts.Tail = nil // of the next, all it has told
		a.progress("forkd: %v; waiting for the next daemon", err)
		if err := a.awaitDaemon(ctx, c); err != nil {
			return unlessDone(ctx, err)
		}
	}
}

// awaitDaemon returns when a daemon answers; it starts none.
func (a *App) awaitDaemon(ctx context.Context, c *client.Client) error {
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := c.Version(ctx)
		if !absent(err) {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// printEvents prints one daemon's events, and notes where it has come to.
func (a *App) printEvents(ctx context.Context, c *client.Client, opts *client.EventOptions) error {
	return c.Events(ctx, *opts, func(e api.Event) error {
		opts.Since, opts.Tail = &e.Sequence, nil
		if !a.json {
			_, err := io.WriteString(a.Out, eventLine(e)+"\n")
			return err
		}
		text, err := json.Marshal(e)
		if err != nil {
			return err
		}
		_, err = a.Out.Write(escapeJSON(append(text, '\n')))
		return err
	})
}

// eventLine is an event for people.
func eventLine(e api.Event) string {
	var words []string
	add := func(name, value string) {
		if value != "" {
			words = append(words, name+value)
		}
	}
	add("", e.SandboxID)
	add("snapshot=", e.SnapshotTag)
	add("labels=", joinLabels(e.Labels))
	if e.Lost > 0 {
		add("lost=", strconv.FormatUint(e.Lost, 10))
	}
	if e.Port != 0 {
		add("port=", strconv.Itoa(e.Port))
	}
	add("reason: ", e.Reason)
	return strings.TrimRight(fmt.Sprintf("%s  %-18s %s", e.Time.Local().Format(time.DateTime), oneLine(e.Type), oneLine(strings.Join(words, " "))), " ")
}
