package files

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// newTree watches a directory in which there is old/deep; nothing is read before until is called.
func newTree(t *testing.T) (n *notifier, dir, outside string) {
	t.Helper()
	dir, outside = filepath.Join(t.TempDir(), "w"), t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "old/deep"), 0o755))
	s := New(account.New("/", account.Defaults{User: strconv.Itoa(os.Getuid())}))
	u, path, err := s.locateOrWorkdir("", dir)
	must(t, err)
	n, err = s.newNotifier(u, &wire.WatchRequest{Path: dir, Recursive: true}, path)
	must(t, err)
	t.Cleanup(n.close)
	return n, dir, outside
}

// until runs a notifier up to an event; it is over then.
func until(t *testing.T, n *notifier, want string) []string {
	t.Helper()
	found := errors.New("found")
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(10*time.Second))
	defer cancel()
	var got []string
	err := n.run(ctx, func(events []wire.FileEvent) error {
		for _, e := range events {
			if got = append(got, brief(e)); got[len(got)-1] == want {
				return found
			}
		}
		return nil
	})
	if !errors.Is(err, found) {
		t.Fatalf("%v, after %q, before %q", err, got, want)
	}
	return got
}

// takeAll has a notifier see everything there is; one read holds it.
func takeAll(t *testing.T, n *notifier) {
	t.Helper()
	buf := make([]byte, 8<<10)
	got, err := n.read(buf)
	must(t, err, n.take(buf[:got]))
	n.idle(n.fd())
}

// TestWatchMovedOut: what happens in a directory after it has left the tree is nobody's business, however late the watch
// reads of its leaving.
func TestWatchMovedOut(t *testing.T) {
	n, dir, outside := newTree(t)
	must(t, os.Rename(filepath.Join(dir, "old"), filepath.Join(outside, "old")),
		os.WriteFile(filepath.Join(outside, "old/deep/unseen"), nil, 0o644),
		os.Mkdir(filepath.Join(dir, "end"), 0o755))
	if got, want := until(t, n, "create end"), []string{"rename old", "create end"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestWatchMovedBack: a directory that was outside for a moment is watched where it is now.
func TestWatchMovedBack(t *testing.T) {
	n, dir, outside := newTree(t)
	must(t, os.Rename(filepath.Join(dir, "old"), filepath.Join(outside, "old")),
		os.Rename(filepath.Join(outside, "old"), filepath.Join(dir, "back")))
	takeAll(t, n)
	must(t, os.WriteFile(filepath.Join(dir, "back/deep/seen"), nil, 0o644))
	until(t, n, "create back/deep/seen")
}

// TestWatchMovedBetween: the kernel may report what happens in a directory between the two halves of its move, and that has
// the new name.
func TestWatchMovedBetween(t *testing.T) {
	n, _, _ := newTree(t)
	const cookie = 7
	for _, h := range []happening{
		{n.wds["."], unix.IN_MOVED_FROM | unix.IN_ISDIR, cookie, "old"},
		{n.wds["old/deep"], unix.IN_CREATE, 0, "x"},
		{n.wds["."], unix.IN_CREATE, 0, "y"},
		{n.wds["."], unix.IN_MOVED_TO | unix.IN_ISDIR, cookie, "new"},
		{n.wds["old/deep"], unix.IN_DELETE, 0, "x"},
	} {
		must(t, n.event(h))
	}
	var got []string
	for _, e := range n.batch {
		got = append(got, brief(e))
	}
	want := []string{"rename old", "create y", "create new", "create new/deep/x", "remove new/deep/x"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestWatchNameTakenAgain: a directory made in the place of one that has left is watched, and not taken for it.
func TestWatchNameTakenAgain(t *testing.T) {
	n, dir, outside := newTree(t)
	must(t, os.Rename(filepath.Join(dir, "old"), filepath.Join(outside, "old")),
		os.Mkdir(filepath.Join(dir, "old"), 0o755))
	takeAll(t, n)
	must(t, os.WriteFile(filepath.Join(outside, "old/deep/unseen"), nil, 0o644),
		os.WriteFile(filepath.Join(dir, "old/seen"), nil, 0o644))
	if got, want := until(t, n, "create old/seen"), []string{"create old/seen"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
