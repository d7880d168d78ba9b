package cli

import (
	"archive/tar"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"forkd.dev/forkd/internal/image"
)

// recipeDir is a recipe's directory and where it is, which paths of its base are relative to.
type recipeDir struct {
	fs.FS
	path string
}

// packBase sends along the file or directory that a base names. Links are followed: it is the user who named it.
func packBase(t *tar.Writer, dir fs.FS, b image.Base) error {
	local, isDir := b.Local()
	if !local {
		return nil
	}
	at, _ := dir.(recipeDir)
	from := b.LocalPath(at.path)
	info, err := os.Stat(from)
	if err != nil {
		return &hinted{fmt.Errorf("base %s: %w", b, err), "a path of a base is absolute, or relative to the recipe's directory"}
	}
	switch {
	case isDir != info.IsDir() && isDir:
		return fmt.Errorf("base %s: %s is no directory", b, from)
	case !isDir && !info.Mode().IsRegular():
		return fmt.Errorf("base %s: %s is no file", b, from)
	case !isDir:
		return packFile(t, from, image.LocalFile)
	}
	files, err := image.LocalFiles(b, os.DirFS(from))
	if err != nil {
		return fmt.Errorf("base %s: %w", b, err)
	}
	for _, name := range files {
		if err := packFile(t, filepath.Join(from, filepath.FromSlash(name)), path.Join(image.LocalDir, name)); err != nil {
			return err
		}
	}
	return nil
}

func packFile(t *tar.Writer, from, name string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	h := &tar.Header{Name: name, Size: info.Size(), Mode: 0o644, Typeflag: tar.TypeReg}
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	if _, err := io.CopyN(t, f, info.Size()); err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	return nil
}
