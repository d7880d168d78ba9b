package flatten

import (
	"archive/tar"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Limits bound what layers may make of the host and the guest. All layers of an image count together.
type Limits struct {
	Layers  int
	Entries int   // headers read
	Names   int64 // bytes of names, link targets and attributes kept
	Content int64 // bytes of files, without runs of zeros
	Stream  int64 // bytes that the layers unpack to
}

// DefaultLimits are wide enough for any image that is meant to be used. content is the size of the disk to fill.
func DefaultLimits(content int64) Limits {
	return Limits{Layers: 500, Entries: 1_000_000, Names: 256 << 20, Content: content, Stream: max(128<<30, 2*content)}
}

// ErrLimit is wrapped by errors about an image that is too large.
var ErrLimit = errors.New("the image is too large")

// ErrFormat is wrapped by errors about layers that make no sense.
var ErrFormat = errors.New("malformed layer")

const (
	maxName     = 255 // of one component, as Linux has it
	maxPath     = 4000
	maxLink     = 4000
	maxSymlinks = 255 // followed for one name
	maxXattrs   = 3800
	maxOwner    = 1<<32 - 2
)

// node is a name in the tree.
type node struct {
	*inode
	children map[string]*node // of a directory
}

// inode is what hard links share.
type inode struct {
	kind         byte // tar's type flag
	mode         int64
	uid, gid     int
	mtime        time.Time
	link         string
	major, minor int64
	xattrs       map[string]string

	// A regular file: where its content is.
	size         int64
	layer, entry int32
	holes        []hole
	inline       []byte // or this
	open         Opener // or this
}

type hole struct{ offset, length int64 }

func (n *node) isDir() bool { return n.kind == tar.TypeDir }

// Tree is the file system that the layers added so far make.
type Tree struct {
	limits Limits
	layers []*Layer
	root   *node

	entries int
	names   int64
	content int64 // of files, without holes
	files   int64 // of files, with them
	stream  int64
}

// New makes an empty tree.
func New(limits Limits) *Tree {
	return &Tree{limits: limits, root: newDir()}
}

// newDir is a directory that no layer describes.
func newDir() *node {
	return &node{
		inode:    &inode{kind: tar.TypeDir, mode: 0o755, mtime: time.Unix(0, 0)},
		children: map[string]*node{},
	}
}

// entry is a header of a layer, read and checked.
type entry struct {
	*inode
	name   string // clean, without a leading slash; "" is the root
	target string // of a hard link, likewise
}

const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
	aufsPrefix     = ".wh..wh."
)

// apply lays a layer over the tree. A whiteout hides what is below, wherever in the layer it is written.
func (t *Tree) apply(entries []entry) error {
	for _, e := range entries {
		if err := t.whiteout(e.name); err != nil {
			return err
		}
	}
	for _, e := range entries {
		if _, base := split(e.name); strings.HasPrefix(base, whiteoutPrefix) {
			continue
		}
		if err := t.put(e); err != nil {
			return err
		}
	}
	return nil
}

// whiteout removes what a name says is gone, if it says so.
func (t *Tree) whiteout(name string) error {
	parent, base := split(name)
	hidden, ok := strings.CutPrefix(base, whiteoutPrefix)
	if !ok {
		return nil
	}
	if base != opaqueName && strings.HasPrefix(base, aufsPrefix) {
		return nil // bookkeeping of a file system of old
	}
	if hidden == "" || hidden == "." || hidden == ".." {
		return fmt.Errorf("%w: %q hides nothing that could have a name", ErrFormat, name)
	}
	dir, err := t.find(parent)
	if err != nil {
		return err
	}
	switch {
	case dir == nil || !dir.isDir(): // hides what never was
	case base == opaqueName:
		clear(dir.children)
	default:
		delete(dir.children, hidden)
	}
	return nil
}

// put makes an entry part of the tree, in place of what has its name.
func (t *Tree) put(e entry) error {
	if e.name == "" {
		if e.kind != tar.TypeDir {
			return fmt.Errorf("%w: the root is not a directory", ErrFormat)
		}
		t.root.inode = e.inode
		return nil
	}
	parent, base := split(e.name)
	dir, err := t.enter(parent)
	if err != nil {
		return fmt.Errorf("%s: %w", e.name, err)
	}
	old := dir.children[base]
	switch e.kind {
	case tar.TypeDir:
		if old != nil && old.isDir() {
			old.inode = e.inode
			return nil
		}
		dir.children[base] = &node{inode: e.inode, children: map[string]*node{}}
	case tar.TypeLink:
		target, err := t.linked(e.target)
		if err != nil {
			return fmt.Errorf("%s is a hard link to %s, %w", e.name, e.target, err)
		}
		dir.children[base] = &node{inode: target}
	default:
		dir.children[base] = &node{inode: e.inode}
	}
	return nil
}

func (t *Tree) linked(name string) (*inode, error) {
	parent, base := split(name)
	dir, err := t.find(parent)
	if err != nil {
		return nil, err
	}
	if dir != nil && dir.isDir() {
		if n := dir.children[base]; n != nil && !n.isDir() {
			return n.inode, nil
		} else if n != nil {
			return nil, fmt.Errorf("%w: which is a directory", ErrFormat)
		}
	}
	return nil, fmt.Errorf("%w: which is not there", ErrFormat)
}

// find follows a path to what it leads to, symbolic links included. nil: there is nothing.
func (t *Tree) find(name string) (*node, error) { return t.walk(name, nil) }

// enter finds a directory, made with its parents when missing.
func (t *Tree) enter(name string) (*node, error) {
	n, err := t.walk(name, newDir)
	if err == nil && !n.isDir() {
		err = fmt.Errorf("%w: %s is not a directory", ErrFormat, name)
	}
	return n, err
}

// walk follows a path as a kernel whose root is the tree's would. Missing directories are made by create, if there is
// one.
func (t *Tree) walk(name string, create func() *node) (*node, error) {
	rest := components(name)
	at := []*node{t.root} // the way here, for ".."
	for links := 0; len(rest) > 0; {
		part := rest[0]
		rest = rest[1:]
		dir := at[len(at)-1]
		if part == ".." {
			at = at[:max(1, len(at)-1)]
			continue
		}
		if !dir.isDir() {
			if create == nil {
				return nil, nil //nolint:nilnil // nothing is there, which is no failure
			}
			return nil, fmt.Errorf("%w: what should be a directory above it is none", ErrFormat)
		}
		next := dir.children[part]
		switch {
		case next == nil && create == nil:
			return nil, nil //nolint:nilnil // nothing is there, which is no failure
		case next == nil:
			if len(part) > maxName || len(at) > maxPath/2 {
				return nil, fmt.Errorf("%w: a symbolic link leads to a name that is too long", ErrFormat)
			}
			next = create()
			dir.children[part] = next
		case next.kind == tar.TypeSymlink:
			if links++; links > maxSymlinks {
				return nil, fmt.Errorf("%w: too many symbolic links", ErrFormat)
			}
			if strings.HasPrefix(next.link, "/") {
				at = at[:1]
			}
			rest = append(components(next.link), rest...)
			if len(rest) > maxPath {
				return nil, fmt.Errorf("%w: symbolic links lead to a name that is too long", ErrFormat)
			}
			continue
		}
		at = append(at, next)
	}
	return at[len(at)-1], nil
}

// components are the parts of a path, without empty ones and ".".
func components(name string) []string {
	return slices.DeleteFunc(strings.Split(name, "/"), func(s string) bool { return s == "" || s == "." })
}

// split cuts a clean name into its parent and its last component.
func split(name string) (parent, base string) {
	i := strings.LastIndexByte(name, '/')
	if i < 0 {
		return "", name
	}
	return name[:i], name[i+1:]
}

// children in order.
func (n *node) sorted() []string { return slices.Sorted(maps.Keys(n.children)) }
