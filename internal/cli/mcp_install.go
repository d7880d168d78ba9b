package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"forkd.dev/forkd/internal/mcp"
)

func (a *App) mcpInstall() *cobra.Command {
	var yes bool
	var file string
	var names []string
	for _, c := range mcp.Clients("", runtime.GOOS) {
		names = append(names, c.Name)
	}
	cmd := &cobra.Command{
		Use:   "install " + strings.Join(names, "|"),
		Short: "Tell a client of the protocol about this server, in its configuration",
		Long: "Show the change to a client's configuration, and make it when you say so. What else is in the file stays. The\n" +
			"entry starts this program, with the FORKD_… variables of now; a token is written into it as well.",
		ValidArgs: names, Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			clients := mcp.Clients(a.Getenv("HOME"), runtime.GOOS)
			i := slices.IndexFunc(clients, func(c mcp.Client) bool { return c.Name == args[0] })
			if i < 0 {
				return usage("unknown client %.40q; known are %s", args[0], strings.Join(names, ", "))
			}
			c := clients[i]
			if file != "" {
				c.File = file
			}
			if !filepath.IsAbs(c.File) && a.Getenv("HOME") == "" && file == "" {
				return &hinted{errors.New("HOME is not set, so the configuration cannot be found"), "forkd mcp install " + c.Name + " --file FILE"}
			}
			return a.installMCP(&c, yes)
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "make the change without asking")
	cmd.Flags().StringVar(&file, "file", "", "the client's configuration, if it is elsewhere")
	return cmd
}

// passedOn are the variables that a client is to start this program with.
func passedOn() []string {
	return []string{"FORKD_HOME", "FORKD_HOST", "FORKD_URL", "FORKD_TOKEN", "FORKD_CA", "FORKD_FINGERPRINT"}
}

func (a *App) installMCP(c *mcp.Client, yes bool) error {
	p := mcp.Program{Command: a.Self, Args: []string{"mcp"}}
	for _, name := range passedOn() {
		if v := a.Getenv(name); v != "" {
			if p.Env == nil {
				p.Env = map[string]string{}
			}
			p.Env[name] = v
		}
	}
	before, err := os.ReadFile(c.File)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read %s's configuration: %w", c.Name, err)
	}
	after, err := c.Configure(before, p)
	if errors.Is(err, mcp.ErrForeign) {
		snippet, snippetErr := c.Snippet(p)
		if snippetErr != nil {
			return snippetErr
		}
		what := "add this to it by hand:\n"
		if token := p.Env["FORKD_TOKEN"]; token != "" {
			what, snippet = "add this to it by hand, with FORKD_TOKEN for …:\n", strings.ReplaceAll(snippet, token, "…")
		}
		return &hinted{err, what + snippet}
	}
	if err != nil {
		return err
	}
	if string(before) == string(after) {
		a.progress("%s has it already", c.File)
		return nil
	}
	fmt.Fprintf(a.Out, "--- %s\n", c.File)
	if err := printChange(a.Out, string(before), string(after), p.Env["FORKD_TOKEN"]); err != nil {
		return err
	}
	if !yes {
		if !term.IsTerminal(int(a.In.Fd())) {
			return &hinted{errors.New("nothing is written, because nobody can be asked"), "forkd mcp install " + c.Name + " --yes"}
		}
		sure, err := a.answered("Write it?")
		if err != nil || !sure {
			a.progress("nothing is written")
			return err
		}
	}
	now, err := os.ReadFile(c.File)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read %s's configuration: %w", c.Name, err)
	}
	if string(now) != string(before) { // some clients write their state into it all the time
		if after, err = c.Configure(now, p); err != nil {
			return &hinted{fmt.Errorf("nothing is written, because the file was changed meanwhile: %w", err), "forkd mcp install " + c.Name}
		}
	}
	if err := replaceFile(c.File, after); err != nil {
		return fmt.Errorf("write %s's configuration: %w", c.Name, err)
	}
	a.progress("written; start %s anew", c.Name)
	return nil
}

// replaceFile writes a file as a whole, through links, and keeps its mode. A new one is its owner's alone: there may be a token in
// it.
func replaceFile(path string, text []byte) error {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	mode, owner := fs.FileMode(0o600), -1
	group := -1
	if info, err := os.Stat(path); err == nil {
		mode = info.Mode().Perm()
		if s, ok := info.Sys().(*syscall.Stat_t); ok {
			owner, group = int(s.Uid), int(s.Gid)
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".forkd-*")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if os.Geteuid() == 0 { // who asks by sudo still owns it
		err = errors.Join(err, f.Chown(owner, group))
	}
	err = errors.Join(err, f.Chmod(mode), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// printChange shows the lines that differ, between two of their neighbours, without the secret.
func printChange(w io.Writer, before, after, secret string) error {
	const around = 2
	if secret != "" {
		before, after = strings.ReplaceAll(before, secret, "…"), strings.ReplaceAll(after, secret, "…")
	}
	old, now := lines(before), lines(after)
	head := 0
	for head < len(old) && head < len(now) && old[head] == now[head] {
		head++
	}
	end := 0
	for end < len(old)-head && end < len(now)-head && old[len(old)-1-end] == now[len(now)-1-end] {
		end++
	}
	var b strings.Builder
	put := func(sign string, list []string) {
		for _, line := range list {
			b.WriteString(sign + printable(line) + "\n")
		}
	}
	put("  ", now[max(0, head-around):head])
	put("- ", old[head:len(old)-end])
	put("+ ", now[head:len(now)-end])
	put("  ", now[len(now)-end:min(len(now), len(now)-end+around)])
	_, err := io.WriteString(w, b.String())
	return err
}

func lines(text string) []string {
	if text = strings.TrimSuffix(text, "\n"); text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}
