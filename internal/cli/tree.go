package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

func (a *App) tree() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use: "tree", Short: "Show images, snapshots and sandboxes as a family tree, with their own and shared sizes", Args: cobra.NoArgs,
		Long: "Show images, snapshots and sandboxes as a family tree. OWN is what a node adds to what it stands on, SHARED what it\n" +
			"has from there and does not cost again; STORED is the size on disk, compressed. With --all also the steps of builds\n" +
			"that are kept for later builds; each stands on the step before it.",
		RunE: a.verb(func(ctx context.Context, c *client.Client, _ []string) error {
			list := c.Tree
			if all {
				list = c.TreeAndSteps
			}
			nodes, err := list(ctx)
			if err != nil {
				return err
			}
			return a.show(nodes, func(w io.Writer) error { return printTree(w, nodes, a.branches()) })
		}),
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "show the steps of builds as well")
	return cmd
}

// branchSet is what a tree is drawn with.
type branchSet struct{ more, last, pass, none string }

func unicodeBranches() branchSet { return branchSet{"├─ ", "└─ ", "│  ", "   "} }
func asciiBranches() branchSet   { return branchSet{"|- ", "`- ", "|  ", "   "} }

// branches are drawn in Unicode where the locale says so; a terminal whose locale says nothing can do it, too.
func (a *App) branches() branchSet {
	if a.Getenv("TERM") == "dumb" {
		return asciiBranches()
	}
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		locale := strings.ToUpper(a.Getenv(name))
		if locale == "" {
			continue
		}
		if strings.Contains(locale, "UTF-8") || strings.Contains(locale, "UTF8") {
			return unicodeBranches()
		}
		return asciiBranches()
	}
	if f, ok := a.Out.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return unicodeBranches()
	}
	return asciiBranches()
}

// treeLine is a node with its place drawn before it.
type treeLine struct {
	label string
	cells [6]string
}

// printTree draws the family with one column of names and right-aligned sizes.
func printTree(w io.Writer, nodes []api.TreeNode, b branchSet) error {
	lines := []treeLine{
		{"", [6]string{"MEMORY", "MEMORY", "DISK", "DISK", "", ""}},
		{"NAME", [6]string{"OWN", "SHARED", "OWN", "SHARED", "STORED", "STATE"}},
	}
	for _, n := range nodes {
		lines = drawNode(lines, n, b, "", "")
	}
	name, widths := 0, [6]int{}
	for _, l := range lines {
		name = max(name, utf8.RuneCountInString(l.label))
		for i, c := range l.cells {
			widths[i] = max(widths[i], utf8.RuneCountInString(c))
		}
	}
	const state = 5
	for _, l := range lines {
		var row strings.Builder
		row.WriteString(l.label + strings.Repeat(" ", name-utf8.RuneCountInString(l.label)))
		for i, c := range l.cells[:state] {
			row.WriteString("  " + strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c)) + c)
		}
		row.WriteString("  " + l.cells[state])
		if _, err := fmt.Fprintln(w, strings.TrimRight(row.String(), " ")); err != nil {
			return err
		}
	}
	return nil
}

func drawNode(lines []treeLine, n api.TreeNode, b branchSet, first, rest string) []treeLine {
	stored := size(n.OwnBytes)
	if n.Kind == "sandbox" {
		stored = "-"
	}
	memory := func(v int64) string {
		if n.Kind == "image" {
			return "-"
		}
		return size(v)
	}
	lines = append(lines, treeLine{first + oneLine(n.Kind+" "+n.Name), [6]string{
		memory(n.MemoryOwnBytes), memory(n.MemorySharedBytes), size(n.DiskOwnBytes), size(n.DiskSharedBytes), stored,
		oneLine(n.State),
	}})
	for i, child := range n.Children {
		if i == len(n.Children)-1 {
			lines = drawNode(lines, child, b, rest+b.last, rest+b.none)
			continue
		}
		lines = drawNode(lines, child, b, rest+b.more, rest+b.pass)
	}
	return lines
}
