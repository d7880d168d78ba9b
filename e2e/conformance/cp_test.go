package conformance

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// forkd runs the program and returns its output, error output and exit code.
func (g *guest) forkd(args ...string) (stdout, stderr string, code int) {
	g.t.Helper()
	cmd := command(g.ctx, testenv.Binary(g.t), args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		exit, ok := err.(*exec.ExitError) //nolint:errorlint // Run returns it as it is
		if !ok {
			g.t.Fatalf("%q: %v", args, err)
		}
		code = exit.ExitCode()
	}
	return out.String(), errs.String(), code
}

func (g *guest) cp(args ...string) {
	g.t.Helper()
	if _, stderr, code := g.forkd(append([]string{"cp"}, args...)...); code != 0 {
		g.t.Fatalf("cp %q: %d: %s", args, code, stderr)
	}
}

// makeTree makes what cp has to carry.
func makeTree(t *testing.T, dir string) {
	t.Helper()
	in := func(name string) string { return filepath.Join(dir, name) }
	when := time.Unix(1_600_000_000, 123_456_789)
	sparse := func() error {
		f, err := os.Create(in("sparse"))
		if err != nil {
			return err
		}
		defer f.Close()
		if _, err := f.WriteAt([]byte("middle"), 2<<20); err != nil {
			return err
		}
		return f.Truncate(64 << 20)
	}
	for _, err := range []error{
		os.MkdirAll(in("sub/empty"), 0o750), os.WriteFile(in("run"), []byte("#!/bin/sh\necho ran\n"), 0o755),
		os.WriteFile(in("sub/data"), []byte("d"), 0o640), os.Link(in("sub/data"), in("sub/same")), os.Symlink("run", in("link")),
		os.Symlink("nothing", in("dangling")), os.WriteFile(in("caf\xe9"), []byte("odd"), 0o600), sparse(),
		os.Chtimes(in("sub/data"), when, when), os.Chtimes(in("sub/empty"), when, when), os.Chmod(in("sub/empty"), 0o500),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// digest describes a tree for comparison.
func digest(t *testing.T, dir string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "sh", "-c",
		`cd "$1" && find . -mindepth 1 ! -type l -printf '%P %m %n %s %y %T@\n' -o -printf '%P %l\n' | grep -av ' d [0-9.]*$' | sort; find . -type f -exec sha256sum {} + | sort -k2`, "sh", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// TestCp: there, on to another place, and back.
func TestCp(t *testing.T) {
	g := newGuest(t)
	dir, there := t.TempDir(), g.dir()
	src := filepath.Join(dir, "src")
	makeTree(t, src)
	remote := func(p string) string { return g.id + ":" + there + "/" + p }

	g.cp("-r", src, remote("new"))
	if got := g.sh(there + "/new/link"); got != "ran\n" {
		t.Errorf("%q", got)
	}
	g.cp("-r", remote("new"), remote("second")) // sandbox to sandbox
	back := filepath.Join(dir, "back")
	g.cp("-r", remote("second"), back)
	if want, got := digest(t, src), digest(t, back); want != got {
		t.Errorf("came back as\n%s\nwent as\n%s", got, want)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(filepath.Join(back, "sparse"), &st); err != nil || st.Blocks*512 > 1<<20 {
		t.Errorf("the hole came back as %d bytes, %v", st.Blocks*512, err)
	}
	if got := strings.TrimSpace(g.sh("stat -c %b " + there + "/second/sparse")); len(got) > 3 {
		t.Errorf("the hole takes %s blocks", got)
	}

	// Into a directory, of one, and several at once.
	g.cp("-r", src, remote(""))
	g.cp("-r", src+"/.", remote("second"))
	g.cp(src+"/run", src+"/sub/data", remote("second/sub"))
	if got := g.sh("cd " + there + "; ls -d src/run second/run second/sub/run second/sub/data | wc -l"); strings.TrimSpace(got) != "4" {
		t.Errorf("%s of 4", got)
	}
	if err := os.Mkdir(filepath.Join(dir, "into"), 0o755); err != nil {
		t.Fatal(err)
	}
	g.cp("-r", remote("new"), remote("new/run"), filepath.Join(dir, "into"))
	for _, name := range []string{"into/new/sub/data", "into/run"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
	// Links: followed without -r, kept with it, and as the flags say.
	for _, tt := range []struct {
		flags []string
		link  bool
	}{{nil, false}, {[]string{"-r"}, true}, {[]string{"-r", "-L"}, false}, {[]string{"-P"}, true}} {
		to := filepath.Join(dir, "link"+strings.Join(tt.flags, ""))
		g.cp(append(tt.flags, remote("new/link"), to)...)
		info, err := os.Lstat(to)
		if err != nil || (info.Mode().Type() == os.ModeSymlink) != tt.link {
			t.Errorf("%q: %v %v", tt.flags, info, err)
		}
		g.cp(append(tt.flags, src+"/link", remote("up"+strings.Join(tt.flags, "")))...)
		got := strings.TrimSpace(g.sh("stat -c %F " + there + "/up" + strings.Join(tt.flags, "")))
		if (got == "symbolic link") != tt.link {
			t.Errorf("%q: %s", tt.flags, got)
		}
	}
	// Standard input and output.
	cmd := command(g.ctx, testenv.Binary(t), "cp", "-", remote("in"))
	cmd.Stdin = strings.NewReader("typed")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if out, _, _ := g.forkd("cp", remote("in"), "-"); out != "typed" {
		t.Errorf("%q", out)
	}
	if out, _, code := g.forkd("cp", g.id+":/proc/version", "-"); code != 0 || !strings.HasPrefix(out, "Linux") {
		t.Errorf("%q", out)
	}
	// As another user.
	g.sh("chmod 777 " + there)
	g.cp("-u", stranger, src+"/run", remote("theirs"))
	g.cp("-r", "-u", stranger, src, remote("theirtree"))
	if got := g.sh("cd " + there + "; stat -c %u theirs theirtree theirtree/sub/data"); got != strings.Repeat(stranger+"\n", 3) {
		t.Errorf("%q", got)
	}
}

func TestCpRefusals(t *testing.T) {
	g := newGuest(t)
	dir, there := t.TempDir(), g.dir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	g.sh("cd " + there + "; mkdir d closed; echo x > f; echo x > closed/secret; chmod 700 closed; mkfifo pipe")
	at := func(p string) string { return g.id + ":" + there + "/" + p }
	for _, tt := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"both here", []string{file, dir}, 2, "ID:PATH"},
		{"a directory without -r", []string{dir, at("")}, 2, "-r"},
		{"a sandbox's directory without -r", []string{at("d"), dir}, 2, "-r"},
		{"missing here", []string{file + "no", at("")}, 1, file + "no"},
		{"missing there", []string{at("no"), dir}, 1, there + "/no"},
		{"into what is missing", []string{file, at("no/")}, 1, there + "/no/"},
		{"into what is missing here", []string{at("f"), dir + "/no/"}, 1, dir + "/no/"},
		{"several to a file", []string{file, file, at("f")}, 2, "more than one"},
		{"a directory over a file", []string{"-r", dir, at("f")}, 1, there + "/f"},
		{"a file over a directory, by name", []string{at("f"), dir + "/file/"}, 1, "directory"},
		{"a pipe", []string{at("pipe"), dir}, 1, "pipe"},
		{"not allowed", []string{"-u", stranger, at("closed/secret"), dir}, 1, "permission"},
		{"not allowed, in a tree", []string{"-r", "-u", stranger, at(""), dir + "/tree"}, 1, "closed"},
		{"both flags", []string{"-L", "-P", at("f"), dir}, 2, "-L"},
		{"no sandbox", []string{"sbnosuchsandbox:/f", dir}, 1, "sbnosuchsandbox"},
		{"a directory to the terminal", []string{"-r", at("d"), "-"}, 2, "standard output"},
	} {
		_, stderr, code := g.forkd(append([]string{"cp"}, tt.args...)...)
		if code != tt.code || !strings.Contains(stderr, tt.says) {
			t.Errorf("%s: code %d, %s", tt.name, code, stderr)
		}
	}
}

func TestFilesVerbs(t *testing.T) {
	g := newGuest(t)
	there := g.dir()
	do := func(want string, args ...string) {
		t.Helper()
		out, stderr, code := g.forkd(append([]string{"files"}, args...)...)
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("%q: %d %q %s", args, code, out, stderr)
		}
	}
	do("", "mkdir", g.id, there+"/a/b")
	do("", "mkdir", "-p", g.id, there+"/a/b")
	do("drwxr-xr-x", "ls", g.id, there+"/a")
	do(there+"/a/b", "ls", "-d", "2", g.id, there)
	do("dir", "stat", g.id, there+"/a")
	do("", "mv", g.id, there+"/a/b", there)
	do(`"path": "`+there+`/b"`, "stat", "--json", g.id, there+"/b")
	do("", "rm", "-r", g.id, there+"/a")
	do("", "rm", "-f", g.id, there+"/a")
	for _, args := range [][]string{{"rm", g.id, there + "/a"}, {"rm", g.id, there + "/b"}, {"mkdir", g.id, there + "/b"}, {"ls", g.id, there + "/no"}} {
		if _, stderr, code := g.forkd(append([]string{"files"}, args...)...); code == 0 || !strings.Contains(stderr, there) {
			t.Errorf("%q: %d %s", args, code, stderr)
		}
	}
}

// TestWatchersInFork: a child goes on with its parent's watchers, and is told of its own changes only.
func TestWatchersInFork(t *testing.T) {
	g := newGuest(t)
	f := &fileTest{guest: g, dir: g.dir()}
	id := f.watcher(wire.WatchRequest{Path: f.dir, Recursive: true})
	g.sh("touch " + f.at("before"))
	tag := "watched"
	out, stderr, code := g.forkd("branch", g.id, "-t", tag, "--json", "-n", "2")
	if code != 0 {
		t.Fatalf("branch: %s", stderr)
	}
	var branch api.Snapshot
	if err := json.Unmarshal([]byte(out), &branch); err != nil || len(branch.Children) != 2 {
		t.Fatalf("%v: %s", err, out)
	}
	var all []*fileTest
	for _, child := range branch.Children {
		own := *g
		own.id, own.Guest = child.ID, g.c.Guest(child.ID)
		all = append(all, &fileTest{guest: &own, dir: f.dir})
	}
	for i, child := range append(all, f) {
		child.sh(fmt.Sprintf("mkdir %s && touch %s", child.at(fmt.Sprint("new", i)), child.at(fmt.Sprintf("new%d/file", i))))
	}
	for i, child := range append(all, f) {
		events := child.fetch(id, fmt.Sprintf("new%d/file", i))
		for _, e := range events {
			if strings.HasPrefix(e.Name, "new") && !strings.HasPrefix(e.Name, fmt.Sprint("new", i)) {
				t.Errorf("sandbox %d was told of another's %+v", i, e)
			}
		}
		if !slices.ContainsFunc(events, func(e wire.FileEvent) bool { return e.Name == "before" }) {
			t.Errorf("sandbox %d has lost what waited: %+v", i, events)
		}
	}
	for _, child := range all {
		if _, stderr, code := g.forkd("kill", child.id); code != 0 {
			t.Error(stderr)
		}
	}
	if _, stderr, code := g.forkd("rmi", tag); code != 0 {
		t.Error(stderr)
	}
}
