package flatten

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/guest/wire"
)

// Size is what the tree takes on a disk.
type Size struct {
	Bytes int64 // of contents, in whole blocks, without holes
	Files int64 // inodes
}

// diskBlock is the unit in which a guest's file system gives out space.
const diskBlock = 4096

// Size adds up what the tree takes.
func (t *Tree) Size() Size {
	var s Size
	seen := map[*inode]bool{}
	_ = t.each(func(_ string, n *node) error {
		if n.isDir() {
			s.Files++
			s.Bytes += diskBlock
			return nil
		}
		if seen[n.inode] {
			return nil
		}
		seen[n.inode] = true
		s.Files++
		s.Bytes += (n.stored() + diskBlock - 1) / diskBlock * diskBlock
		return nil
	})
	return s
}

// stored is a file's size without its holes.
func (i *inode) stored() int64 {
	size := i.size
	for _, h := range i.holes {
		size -= h.length
	}
	return size
}

// each visits every name, a directory before what is in it, in order.
func (t *Tree) each(f func(name string, n *node) error) error {
	var visit func(name string, n *node) error
	visit = func(name string, n *node) error {
		if len(name) > maxPath {
			return fmt.Errorf("%w: the name %s is too long", ErrFormat, show(name))
		}
		if err := f(name, n); err != nil {
			return err
		}
		for _, child := range n.sorted() {
			if err := visit(strings.TrimPrefix(name+"/"+child, "/"), n.children[child]); err != nil {
				return err
			}
		}
		return nil
	}
	return visit("", t.root)
}

// wanted is a file whose content is in a layer.
type wanted struct {
	name string
	*inode
}

// alias is another name of a file.
type alias struct{ name, of string }

// Write writes the tree as a tar stream: directories and what has no content in order, then contents in the order of
// the layers, then hard links. No name of it leads through a symbolic link, and none is there twice.
func (t *Tree) Write(ctx context.Context, w io.Writer) error {
	buffered := bufio.NewWriterSize(w, 256<<10)
	out := tar.NewWriter(buffered)
	buf := make([]byte, blockSize)
	contents := make([][]wanted, len(t.layers))
	var aliases []alias
	first := map[*inode]string{}
	err := t.each(func(name string, n *node) error {
		if !n.isDir() {
			if of, ok := first[n.inode]; ok {
				aliases = append(aliases, alias{name, of})
				return nil
			}
			first[n.inode] = name
		}
		switch {
		case n.kind == tar.TypeReg && n.inline == nil && n.open == nil && n.size > 0:
			contents[n.layer] = append(contents[n.layer], wanted{name, n.inode})
			return nil
		case n.kind == tar.TypeReg:
			return writeOwn(ctx, out, name, n.inode, buf)
		}
		return out.WriteHeader(n.header(name))
	})
	if err != nil {
		return err
	}
	for i, files := range contents {
		if err := t.writeLayer(ctx, out, t.layers[i], files, buf); err != nil {
			return fmt.Errorf("%s: %w", t.layers[i].Name, err)
		}
	}
	for _, a := range aliases {
		h := &tar.Header{Typeflag: tar.TypeLink, Name: a.name, Linkname: a.of, Format: tar.FormatPAX}
		if err := out.WriteHeader(h); err != nil {
			return err
		}
	}
	if err := out.Close(); err != nil {
		return err
	}
	return buffered.Flush()
}

// header describes a file; the size is that of what follows.
func (i *inode) header(name string) *tar.Header {
	h := &tar.Header{
		Typeflag: i.kind, Name: name, Linkname: i.link, Mode: i.mode, Uid: i.uid, Gid: i.gid, ModTime: i.mtime,
		Devmajor: i.major, Devminor: i.minor, Format: tar.FormatPAX,
	}
	if i.kind == tar.TypeDir {
		h.Name += "/"
		if name == "" {
			h.Name = "./"
		}
	}
	if len(i.xattrs) > 0 {
		h.PAXRecords = map[string]string{}
		for attr, value := range i.xattrs {
			h.PAXRecords[xattrPrefix+attr] = value
		}
	}
	if i.kind != tar.TypeReg {
		return h
	}
	h.Size = i.stored()
	if len(i.holes) > 0 {
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords[wire.SparseSize] = strconv.FormatInt(i.size, 10)
		h.PAXRecords[wire.SparseHoles] = i.holeText()
	}
	return h
}

func (i *inode) holeText() string {
	var b []byte
	for _, h := range i.holes {
		if len(b) > 0 {
			b = append(b, ' ')
		}
		b = strconv.AppendInt(b, h.offset, 10)
		b = append(b, '+')
		b = strconv.AppendInt(b, h.length, 10)
	}
	return string(b)
}

// writeOwn writes a file that is in no layer.
func writeOwn(ctx context.Context, out *tar.Writer, name string, i *inode, buf []byte) error {
	if err := out.WriteHeader(i.header(name)); err != nil {
		return err
	}
	if i.open == nil {
		_, err := out.Write(i.inline)
		return err
	}
	r, err := i.open(ctx)
	if err != nil {
		return err
	}
	defer r.Close()
	n, err := io.CopyBuffer(out, io.LimitReader(r, i.size), buf)
	if err == nil && n < i.size {
		err = io.ErrUnexpectedEOF
	}
	if v, ok := r.(interface{ Verify() error }); ok && err == nil {
		err = v.Verify()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", show(name), err)
	}
	return nil
}

// writeLayer reads a layer again and passes on the contents that are wanted of it.
func (t *Tree) writeLayer(ctx context.Context, out *tar.Writer, l *Layer, files []wanted, buf []byte) error {
	if len(files) == 0 {
		return nil
	}
	slices.SortFunc(files, func(a, b wanted) int { return int(a.entry - b.entry) })
	r, err := openLayer(ctx, &Layer{Open: l.Open})
	if err != nil {
		return err
	}
	defer r.Close()
	archive := tar.NewReader(r)
	for n := int32(0); len(files) > 0; n++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		h, err := archive.Next()
		if err != nil {
			return readError(err)
		}
		if n != files[0].entry {
			continue
		}
		f := files[0]
		files = files[1:]
		if h.Size != f.size {
			return errors.New("it changed while the image was being built; build again")
		}
		if err := out.WriteHeader(f.header(f.name)); err != nil {
			return err
		}
		if err := copyData(ctx, out, archive, f.inode, buf); err != nil {
			return fmt.Errorf("%s: %w", show(f.name), err)
		}
	}
	return nil
}

// copyData copies a content without its holes.
func copyData(ctx context.Context, w io.Writer, r io.Reader, i *inode, buf []byte) error {
	var off int64
	piece := func(w io.Writer, n int64) error {
		off += n
		for n > 0 && ctx.Err() == nil {
			m, err := io.ReadFull(r, buf[:min(n, int64(len(buf)))])
			if err != nil {
				return readError(err)
			}
			if _, err := w.Write(buf[:m]); err != nil {
				return err
			}
			n -= int64(m)
		}
		return context.Cause(ctx)
	}
	for _, h := range i.holes {
		if err := piece(w, h.offset-off); err != nil {
			return err
		}
		if err := piece(io.Discard, h.length); err != nil {
			return err
		}
	}
	return piece(w, i.size-off)
}
