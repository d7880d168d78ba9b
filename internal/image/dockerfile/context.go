package dockerfile

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"forkd.dev/forkd/internal/image/flatten"
)

const (
	maxEntries    = 500_000
	maxNameLength = 4096
)

// Entry is a file, directory or symbolic link of a context.
type Entry struct {
	Name     string // below the context; "." is itself
	Type     byte   // tar.TypeReg, tar.TypeDir, tar.TypeSymlink
	Mode     int64
	Size     int64
	Linkname string
	ModTime  time.Time
	SHA256   string // of a file's content

	offset int64
}

// Context is what a build may copy from: a spooled archive with its index. No name in it is ever a path of the host.
type Context struct {
	spool   Spool
	entries map[string]*Entry
	names   []string // sorted
	end     int64
}

// Spool is where the content of a context's files lies.
type Spool interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
}

// NewContext makes an empty one; the content of what is added goes to spool.
func NewContext(spool Spool) *Context {
	return &Context{spool: spool, entries: map[string]*Entry{".": {Name: ".", Type: tar.TypeDir, Mode: 0o755}}}
}

// Add enters what an archive's header describes, under that name, with the content that follows.
func (c *Context) Add(name string, h *tar.Header, content io.Reader) error {
	if !fs.ValidPath(name) && (name == "" || strings.HasPrefix(name, "/") || path.Clean(name) != name || strings.HasPrefix(name, "../") || name == "..") {
		return errors.New("not a relative path inside the context")
	}
	if len(c.entries) >= maxEntries || len(name) > maxNameLength {
		return fmt.Errorf("a context has at most %d entries, and names at most %d bytes", maxEntries, maxNameLength)
	}
	e := &Entry{Name: name, Type: h.Typeflag, Mode: h.Mode & 0o7777, ModTime: h.ModTime, Linkname: h.Linkname}
	switch h.Typeflag {
	case tar.TypeDir, tar.TypeSymlink:
	case tar.TypeReg:
		sum := sha256.New()
		e.offset, e.Size = c.end, h.Size
		n, err := io.Copy(io.NewOffsetWriter(c.spool, c.end), io.TeeReader(content, sum))
		c.end += n
		if err != nil {
			return err
		}
		if n != h.Size {
			return io.ErrUnexpectedEOF
		}
		e.SHA256 = hex.EncodeToString(sum.Sum(nil))
	default:
		return errors.New("neither a file nor a directory nor a symbolic link")
	}
	if old := c.entries[name]; old != nil && (name != "." && old.Type != tar.TypeDir || e.Type != tar.TypeDir) {
		return errors.New("it is there twice")
	}
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		if above := c.entries[dir]; above != nil {
			if above.Type != tar.TypeDir {
				return fmt.Errorf("%s, which it is below of, is no directory", dir)
			}
			break
		}
		c.entries[dir] = &Entry{Name: dir, Type: tar.TypeDir, Mode: 0o755, ModTime: h.ModTime}
	}
	c.entries[name] = e
	c.names = nil
	return nil
}

// Close closes the spool.
func (c *Context) Close() error { return c.spool.Close() }

// open is the content of a file.
func (c *Context) open(e *Entry) io.Reader { return io.NewSectionReader(c.spool, e.offset, e.Size) }

func (c *Context) sorted() []string {
	if c.names == nil {
		c.names = slices.Sorted(maps.Keys(c.entries))
	}
	return c.names
}

// below lists what is below a directory, parents before children.
func (c *Context) below(dir string) []*Entry {
	prefix := dir + "/"
	if dir == "." {
		prefix = ""
	}
	var list []*Entry
	names := c.sorted()
	start, _ := slices.BinarySearch(names, prefix)
	for _, n := range names[start:] {
		if !strings.HasPrefix(n, prefix) {
			break
		}
		if n != "." {
			list = append(list, c.entries[n])
		}
	}
	return list
}

// maxLinks bounds the symbolic links followed for one name, as the kernel does.
const maxLinks = 40

// resolve follows symbolic links, none of which leads out of the context.
func (c *Context) resolve(name string) (*Entry, error) {
	parts := strings.Split(name, "/")
	var done []string
	for hops := 0; len(parts) > 0; {
		part := parts[0]
		parts = parts[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			done = done[:max(0, len(done)-1)]
			continue
		}
		e := c.entries[strings.Join(append(slices.Clone(done), part), "/")]
		if e == nil {
			return nil, fs.ErrNotExist
		}
		if e.Type != tar.TypeSymlink {
			done = append(done, part)
			continue
		}
		if hops++; hops > maxLinks {
			return nil, errors.New("too many symbolic links")
		}
		if strings.HasPrefix(e.Linkname, "/") {
			done = done[:0]
		}
		parts = append(strings.Split(e.Linkname, "/"), parts...)
	}
	if len(done) == 0 {
		return c.entries["."], nil
	}
	return c.entries[strings.Join(done, "/")], nil
}

// item is something a copy puts into the machine.
type item struct {
	name   string // relative to the destination, or "" for the destination itself
	entry  *Entry
	inline *string
}

// Selection is what a copy's sources are, before it is known what its destination is.
type Selection struct {
	c     *Context
	copy  *Copy
	files []item // by name in a destination that is a directory; a single one may take the destination's own name
	trees []item // what directories hold
	packs []*Entry
}

// Select finds a copy's sources in the context. Errors say which is missing.
func (c *Context) Select(cp *Copy) (*Selection, error) {
	s := &Selection{c: c, copy: cp}
	for _, src := range cp.Sources {
		found, err := c.glob(src)
		if err != nil {
			return nil, err
		}
		if len(found) > 1 && !strings.HasSuffix(cp.Dest, "/") {
			return nil, fmt.Errorf("%s: %d sources, so the destination is a directory: end it with a slash", shorten(src), len(found))
		}
		for _, name := range found {
			if err := s.add(name); err != nil {
				return nil, err
			}
		}
	}
	for _, doc := range cp.Inline {
		s.files = append(s.files, item{name: doc.Name, inline: &doc.Content})
	}
	return s, nil
}

func (c *Context) glob(src string) ([]string, error) {
	name := strings.TrimPrefix(path.Clean("/"+src), "/")
	if name == "" {
		return []string{"."}, nil
	}
	if !strings.ContainsAny(name, `*?[\`) {
		if _, err := c.resolve(name); err != nil {
			return nil, fmt.Errorf("%s is not in the build's context (or .dockerignore leaves it out)", shorten(src))
		}
		return []string{name}, nil
	}
	var found []string
	for _, n := range c.sorted() {
		ok, err := path.Match(name, n)
		if err != nil {
			return nil, fmt.Errorf("%s: not a pattern: %w", shorten(src), err)
		}
		if ok && n != "." {
			found = append(found, n)
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("%s matches nothing in the build's context (or .dockerignore leaves it out)", shorten(src))
	}
	return found, nil
}

func (s *Selection) add(name string) error {
	e, err := s.c.resolve(name)
	if err != nil {
		return fmt.Errorf("%s: %w", shorten(name), err)
	}
	if e.Type == tar.TypeDir {
		prefix := len(e.Name) + 1
		if e.Name == "." {
			prefix = 0
		}
		for _, child := range s.c.below(e.Name) {
			s.trees = append(s.trees, item{name: child.Name[prefix:], entry: child})
		}
		s.trees = append(s.trees, item{}) // the destination, also for an empty directory
		return nil
	}
	if s.copy.Add {
		packed, err := s.c.packed(e)
		if err != nil {
			return err
		}
		if packed {
			s.packs = append(s.packs, e)
			return nil
		}
	}
	s.files = append(s.files, item{name: path.Base(name), entry: e})
	return nil
}

// Digest is of everything about the sources that the result depends on; times are not.
func (s *Selection) Digest() string {
	h := sha256.New()
	for _, it := range append(slices.Clone(s.files), s.trees...) {
		switch {
		case it.inline != nil:
			fmt.Fprintf(h, "inline %q %x\n", it.name, sha256.Sum256([]byte(*it.inline)))
		case it.entry != nil:
			e := it.entry
			fmt.Fprintf(h, "%c %q %o %d %q %s\n", e.Type, it.name, e.Mode, e.Size, e.Linkname, e.SHA256)
		}
	}
	for _, e := range s.packs {
		fmt.Fprintf(h, "pack %q %s\n", path.Base(e.Name), e.SHA256)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// NeedsDest says whether it depends on the machine where the copy goes: a single file takes the destination's name unless
// that is a directory there.
func (s *Selection) NeedsDest() bool {
	return !strings.HasSuffix(s.copy.Dest, "/") && len(s.trees) == 0 && len(s.packs) == 0
}

// Owner is a user and a group by number.
type Owner struct{ UID, GID int }

// Write writes the copy as an archive to be extracted over the root directory, in which directories that are there stay as
// they are. destIsDir is what the machine says of the destination, if it was asked.
func (s *Selection) Write(ctx context.Context, w io.Writer, destIsDir bool, owner Owner) error {
	t := tar.NewWriter(w)
	dest := strings.Trim(s.copy.Dest, "/")
	isDir := destIsDir || !s.NeedsDest()
	p := packer{ctx: ctx, t: t, c: s.c, owner: owner, chmod: int64(s.copy.Chmod), made: map[string]bool{}, now: time.Now()}
	if isDir && dest != "" {
		if err := p.dirs(dest); err != nil {
			return err
		}
	}
	for _, it := range s.files {
		name := path.Join(dest, it.name)
		if !isDir {
			name = dest
		}
		if err := p.put(name, it); err != nil {
			return err
		}
	}
	for _, it := range s.trees {
		if it.entry == nil {
			continue
		}
		if err := p.put(path.Join(dest, it.name), it); err != nil {
			return err
		}
	}
	for _, e := range s.packs {
		if err := p.unpack(dest, e, s.copy.Chown != ""); err != nil {
			return fmt.Errorf("unpack %s: %w", e.Name, err)
		}
	}
	return t.Close()
}

type packer struct {
	ctx   context.Context //nolint:containedctx // of one call of Write
	t     *tar.Writer
	c     *Context
	owner Owner
	chmod int64
	made  map[string]bool
	now   time.Time // of what has no time of its own
}

// dirs makes a directory and those above it, as far as they are missing.
func (p *packer) dirs(name string) error {
	if name == "." || name == "" || p.made[name] {
		return nil
	}
	if err := p.dirs(path.Dir(name)); err != nil {
		return err
	}
	p.made[name] = true
	return p.t.WriteHeader(&tar.Header{
		Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, Uid: p.owner.UID, Gid: p.owner.GID, ModTime: p.now, Format: tar.FormatPAX,
	})
}

func (p *packer) put(name string, it item) error {
	if err := p.ctx.Err(); err != nil {
		return context.Cause(p.ctx)
	}
	if err := p.dirs(path.Dir(name)); err != nil {
		return err
	}
	h := &tar.Header{
		Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Uid: p.owner.UID, Gid: p.owner.GID, ModTime: p.now, Format: tar.FormatPAX,
	}
	var content io.Reader
	if it.inline != nil {
		h.Size, content = int64(len(*it.inline)), strings.NewReader(*it.inline)
	} else {
		e := it.entry
		h.Typeflag, h.Mode, h.Size, h.Linkname, h.ModTime = e.Type, e.Mode, e.Size, e.Linkname, e.ModTime.Truncate(time.Second)
		content = p.c.open(e)
	}
	if p.chmod != 0 && h.Typeflag != tar.TypeSymlink {
		h.Mode = p.chmod
	}
	if h.Typeflag == tar.TypeDir {
		if p.made[name] {
			return nil
		}
		p.made[name] = true
		h.Name += "/"
	}
	if err := p.t.WriteHeader(h); err != nil {
		return err
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	_, err := io.Copy(p.t, content)
	return err
}

// packed says whether a file is an archive that ADD unpacks: by its content, as with Docker, not by its name.
func (c *Context) packed(e *Entry) (bool, error) {
	r, closer, err := flatten.Decompress(c.open(e))
	if err != nil {
		return false, nil // a file like others
	}
	defer closer()
	_, err = tar.NewReader(r).Next()
	return err == nil, nil
}

// unpack writes an archive's entries anew below dest.
func (p *packer) unpack(dest string, e *Entry, chown bool) error {
	r, closer, err := flatten.Decompress(p.c.open(e))
	if err != nil {
		return err
	}
	defer closer()
	in := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if n >= maxEntries {
			return fmt.Errorf("more than %d entries", maxEntries)
		}
		if err := p.ctx.Err(); err != nil {
			return context.Cause(p.ctx)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		if name == "" {
			continue
		}
		h.Name = path.Join(dest, name)
		if h.Typeflag == tar.TypeDir {
			h.Name += "/"
		}
		if h.Typeflag == tar.TypeLink {
			h.Linkname = path.Join(dest, path.Clean("/"+h.Linkname))
		}
		if chown {
			h.Uid, h.Gid = p.owner.UID, p.owner.GID
		}
		h.Uname, h.Gname, h.Format, h.PAXRecords = "", "", tar.FormatPAX, xattrs(h)
		if h.ModTime.Unix() < 0 {
			h.ModTime = time.Time{}
		}
		h.AccessTime, h.ChangeTime = time.Time{}, time.Time{}
		if err := p.t.WriteHeader(h); err != nil {
			return err
		}
		if _, err := io.Copy(p.t, in); err != nil {
			return err
		}
	}
}

func xattrs(h *tar.Header) map[string]string {
	records := map[string]string{}
	for k, v := range h.PAXRecords {
		if strings.HasPrefix(k, "SCHILY.xattr.") {
			records[k] = v
		}
	}
	return records
}

// AddArchive adds all of an archive, whose names are below a directory of the context. Hard links become copies; what is
// neither file, directory nor link is left out.
func (c *Context) AddArchive(dir string, r io.Reader) error {
	in := tar.NewReader(r)
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			_, err = io.Copy(io.Discard, r)
			return err
		}
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path.Join("/", dir, path.Clean("/"+h.Name)), "/")
		if name == "" {
			name = "."
		}
		switch h.Typeflag {
		case tar.TypeLink:
			target := c.entries[strings.TrimPrefix(path.Join("/", dir, path.Clean("/"+h.Linkname)), "/")]
			if target == nil || target.Type != tar.TypeReg {
				return fmt.Errorf("%s is a hard link to %s, which is not before it", name, h.Linkname)
			}
			if c.entries[name] == nil {
				linked := *target
				linked.Name = name
				c.entries[name], c.names = &linked, nil
			}
			continue
		case tar.TypeGNUSparse:
			h.Typeflag = tar.TypeReg
		case tar.TypeReg, tar.TypeDir, tar.TypeSymlink:
		default:
			continue
		}
		if c.entries[name] != nil && h.Typeflag != tar.TypeDir { // named by two sources
			continue
		}
		if err := c.Add(name, h, in); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
}

// WriteDir writes an archive with a directory, to be extracted over the root directory.
func WriteDir(w io.Writer, dir string) error {
	t := tar.NewWriter(w)
	p := packer{t: t, made: map[string]bool{}, now: time.Now()}
	if err := p.dirs(strings.Trim(dir, "/")); err != nil {
		return err
	}
	return t.Close()
}
