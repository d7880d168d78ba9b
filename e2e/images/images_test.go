package images

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/testenv"
)

// suite is the one daemon of this package.
var suite struct{ dir string }

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == treeWord { // in a guest
		if err := printTree(os.Args[2], os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "tree:", err)
			os.Exit(1) //nolint:forbidigo // it is a main of its own.
		}
		return
	}
	dir, err := os.MkdirTemp("", "forkd-images-")
	if err != nil {
		panic(err)
	}
	suite.dir = dir
	// The daemon reads its user's docker configuration, which must not be that of whoever runs the tests.
	if err := os.Setenv("DOCKER_CONFIG", filepath.Join(dir, "docker")); err != nil {
		panic(err)
	}
	testenv.Main(func() int { return max(m.Run(), endSuite()) }, dir)
}

func home() string { return filepath.Join(suite.dir, "home") }

func endSuite() int {
	code := 0
	if _, err := os.Stat(filepath.Join(home(), "forkd.sock")); err == nil {
		if out, err := command(context.Background(), suite.dir, "daemon", "stop", "--kill").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "images: stop the daemon: %v: %s\n", err, out)
			code = 1
		}
	}
	if err := os.RemoveAll(suite.dir); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		code = 1
	}
	return code
}

// command is a run of the program, whose path the suite's directory has as a link, against the suite's daemon.
func command(ctx context.Context, dir string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "forkd"), args...)
	cmd.Env = append(os.Environ(), "FORKD_HOME="+home(), "FORKD_HOST=")
	return cmd
}

// forkd runs the program; it must succeed unless wanted is not nil.
func forkd(t *testing.T, args ...string) (stdout string) {
	t.Helper()
	out, stderr, err := try(t, args...)
	if err != nil {
		t.Fatalf("forkd %s: %v\n%s%s", strings.Join(args, " "), err, out, stderr)
	}
	return out
}

func try(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(4*time.Minute))
	defer cancel()
	cmd := command(ctx, suite.dir, args...)
	var out, text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &text
	err = cmd.Run()
	return out.String(), text.String(), err
}

// prepare makes the suite's home once, with what an earlier run downloaded.
func prepare(t *testing.T) {
	t.Helper()
	testenv.Need(t, "qemu", "agent", "mke2fs", "binary", "net", "keyring")
	if runtime.GOARCH != "amd64" {
		t.Skip("the packages that the images are made of are fetched for amd64 only")
	}
	link := filepath.Join(suite.dir, "forkd")
	if _, err := os.Lstat(link); err == nil {
		return
	}
	if err := errors.Join(os.Symlink(testenv.Binary(t), link), os.Mkdir(os.Getenv("DOCKER_CONFIG"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if seed := testenv.Seed(); seed != "" {
		if err := os.CopyFS(filepath.Join(home(), "cache"), os.DirFS(filepath.Join(seed, "cache"))); err != nil {
			t.Fatal(err)
		}
	}
}

// build makes a snapshot of an image whose recipe has the lines.
func build(t *testing.T, tag, base string, lines ...string) {
	t.Helper()
	forkd(t, "build", recipe(t, base, lines...), "-t", tag)
}

func recipe(t *testing.T, base string, lines ...string) string {
	t.Helper()
	dir := t.TempDir()
	text := "base: " + base + "\nmachine: {memory: 256MiB}\n" + strings.Join(lines, "\n") + "\n"
	if err := os.WriteFile(filepath.Join(dir, "recipe.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// fork makes a sandbox that ends with the test.
func fork(t *testing.T, tag string) string {
	t.Helper()
	var children []api.Sandbox
	if err := json.Unmarshal([]byte(forkd(t, "fork", "--json", tag)), &children); err != nil || len(children) != 1 {
		t.Fatalf("fork %s: %v", tag, err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), testenv.Timeout(time.Minute))
		defer cancel()
		_ = command(ctx, suite.dir, "kill", children[0].ID).Run()
	})
	return children[0].ID
}

// guestTree is a directory of a sandbox, by name.
func guestTree(t *testing.T, id, dir string) map[string]string {
	t.Helper()
	out := forkd(t, "exec", id, "--user", "root", "--", "/run/tree", treeWord, dir)
	lines := map[string]string{}
	for line := range strings.Lines(out) {
		line = strings.TrimSuffix(line, "\n")
		quoted, err := strconv.QuotedPrefix(line)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		name, err := strconv.Unquote(quoted)
		if err != nil {
			t.Fatal(err)
		}
		lines[name] = line
	}
	return lines
}

// putTree puts this test's own executable into a sandbox, whoever its processes run as.
func putTree(t *testing.T, guest call.Opener) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(self)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	pr, pw := io.Pipe()
	defer pr.Close()
	go func() {
		w := tar.NewWriter(pw)
		err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "tree", Mode: 0o755, Size: info.Size()})
		if err == nil {
			_, err = io.Copy(w, f)
		}
		pw.CloseWithError(errors.Join(err, w.Close()))
	}()
	if err := call.Upload(t.Context(), guest, wire.MethodExtract, wire.ExtractRequest{Path: "/run"}, pr, nil); err != nil {
		t.Fatal(err)
	}
}

// daemon is a client of the suite's daemon.
func daemon(t *testing.T) *client.Client {
	t.Helper()
	c, err := client.New("unix://" + filepath.Join(home(), "forkd.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// compare holds a guest's tree against the reference. What a machine adds is named; what the reference has must be there
// exactly, but for what is below mount points.
func compare(t *testing.T, want, got map[string]string, added func(name string) bool) {
	t.Helper()
	for name := range got {
		if _, ok := want[name]; !ok && added(name) {
			delete(got, name)
		}
	}
	if digest(want) == digest(got) {
		return
	}
	t.Errorf("the trees differ (- reference, + guest): %s", cmp.Diff(want, got))
}

// digest is of a whole tree: paths, kinds, modes, owners, links, attributes, times of files, contents.
func digest(tree map[string]string) string {
	h := sha256.New()
	var names []string
	for name := range tree {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintln(h, tree[name])
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Nine families become machines, which run what the images say, and have their trees.
func TestBooted(t *testing.T) {
	testenv.OncePerRun(t)
	prepare(t)
	families := booted(openPackages(t, filepath.Join(home(), "cache")))
	if n := len(families) + len(compared()); n < 25 {
		t.Fatalf("%d families", n)
	}
	dir := filepath.Join(t.TempDir(), "layout")
	l := newLayout(t, dir)
	want := map[string]string{
		"static": "hello from nothing else\n", "distroless": "served\n", "glibc": "Hello, world!\n/home/app grüß\n", "musl": "hello from musl\n",
		"busybox": "uid=1000(app) gid=2000(extra)\n/work/made\n", "forty-layers": "layer 39\n", "numeric-user": "uid=12345 gid=0\n",
		"privileged-files": "who 0\nwho-plain 232\nraw 0\nraw-plain 1\n", // 1000 modulo 256
	}
	for _, f := range families {
		l.add(f)
	}
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel() // much of a build waits for one thing after the other
			boot(t, dir, f, want[f.name])
		})
	}
}

// boot makes a machine of a family, which says what it is meant to, and has the tree that it should.
func boot(t *testing.T, dir string, f *family, want string) {
	t.Helper()
	build(t, f.name, "oci-layout:"+dir+"#"+f.name)
	if out := forkd(t, "run", f.name); want != "" && out != want {
		t.Errorf("it printed %q, not %q", out, want)
	}
	id := fork(t, f.name)
	putTree(t, daemon(t).Guest(id))
	reference, err := f.reference()
	if err != nil {
		t.Fatal(err)
	}
	compare(t, reference, guestTree(t, id, "/"), func(name string) bool {
		return name == "work" || name == "work/made" || machines(name)
	})
}

// The families that TestCompared only unpacks become machines as well, with a program to run.
func TestEveryFamilyBoots(t *testing.T) {
	if os.Getenv(testenv.EnvSoak) == "" {
		t.Skipf("set %s=1: it boots %d more machines", testenv.EnvSoak, len(compared()))
	}
	prepare(t)
	dir := filepath.Join(t.TempDir(), "layout")
	l := newLayout(t, dir)
	families := compared()
	for _, f := range families {
		f.name = "boots-" + f.name
		f.layers = append(f.layers, of(file("forkd-test-hello", 0o755, string(program("hello\n")))))
		f.config = config{Cmd: []string{"/forkd-test-hello"}}
		l.add(f)
	}
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			boot(t, dir, f, "hello\n")
		})
	}
}

// machines are the names that a machine has besides its image's.
func machines(name string) bool {
	switch name {
	case "lost+found", "dev", "proc", "sys", "run", "tmp", "etc", "etc/forkd", "etc/forkd/image.json", "etc/hosts", "etc/hostname", "etc/resolv.conf",
		"etc/machine-id", "var", "var/tmp":
		return true
	}
	return false
}

// The other families' trees, as the agent of a machine unpacks them out of the same stream that an image is made of.
func TestCompared(t *testing.T) {
	testenv.OncePerRun(t)
	prepare(t)
	dir := filepath.Join(t.TempDir(), "layout")
	l := newLayout(t, dir)
	l.add(&family{name: "carrier", layers: []layer{of(file("hello", 0o755, string(program("hello\n"))))}})
	build(t, "carrier", "oci-layout:"+dir+"#carrier")
	id := fork(t, "carrier")
	c := daemon(t)
	putTree(t, c.Guest(id))
	for _, f := range compared() {
		t.Run(f.name, func(t *testing.T) {
			l.add(f)
			to := "/trees/" + f.name
			upload(t, c.Guest(id), dir, "oci-layout:x#"+f.name, to)
			reference, err := f.reference()
			if err != nil {
				t.Fatal(err)
			}
			compare(t, reference, guestTree(t, id, to), machines)
		})
	}
}

// upload makes the stream of an image and has the agent unpack it.
func upload(t *testing.T, guest call.Opener, layout, base, to string) {
	t.Helper()
	r, err := image.ParseRecipe("recipe.yaml", []byte("base: "+base+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(t.TempDir(), "files")
	if err := errors.Join(os.Mkdir(root, 0o700), os.Symlink(layout, filepath.Join(root, image.LocalDir))); err != nil {
		t.Fatal(err)
	}
	plan, err := image.Resolve(t.Context(), r, os.DirFS(root), image.Host{CacheDir: t.TempDir(), Arch: runtime.GOARCH})
	if err != nil {
		t.Fatal(err)
	}
	defer plan.Close()
	if err := plan.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	pr, pw := io.Pipe()
	go func() { pw.CloseWithError(plan.WriteRootfs(t.Context(), pw)) }()
	defer pr.Close()
	if err := call.Upload(t.Context(), guest, wire.MethodExtract, wire.ExtractRequest{Path: to}, pr, nil); err != nil {
		t.Fatal(err)
	}
}
