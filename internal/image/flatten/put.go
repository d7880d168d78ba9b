package flatten

import (
	"archive/tar"
	"fmt"
	"strings"
	"time"
)

// File is something to put on top of what the layers made. Its name is absolute or relative to the root and may lead
// through symbolic links; parents that are missing are made.
type File struct {
	Name     string
	Mode     int64
	UID, GID int
	Dir      bool // one that is there stays as it is
	Content  []byte
	Open     Opener // instead of Content
	Size     int64  // of what Open opens
}

// Put puts a file into the tree, in place of what has its name.
func (t *Tree) Put(f File) error {
	name, err := cleanName(f.Name)
	if err != nil {
		return err
	}
	if f.Dir {
		n, err := t.find(name)
		if err != nil {
			return err
		}
		if n != nil && n.isDir() {
			return nil
		}
	}
	i := &inode{
		kind: tar.TypeReg, mode: f.Mode, uid: f.UID, gid: f.GID, mtime: time.Unix(0, 0), layer: -1,
		inline: f.Content, open: f.Open, size: int64(len(f.Content)),
	}
	if f.Dir {
		i.kind, i.inline, i.size = tar.TypeDir, nil, 0
	}
	if f.Open != nil {
		i.size = f.Size
	}
	return t.put(entry{inode: i, name: name})
}

// Mount makes sure that something can be mounted at a name below the root: it is a directory, or made one.
func (t *Tree) Mount(name string) error {
	n := t.root.children[name]
	switch {
	case n == nil:
		t.root.children[name] = newDir()
	case !n.isDir():
		return fmt.Errorf("%w: /%s must be a directory: a machine mounts a file system there", ErrFormat, name)
	}
	return nil
}

// Reach makes sure that a directory can be made at a name: what is there leads to one, be it through a link to what is yet
// to be made, and nothing stands in the way of its parents.
func (t *Tree) Reach(name string) error {
	parent, _ := split(strings.TrimPrefix(name, "/"))
	if t.Exists(name) {
		parent = name
	}
	_, err := t.enter(parent)
	return err
}

// Exists reports whether there is something of that name, be it a link that leads nowhere.
func (t *Tree) Exists(name string) bool {
	parent, base := split(strings.TrimPrefix(name, "/"))
	dir, err := t.find(parent)
	return err == nil && dir != nil && dir.children[base] != nil
}

// Executable reports whether a name leads to a file that may be executed.
func (t *Tree) Executable(name string) bool {
	n, err := t.find(name)
	return err == nil && n != nil && n.kind == tar.TypeReg && n.mode&0o111 != 0
}

// Account returns the content of /etc/passwd or /etc/group; nil when there is none, or it is too large to be read.
func (t *Tree) Account(name string) []byte {
	n, err := t.find(name)
	if err != nil || n == nil || n.kind != tar.TypeReg {
		return nil
	}
	return n.inline
}
