package cli

import (
	"context"
	"fmt"
	"io"
	"strings"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

func (a *App) doProvenance(ctx context.Context, c *client.Client, tag string) error {
	p, err := c.Provenance(ctx, tag)
	if err != nil {
		return a.elsewhere(err, c, tag)
	}
	return a.show(p, func(w io.Writer) error { return printProvenance(w, p) })
}

// printProvenance prints the newest first. Records may come from elsewhere: what is in them is only text.
func printProvenance(w io.Writer, p *api.Provenance) error {
	for i := len(p.Snapshots) - 1; i >= 0; i-- {
		o := &p.Snapshots[i]
		if err := printOrigin(w, o); err != nil {
			return err
		}
		if i > 0 && o.RecipeDigest == p.Snapshots[i-1].RecipeDigest {
			continue // a branch has that of what it stands on, which comes next
		}
		if err := printRecipe(w, o.RecipeText); err != nil {
			return err
		}
	}
	for _, m := range p.Images {
		err := table(w, "image | "+m.Name, [][]string{
			{"id", m.ID}, {"base", m.Base}, {"content", "sha256:" + m.Disk}, {"created", m.CreatedAt}, {"packages", strings.Join(m.Packages, " ")},
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// ranRows are what was run in a sandbox before it was branched.
func ranRows(r *api.Ran) (rows [][]string) {
	if r == nil {
		return [][]string{{"ran before", "that was not written down when it was branched"}}
	}
	for _, argv := range r.Commands {
		words := make([]string, len(argv))
		for i, arg := range argv {
			words[i] = quoted(arg)
		}
		rows = append(rows, []string{"ran before", strings.Join(words, " ")})
	}
	if r.More > 0 {
		rows = append(rows, []string{"ran before", fmt.Sprintf("… and %d more, which are not written down here", r.More)})
	}
	if r.Lost {
		rows = append(rows, []string{"ran before", "maybe more: the daemon was started again meanwhile"})
	}
	return rows
}

// quoted is an argument as a shell takes it, where it would take it for something else.
func quoted(arg string) string {
	plain := func(r rune) bool {
		return r > 0x7f || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_@%+=:,./-", r)
	}
	if arg != "" && !strings.ContainsFunc(arg, func(r rune) bool { return !plain(r) }) {
		return arg
	}
	return "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
}

func printOrigin(w io.Writer, o *api.Origin) error {
	rows := [][]string{{"id", o.ID}}
	add := func(name, value string) {
		if value != "" {
			rows = append(rows, []string{name, value})
		}
	}
	add("was", strings.Join(o.Formerly, ", "))
	if o.ParentTag != "" {
		add("stands on", o.ParentTag+" "+o.ParentID)
	}
	add("created", o.CreatedAt)
	tool := "forkd " + o.Tool
	if o.Tool == "" {
		tool = "a forkd that did not write down its version"
	}
	add("made by", tool)
	add("of", o.Source)
	if o.BranchedFrom != "" {
		add("branched from", o.BranchedFrom+", mode "+o.Mode)
		rows = append(rows, ranRows(o.Ran)...)
	}
	add("recipe", o.Recipe)
	if o.RecipeDigest != "" {
		add("recipe's digest", "sha256:"+o.RecipeDigest)
	}
	for i, c := range o.Commands {
		add(fmt.Sprintf("command %d", i+1), oneLine(c))
	}
	add("warm", strings.Join(o.Warm, ", "))
	add("image", o.Image)
	add("kernel", o.Kernel)
	if o.KernelContent != "" {
		add("kernel's content", "sha256:"+o.KernelContent)
	}
	add("agent", o.Agent)
	add("engine", fmt.Sprintf("%v %v, %v, %v, %v, CPU %v", o.Engine["engine"], o.Engine["version"], o.Engine["arch"], o.Engine["accelerator"],
		o.Engine["machine"], o.Engine["cpu_model"]))
	add("memory", o.MemoryLayer)
	add("disk", o.DiskLayer)
	add("devices", o.State)
	return table(w, "tag | "+o.Tag, rows)
}

func printRecipe(w io.Writer, text string) error {
	for line := range strings.Lines(printable(text)) {
		if _, err := fmt.Fprintf(w, "    | %s", strings.TrimRight(line, "\n")+"\n"); err != nil {
			return err
		}
	}
	return nil
}
