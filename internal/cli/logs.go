package cli

import (
	"bytes"
	"context"
	"errors"
	"io"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
)

func (a *App) logs() *cobra.Command {
	var follow bool
	var tail int
	cmd := &cobra.Command{
		Use: "logs ID [PID|TAG]", Short: "Print the newest part of a sandbox's console, or of what a process in it printed",
		Long: "Print the newest 64 KiB of a sandbox's console, or of what a process printed that was started from outside\n" +
			"(of what nobody was attached to see, 256 KiB). Looking on takes nothing from who is attached and does not hold the\n" +
			"process back; who is too slow is told what is missing. A process's stderr goes to standard error.",
		Example: "  forkd logs -f sbx2abc\n  forkd logs -f sbx2abc web",
		Args:    cobra.RangeArgs(1, 2), ValidArgsFunction: a.completeProcesses(),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			switch {
			case tail < -1:
				return usage("--tail is %d", tail)
			case len(args) == 2:
				return a.processLogs(ctx, c, args[0], args[1], follow, tail)
			case follow:
				return unlessDone(ctx, a.followConsole(ctx, c, args[0], tail))
			}
			text, err := c.Logs(ctx, args[0])
			if err != nil {
				return err
			}
			return a.show(map[string]string{"console": string(text)}, func(w io.Writer) error {
				_, err := io.WriteString(w, printable(string(lastOf(text, tail))))
				return err
			})
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until it ends")
	cmd.Flags().IntVarP(&tail, "tail", "n", -1, "only so many of the lines there are")
	return cmd
}

func (a *App) followConsole(ctx context.Context, c *client.Client, id string, tail int) error {
	// A guest's console must not steer the user's terminal.
	text := &call.Text{Pass: func(text string) error {
		_, err := io.WriteString(a.Out, printable(text))
		return err
	}}
	out := io.Writer(text)
	if tail >= 0 {
		kept, err := c.Logs(ctx, id)
		if err != nil {
			return err
		}
		out = allBut(kept, tail).of(out)
	}
	return errors.Join(c.FollowLogs(ctx, id, out), text.Flush())
}

func (a *App) processLogs(ctx context.Context, c *client.Client, id, name string, follow bool, tail int) error {
	req := wire.ConnectRequest{Process: call.Select(name), Replay: true, Observe: true, NoWait: !follow}
	g := c.Guest(id)
	out := call.Output{Stdout: a.Out, Stderr: a.Err}
	if tail >= 0 {
		// The lines of both streams together, as they were printed.
		var kept bytes.Buffer
		now := req
		now.NoWait = true
		if _, err := call.Attach(ctx, g, now, call.Session{Output: call.Output{Stdout: &kept, Stderr: &kept}}); err != nil {
			return err
		}
		rest := allBut(kept.Bytes(), tail)
		out = call.Output{Stdout: rest.of(a.Out), Stderr: rest.of(a.Err)}
	}
	_, err := call.Attach(ctx, g, req, call.Session{Output: out, Lost: func(n int64) {
		a.progress("forkd: %d bytes are missing here", n)
	}})
	if err = unlessDone(ctx, err); err != nil {
		return a.lost(ctx, c, id, err)
	}
	return nil
}

// unlessDone is err, but nothing if the user ended what can only be ended so.
func unlessDone(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // That is the end that was wanted.
	}
	return err
}

// lastOf is the last lines of a text; all if lines is negative.
func lastOf(text []byte, lines int) []byte {
	if lines < 0 {
		return text
	}
	at := len(text)
	for i := 0; i < lines && at > 0; i++ {
		at = bytes.LastIndexByte(text[:at-1], '\n') + 1
	}
	return text[at:]
}

// skipped drops the beginning of what is written to several writers.
type skipped struct{ left int }

// allBut skips a text but for its last lines.
func allBut(text []byte, lines int) *skipped {
	return &skipped{left: len(text) - len(lastOf(text, lines))}
}

func (s *skipped) of(w io.Writer) io.Writer { return skippedWriter{s, w} }

type skippedWriter struct {
	*skipped
	w io.Writer
}

func (s skippedWriter) Write(p []byte) (int, error) {
	drop := min(len(p), s.left)
	s.left -= drop
	if _, err := s.w.Write(p[drop:]); err != nil {
		return 0, err
	}
	return len(p), nil
}
