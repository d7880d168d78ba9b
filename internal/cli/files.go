package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

// files are the verbs for what is in a sandbox that need no program there.
func (a *App) files() *cobra.Command {
	cmd := &cobra.Command{
		Use: "files", Short: "Look at and change a sandbox's files, whatever programs it has",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var user string
	cmd.PersistentFlags().StringVarP(&user, "user", "u", "", "user to act as (default: the image's)")
	cmd.AddCommand(a.filesLs(&user), a.filesStat(&user), a.filesMkdir(&user), a.filesMv(&user), a.filesRm(&user), a.filesWatch(&user))
	for _, c := range cmd.Commands() {
		c.ValidArgsFunction = a.completeSandboxes(1)
	}
	return cmd
}

func (a *App) filesLs(user *string) *cobra.Command {
	var depth int
	cmd := &cobra.Command{
		Use: "ls ID [PATH]", Short: "List a directory", Args: cobra.RangeArgs(1, 2),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			dir := ""
			if len(args) > 1 {
				dir = args[1]
			}
			list, err := c.Files(ctx, args[0], dir, depth, *user)
			if err != nil {
				return err
			}
			return a.show(list, func(w io.Writer) error {
				var rows [][]string
				for _, f := range list {
					rows = append(rows, fileRow(f, shownName(f, depth)))
				}
				return table(w, "MODE | OWNER | GROUP | SIZE | CHANGED | NAME", rows)
			})
		}),
	}
	cmd.Flags().IntVarP(&depth, "depth", "d", 1, "levels of directories")
	return cmd
}

func fileRow(f api.File, name string) []string {
	return []string{f.Permissions, f.Owner, f.Group, fmt.Sprint(f.Size), f.ModifiedTime.Local().Format(time.DateTime), name}
}

func shownName(f api.File, depth int) string {
	name := f.Name
	if depth > 1 {
		name = f.Path
	}
	if f.SymlinkTarget != "" {
		name += " -> " + f.SymlinkTarget
	}
	// The bytes that are no text, as a shell would take them.
	return strings.ReplaceAll(name, "\x00", `\x`)
}

func (a *App) filesStat(user *string) *cobra.Command {
	return &cobra.Command{
		Use: "stat ID PATH", Short: "Describe a file", Args: cobra.ExactArgs(2),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			f, err := c.File(ctx, args[0], args[1], *user)
			if err != nil {
				return err
			}
			return a.show(f, func(w io.Writer) error {
				rows := [][]string{
					{"path", strings.ReplaceAll(f.Path, "\x00", `\x`)},
					{"type", f.Type},
					{"size", fmt.Sprint(f.Size)},
					{"mode", fmt.Sprintf("%04o %s", f.Mode, f.Permissions)},
					{"owner", f.Owner + ":" + f.Group},
					{"changed", f.ModifiedTime.Local().Format(time.RFC3339Nano)},
				}
				if f.SymlinkTarget != "" {
					rows = append(rows, []string{"target", strings.ReplaceAll(f.SymlinkTarget, "\x00", `\x`)})
				}
				for k, v := range f.Metadata {
					rows = append(rows, []string{"metadata " + k, v})
				}
				return table(w, "FIELD | VALUE", rows)
			})
		}),
	}
}

func (a *App) filesMkdir(user *string) *cobra.Command {
	var parents bool
	cmd := &cobra.Command{
		Use: "mkdir ID PATH…", Short: "Make directories, with those above them", Args: cobra.MinimumNArgs(2),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			for _, p := range args[1:] {
				_, err := c.MakeDir(ctx, args[0], api.FileRequest{Path: p, User: *user})
				if e, ok := errors.AsType[*api.Error](err); ok && e.Code == api.CodeExists && parents {
					err = nil
				}
				if err != nil {
					return err
				}
			}
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&parents, "parents", "p", false, "one that is there already is no error")
	return cmd
}

func (a *App) filesMv(user *string) *cobra.Command {
	return &cobra.Command{
		Use: "mv ID SRC DST", Short: "Rename a file or directory", Args: cobra.ExactArgs(3),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			dst := args[2]
			if at, err := c.File(ctx, args[0], dst, *user); err == nil && at.Type == api.FileTypeDir {
				dst = path.Join(dst, path.Base(args[1]))
			}
			_, err := c.MoveFile(ctx, args[0], api.MoveRequest{Source: args[1], Destination: dst, User: *user})
			return err
		}),
	}
}

func (a *App) filesRm(user *string) *cobra.Command {
	var recursive, force bool
	cmd := &cobra.Command{
		Use: "rm ID PATH…", Short: "Remove files, with -r also directories", Args: cobra.MinimumNArgs(2),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			for _, p := range args[1:] {
				err := a.removeFile(ctx, c, args[0], p, *user, recursive)
				if e, ok := errors.AsType[*api.Error](err); ok && e.Code == api.CodeNotFound && force {
					err = nil
				}
				if err != nil {
					return err
				}
			}
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "directories, too, with all that is in them")
	cmd.Flags().BoolVarP(&force, "force", "f", false, "what is not there is no error")
	return cmd
}

func (a *App) removeFile(ctx context.Context, c *client.Client, id, p, user string, recursive bool) error {
	at, err := c.File(ctx, id, p, user)
	if err != nil {
		return err
	}
	if strings.HasPrefix(at.Permissions, "d") && !recursive {
		return usage("%s is a directory; remove it with -r", p)
	}
	return c.RemoveFile(ctx, id, api.FileRequest{Path: p, User: user})
}

func (a *App) filesWatch(user *string) *cobra.Command {
	var req api.WatchRequest
	cmd := &cobra.Command{
		Use: "watch ID PATH", Short: "Print changes in a directory as they happen, until ctrl-c", Args: cobra.ExactArgs(2),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			req.Path, req.User = args[1], *user
			err := c.WatchFiles(ctx, args[0], req, func(e api.FileEvent) {
				switch {
				case a.json:
					if line, err := json.Marshal(e); err == nil {
						_, _ = a.Out.Write(append(escapeJSON(line), '\n'))
					}
				case e.Started:
					a.progress("watching %s", printable(args[1]))
				default:
					fmt.Fprintf(a.Out, "%s %s\n", e.Type, oneLine(strings.ReplaceAll(e.Name, "\x00", `\x`)))
				}
			})
			if ctx.Err() != nil {
				return nil //nolint:nilerr // it was asked to stop
			}
			return err
		}),
	}
	cmd.Flags().BoolVarP(&req.Recursive, "recursive", "r", false, "directories below it, too")
	cmd.Flags().BoolVarP(&req.Entries, "entries", "e", false, "describe what has changed (with --json)")
	return cmd
}
