package files

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/agenttest"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// stream is a call of WatchDir.
type stream struct {
	t *testing.T
	s *wire.Stream
}

func (f *fixture) watch(req wire.WatchRequest) *stream {
	f.t.Helper()
	st := &stream{f.t, agenttest.Call(f.t, f.handlers[wire.MethodWatch], req)}
	if e, err := st.next(); err != nil || e.Start == nil {
		f.t.Fatalf("%+v %v", e, err)
	}
	return st
}

func (s *stream) next() (e wire.WatchEvent, err error) {
	_, payload, err := s.s.Recv()
	if err != nil {
		return e, err
	}
	return e, json.Unmarshal(payload, &e)
}

// until collects "type name" up to the one wanted.
func (s *stream) until(want string) []string {
	s.t.Helper()
	var got []string
	for {
		e, err := s.next()
		if err != nil {
			s.t.Fatalf("%v, after %q, before %q", err, got, want)
		}
		got = append(got, brief(*e.Filesystem))
		if got[len(got)-1] == want {
			return got
		}
	}
}

func brief(e wire.FileEvent) string {
	return strings.ToLower(strings.TrimPrefix(e.Type, "EVENT_TYPE_")) + " " + e.Name
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestWatch(t *testing.T) {
	f := newFixture(t)
	dir := f.path("w")
	must(t, os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
	w := f.watch(wire.WatchRequest{Path: dir})
	must(t,
		os.WriteFile(filepath.Join(dir, "a"), []byte("x"), 0o644),
		os.Chmod(filepath.Join(dir, "a"), 0o600),
		os.Rename(filepath.Join(dir, "a"), filepath.Join(dir, "b")),
		os.WriteFile(filepath.Join(dir, "sub/unseen"), nil, 0o644),
		os.Remove(filepath.Join(dir, "b")),
		os.WriteFile(filepath.Join(dir, "\xff"), nil, 0o644),
		os.Mkdir(filepath.Join(dir, "end"), 0o755),
	)
	got := w.until("create end")
	want := []string{"create a", "write a", "chmod a", "rename a", "create b", "remove b", "create \x00ff", "create end"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	must(t, os.Chmod(dir, 0o700), os.RemoveAll(dir))
	w.until("chmod .")
	w.until("remove .")
	if e, err := w.next(); err == nil || agenttest.Code(err) == wire.CodeInternal {
		t.Errorf("the directory is gone, the watch goes on: %+v %v", e, err)
	}
}

func TestWatchRecursive(t *testing.T) {
	f := newFixture(t)
	dir, outside := f.path("w"), f.path("outside")
	must(t, os.MkdirAll(filepath.Join(dir, "old/deep"), 0o755), os.MkdirAll(filepath.Join(outside, "tree/x"), 0o755))
	w := f.watch(wire.WatchRequest{Path: dir, Recursive: true, IncludeEntry: true})
	must(t, os.WriteFile(filepath.Join(dir, "old/deep/f"), nil, 0o644))
	w.until("create old/deep/f")

	// A tree made in one go: nothing in it is missed, and nothing told twice.
	var want []string
	for i := range 20 {
		at := filepath.Join("new", strconv.Itoa(i))
		must(t, os.MkdirAll(filepath.Join(dir, at, "sub"), 0o755), os.WriteFile(filepath.Join(dir, at, "sub/file"), nil, 0o644))
		want = append(want, "create "+at, "create "+at+"/sub", "create "+at+"/sub/file")
	}
	must(t, os.Mkdir(filepath.Join(dir, "mark"), 0o755))
	got := w.until("create mark")
	for _, event := range want {
		if n := count(got, event); n != 1 {
			t.Errorf("%s: %d times in %q", event, n, got)
		}
	}

	// Moved within the tree, out of it, and into it.
	must(t, os.Rename(filepath.Join(dir, "old"), filepath.Join(dir, "moved")))
	w.until("create moved")
	must(t, os.WriteFile(filepath.Join(dir, "moved/deep/g"), nil, 0o644))
	w.until("create moved/deep/g")
	must(t, os.Rename(filepath.Join(dir, "moved"), filepath.Join(outside, "moved")))
	w.until("rename moved")
	must(t, os.WriteFile(filepath.Join(outside, "moved/deep/unseen"), nil, 0o644), os.Rename(filepath.Join(outside, "tree"), filepath.Join(dir, "in")))
	if got := w.until("create in/x"); count(got, "create moved/deep/unseen") != 0 {
		t.Errorf("%q", got)
	}
	must(t, os.WriteFile(filepath.Join(dir, "in/x/h"), []byte("text"), 0o640))
	for {
		e, err := w.next()
		must(t, err)
		if e.Filesystem.Entry == nil {
			t.Fatalf("no entry: %+v", e.Filesystem)
		}
		if e.Filesystem.Entry.Path != filepath.Join(dir, e.Filesystem.Name) {
			t.Errorf("%+v", e.Filesystem.Entry)
		}
		if brief(*e.Filesystem) == "write in/x/h" {
			break
		}
	}
	must(t, os.RemoveAll(filepath.Join(dir, "in")))
	if got := w.until("remove in"); count(got, "remove in/x") != 1 || count(got, "remove in/x/h") != 1 {
		t.Errorf("%q", got)
	}
	// The same name again, which a look at the directory had found before.
	must(t, os.MkdirAll(filepath.Join(dir, "in/x"), 0o755))
	w.until("create in/x")
}

func count(list []string, s string) int {
	n := 0
	for _, x := range list {
		if x == s {
			n++
		}
	}
	return n
}

func TestWatchers(t *testing.T) {
	f := newFixture(t)
	var made wire.WatcherReply
	must(t, agenttest.Unary(t, f.handlers[wire.MethodWatcherNew], wire.WatchRequest{Path: f.dir, Recursive: true}, &made))
	poll := func() ([]string, error) {
		var reply wire.WatcherEvents
		err := agenttest.Unary(t, f.handlers[wire.MethodWatcherEvents], made, &reply)
		var got []string
		for _, e := range reply.Events {
			got = append(got, brief(e))
		}
		return got, err
	}
	if got, err := poll(); err != nil || len(got) != 0 {
		t.Errorf("%q %v", got, err)
	}
	f.put("a", "x", 0o644)
	must(t, os.Mkdir(f.path("d"), 0o755))
	f.put("d/b", "x", 0o644)
	var got []string
	deadline := time.Now().Add(testenv.Timeout(10 * time.Second))
	for count(got, "create d/b") == 0 {
		more, err := poll()
		must(t, err)
		got = append(got, more...)
		if time.Now().After(deadline) {
			t.Fatalf("%q", got)
		}
	}
	if count(got, "create a") != 1 || count(got, "create d") != 1 {
		t.Errorf("%q", got)
	}
	must(t, agenttest.Unary(t, f.handlers[wire.MethodWatcherRemove], made, nil))
	if _, err := poll(); agenttest.Code(err) != wire.CodeNotFound {
		t.Error(err)
	}
	if err := agenttest.Unary(t, f.handlers[wire.MethodWatcherRemove], made, nil); agenttest.Code(err) != wire.CodeNotFound {
		t.Error(err)
	}
}

// TestWatcherBounds: what nobody fetches is dropped with a word, and there are only so many watchers.
func TestWatcherBounds(t *testing.T) {
	w := &watcher{}
	var err error
	n := 0
	for ; err == nil; n++ {
		err = w.add([]wire.FileEvent{{Name: strconv.Itoa(n), Type: wire.EventCreate}})
	}
	w.end(err)
	if n != maxPending+1 {
		t.Errorf("%d events", n)
	}
	if events, err := w.drain(); err != nil || len(events) != maxPending {
		t.Errorf("%d %v", len(events), err)
	}
	if _, err := w.drain(); agenttest.Code(err) != wire.CodeExhausted {
		t.Error(err)
	}
	w = &watcher{}
	must(t, w.add([]wire.FileEvent{{Name: "f", Type: wire.EventWrite}}), w.add([]wire.FileEvent{{Name: "f", Type: wire.EventWrite}}))
	if events, _ := w.drain(); len(events) != 1 {
		t.Errorf("the same change twice: %+v", events)
	}

	f := newFixture(t)
	var ids []string
	for {
		var made wire.WatcherReply
		err := agenttest.Unary(t, f.handlers[wire.MethodWatcherNew], wire.WatchRequest{Path: f.dir}, &made)
		if agenttest.Code(err) == wire.CodeExhausted {
			break
		}
		must(t, err)
		if ids = append(ids, made.WatcherID); len(ids) > maxWatchers {
			t.Fatal("no limit")
		}
	}
	for _, id := range ids {
		must(t, agenttest.Unary(t, f.handlers[wire.MethodWatcherRemove], wire.WatcherReply{WatcherID: id}, nil))
	}
}

// TestWatcherEviction: only one that nobody asks makes room.
func TestWatcherEviction(t *testing.T) {
	var stopped []string
	ws := &watchers{active: maxWatchers}
	for i, age := range []time.Duration{time.Minute, 2 * abandoned, 3 * abandoned} {
		ws.put(strconv.Itoa(i), &watcher{asked: time.Now().Add(-age), stop: func(error) { stopped = append(stopped, strconv.Itoa(i)) }})
	}
	must(t, ws.enter("/"), ws.enter("/"))
	if err := ws.enter("/"); agenttest.Code(err) != wire.CodeExhausted {
		t.Error(err)
	}
	if !slices.Equal(stopped, []string{"2", "1"}) {
		t.Errorf("%q", stopped)
	}
}

func TestWatchOverflow(t *testing.T) {
	n := &notifier{paths: map[int32]string{1: "."}}
	if err := n.event(happening{wd: -1, mask: unix.IN_Q_OVERFLOW}); agenttest.Code(err) != wire.CodeExhausted {
		t.Error(err)
	}
}

func TestWatchCodes(t *testing.T) {
	f := newFixture(t)
	file := f.put("file", "", 0o644)
	must(t, os.Symlink("loop", f.path("loop")), os.Symlink("no", f.path("dangling")), os.Symlink(".", f.path("here")))
	for name, tt := range map[string]struct{ path, code string }{
		"missing":  {f.path("no"), wire.CodeNotFound},
		"dangling": {f.path("dangling"), wire.CodeNotFound},
		"file":     {file, wire.CodeInvalid},
		"loop":     {f.path("loop"), wire.CodePrecondition},
		"link":     {f.path("here"), ""},
	} {
		var made wire.WatcherReply
		err := agenttest.Unary(t, f.handlers[wire.MethodWatcherNew], wire.WatchRequest{Path: tt.path}, &made)
		if agenttest.Code(err) != tt.code {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			must(t, agenttest.Unary(t, f.handlers[wire.MethodWatcherRemove], made, nil))
		}
	}
}

// TestWatchAsUser: nobody is told of what they may not read.
func TestWatchAsUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can act as others")
	}
	f := newFixture(t)
	testenv.Enterable(t, f.dir)
	open, secret := f.path("open"), f.path("open/secret")
	must(t, os.Mkdir(open, 0o755), os.Mkdir(secret, 0o700))
	if err := agenttest.Unary(t, f.handlers[wire.MethodWatcherNew], wire.WatchRequest{Path: secret, User: "65534"}, nil); agenttest.Code(err) != wire.CodeDenied {
		t.Error(err)
	}
	w := f.watch(wire.WatchRequest{Path: open, Recursive: true, User: "65534"})
	must(t, os.WriteFile(filepath.Join(secret, "x"), nil, 0o644), os.WriteFile(filepath.Join(open, "end"), nil, 0o644))
	if got := w.until("create end"); len(got) != 1 {
		t.Errorf("%q", got)
	}
}

func FuzzNotifier(f *testing.F) {
	f.Add([]byte(strings.Repeat("\x01\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x10\x00\x00\x00name\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00", 2)))
	f.Fuzz(func(t *testing.T, b []byte) {
		n := &notifier{root: "/nonexistent", paths: map[int32]string{1: ".", 2: "sub"}, wds: map[string]int32{".": 1, "sub": 2}, found: map[string]struct{}{}}
		_ = n.take(b)
		for _, e := range n.batch {
			if _, err := wire.DecodeName(e.Name); err != nil {
				t.Error(err)
			}
		}
	})
}
