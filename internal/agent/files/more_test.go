package files

import (
	"archive/tar"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/agenttest"
	"forkd.dev/forkd/internal/guest/wire"
)

func TestMetadata(t *testing.T) {
	f := newFixture(t)
	path := f.path("file")
	want := map[string]string{"author": "me", "empty": ""}
	entry, err := f.write(wire.WriteRequest{Path: path, Metadata: want}, "x")
	if err != nil {
		t.Fatal(err)
	}
	if entry.Metadata == nil {
		if unix.Setxattr(path, "user.test", nil, 0) != nil {
			t.Skip("this file system has no user attributes")
		}
	}
	if !maps.Equal(entry.Metadata, want) {
		t.Errorf("%v", entry.Metadata)
	}
	// What is no metadata, or no text, is not shown.
	for name, value := range map[string]string{"user.other": "x", "user.e2b.bytes": "\xff", "user.e2b.set": "inside"} {
		if err := unix.Setxattr(path, name, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	entry, err = f.entry(wire.MethodFileStat, wire.PathRequest{Path: path})
	if err != nil || !maps.Equal(entry.Metadata, map[string]string{"author": "me", "empty": "", "set": "inside"}) {
		t.Errorf("%v %v", entry.Metadata, err)
	}
	if entry, err = f.write(wire.WriteRequest{Path: path}, "y"); err != nil || entry.Metadata != nil {
		t.Errorf("replacing replaces metadata: %v %v", entry.Metadata, err)
	}
	for name, meta := range map[string]map[string]string{
		"empty name": {"": "x"}, "long name": {strings.Repeat("k", 300): "x"}, "control": {"k": "a\nb"}, "not ASCII": {"k": "é"},
		"too much": {"a": strings.Repeat("v", 4090)},
	} {
		if _, err := f.write(wire.WriteRequest{Path: path, Metadata: meta}, "z"); agenttest.Code(err) != wire.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if text, _, err := f.read(wire.ReadRequest{Path: path}); err != nil || text != "y" {
		t.Errorf("a refused write changed the file: %q %v", text, err)
	}
}

// TestForeignNames: names are bytes. They come out as text that goes in again.
func TestForeignNames(t *testing.T) {
	f := newFixture(t)
	raw := "caf\xe9 \xff.txt"
	f.put(raw, "x", 0o644)
	if err := os.Symlink(raw, f.path("link")); err != nil {
		t.Fatal(err)
	}
	var reply wire.EntriesReply
	if err := agenttest.Unary(t, f.handlers[wire.MethodFileList], wire.ListDirRequest{Path: f.dir}, &reply); err != nil {
		t.Fatal(err)
	}
	if len(reply.Entries) != 2 || reply.Entries[0].Name != "caf\x00e9 \x00ff.txt" {
		t.Fatalf("%+v", reply.Entries)
	}
	if text, e, err := f.read(wire.ReadRequest{Path: reply.Entries[0].Path}); err != nil || text != "x" || e.Path != reply.Entries[0].Path {
		t.Errorf("%q %+v %v", text, e, err)
	}
	if target := reply.Entries[1].SymlinkTarget; target == nil || *target != f.dir+"/caf\x00e9 \x00ff.txt" {
		t.Errorf("%v", target)
	}
	if _, err := f.entry(wire.MethodFileMove, wire.MoveRequest{Source: reply.Entries[0].Path, Destination: f.path("to \x0080")}); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(f.path("to \x80")); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"\x00", "\x00f", "\x00zz", "\x0041", "\x00c3\x00a9", "\x00FF"} {
		if _, err := f.entry(wire.MethodFileStat, wire.PathRequest{Path: f.path(bad)}); agenttest.Code(err) != wire.CodeInvalid {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := f.entry(wire.MethodFileStat, wire.PathRequest{Path: f.path("no\x00ff")}); agenttest.Code(err) != wire.CodeNotFound {
		t.Error(err)
	}
}

func TestCompose(t *testing.T) {
	f := newFixture(t)
	one, two := f.put("1", "one,", 0o644), f.put("2", "two", 0o644)
	f.put("old", "old", 0o600)
	compose := func(to string, from ...string) (wire.EntryInfo, error) {
		return f.entry(wire.MethodFileCompose, wire.ComposeRequest{Sources: from, Destination: to})
	}
	if err := unix.Mkfifo(f.path("pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		to, code string
		from     []string
	}{
		"nothing":          {f.path("x"), wire.CodeInvalid, nil},
		"missing":          {f.path("x"), wire.CodeNotFound, []string{one, f.path("no")}},
		"directory":        {f.path("x"), wire.CodeInvalid, []string{f.dir}},
		"pipe":             {f.path("x"), wire.CodeInvalid, []string{f.path("pipe")}},
		"itself":           {one, wire.CodeInvalid, []string{two, one}},
		"no destination":   {"", wire.CodeInvalid, []string{one}},
		"to a directory":   {f.dir, wire.CodeInvalid, []string{one}},
		"no source's name": {f.path("x"), wire.CodeInvalid, []string{""}},
	} {
		if _, err := compose(tt.to, tt.from...); agenttest.Code(err) != tt.code {
			t.Errorf("%s: %v", name, err)
		}
	}
	e, err := compose(f.path("old"), one, two, one)
	if err != nil || e.Size != 11 || e.Mode != 0o600 {
		t.Errorf("%+v %v", e, err)
	}
	if text, _, err := f.read(wire.ReadRequest{Path: f.path("old")}); err != nil || text != "one,twoone," {
		t.Errorf("%q %v", text, err)
	}
	if names := f.names("."); !slices.Equal(names, []string{"old", "pipe"}) {
		t.Errorf("%q", names)
	}
}

func TestWorkdir(t *testing.T) {
	f := newFixture(t)
	e, err := f.entry(wire.MethodFileStat, wire.PathRequest{})
	if err != nil || e.Type != wire.TypeDirectory {
		t.Errorf("%+v %v", e, err)
	}
}

// TestSpecial: what is no file or directory is described, and neither read nor written.
func TestSpecial(t *testing.T) {
	f := newFixture(t)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	t.Chdir(f.dir)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: "socket"}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(f.path("pipe"), 0o640); err != nil {
		t.Fatal(err)
	}
	for path, perm := range map[string]string{f.path("socket"): "s", f.path("pipe"): "p", "/dev/null": "c"} {
		e, err := f.entry(wire.MethodFileStat, wire.PathRequest{Path: path})
		if err != nil || e.Type != wire.TypeOther || e.Permissions[:1] != perm {
			t.Errorf("%s: %+v %v", path, e, err)
		}
		if _, _, err := f.read(wire.ReadRequest{Path: path}); agenttest.Code(err) != wire.CodeInvalid {
			t.Errorf("read %s: %v", path, err)
		}
		if _, err := f.write(wire.WriteRequest{Path: path}, "x"); agenttest.Code(err) != wire.CodeInvalid {
			t.Errorf("write %s: %v", path, err)
		}
	}
}

func TestTree(t *testing.T) {
	f := newFixture(t)
	if err := os.MkdirAll(f.path("a/empty"), 0o750); err != nil {
		t.Fatal(err)
	}
	f.put("a/file", "text", 0o640)
	s := agenttest.Call(t, f.handlers[wire.MethodFileTree], wire.TreeRequest{Path: f.path("a")})
	r := tar.NewReader(s.DataReader())
	var got []string
	for {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, h.Name)
	}
	if !slices.Equal(got, []string{"./", "empty/", "file"}) {
		t.Errorf("%q", got)
	}
	s = agenttest.Call(t, f.handlers[wire.MethodFileTree], wire.TreeRequest{Path: f.path("no")})
	if _, err := io.Copy(io.Discard, s.DataReader()); agenttest.Code(err) != wire.CodeNotFound {
		t.Error(err)
	}
	if err := os.Symlink(".", f.path("a/loop")); err != nil {
		t.Fatal(err)
	}
	s = agenttest.Call(t, f.handlers[wire.MethodFileTree], wire.TreeRequest{Path: f.path("a"), Follow: true})
	if _, err := io.Copy(io.Discard, s.DataReader()); agenttest.Code(err) != wire.CodePrecondition || !strings.Contains(err.Error(), filepath.Join("a", "loop")) {
		t.Error(err)
	}
}
