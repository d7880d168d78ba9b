package image

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"path"
	"strings"
)

// WriteStaged writes them as an archive, to be extracted over the root directory. owner gives the numbers of a file's owner.
func WriteStaged(w io.Writer, files fs.FS, list []StagedFile, owner func(string) (uid, gid int, err error)) error {
	t := tar.NewWriter(w)
	for _, f := range list {
		uid, gid, err := owner(f.Owner)
		if err != nil {
			return err
		}
		h := &tar.Header{
			Typeflag: tar.TypeReg, Name: strings.TrimPrefix(f.Path, "/"), Mode: int64(f.Mode), Uid: uid, Gid: gid, Format: tar.FormatPAX,
		}
		if f.Dir {
			h.Typeflag, h.Name = tar.TypeDir, path.Clean(h.Name)+"/"
		} else {
			h.Size = f.size
		}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		if f.Dir {
			continue
		}
		if err := f.copy(t, files); err != nil {
			return err
		}
	}
	return t.Close()
}

// errChanged is about a file that no longer has the content that what is built is known by.
var errChanged = errors.New("it changed during the build; build again")

// copy writes a file's content, which must be what it was when the file was staged.
func (f *StagedFile) copy(w io.Writer, files fs.FS) error {
	if f.source == "" {
		_, err := io.WriteString(w, f.inline)
		return err
	}
	in, err := files.Open(f.source)
	if err != nil {
		return err
	}
	defer in.Close()
	sum, n, err := copyHash(w, io.LimitReader(in, f.size))
	if err != nil {
		return err
	}
	if n != f.size || sum != f.SHA256 {
		return errChanged
	}
	return nil
}

// With is the configuration with a recipe's values on top. Of another user the home is another's.
func (c Config) With(r *Recipe) Config {
	if c.Env == nil {
		c.Env = map[string]string{}
	}
	out := c.with(r)
	if r.User != "" && r.User != c.User {
		for _, name := range []string{"HOME", "USER"} {
			if _, own := r.Env[name]; !own {
				delete(out.Env, name)
			}
		}
	}
	return out
}
