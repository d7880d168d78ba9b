package images

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
)

// reference unpacks layers one by one into a flat table of names, as the image specification says, and as simply as it
// can be said. It shares nothing with the program under test but the standard library's reader of tar files.
type reference struct {
	names map[string]*node
}

func newReference() *reference {
	return &reference{names: map[string]*node{"": {kind: "dir", mode: 0o755}}}
}

// layer applies one layer.
func (r *reference) layer(stream func() io.ReadCloser) error {
	// What a layer hides is what is below it, so that comes first.
	err := r.each(stream, func(h *tar.Header, _ io.Reader) error {
		base := path.Base(h.Name)
		hidden, ok := strings.CutPrefix(base, ".wh.")
		if !ok {
			return nil
		}
		dir, there := r.follow(path.Dir(clean(h.Name)), false)
		switch {
		case !there:
		case base == ".wh..wh..opq":
			r.remove(dir + "/")
		case !strings.HasPrefix(hidden, ".wh."):
			r.remove(join(dir, hidden))
			r.remove(join(dir, hidden) + "/")
		}
		return nil
	})
	if err != nil {
		return err
	}
	return r.each(stream, func(h *tar.Header, content io.Reader) error {
		if strings.HasPrefix(path.Base(h.Name), ".wh.") {
			return nil
		}
		return r.entry(h, content)
	})
}

func (r *reference) each(stream func() io.ReadCloser, f func(*tar.Header, io.Reader) error) error {
	s := stream()
	defer s.Close()
	t := tar.NewReader(s)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := f(h, t); err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
	}
}

func clean(name string) string { return path.Clean("/" + name)[1:] }

func join(dir, base string) string { return strings.TrimPrefix(dir+"/"+base, "/") }

// remove removes a name, or with a slash at its end everything below it.
func (r *reference) remove(name string) {
	for known := range r.names {
		if known == name || known != "" && strings.HasSuffix(name, "/") && (name == "/" || strings.HasPrefix(known, name)) {
			delete(r.names, known)
		}
	}
}

// follow resolves symbolic links in a directory's name; those that are missing are made if asked.
func (r *reference) follow(dir string, create bool) (string, bool) {
	rest, at := strings.Split(dir, "/"), ""
	for hops := 0; len(rest) > 0 && hops < 1000; hops++ {
		part := rest[0]
		rest = rest[1:]
		if part == "" || part == "." {
			continue
		}
		if part == ".." {
			at = path.Dir("/" + at)[1:]
			continue
		}
		next := join(at, part)
		n := r.names[next]
		switch {
		case n == nil && !create:
			return "", false
		case n == nil:
			r.names[next] = &node{kind: "dir", mode: 0o755}
		case n.kind == "link":
			if strings.HasPrefix(n.target, "/") {
				at = ""
			}
			rest = append(strings.Split(n.target, "/"), rest...)
			continue
		}
		at = next
	}
	return at, true
}

func (r *reference) entry(h *tar.Header, content io.Reader) error {
	name := clean(h.Name)
	if name != "" {
		dir, _ := r.follow(path.Dir(name), true)
		name = join(dir, path.Base(name))
	}
	if h.Typeflag == tar.TypeLink {
		target := clean(h.Linkname)
		dir, _ := r.follow(path.Dir(target), false)
		n := r.names[join(dir, path.Base(target))]
		if n == nil {
			return errors.New("a link to nothing")
		}
		r.remove(name + "/")
		r.names[name] = n
		return nil
	}
	n := &node{
		mode: h.Mode & 0o7777, uid: h.Uid, gid: h.Gid, seconds: h.ModTime.Unix(), nanos: int64(h.ModTime.Nanosecond()),
	}
	for key, value := range h.PAXRecords {
		if attr, ok := strings.CutPrefix(key, "SCHILY.xattr."); ok {
			if n.attributes == nil {
				n.attributes = map[string]string{}
			}
			n.attributes[attr] = value
		}
	}
	old := r.names[name]
	if old != nil && (old.kind != "dir" || h.Typeflag != tar.TypeDir) {
		r.remove(name + "/")
	}
	r.names[name] = n
	switch h.Typeflag {
	case tar.TypeDir:
		n.kind = "dir"
	case tar.TypeSymlink:
		n.kind, n.target, n.mode = "link", h.Linkname, 0o777
	case tar.TypeChar, tar.TypeBlock:
		n.kind = map[byte]string{tar.TypeChar: "char", tar.TypeBlock: "block"}[h.Typeflag]
		n.device = fmt.Sprintf("%d,%d", h.Devmajor, h.Devminor)
	case tar.TypeFifo:
		n.kind = "fifo"
	default:
		n.kind, n.size = "file", h.Size
		sum, err := sumReader(content)
		if err != nil {
			return err
		}
		n.sum = sum
	}
	return nil
}

// lines describes the tree as printTree does.
func (r *reference) lines() map[string]string {
	counts, first := map[*node]int{}, map[*node]string{}
	names := slices.Sorted(maps.Keys(r.names))
	// A directory's entries come right after it, so names are compared component by component.
	slices.SortFunc(names, func(a, b string) int { return slices.Compare(strings.Split(a, "/"), strings.Split(b, "/")) })
	for _, name := range names {
		n := r.names[name]
		if counts[n]++; first[n] == "" {
			first[n] = name
		}
	}
	out := map[string]string{}
	for _, name := range names {
		n, same := r.names[name], ""
		if counts[n] > 1 {
			same = first[n]
		}
		out[name] = n.line(name, same)
	}
	return out
}

// reference unpacks a family.
func (f *family) reference() (map[string]string, error) {
	r := newReference()
	for i, l := range f.layers {
		err := r.layer(func() io.ReadCloser {
			pr, pw := io.Pipe()
			go func() { pw.CloseWithError(l(pw)) }()
			return pr
		})
		if err != nil {
			return nil, fmt.Errorf("layer %d: %w", i+1, err)
		}
	}
	return r.lines(), nil
}
