package image

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"path"
	"strings"
)

// StagedFile is a file or directory of a recipe, as it goes into a machine that runs.
type StagedFile struct {
	Path   string // in the machine
	Owner  string // "user", "user:group" or numbers
	Mode   uint32
	SHA256 string // of a file's content
	Dir    bool

	file stagedFile
}

// StageFiles finds a recipe's files in its directory and reads each once, to know its content.
func StageFiles(files fs.FS, list []File) ([]StagedFile, error) {
	staged, err := stage(files, list)
	if err != nil {
		return nil, err
	}
	out := make([]StagedFile, 0, len(staged))
	for _, f := range staged {
		out = append(out, StagedFile{Path: f.path, Owner: f.owner, Mode: f.mode, SHA256: f.sha256, Dir: f.dir, file: f})
	}
	return out, nil
}

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
			h.Size = f.file.size
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

func (f *StagedFile) copy(w io.Writer, files fs.FS) error {
	if f.file.source == "" {
		_, err := io.WriteString(w, f.file.inline)
		return err
	}
	in, err := files.Open(f.file.source)
	if err != nil {
		return err
	}
	defer in.Close()
	sum, n, err := copyHash(w, io.LimitReader(in, f.file.size))
	if err != nil {
		return err
	}
	if n != f.file.size || sum != f.SHA256 {
		return errors.New("it changed while the snapshot was being built; build again")
	}
	return nil
}

// WarmupCode is the code that a warm-up evaluates, which may be in a file of the recipe's directory.
func WarmupCode(files fs.FS, w *Warmup) (string, error) { return warmupCode(files, w) }

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
