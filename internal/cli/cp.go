package cli

import (
	"archive/tar"
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
	"forkd.dev/forkd/internal/guest/wire"
)

func (a *App) cp() *cobra.Command {
	var recursive bool
	cmd := &cobra.Command{
		Use: "cp SRC DST", Short: "Copy files between here and a sandbox; name the sandbox's side ID:PATH",
		Example: "  forkd cp data.csv sbx2abc:/root/\n  forkd cp -r sbx2abc:/root/out ./out\n  forkd cp sbx2abc:/etc/os-release -",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			srcID, src := splitRemote(args[0])
			dstID, dst := splitRemote(args[1])
			if (srcID == "") == (dstID == "") {
				return usage("exactly one of the two is in a sandbox, written ID:PATH")
			}
			err := a.withDaemon(cmd.Context(), func(c *client.Client) error {
				if srcID != "" {
					return a.download(cmd.Context(), c.Guest(srcID), src, dst, recursive)
				}
				return a.upload(cmd.Context(), c.Guest(dstID), src, dst, recursive)
			})
			if err != nil || dst == "-" {
				return err
			}
			return a.show(map[string]string{"source": args[0], "destination": args[1]}, func(io.Writer) error { return nil })
		},
	}
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "copy directories")
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

func (a *App) upload(ctx context.Context, g *client.Guest, src, dst string, recursive bool) error {
	if src == "-" {
		return writeRemote(ctx, g, dst, nil, a.In)
	}
	info, err := os.Stat(src)
	if err != nil {
		return err
	}
	if info.IsDir() {
		if !recursive {
			return usage("%s is a directory; copy it with -r", src)
		}
		return uploadDir(ctx, g, src, dst)
	}
	f, err := os.Open(src)
	if err != nil {
		return err
	}
	defer f.Close()
	if dst == "" || strings.HasSuffix(dst, "/") || remoteIsDir(ctx, g, dst) {
		dst = path.Join(dst, filepath.Base(src))
	}
	mode := uint32(info.Mode().Perm())
	return writeRemote(ctx, g, dst, &mode, f)
}

func writeRemote(ctx context.Context, g *client.Guest, dst string, mode *uint32, r io.Reader) error {
	err := call.Upload(ctx, g, wire.MethodFileWrite, wire.WriteRequest{Path: dst, Mode: mode}, r, nil)
	if err != nil {
		return fmt.Errorf("write %s in the sandbox: %w", dst, err)
	}
	return nil
}

func remoteIsDir(ctx context.Context, g *client.Guest, p string) bool {
	var e wire.EntryReply
	return call.Unary(ctx, g, wire.MethodFileStat, wire.PathRequest{Path: p}, &e) == nil && e.Entry.Type == wire.TypeDirectory
}

// uploadDir sends a tree as a tar stream. Like cp -r, it goes into an existing directory, or becomes dst.
func uploadDir(ctx context.Context, g *client.Guest, src, dst string) error {
	if dst == "" || strings.HasSuffix(dst, "/") || remoteIsDir(ctx, g, dst) {
		abs, err := filepath.Abs(src)
		if err != nil {
			return err
		}
		dst = path.Join(dst, filepath.Base(abs))
	}
	r, w := io.Pipe()
	go func() { _ = w.CloseWithError(writeTar(w, src)) }()
	defer r.Close()
	err := call.Upload(ctx, g, wire.MethodExtract, wire.ExtractRequest{Path: dst, User: "root"}, r, nil)
	if err != nil {
		return fmt.Errorf("copy %s to %s: %w", src, dst, err)
	}
	return nil
}

func writeTar(w io.Writer, root string) error {
	t := tar.NewWriter(w)
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == root {
			return err
		}
		return addToTar(t, root, p, d)
	})
	return errors.Join(err, t.Close())
}

func addToTar(t *tar.Writer, root, p string, d fs.DirEntry) error {
	info, err := d.Info()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() && !info.IsDir() && info.Mode()&fs.ModeSymlink == 0 {
		return nil // sockets, pipes and devices are no data
	}
	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(p); err != nil {
			return err
		}
	}
	h, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	rel, err := filepath.Rel(root, p)
	if err != nil {
		return err
	}
	h.Name = filepath.ToSlash(rel)
	h.Uid, h.Gid, h.Uname, h.Gname = 0, 0, "", ""
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return nil
	}
	f, err := os.Open(p)
	if err != nil {
		return err
	}
	defer f.Close()
	// A file that grows meanwhile must not spoil the archive.
	_, err = io.CopyN(t, f, h.Size)
	return err
}

func (a *App) download(ctx context.Context, g *client.Guest, src, dst string, recursive bool) error {
	var e wire.EntryReply
	if err := call.Unary(ctx, g, wire.MethodFileStat, wire.PathRequest{Path: src}, &e); err != nil {
		return fmt.Errorf("look at %s in the sandbox: %w", src, err)
	}
	if e.Entry.Type == wire.TypeDirectory {
		if !recursive {
			return usage("%s is a directory; copy it with -r", src)
		}
		return downloadDir(ctx, g, e.Entry, dst)
	}
	if dst == "-" {
		return call.Download(ctx, g, wire.MethodFileRead, wire.ReadRequest{Path: src}, a.Out)
	}
	if isDir(dst) {
		dst = filepath.Join(dst, path.Base(e.Entry.Path))
	}
	return downloadFile(ctx, g, src, dst, fs.FileMode(e.Entry.Mode).Perm())
}

func isDir(p string) bool {
	info, err := os.Stat(p)
	return err == nil && info.IsDir()
}

// downloadFile writes beside the destination and renames, so that a broken copy leaves the old file.
func downloadFile(ctx context.Context, g *client.Guest, src, dst string, mode fs.FileMode) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(dst), ".forkd-cp-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp.Name())
		}
	}()
	err = call.Download(ctx, g, wire.MethodFileRead, wire.ReadRequest{Path: src}, tmp)
	err = errors.Join(err, tmp.Chmod(mode), tmp.Close())
	if err != nil {
		return fmt.Errorf("copy %s to %s: %w", src, dst, err)
	}
	return os.Rename(tmp.Name(), dst)
}

// downloadDir receives a tree as a tar stream made by an untrusted guest: os.Root keeps every name below dst.
func downloadDir(ctx context.Context, g *client.Guest, src wire.EntryInfo, dst string) error {
	if isDir(dst) {
		dst = filepath.Join(dst, path.Base(src.Path))
	}
	if err := os.MkdirAll(dst, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dst)
	if err != nil {
		return err
	}
	defer root.Close()
	r, w := io.Pipe()
	go func() {
		_ = w.CloseWithError(call.Download(ctx, g, wire.MethodArchive, wire.ArchiveRequest{Path: src.Path}, w))
	}()
	defer r.Close()
	if err := extract(root, tar.NewReader(r), path.Base(src.Path)); err != nil {
		return fmt.Errorf("copy %s to %s: %w", src.Path, dst, err)
	}
	return nil
}

// extract unpacks below root; the archive's names begin with top.
func extract(root *os.Root, t *tar.Reader, top string) error {
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name := path.Clean(strings.TrimPrefix(h.Name, "/"))
		name = strings.TrimPrefix(strings.TrimPrefix(name, top), "/")
		if name == "" || name == "." {
			continue
		}
		if err := extractOne(root, t, h, name); err != nil {
			return err
		}
	}
}

func extractOne(root *os.Root, t *tar.Reader, h *tar.Header, name string) error {
	mode := fs.FileMode(h.Mode).Perm()
	switch h.Typeflag {
	case tar.TypeDir:
		return root.MkdirAll(name, mode|0o700)
	case tar.TypeSymlink:
		_ = root.Remove(name)
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		_ = root.Remove(name)
		target := path.Clean(h.Linkname)
		_, rest, _ := strings.Cut(target, "/")
		return root.Link(rest, name)
	case tar.TypeReg:
		_ = root.Remove(name)
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, t)
		return errors.Join(err, f.Chmod(mode), f.Close())
	}
	return nil // devices, pipes and sockets stay in the guest
}
