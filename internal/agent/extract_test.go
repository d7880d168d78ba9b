package agent

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/agenttest"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// archiveOf makes a tar of headers; a regular file's content is its Size times "x" unless given.
func archiveOf(t testing.TB, headers ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		content := []byte(h.PAXRecords["test.content"])
		delete(h.PAXRecords, "test.content")
		if h.Typeflag == tar.TypeReg && len(content) > 0 {
			h.Size = int64(len(content))
		}
		if h.Uid == 0 {
			h.Uid, h.Gid = os.Getuid(), os.Getgid()
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func file(name, content string) *tar.Header {
	return &tar.Header{Name: name, Typeflag: tar.TypeReg, PAXRecords: map[string]string{"test.content": content}}
}

func link(kind byte, name, target string) *tar.Header {
	return &tar.Header{Name: name, Typeflag: kind, Linkname: target, Mode: 0o777}
}

func directory(name string) *tar.Header {
	return &tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}
}

func unpackBytes(t *testing.T, dir string, b []byte) error {
	t.Helper()
	return unpack(t.Context(), dir, nil, bytes.NewReader(b))
}

// What is packed comes out the same: names, kinds, modes, times, links, attributes, holes.
func TestPackAndUnpack(t *testing.T) {
	src := filepath.Join(t.TempDir(), "tree")
	then := time.Date(2020, 1, 2, 3, 4, 5, 678_000_000, time.UTC)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(filepath.Join(src, "a/b"), 0o750))
	must(os.WriteFile(filepath.Join(src, "a/file"), []byte("content"), 0o640))
	must(os.Chmod(filepath.Join(src, "a/file"), 0o640|fs.ModeSetuid))
	must(os.WriteFile(filepath.Join(src, "a/empty"), nil, 0o600))
	must(os.WriteFile(filepath.Join(src, "hole"), append(make([]byte, 300_000), 'x'), 0o600))
	must(os.WriteFile(filepath.Join(src, "zeros"), make([]byte, 200_000), 0o600))
	must(os.Link(filepath.Join(src, "a/file"), filepath.Join(src, "a/b/hard")))
	must(os.Symlink("../nowhere", filepath.Join(src, "a/soft")))
	must(unix.Mkfifo(filepath.Join(src, "fifo"), 0o600))
	attributes := unix.Setxattr(filepath.Join(src, "a/file"), "user.test", []byte("value\x00\n"), 0) == nil
	for _, name := range []string{"a/file", "a/b", "a", "hole", "."} {
		must(os.Chtimes(filepath.Join(src, name), then, then))
	}
	var b bytes.Buffer
	must(pack(t.Context(), src, &b))
	dst := filepath.Join(t.TempDir(), "made", "too")
	must(unpackBytes(t, dst, b.Bytes()))
	if diff := cmp.Diff(describe(t, src), describe(t, filepath.Join(dst, "tree"))); diff != "" {
		t.Fatal(diff)
	}
	if attributes {
		var value [64]byte
		n, err := unix.Getxattr(filepath.Join(dst, "tree/a/file"), "user.test", value[:])
		if err != nil || string(value[:n]) != "value\x00\n" {
			t.Errorf("attribute %q, %v", value[:max(n, 0)], err)
		}
	}
	one, err := os.Stat(filepath.Join(dst, "tree/a/file"))
	must(err)
	two, err := os.Stat(filepath.Join(dst, "tree/a/b/hard"))
	must(err)
	if !os.SameFile(one, two) {
		t.Error("the hard link is a file of its own")
	}
	// Again over what is there, as an update would.
	must(unpackBytes(t, dst, b.Bytes()))
	if diff := cmp.Diff(describe(t, src), describe(t, filepath.Join(dst, "tree"))); diff != "" {
		t.Fatal(diff)
	}
}

// describe maps each name to what matters of it.
func describe(t *testing.T, root string) map[string]string {
	t.Helper()
	tree := map[string]string{}
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		text := info.Mode().String()
		if info.Mode()&fs.ModeSymlink == 0 {
			text += info.ModTime().UTC().Format(" 2006-01-02T15:04:05.000000000")
		}
		switch {
		case info.Mode().IsRegular():
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			text += " " + string(content)
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			text += " -> " + target
		}
		tree[rel] = text
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

func TestHolesStayHoles(t *testing.T) {
	dir := t.TempDir()
	if err := unpackBytes(t, dir, archiveOf(t, file("zeros", string(make([]byte, 8<<20))))); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(dir, "zeros"))
	if err != nil {
		t.Fatal(err)
	}
	if st := info.Sys().(*syscall.Stat_t); info.Size() != 8<<20 || st.Blocks*512 > 1<<20 {
		t.Fatalf("%d bytes in %d blocks", info.Size(), st.Blocks)
	}
}

// No archive reaches outside of the directory it is unpacked into.
func TestUnpackStaysInside(t *testing.T) {
	for name, headers := range map[string][]*tar.Header{
		"dots":                 {file("../outside/f", "evil")},
		"absolute":             {file("/outside/f", "evil")},
		"dots in the middle":   {file("a/../../outside/f", "evil")},
		"link to parent":       {link(tar.TypeSymlink, "l", ".."), file("l/outside/f", "evil")},
		"absolute link":        {link(tar.TypeSymlink, "l", "OUTSIDE"), file("l/f", "evil")},
		"link to the file":     {link(tar.TypeSymlink, "l", "OUTSIDE/f"), file("l", "evil")},
		"link chain":           {link(tar.TypeSymlink, "a", "../.."), link(tar.TypeSymlink, "b", "a/../outside"), file("b/f", "evil")},
		"directory over link":  {link(tar.TypeSymlink, "l", "OUTSIDE"), directory("l/"), file("l/f", "evil")},
		"hard link":            {link(tar.TypeLink, "h", "../outside/f"), file("h", "evil")},
		"hard link via link":   {link(tar.TypeSymlink, "l", "OUTSIDE"), link(tar.TypeLink, "h", "l/f"), file("h", "evil")},
		"metadata of a link":   {link(tar.TypeSymlink, "l", "OUTSIDE/f"), {Name: "l", Typeflag: tar.TypeFifo, Mode: 0o777}},
		"link in place before": {file("before/f", "evil")},
	} {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			outside := filepath.Join(base, "outside")
			dir := filepath.Join(base, "in", "side")
			for _, d := range []string{outside, dir} {
				if err := os.MkdirAll(d, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(filepath.Join(outside, "f"), []byte("good"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(outside, filepath.Join(dir, "before")); err != nil {
				t.Fatal(err)
			}
			for _, h := range headers {
				h.Linkname = strings.ReplaceAll(h.Linkname, "OUTSIDE", outside)
			}
			before := describe(t, outside)
			_ = unpackBytes(t, dir, archiveOf(t, headers...)) // may be refused or land inside
			if diff := cmp.Diff(before, describe(t, outside)); diff != "" {
				t.Fatal(diff)
			}
			entries, err := os.ReadDir(base)
			if err != nil || len(entries) != 2 {
				t.Fatalf("%v, %v", entries, err)
			}
		})
	}
}

func TestUnpackReplaces(t *testing.T) {
	dir := t.TempDir()
	first := archiveOf(t, directory("usr/"), directory("usr/lib/"), link(tar.TypeSymlink, "lib", "usr/lib"), link(tar.TypeSymlink, "var", "/usr"),
		file("f", "a long content"), link(tar.TypeSymlink, "s", "f"), directory("d"))
	second := archiveOf(t, directory("lib/"), file("lib/x", "through the link"), file("var/y", "through an absolute one"),
		file("f", "short"), file("s", "no link any more"), link(tar.TypeSymlink, "d", "f"))
	for _, b := range [][]byte{first, second} {
		if err := unpackBytes(t, dir, b); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"usr/lib/x": "through the link", "usr/y": "through an absolute one", "f": "short", "s": "no link any more", "d": "short",
	} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if target, err := os.Readlink(filepath.Join(dir, "lib")); err != nil || target != "usr/lib" {
		t.Errorf("lib -> %q, %v", target, err)
	}
}

func TestUnpackRefusesWhatIsCut(t *testing.T) {
	whole := archiveOf(t, file("f", strings.Repeat("x", 5000)))
	for _, n := range []int{1, 100, 511, 513, 4000} {
		err := unpackBytes(t, t.TempDir(), whole[:n])
		if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, tar.ErrHeader) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

func TestUnpackAsUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it becomes another user")
	}
	dir := t.TempDir()
	theirs := filepath.Join(dir, "theirs")
	if err := errors.Join(os.Mkdir(theirs, 0o755), os.Chown(theirs, 12345, 12345)); err != nil {
		t.Fatal(err)
	}
	testenv.Enterable(t, dir)
	user := testUser(12345)
	b := archiveOf(t, file("f", "x"))
	err := account.As(user, func() error { return unpack(t.Context(), theirs, user, bytes.NewReader(b)) })
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(theirs, "f"))
	if err != nil || info.Sys().(*syscall.Stat_t).Uid != 12345 {
		t.Fatalf("%v, %v", info, err)
	}
	err = account.As(user, func() error { return unpack(t.Context(), dir, user, bytes.NewReader(b)) })
	if !errors.Is(err, fs.ErrPermission) {
		t.Fatalf("wrote into root's directory: %v", err)
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add(archiveOf(f, directory("d"), file("d/f", "x"), link(tar.TypeSymlink, "s", "d"), link(tar.TypeLink, "h", "d/f")))
	f.Fuzz(func(t *testing.T, b []byte) {
		base := t.TempDir()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_ = unpack(ctx, filepath.Join(base, "in"), testUser(uint32(os.Getuid())), bytes.NewReader(b))
		if entries, err := os.ReadDir(base); err != nil || len(entries) != 1 {
			t.Fatalf("%v, %v", entries, err)
		}
	})
}

// An archive may leave out what is zero: at the beginning, between, and at the end of a file.
func TestUnpackHoles(t *testing.T) {
	for _, c := range []struct{ size, holes, data, want string }{
		{"10", "0+3 5+2", "abcde", "\x00\x00\x00ab\x00\x00cde"},
		{"8", "3+5", "abc", "abc\x00\x00\x00\x00\x00"},
		{"4", "0+4", "", "\x00\x00\x00\x00"},
		{"3", "", "abc", "abc"},
		{"3", "1+1", "abc", ""},
		{"3", "2+2", "ab", ""},
		{"3", "2+1 1+1", "a", ""},
		{"3", "0-1", "abc", ""},
		{"-1", "", "", ""},
		{"x", "", "", ""},
		{"9223372036854775807", "1+9223372036854775807", "a", ""},
	} {
		dir := t.TempDir()
		h := file("f", c.data)
		h.PAXRecords[wire.SparseSize], h.PAXRecords[wire.SparseHoles] = c.size, c.holes
		err := unpackBytes(t, dir, archiveOf(t, h))
		if c.want == "" {
			if agenttest.Code(err) != wire.CodeInvalid {
				t.Errorf("%+v: %v", c, err)
			}
			continue
		}
		if got, _ := os.ReadFile(filepath.Join(dir, "f")); err != nil || string(got) != c.want {
			t.Errorf("%+v: %q %v", c, got, err)
		}
	}
}
