package images

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// treeWord as the first argument makes this test's own executable print a tree, in a guest: `BINARY forkd-tree DIR`.
const treeWord = "forkd-tree"

// printTree walks a directory, without what is mounted below it, and prints a line a name.
func printTree(root string, w io.Writer) error {
	var top unix.Stat_t
	if err := unix.Lstat(root, &top); err != nil {
		return err
	}
	out := bufio.NewWriter(w)
	links := map[uint64]string{} // inode → first name
	var visit func(name string) error
	visit = func(name string) error {
		path := filepath.Join(root, name)
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return &fs.PathError{Op: "lstat", Path: path, Err: err}
		}
		if st.Dev != top.Dev {
			return nil
		}
		n := node{
			mode: int64(st.Mode & 0o7777), uid: int(st.Uid), gid: int(st.Gid), seconds: st.Mtim.Sec, nanos: st.Mtim.Nsec,
		}
		isDir := false
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			n.kind, isDir = "dir", true
		case unix.S_IFREG:
			n.kind, n.size = "file", st.Size
			sum, err := sumFile(path, st.Size)
			if err != nil {
				return err
			}
			n.sum = sum
		case unix.S_IFLNK:
			n.kind, n.mode = "link", 0o777
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			n.target = target
		case unix.S_IFCHR:
			n.kind, n.device = "char", fmt.Sprintf("%d,%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		case unix.S_IFBLK:
			n.kind, n.device = "block", fmt.Sprintf("%d,%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		case unix.S_IFIFO:
			n.kind = "fifo"
		default:
			n.kind = fmt.Sprintf("%o", st.Mode)
		}
		var err error
		if n.attributes, err = attributes(path); err != nil {
			return err
		}
		same := ""
		if !isDir && st.Nlink > 1 {
			if links[st.Ino] == "" {
				links[st.Ino] = name
			}
			same = links[st.Ino]
		}
		fmt.Fprintln(out, n.line(name, same))
		if !isDir {
			return nil
		}
		entries, err := os.ReadDir(path) // in order of the names' bytes
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := visit(strings.TrimPrefix(name+"/"+e.Name(), "/")); err != nil {
				return err
			}
		}
		return nil
	}
	if err := visit(""); err != nil {
		return err
	}
	return out.Flush()
}

// node is what a line says of a name.
type node struct {
	kind           string
	mode           int64
	uid, gid       int
	size           int64
	sum            string
	target, device string
	seconds, nanos int64
	attributes     map[string]string
}

// line describes a name; of names that are hard links of one another each names the first of them. The times of
// directories are left out: making what is in them changes those.
func (n *node) line(name, first string) string {
	s := fmt.Sprintf("%q %s %04o %d:%d", name, n.kind, n.mode, n.uid, n.gid)
	switch n.kind {
	case "file":
		s += fmt.Sprintf(" %d %s", n.size, n.sum)
	case "link":
		s += fmt.Sprintf(" -> %q", n.target)
	case "char", "block":
		s += " " + n.device
	}
	if n.kind != "dir" {
		s += fmt.Sprintf(" @%d.%09d", n.seconds, n.nanos)
	}
	if first != "" {
		s += fmt.Sprintf(" = %q", first)
	}
	var names []string
	for name := range n.attributes {
		names = append(names, name)
	}
	slices.Sort(names)
	parts := []string{s}
	for _, name := range names {
		parts = append(parts, fmt.Sprintf("%s=%q", name, n.attributes[name]))
	}
	return strings.Join(parts, " ")
}

func attributes(path string) (map[string]string, error) {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buf)
	if err != nil || n == 0 {
		return nil, err
	}
	found := map[string]string{}
	value := make([]byte, 64<<10)
	for name := range strings.SplitSeq(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00") {
		m, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			return nil, fmt.Errorf("%s of %s: %w", name, path, err)
		}
		found[name] = string(value[:m])
	}
	return found, nil
}

// sumBlock is the unit in which contents are digested: blocks of zeros do not count, so that a hole of a gigabyte costs
// nothing and two contents are equal exactly when their sizes and sums are.
const sumBlock = 64 << 10

type summer struct{ hash [32]byte }

func (s *summer) block(at int64, b []byte) {
	if len(bytes.TrimLeft(b, "\x00")) == 0 {
		return
	}
	h := sha256.New()
	fmt.Fprintf(h, "%d %d ", at, len(b))
	h.Write(s.hash[:])
	h.Write(b)
	copy(s.hash[:], h.Sum(nil))
}

func (s *summer) text() string { return hex.EncodeToString(s.hash[:8]) }

// sumReader digests a stream.
func sumReader(r io.Reader) (string, error) {
	s := &summer{}
	buf := make([]byte, sumBlock)
	for at := int64(0); ; at += sumBlock {
		n, err := io.ReadFull(r, buf)
		if n > 0 {
			s.block(at, buf[:n])
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return s.text(), nil
		}
		if err != nil {
			return "", err
		}
	}
}

// sumFile digests a file where it has data.
func sumFile(path string, size int64) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	s := &summer{}
	buf := make([]byte, sumBlock)
	for at := int64(0); at < size; {
		data, err := f.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return "", err
		}
		at = data / sumBlock * sumBlock
		n, err := f.ReadAt(buf[:min(sumBlock, size-at)], at)
		if err != nil && !errors.Is(err, io.EOF) {
			return "", err
		}
		s.block(at, buf[:n])
		at += sumBlock
	}
	return s.text(), nil
}
