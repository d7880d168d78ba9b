package files

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/agenttest"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

type fixture struct {
	t        *testing.T
	handlers map[string]wire.Handler
	dir      string
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	s := New(account.New("/", account.Defaults{User: strconv.Itoa(os.Getuid())}))
	return &fixture{t: t, handlers: s.Handlers(), dir: t.TempDir()}
}

func (f *fixture) path(name string) string { return filepath.Join(f.dir, name) }

func (f *fixture) entry(method string, req any) (wire.EntryInfo, error) {
	f.t.Helper()
	var reply wire.EntryReply
	err := agenttest.Unary(f.t, f.handlers[method], req, &reply)
	return reply.Entry, err
}

func (f *fixture) write(req wire.WriteRequest, data ...string) (wire.EntryInfo, error) {
	f.t.Helper()
	s := agenttest.Call(f.t, f.handlers[wire.MethodFileWrite], req)
	for _, d := range data {
		if err := s.Send(wire.KindData, []byte(d)); err != nil {
			break // the reply says why
		}
	}
	_ = s.HalfClose()
	var reply wire.EntryReply
	err := s.RecvMessage(&reply)
	return reply.Entry, err
}

func (f *fixture) read(req wire.ReadRequest) (string, wire.EntryInfo, error) {
	f.t.Helper()
	s := agenttest.Call(f.t, f.handlers[wire.MethodFileRead], req)
	var reply wire.EntryReply
	if err := s.RecvMessage(&reply); err != nil {
		return "", reply.Entry, err
	}
	var b bytes.Buffer
	for {
		kind, p, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return b.String(), reply.Entry, nil
		}
		if err != nil {
			return b.String(), reply.Entry, err
		}
		if kind != wire.KindData {
			f.t.Fatalf("frame %q", byte(kind))
		}
		b.Write(p)
	}
}

func (f *fixture) put(name, text string, mode os.FileMode) string {
	f.t.Helper()
	path := f.path(name)
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		f.t.Fatal(err)
	}
	return path
}

func TestWriteAndRead(t *testing.T) {
	f := newFixture(t)
	path := f.path("new/dir/file.txt")
	entry, err := f.write(wire.WriteRequest{Path: path}, "hello ", "world")
	if err != nil {
		t.Fatal(err)
	}
	me, err := account.New("/", account.Defaults{}).User(strconv.Itoa(os.Getuid()))
	if err != nil {
		t.Fatal(err)
	}
	if entry.Name != "file.txt" || entry.Path != path || entry.Type != wire.TypeFile || entry.Size != 11 || entry.Mode != 0o644 ||
		entry.Permissions != "-rw-r--r--" || entry.Owner != me.Name {
		t.Errorf("%+v", entry)
	}
	for _, tt := range []struct {
		offset, length int64
		want           string
	}{{0, 0, "hello world"}, {6, 0, "world"}, {0, 5, "hello"}, {3, 4, "lo w"}, {100, 0, ""}, {6, 100, "world"}} {
		got, e, err := f.read(wire.ReadRequest{Path: path, Offset: tt.offset, Length: tt.length})
		if err != nil || got != tt.want || e.Size != 11 {
			t.Errorf("%d+%d: %q %+v %v", tt.offset, tt.length, got, e, err)
		}
	}
	mode := uint32(0o750)
	if entry, err = f.write(wire.WriteRequest{Path: path, Mode: &mode}); err != nil || entry.Size != 0 || entry.Mode != 0o750 {
		t.Errorf("%+v %v", entry, err)
	}
	if entry, err = f.write(wire.WriteRequest{Path: path}, "x"); err != nil || entry.Mode != 0o750 {
		t.Errorf("replacing keeps the mode: %+v %v", entry, err)
	}
	if names := f.names("new/dir"); !slices.Equal(names, []string{"file.txt"}) {
		t.Errorf("left behind: %q", names)
	}
}

func (f *fixture) names(dir string) []string {
	entries, err := os.ReadDir(f.path(dir))
	if err != nil {
		f.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestWriteIsAtomic: a file whose writer goes away does not appear, and the old one stays.
func TestWriteIsAtomic(t *testing.T) {
	f := newFixture(t)
	path := f.put("file", "old", 0o644)
	t.Cleanup(func() { // runs after that of Call, which waits for the handler
		if b, _ := os.ReadFile(path); string(b) != "old" || len(f.names(".")) != 1 {
			t.Errorf("%q, %q", b, f.names("."))
		}
	})
	s := agenttest.Call(t, f.handlers[wire.MethodFileWrite], wire.WriteRequest{Path: path})
	if err := s.Send(wire.KindData, []byte("new")); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestWriteThroughLink(t *testing.T) {
	f := newFixture(t)
	target := f.put("target", "old", 0o644)
	for link, to := range map[string]string{"link": "target", "dangling": "fresh"} {
		if err := os.Symlink(to, f.path(link)); err != nil {
			t.Fatal(err)
		}
		entry, err := f.write(wire.WriteRequest{Path: f.path(link)}, "new")
		if err != nil || entry.SymlinkTarget == nil || *entry.SymlinkTarget != f.path(to) || entry.Type != wire.TypeFile {
			t.Errorf("%s: %+v %v", link, entry, err)
		}
	}
	if b, _ := os.ReadFile(target); string(b) != "new" {
		t.Errorf("target has %q", b)
	}
	if b, _ := os.ReadFile(f.path("fresh")); string(b) != "new" {
		t.Errorf("new target has %q", b)
	}
}

func TestList(t *testing.T) {
	f := newFixture(t)
	for _, dir := range []string{"a/b/c", "d"} {
		if err := os.MkdirAll(f.path(dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	f.put("a/f", "1", 0o600)
	f.put("a/b/g", "1", 0o600)
	if err := os.Symlink("/no/where", f.path("dangling")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("a", f.path("todir")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(f.path("pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	for depth, want := range map[uint32]string{
		0: "a d dangling pipe todir",
		1: "a d dangling pipe todir",
		2: "a a/b a/f d dangling pipe todir",
		9: "a a/b a/b/c a/b/g a/f d dangling pipe todir",
	} {
		var reply wire.EntriesReply
		if err := agenttest.Unary(t, f.handlers[wire.MethodFileList], wire.ListDirRequest{Path: f.dir, Depth: depth}, &reply); err != nil {
			t.Fatal(err)
		}
		var got []string
		types := map[string]string{}
		for _, e := range reply.Entries {
			rel, _ := filepath.Rel(f.dir, e.Path)
			got = append(got, rel)
			types[rel] = e.Type
		}
		if strings.Join(got, " ") != want {
			t.Errorf("depth %d: %q", depth, got)
		}
		if types["todir"] != wire.TypeDirectory || types["dangling"] != wire.TypeSymlink || types["pipe"] != wire.TypeOther {
			t.Errorf("types %v", types)
		}
	}
	var reply wire.EntriesReply
	if err := agenttest.Unary(t, f.handlers[wire.MethodFileList], wire.ListDirRequest{Path: f.path("todir")}, &reply); err != nil || len(reply.Entries) != 2 {
		t.Errorf("through a link: %+v %v", reply, err)
	}
	if err := agenttest.Unary(t, f.handlers[wire.MethodFileList], wire.ListDirRequest{Path: f.path("d")}, &reply); err != nil {
		t.Error(err)
	}
}

func TestMoveMakeRemove(t *testing.T) {
	f := newFixture(t)
	if e, err := f.entry(wire.MethodFileMakeDir, wire.PathRequest{Path: f.path("x/y")}); err != nil || e.Type != wire.TypeDirectory || e.Permissions != "drwxr-xr-x" {
		t.Errorf("%+v %v", e, err)
	}
	f.put("x/y/file", "text", 0o644)
	if e, err := f.entry(wire.MethodFileMove, wire.MoveRequest{Source: f.path("x/y"), Destination: f.path("p/q")}); err != nil || e.Path != f.path("p/q") {
		t.Errorf("%+v %v", e, err)
	}
	if text, _, err := f.read(wire.ReadRequest{Path: f.path("p/q/file")}); err != nil || text != "text" {
		t.Errorf("%q %v", text, err)
	}
	if err := agenttest.Unary(t, f.handlers[wire.MethodFileRemove], wire.PathRequest{Path: f.path("p")}, nil); err != nil {
		t.Error(err)
	}
	if _, err := f.entry(wire.MethodFileStat, wire.PathRequest{Path: f.path("p")}); agenttest.Code(err) != wire.CodeNotFound {
		t.Error(err)
	}
}

func TestCodes(t *testing.T) {
	f := newFixture(t)
	file := f.put("file", "", 0o644)
	if err := unix.Mkfifo(f.path("pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(f.path("full/x"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("loop", f.path("loop")); err != nil {
		t.Fatal(err)
	}
	entry := func(method string, req any) error {
		_, err := f.entry(method, req)
		return err
	}
	reading := func(path string) error {
		_, _, err := f.read(wire.ReadRequest{Path: path})
		return err
	}
	writing := func(path string) error {
		_, err := f.write(wire.WriteRequest{Path: path}, "x")
		return err
	}
	badMode := uint32(0o100000)
	_, modeErr := f.write(wire.WriteRequest{Path: file, Mode: &badMode})
	_, _, offsetErr := f.read(wire.ReadRequest{Path: file, Offset: -1})
	for name, tt := range map[string]struct {
		err  error
		code string
	}{
		"stat missing":         {entry(wire.MethodFileStat, wire.PathRequest{Path: f.path("no")}), wire.CodeNotFound},
		"stat below a file":    {entry(wire.MethodFileStat, wire.PathRequest{Path: file + "/x"}), wire.CodeInvalid},
		"remove nothing":       {entry(wire.MethodFileRemove, wire.PathRequest{}), wire.CodeInvalid},
		"stat another's home":  {entry(wire.MethodFileStat, wire.PathRequest{Path: "~root/x"}), wire.CodeInvalid},
		"stat NUL":             {entry(wire.MethodFileStat, wire.PathRequest{Path: "a\x00b"}), wire.CodeInvalid},
		"stat long name":       {entry(wire.MethodFileStat, wire.PathRequest{Path: f.path(strings.Repeat("a", 300))}), wire.CodeInvalid},
		"stat unknown user":    {entry(wire.MethodFileStat, wire.PathRequest{Path: file, User: "no-such-user"}), wire.CodeUnknownUser},
		"make existing":        {entry(wire.MethodFileMakeDir, wire.PathRequest{Path: f.dir}), wire.CodeExists},
		"make over a file":     {entry(wire.MethodFileMakeDir, wire.PathRequest{Path: file}), wire.CodeInvalid},
		"move missing":         {entry(wire.MethodFileMove, wire.MoveRequest{Source: f.path("no"), Destination: f.path("to")}), wire.CodeNotFound},
		"move to nothing":      {entry(wire.MethodFileMove, wire.MoveRequest{Source: file}), wire.CodeInvalid},
		"move over full":       {entry(wire.MethodFileMove, wire.MoveRequest{Source: f.path("full/x"), Destination: f.path("full")}), wire.CodeExists},
		"move into itself":     {entry(wire.MethodFileMove, wire.MoveRequest{Source: f.path("full"), Destination: f.path("full/x/y")}), wire.CodeInvalid},
		"move file over dir":   {entry(wire.MethodFileMove, wire.MoveRequest{Source: file, Destination: f.path("full/x")}), wire.CodeInvalid},
		"remove missing":       {entry(wire.MethodFileRemove, wire.PathRequest{Path: f.path("no")}), wire.CodeNotFound},
		"remove root":          {entry(wire.MethodFileRemove, wire.PathRequest{Path: "/../"}), wire.CodeInvalid},
		"list missing":         {entry(wire.MethodFileList, wire.ListDirRequest{Path: f.path("no")}), wire.CodeNotFound},
		"list a file":          {entry(wire.MethodFileList, wire.ListDirRequest{Path: file}), wire.CodeInvalid},
		"read missing":         {reading(f.path("no")), wire.CodeNotFound},
		"read directory":       {reading(f.dir), wire.CodeInvalid},
		"read pipe":            {reading(f.path("pipe")), wire.CodeInvalid},
		"read device":          {reading("/dev/zero"), wire.CodeInvalid},
		"read loop":            {reading(f.path("loop")), wire.CodePrecondition},
		"read negative offset": {offsetErr, wire.CodeInvalid},
		"write directory":      {writing(f.dir), wire.CodeInvalid},
		"write slash":          {writing(f.path("x") + "/"), wire.CodeInvalid},
		"write pipe":           {writing(f.path("pipe")), wire.CodeInvalid},
		"write device":         {writing("/dev/null"), wire.CodeInvalid},
		"write below a file":   {writing(file + "/x"), wire.CodeInvalid},
		"write loop":           {writing(f.path("loop")), wire.CodePrecondition},
		"write bad mode":       {modeErr, wire.CodeInvalid},
		"write full disk":      {failure("write", "/x", &os.PathError{Op: "write", Err: unix.ENOSPC}), wire.CodeExhausted},
	} {
		if got := agenttest.Code(tt.err); got != tt.code {
			t.Errorf("%s: %q (%v), want %s", name, got, tt.err, tt.code)
		}
	}
	if names := f.names("."); !slices.Equal(names, []string{"file", "full", "loop", "pipe"}) {
		t.Errorf("left behind: %q", names)
	}
}

// TestProc: files without a size are read to their end.
func TestProc(t *testing.T) {
	f := newFixture(t)
	if text, _, err := f.read(wire.ReadRequest{Path: "/proc/self/status"}); err != nil || !strings.Contains(text, "Pid:") {
		t.Errorf("%q %v", text, err)
	}
}

func TestHomeRelative(t *testing.T) {
	dir := t.TempDir()
	root := filepath.Join(dir, "root")
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	uid := strconv.Itoa(os.Getuid())
	passwd := "me:x:" + uid + ":" + strconv.Itoa(os.Getgid()) + "::" + dir + ":/bin/sh\n"
	if err := os.WriteFile(filepath.Join(root, "etc/passwd"), []byte(passwd), 0o644); err != nil {
		t.Fatal(err)
	}
	f := &fixture{t: t, handlers: New(account.New(root, account.Defaults{User: "me"})).Handlers(), dir: dir}
	for _, path := range []string{"~/one", "two", "~/../" + filepath.Base(dir) + "/three"} {
		entry, err := f.write(wire.WriteRequest{Path: path}, "x")
		if err != nil || filepath.Dir(entry.Path) != dir || entry.Owner != "me" {
			t.Errorf("%s: %+v %v", path, entry, err)
		}
	}
}

func TestAsUser(t *testing.T) {
	f := newFixture(t)
	if os.Getuid() != 0 {
		if _, err := f.entry(wire.MethodFileStat, wire.PathRequest{Path: "/", User: "root"}); agenttest.Code(err) != wire.CodeDenied {
			t.Error(err)
		}
		return
	}
	const nobody = "65534"
	open := f.path("open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(open, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	testenv.Enterable(t, f.dir)
	if e, err := f.write(wire.WriteRequest{Path: filepath.Join(open, "sub/file"), User: nobody}, "mine"); err != nil || !owned(t, e.Path, 65534) || !owned(t, filepath.Dir(e.Path), 65534) {
		t.Errorf("%+v %v", e, err)
	}
	secret := f.put("secret", "s", 0o600)
	for name, err := range map[string]error{
		"read":   second(f.read(wire.ReadRequest{Path: secret, User: nobody})),
		"write":  secondOf(f.write(wire.WriteRequest{Path: secret, User: nobody}, "x")),
		"create": secondOf(f.write(wire.WriteRequest{Path: f.path("new"), User: nobody}, "x")),
		"remove": agenttest.Unary(t, f.handlers[wire.MethodFileRemove], wire.PathRequest{Path: secret, User: nobody}, nil),
		"make":   secondOf(f.entry(wire.MethodFileMakeDir, wire.PathRequest{Path: f.path("d"), User: nobody})),
	} {
		if agenttest.Code(err) != wire.CodeDenied {
			t.Errorf("%s: %v", name, err)
		}
	}
	// In a directory of theirs they may replace a file by renaming, but not one that they could not write.
	guarded := filepath.Join(open, "guarded")
	if err := os.WriteFile(guarded, []byte("root's"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := f.write(wire.WriteRequest{Path: guarded, User: nobody}, "x"); agenttest.Code(err) != wire.CodeDenied {
		t.Errorf("replace root's file: %v", err)
	}
	// The agent itself still is root, on every thread.
	for range 20 {
		if text, _, err := f.read(wire.ReadRequest{Path: secret}); err != nil || text != "s" {
			t.Fatal(err)
		}
	}
}

func second(_ string, _ wire.EntryInfo, err error) error { return err }
func secondOf(_ wire.EntryInfo, err error) error         { return err }

func owned(t *testing.T, path string, uid uint32) bool {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Uid == uid
}

// TestLargeFile goes through in both directions without being held in memory.
func TestLargeFile(t *testing.T) {
	f := newFixture(t)
	size := int64(256 << 20)
	if testenv.Soak() {
		size = 1 << 30
	}
	path := f.path("large")
	block := bytes.Repeat([]byte("0123456789abcdef"), wire.MaxPayload/16)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	s := agenttest.Call(t, f.handlers[wire.MethodFileWrite], wire.WriteRequest{Path: path})
	for sent := int64(0); sent < size; sent += int64(len(block)) {
		if err := s.Send(wire.KindData, block); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.HalfClose(); err != nil {
		t.Fatal(err)
	}
	var reply wire.EntryReply
	if err := s.RecvMessage(&reply); err != nil || reply.Entry.Size != size {
		t.Fatalf("%+v %v", reply, err)
	}
	r := agenttest.Call(t, f.handlers[wire.MethodFileRead], wire.ReadRequest{Path: path})
	var got int64
	for {
		kind, b, err := r.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if kind == wire.KindMessage {
			if err := json.Unmarshal(b, &reply); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if !bytes.Equal(b, block[:len(b)]) {
			t.Fatalf("different at %d", got)
		}
		got += int64(len(b))
	}
	runtime.ReadMemStats(&after)
	if got != size {
		t.Errorf("read %d of %d", got, size)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 4<<20 {
		t.Errorf("allocated %d bytes on the way", n)
	}
}

func TestPermissions(t *testing.T) {
	for mode, want := range map[os.FileMode]string{
		0o644:                                     "-rw-r--r--",
		os.ModeDir | 0o755:                        "drwxr-xr-x",
		os.ModeDir | os.ModeSticky | 0o777:        "drwxrwxrwt",
		os.ModeSetuid | 0o755:                     "-rwsr-xr-x",
		os.ModeSetgid | 0o644:                     "-rw-r-Sr--",
		os.ModeSymlink | 0o777:                    "lrwxrwxrwx",
		os.ModeDevice | os.ModeCharDevice | 0o666: "crw-rw-rw-",
		os.ModeNamedPipe | 0o600:                  "prw-------",
	} {
		if got := permissions(mode); got != want {
			t.Errorf("%v: %s, want %s", mode, got, want)
		}
	}
}
