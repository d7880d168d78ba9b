// Package cli is the command line: one file a verb, each a thin client of the daemon. Results go to standard output,
// progress and errors to standard error. It reaches the daemon through package client only, and starts one in the
// background when none answers.
package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/layout"
)

// Exit codes. exec, run and shell give the guest's own code instead of 0 and 1, and exitForkd when forkd itself failed.
const (
	exitFailed = 1
	exitUsage  = 2
	exitForkd  = 125
)

// App is what a run of the command line depends on.
type App struct {
	In       *os.File
	Out, Err io.Writer
	Getenv   func(string) string
	Version  string
	Self     string // path of this program, to start a daemon with
	Name     string // as it was called, for what to type next

	// Serve runs a daemon until ctx ends, and calls ready once it answers.
	Serve func(ctx context.Context, home layout.Home, getenv func(string) string, log *slog.Logger, ready func()) error

	// Network is the process of the sandboxes' networks, which the daemon starts: what it does until ctx ends.
	Network func(ctx context.Context, staged bool) error

	home        string
	json        bool
	noAutostart bool
	settings    settings        // of a daemon to start
	steps       []api.BuildStep // of a build, as it tells of them
}

// Main runs one command and returns its exit code.
func (a *App) Main(ctx context.Context, args []string) int {
	root := a.root() //nolint:contextcheck // cobra hands ctx to every verb
	root.SetArgs(args)
	root.SetIn(a.In)
	root.SetOut(a.Out)
	root.SetErr(a.Err)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	if code, ok := errors.AsType[guestExitError](err); ok {
		return int(code)
	}
	if quiet, ok := errors.AsType[silentError](err); ok {
		return int(quiet)
	}
	a.explain(cmd, err)
	if _, ok := errors.AsType[*usageError](err); ok {
		return exitUsage
	}
	if cmd.Annotations[guestCode] != "" {
		return exitForkd
	}
	return exitFailed
}

// guestCode marks verbs whose exit code is the guest's.
const guestCode = "guest-exit-code"

// guestExitError is the code of a program in the guest; nothing is printed.
type guestExitError int

func (e guestExitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// silentError ends with a code when everything has been said already.
type silentError int

func (e silentError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// usageError is a command line that cannot be meant.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usage(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// hinted is an error of the command line's own with advice.
type hinted struct {
	err error
	try string
}

func (e *hinted) Error() string { return e.err.Error() }
func (e *hinted) Unwrap() error { return e.err }

// explain prints what went wrong and what to try.
func (a *App) explain(cmd *cobra.Command, err error) {
	var console, try string
	if e, ok := errors.AsType[*api.Error](err); ok {
		console, try = e.Console, e.Hint
	}
	if e, ok := errors.AsType[*hinted](err); ok {
		try = e.try
	}
	if _, ok := errors.AsType[*usageError](err); ok && try == "" {
		try = cmd.CommandPath() + " --help"
	}
	if console != "" {
		fmt.Fprintf(a.Err, "--- the guest's console, last lines ---\n%s\n---\n", printable(lastLines(console, 40)))
	}
	fmt.Fprintf(a.Err, "forkd: %s\n", printable(err.Error()))
	if try != "" {
		fmt.Fprintf(a.Err, "try: %s\n", printable(try))
	}
}

// printable keeps a guest or a file name from steering the user's terminal.
func printable(s string) string { return wire.Printable(s) }

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

func (a *App) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "forkd",
		Short: "Warm one microVM, freeze it, fork as many isolated children as wanted",
		Long: "forkd boots one virtual machine, warms it (runtime started, libraries imported), freezes it as a snapshot,\n" +
			"and forks children from it that answer in milliseconds, each isolated, each with an identity of its own.\n\n" +
			"First steps:  forkd quickstart",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          a.noVerb,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.PersistentFlags().StringVar(&a.home, "home", "", "directory for all state of a daemon (environment: FORKD_HOME)")
	root.PersistentFlags().BoolVar(&a.json, "json", false, "print the API's objects as JSON")
	root.PersistentFlags().BoolVar(&a.noAutostart, "no-autostart", false, "do not start a daemon when none answers")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	root.AddCommand(a.mcp())
	root.CompletionOptions.HiddenDefaultCmd = false
	root.SuggestionsMinimumDistance = 2
	root.AddCommand(
		a.quickstart(), a.doctor(), a.build(), a.images(), a.run(), a.fork(), a.branch(), a.ls(), a.inspect(), a.exec(),
		a.shell(), a.ps(), a.attach(), a.signal(), a.eval(), a.contexts(), a.cp(), a.files(), a.logs(), a.events(), a.stats(), a.top(), a.egress(), a.ports(), a.portForward(), a.pause(), a.resume(), a.suspend(), a.wake(), a.kill(), a.snapshot(), a.snapshots(),
		a.snapshotInfo(), a.pack(), a.unpack(), a.push(), a.pull(), a.verify(), a.compact(), a.rmi(), a.tree(), a.workspace(), a.gc(), a.pin(), a.unpin(), a.cleanup(), a.bench(), a.serve(), a.daemon(), a.token(), a.env(), a.version(), a.netd(),
	)
	for _, c := range root.Commands() {
		wrapArgs(c)
	}
	return root
}

// noVerb turns a mistyped verb into a usage error with the nearest names.
func (a *App) noVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	err := usage("unknown command %q", args[0])
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		return &hinted{err, "forkd " + strings.Join(near, ", or forkd ")}
	}
	return err
}

// wrapArgs makes wrong numbers of arguments usage errors.
func wrapArgs(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return usage("%w\nusage: %s", err, cmd.UseLine())
			}
			return nil
		}
	}
	for _, sub := range c.Commands() {
		wrapArgs(sub)
	}
}

// layout finds the home of the daemon to use or start.
func (a *App) layout() (layout.Home, error) {
	explicit := a.home
	if explicit == "" {
		explicit = a.Getenv("FORKD_HOME")
	}
	return layout.Find(explicit, os.Getuid(), a.Getenv)
}

// show writes v as JSON when asked to, and calls text otherwise.
func (a *App) show(v any, text func(w io.Writer) error) error {
	if !a.json {
		return text(a.Out)
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := a.Out.Write(escapeJSON(b.Bytes()))
	return err
}

// escapeJSON writes what could steer a terminal as \u escapes: the same JSON. Encoding/json does that for ASCII's control
// characters only, and leaves those of Latin-1, which some terminals obey.
func escapeJSON(b []byte) []byte {
	clean := true
	for _, c := range b {
		clean = clean && c < 0x7f
	}
	if clean {
		return b
	}
	out := make([]byte, 0, len(b)+64)
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		switch {
		case r == utf8.RuneError || !wire.Steers(r):
			out = append(out, b[:n]...)
		case r > 0xffff:
			hi, lo := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, hi, lo)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
		b = b[n:]
	}
	return out
}

func (a *App) progress(format string, args ...any) {
	fmt.Fprintf(a.Err, format+"\n", args...)
}
