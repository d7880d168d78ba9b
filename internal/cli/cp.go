package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/tree"
	"forkd.dev/forkd/internal/guest/wire"
)

func (a *App) cp() *cobra.Command {
	c := &copier{a: a}
	cmd := &cobra.Command{
		Use: "cp SRC… DST", Short: "Copy files between here and sandboxes; name a sandbox's side ID:PATH",
		Long: "Copies like cp: into DST if it is a directory, else to that name. Without -r links are followed; with it the\n" +
			"links in a tree are copied as links. Modes are kept, and with -r times, hard links, holes and user attributes;\n" +
			"owners are not: here everything belongs to you, in a sandbox to --user. The name - is standard input or output.\n" +
			"A local name with a colon is written ./a:b.",
		Example: "  forkd cp data.csv sbx2abc:/root/\n  forkd cp -r sbx2abc:/root/out ./out\n  forkd cp sbx2abc:/etc/os-release -\n" +
			"  forkd cp -r sbx2abc:src sbx3def:",
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			var places []place
			remote := false
			for _, arg := range args {
				id, p := splitRemote(arg)
				places = append(places, place{id: id, path: p})
				remote = remote || id != ""
			}
			if !remote {
				return usage("none of these is in a sandbox, written ID:PATH")
			}
			if c.follow && c.noFollow {
				return usage("-L and -P exclude each other")
			}
			return a.withDaemon(cmd.Context(), func(cl *client.Client) error {
				for i := range places {
					if places[i].id != "" {
						places[i].g = cl.Guest(places[i].id)
					}
				}
				last := len(places) - 1
				if err := c.copyAll(cmd.Context(), places[:last], places[last]); err != nil {
					return err
				}
				if places[last].stdio() {
					return nil
				}
				return a.show(map[string]any{"sources": args[:last], "destination": args[last], "bytes": c.meter.total()}, func(io.Writer) error { return nil })
			})
		},
	}
	cmd.Flags().BoolVarP(&c.recursive, "recursive", "r", false, "copy directories with all that is in them")
	cmd.Flags().BoolVarP(&c.follow, "dereference", "L", false, "copy what links point at instead of the links")
	cmd.Flags().BoolVarP(&c.noFollow, "no-dereference", "P", false, "copy links as links")
	cmd.Flags().StringVarP(&c.user, "user", "u", "", "user of the sandboxes to act as (default: the image's)")
	return cmd
}

// splitRemote takes ID:PATH apart. A local path with a colon is written ./a:b.
func splitRemote(s string) (id, p string) {
	id, p, ok := strings.Cut(s, ":")
	if !ok || strings.ContainsAny(id, "/.") {
		return "", s
	}
	return id, p
}

// place is one side of a copy.
type place struct {
	id   string
	g    *client.Guest // nil: here
	path string
}

func (p place) stdio() bool { return p.g == nil && p.path == "-" }

func (p place) String() string {
	if p.g == nil {
		return p.path
	}
	return p.id + ":" + p.path
}

// base is the name of the place in a directory that it is copied into; of what has none, its content goes there.
func (p place) base() string {
	name := filepath.Base(p.path)
	if p.g != nil {
		name = path.Base(p.path)
	}
	if name == ".." || name == "/" || p.path == "" {
		return "."
	}
	return name
}

// in is the place of a name in it.
func (p place) in(name string) place {
	if name == "." {
		return p
	}
	p.path = strings.TrimSuffix(p.path, "/") + "/" + name
	return p
}

// found is what is at a place.
type found struct {
	kind fs.FileMode // type bits
	mode fs.FileMode // permissions
	size int64
	path string // absolute; of a sandbox only
}

type copier struct {
	a                           *App
	recursive, follow, noFollow bool
	user                        string
	meter                       meter
}

// look describes what is at a place, a link itself or its target. A missing one is fs.ErrNotExist.
func (c *copier) look(ctx context.Context, p place, follow bool) (found, error) {
	if p.g == nil {
		stat := os.Lstat
		if follow {
			stat = os.Stat
		}
		info, err := stat(p.path)
		if err != nil {
			return found{}, err
		}
		return found{kind: info.Mode().Type(), mode: info.Mode().Perm(), size: info.Size()}, nil
	}
	var r wire.EntryReply
	err := call.Unary(ctx, p.g, wire.MethodFileStat, wire.PathRequest{Path: c.remote(p), User: c.user}, &r)
	if refusal, ok := errors.AsType[*wire.Error](err); ok && refusal.Code == wire.CodeNotFound {
		return found{}, fmt.Errorf("%s: %w", p, fs.ErrNotExist)
	}
	if err != nil {
		return found{}, fmt.Errorf("look at %s: %w", p, err)
	}
	f := found{mode: fs.FileMode(r.Entry.Mode).Perm(), size: r.Entry.Size}
	if f.path, err = wire.DecodeName(r.Entry.Path); err != nil {
		return found{}, fmt.Errorf("look at %s: %w", p, err)
	}
	switch {
	case r.Entry.SymlinkTarget != nil && !follow:
		f.kind = fs.ModeSymlink
	case r.Entry.Type == wire.TypeDirectory:
		f.kind = fs.ModeDir
	case r.Entry.Type == wire.TypeSymlink:
		return found{}, fmt.Errorf("%s is a link to nothing: %w", p, fs.ErrNotExist)
	case r.Entry.Type != wire.TypeFile:
		f.kind = fs.ModeIrregular
	case r.Entry.SymlinkTarget != nil:
		f.size = -1 // that of the link was told
	}
	return f, nil
}

// remote is a path as messages have it. Without one the user's home is meant.
func (c *copier) remote(p place) string {
	if p.path == "" {
		return "~"
	}
	return wire.EncodeName(p.path)
}

func (c *copier) copyAll(ctx context.Context, sources []place, dst place) error {
	stop := c.meter.show(c.a)
	defer stop()
	into := false
	if !dst.stdio() {
		at, err := c.look(ctx, dst, true)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		into = err == nil && at.kind.IsDir()
		slash := strings.HasSuffix(dst.path, "/")
		switch {
		case into:
			if dst.g != nil {
				dst.path = at.path
			}
		case len(sources) > 1:
			return usage("%s is no directory, and there is more than one source", dst)
		case slash && err == nil:
			return fmt.Errorf("%s: it is no directory", dst)
		}
	}
	for _, src := range sources {
		if src.g == nil && dst.g == nil && !src.stdio() && !dst.stdio() {
			return usage("neither %s nor %s is in a sandbox", src, dst)
		}
		if err := c.copyOne(ctx, src, dst, into); err != nil {
			return err
		}
	}
	return nil
}

func (c *copier) copyOne(ctx context.Context, src, dst place, into bool) error {
	if src.stdio() {
		if dst.g == nil || into {
			return usage("standard input is copied to a file in a sandbox: ID:PATH")
		}
		return c.write(ctx, dst, nil, c.meter.reader(c.a.In))
	}
	follow := c.follow || !c.noFollow && !c.recursive || strings.HasSuffix(src.path, "/")
	at, err := c.look(ctx, src, follow)
	if err != nil {
		return err
	}
	switch {
	case at.kind.IsDir() && !c.recursive:
		return usage("%s is a directory; copy it with -r", src)
	case at.kind.IsDir() && dst.stdio():
		return usage("%s is a directory; only a file can be written to standard output", src)
	case !at.kind.IsDir() && !into && strings.HasSuffix(dst.path, "/"):
		return &hinted{fmt.Errorf("%s: there is no such directory", dst), "make it first, or leave out the / at the end"}
	}
	target := dst
	if into {
		target = dst.in(src.base())
	}
	// A merge leaves the directory itself as it is.
	merge := false
	if at.kind.IsDir() {
		there, err := c.look(ctx, target, true)
		switch {
		case err == nil && !there.kind.IsDir():
			return fmt.Errorf("%s: it is no directory, and not replaced by one", target)
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return err
		}
		merge = err == nil
	}
	c.meter.name(src.String())
	asTree := at.kind.IsDir() || at.kind == fs.ModeSymlink || c.recursive && at.kind.IsRegular() && at.size > 0
	switch {
	case dst.stdio():
		err = c.read(ctx, src, c.a.Out)
	case asTree:
		err = c.tree(ctx, src, target, at.kind.IsDir(), merge)
	case src.g == nil:
		err = c.upload(ctx, src, target, at)
	case dst.g == nil:
		err = c.download(ctx, src, target, at)
	default:
		r, w := io.Pipe()
		go func() { _ = w.CloseWithError(c.read(ctx, src, w)) }()
		mode := uint32(at.mode)
		err = c.write(ctx, target, &mode, r) // metered where it is read
		_ = r.Close()
	}
	if err == nil {
		return nil
	}
	err = fmt.Errorf("copy %s to %s: %w", src, target, err)
	if refusal, ok := errors.AsType[*wire.Error](err); ok && refusal.Code == wire.CodeUnimplemented {
		return &hinted{err, "build the snapshot again: the agent in it is older than this forkd"}
	}
	return err
}

func (c *copier) read(ctx context.Context, src place, w io.Writer) error {
	return call.Download(ctx, src.g, wire.MethodFileRead, wire.ReadRequest{Path: c.remote(src), User: c.user}, c.meter.writer(w))
}

func (c *copier) write(ctx context.Context, dst place, mode *uint32, r io.Reader) error {
	req := wire.WriteRequest{Path: c.remote(dst), User: c.user, Mode: mode}
	return call.Upload(ctx, dst.g, wire.MethodFileWrite, req, r, nil)
}

func (c *copier) upload(ctx context.Context, src, dst place, at found) error {
	f, err := os.Open(src.path)
	if err != nil {
		return err
	}
	defer f.Close()
	var mode *uint32
	if at.kind.IsRegular() {
		m := uint32(at.mode)
		mode = &m
	}
	return c.write(ctx, dst, mode, c.meter.reader(f))
}

// download writes beside the destination and renames, so that a copy that breaks off leaves the old file.
func (c *copier) download(ctx context.Context, src, dst place, at found) (err error) {
	target := dst.path
	if resolved, err := filepath.EvalSymlinks(target); err == nil {
		target = resolved
	}
	if info, err := os.Stat(target); err == nil && !info.Mode().IsRegular() {
		f, err := os.OpenFile(target, os.O_WRONLY, 0) // a device or pipe of the user's
		if err != nil {
			return err
		}
		return errors.Join(c.read(ctx, src, f), f.Close())
	}
	tmp, err := os.CreateTemp(filepath.Dir(target), ".forkd-cp-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp.Name())
		}
	}()
	err = c.read(ctx, src, tmp)
	if err = errors.Join(err, tmp.Chmod(at.mode), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), target)
}

// tree copies a directory with all that is in it, or a link, or a file with everything a file can have.
func (c *copier) tree(ctx context.Context, src, dst place, isDir, merge bool) error {
	r, w := io.Pipe()
	defer r.Close()
	// In a sandbox what is no directory goes into one, under its name.
	name, into := "", dst
	if dst.g != nil && !isDir {
		name, into.path = path.Base(dst.path), path.Dir(dst.path)
	}
	noRoot := merge && dst.g != nil
	go func() {
		if src.g == nil {
			o := tree.PackOptions{Follow: c.follow, Name: name, NoRoot: noRoot, Count: c.meter.name}
			_ = w.CloseWithError(tree.Pack(ctx, c.meter.writer(w), src.path, o))
			return
		}
		req := wire.TreeRequest{Path: c.remote(src), User: c.user, Follow: c.follow, Name: wire.EncodeName(name), NoRoot: noRoot}
		_ = w.CloseWithError(call.Download(ctx, src.g, wire.MethodFileTree, req, c.meter.writer(w)))
	}()
	if dst.g == nil {
		return tree.Unpack(ctx, dst.path, r, tree.UnpackOptions{Count: c.meter.name, Skipped: func(name, why string) {
			c.a.progress("left out: %s, %s", oneLine(name), why)
		}})
	}
	absolute, err := c.absolute(ctx, into)
	if err != nil {
		return err
	}
	req := wire.ExtractRequest{Path: wire.EncodeName(absolute), User: c.user, DefaultUser: c.user == "", KeepDirs: merge}
	return call.Upload(ctx, dst.g, wire.MethodExtract, req, r, nil)
}

// absolute is a place's path as Extract takes it.
func (c *copier) absolute(ctx context.Context, p place) (string, error) {
	if path.IsAbs(p.path) {
		return p.path, nil
	}
	home, err := c.look(ctx, place{id: p.id, g: p.g, path: "~"}, true)
	if err != nil {
		return "", err
	}
	return path.Join(home.path, strings.TrimPrefix(p.path, "~")), nil
}
