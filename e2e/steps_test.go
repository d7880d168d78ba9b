package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// dockerContext is a directory with a Dockerfile and more files.
func dockerContext(t testing.TB, dockerfile string, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string) {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("Dockerfile", dockerfile)
	for name, text := range files {
		write(name, text)
	}
	return dir
}

// buildIn builds a Dockerfile and returns its progress.
func (f *forkd) buildIn(dir, tag string, more ...string) string {
	f.t.Helper()
	args := append([]string{"build", "-f", filepath.Join(dir, "Dockerfile"), "-t", tag, dir}, more...)
	r := f.try(args...)
	if r.code != 0 {
		f.t.Fatalf("build %s: exit code %d\n%s", tag, r.code, r.stderr)
	}
	return r.stderr
}

// inOne runs a command in a child of a snapshot and returns what it prints.
func (f *forkd) inOne(tag string, args ...string) string {
	f.t.Helper()
	id := f.forkOf(tag, 1)[0].ID
	return strings.TrimSpace(f.run(append([]string{"exec", id, "--"}, args...)...))
}

// ran counts the steps of a build that were done, and those that were there.
func ran(progress string) (done, cached int) {
	return strings.Count(progress, "] done in "), strings.Count(progress, "(cached)")
}

// fiveSteps writes a random value in an early step and a line per step. A step that runs again shows.
func fiveSteps(last string) string {
	return "FROM image:" + parentTag + `
ARG WHO=nobody
ENV GREETING="hello $WHO"
RUN head -c 16 /dev/urandom | od -An -tx1 > /random
WORKDIR /srv/app
COPY app/ ./
RUN (sleep 1000 &); cat /srv/app/data > /seen
RUN ["/bin/sh", "-c", "echo $GREETING > /greeting"]
` + last + `
LABEL purpose=test
USER nobody
CMD ["/bin/cat", "/greeting"]
`
}

// TestDockerfile: each step is kept, and a changed one goes on from the step before it.
func TestDockerfile(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	testenv.Need(t, "net", "keyring") // the kernel's package index
	dir := dockerContext(t, fiveSteps("RUN echo 1 > /last"), map[string]string{
		"app/data": "one", "app/sub/deep": "x", ".dockerignore": "**/secret\n", "app/secret": "s",
	})
	first := f.buildIn(dir, "e2e-df1")
	t.Cleanup(func() { f.try("rmi", "e2e-df1", "e2e-df2", "e2e-df3", "e2e-df4", "e2e-df5") })
	const show = `cat /random /seen /greeting /last; pwd; id -un; ls -A /srv/app; pgrep sleep; stat -c %U:%a /srv/app/data`
	was := f.inOne("e2e-df1", "/bin/sh", "-c", show)
	random, rest, _ := strings.Cut(was, "\n")
	if want := "onehello nobody\n1\n/srv/app\nnobody\ndata\nsub\nroot:600"; rest != want {
		t.Errorf("the machine has\n%s\nwant\n%s\nthe build said\n%s", rest, want, first)
	}

	t.Run("last line", func(t *testing.T) {
		rewrite(t, dir, fiveSteps("RUN echo 2 > /last"))
		progress := f.buildIn(dir, "e2e-df2")
		if done, cached := ran(progress); done != 1 || cached != 5 {
			t.Errorf("%d steps were done and %d cached, want 1 and 5:\n%s", done, cached, progress)
		}
		now := f.inOne("e2e-df2", "/bin/sh", "-c", show)
		if r, rest, _ := strings.Cut(now, "\n"); r != random || !strings.Contains(rest, "hello nobody\n2\n") {
			t.Errorf("the first step ran again, or the last did not:\n%s\nwas\n%s", now, was)
		}
	})
	t.Run("nothing", func(t *testing.T) {
		if done, _ := ran(f.buildIn(dir, "e2e-df3")); done != 0 {
			t.Errorf("%d steps were done", done)
		}
		var built api.Build
		f.json(&built, "build", "-f", filepath.Join(dir, "Dockerfile"), "-t", "e2e-df3", dir, "--replace")
		if len(built.Steps) != 6 || !built.Steps[5].Cached || built.Steps[5].Title != "RUN echo 2 > /last" || built.Tag != "e2e-df3" {
			t.Errorf("as JSON it is %+v", built)
		}
		if progress := f.buildIn(dir, "e2e-df3"); !strings.Contains(progress, "up to date") {
			t.Errorf("building the same tag again:\n%s", progress)
		}
		r := f.try("build", "-f", filepath.Join(dir, "Dockerfile"), "-t", "e2e-df1", dir)
		if r.code != 1 || !strings.Contains(r.stderr, "--replace") {
			t.Errorf("a tag of another build: %+v", r)
		}
	})
	t.Run("copied file", func(t *testing.T) {
		rewriteFile(t, filepath.Join(dir, "app/data"), "two")
		progress := f.buildIn(dir, "e2e-df4")
		if done, cached := ran(progress); done != 5 || cached != 1 { // WORKDIR is done again with the next that is kept
			t.Errorf("%d steps were done and %d cached, want 5 and 1:\n%s", done, cached, progress)
		}
		now := f.inOne("e2e-df4", "/bin/sh", "-c", show)
		if r, rest, _ := strings.Cut(now, "\n"); r != random || !strings.HasPrefix(rest, "twohello") {
			t.Errorf("after a changed file:\n%s\nwas\n%s", now, was)
		}
	})
	t.Run("argument", func(t *testing.T) {
		progress := f.buildIn(dir, "e2e-df5", "--build-arg", "WHO=you", "--build-arg", "NOBODY=1")
		if done, cached := ran(progress); done != 6 || cached != 0 {
			t.Errorf("an argument in the environment of all: %d steps were done and %d cached:\n%s", done, cached, progress)
		}
		if !strings.Contains(progress, "NOBODY") {
			t.Errorf("an argument that no line takes is not told:\n%s", progress)
		}
		if got := f.inOne("e2e-df5", "/bin/cat", "/greeting"); got != "hello you" {
			t.Errorf("the greeting is %q", got)
		}
	})
	t.Run("hidden", func(t *testing.T) { stepsAreHidden(t, f) })
}

func rewrite(t testing.TB, dir, dockerfile string) {
	t.Helper()
	rewriteFile(t, filepath.Join(dir, "Dockerfile"), dockerfile)
}

func rewriteFile(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func stepsAreHidden(t *testing.T, f *forkd) {
	t.Helper()
	var list, all []api.Snapshot
	f.json(&list, "snapshots")
	f.json(&all, "snapshots", "--all")
	steps := 0
	for _, s := range all {
		if s.Step {
			steps++
		}
	}
	for _, s := range list {
		if s.Step || strings.HasPrefix(s.Tag, ".") {
			t.Errorf("%s is listed", s.Tag)
		}
	}
	if steps < 6 || len(all) != len(list)+steps {
		t.Errorf("%d of %d are steps, %d are listed", steps, len(all), len(list))
	}
	if out := f.run("tree"); strings.Contains(out, ".step-") || !strings.Contains(out, "e2e-df1") {
		t.Errorf("the tree:\n%s", out)
	}
	if out := f.run("tree", "--all"); !strings.Contains(out, ".step-") {
		t.Errorf("the tree with --all:\n%s", out)
	}
	r := f.try("branch", f.one(), "-t", ".step-00000000000000000000000000000000")
	if r.code != 1 || !strings.Contains(r.stderr, "tag") {
		t.Errorf("a user's tag of a step: %+v", r)
	}
}

// TestDockerfileFails: the line, the command, its output and exit code are told, and what was done before stays.
func TestDockerfileFails(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	testenv.Need(t, "net", "keyring")
	text := "FROM image:" + parentTag + "\nRUN head -c 8 /dev/urandom | od -An -tx1 > /random\n\n# comment\nRUN echo said; echo complained >&2; \\\n  exit 7\n"
	dir := dockerContext(t, text, nil)
	r := f.try("build", "-f", filepath.Join(dir, "Dockerfile"), "-t", "e2e-dff", dir)
	for _, want := range []string{"Dockerfile:5", "exit status 7", "said", "complained", "RUN echo said", "forkd run .step-"} {
		if r.code != 1 || !strings.Contains(r.stderr, want) {
			t.Errorf("exit code %d, want %q in\n%s", r.code, want, r.stderr)
		}
	}
	rewrite(t, dir, strings.ReplaceAll(text, "exit 7", "exit 0"))
	t.Cleanup(func() { f.try("rmi", "e2e-dff") })
	if done, cached := ran(f.buildIn(dir, "e2e-dff")); done != 1 || cached != 1 {
		t.Errorf("%d steps were done and %d cached, want 1 and 1", done, cached)
	}
	for text, want := range map[string]string{
		"FROM image:" + parentTag + "\nHEALTHCHECK CMD true\n": "Dockerfile:2: HEALTHCHECK",
		"FROM image:" + parentTag + "\nCOPY nothing /\n":       "Dockerfile:2: COPY nothing /",
		"FROM image:no-such-image\nRUN true\n":                 "Dockerfile:1: image:no-such-image",
		"FROM snapshot:no-such\nRUN true\n":                    "Dockerfile:1: snapshot:no-such",
		"FROM image:" + parentTag + "\nUSER ghost\nRUN true\n": "Dockerfile:3: RUN true",
	} {
		rewrite(t, dir, text)
		r := f.try("build", "-f", filepath.Join(dir, "Dockerfile"), "-t", "e2e-dfx", dir)
		if r.code != 1 || !strings.Contains(r.stderr, want) {
			t.Errorf("exit code %d, want %q in\n%s", r.code, want, r.stderr)
		}
	}
}

// TestDockerfileStages: a stage copies from another, and from a snapshot of somebody else.
func TestDockerfileStages(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	testenv.Need(t, "net", "keyring")
	dir := dockerContext(t, `FROM image:`+parentTag+` AS build
RUN mkdir /out && echo made > /out/file && ln -s file /out/link && chmod 750 /out/file
FROM image:`+parentTag+`
COPY --from=build --chown=daemon /out/ /opt/out
COPY <<END /etc/note
from ${HOME:-nowhere}
END
`, nil)
	f.buildIn(dir, "e2e-dfs")
	t.Cleanup(func() { f.try("rmi", "e2e-dfs") })
	got := f.inOne("e2e-dfs", "/bin/sh", "-c", "cat /opt/out/link /etc/note; stat -c %U:%a /opt/out/file; ls /out 2>&1 | grep -c No")
	if want := "made\nfrom nowhere\ndaemon:750\n1"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	t.Cleanup(func() { f.try("rmi", "e2e-dfb") })
	progress := f.buildIn(dir, "e2e-dfb", "--target", "build")
	if done, _ := ran(progress); done != 0 {
		t.Errorf("the stage was there:\n%s", progress)
	}
	if got := f.inOne("e2e-dfb", "/bin/cat", "/out/file"); got != "made" {
		t.Errorf("the stage has %q", got)
	}
}

// TestSnapshotOnSnapshot: a recipe goes on in a warm machine and adds only what it changes.
func TestSnapshotOnSnapshot(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	recipe := "base: snapshot:" + parentTag + `
env: {ADDED: "yes"}
files:
  - content: "text\n"
    path: /etc/added
    owner: daemon
run:
  - test "$(cat /etc/added)" = text; echo one > /root/one
  - echo two > /root/two
warmup:
  context: python
  code: |
    also = np.arange(10).sum()
`
	const tag = "e2e-on"
	r := f.try("build", recipeText(t, recipe), "-t", tag)
	if r.code != 0 {
		t.Fatal(r.stderr)
	}
	t.Cleanup(func() { f.try("rmi", tag) })
	var info, base api.SnapshotInfo
	f.json(&info, "snapshot-info", tag)
	f.json(&base, "snapshot-info", parentTag)
	if info.MemoryOwnBytes > base.MemoryOwnBytes/4 || info.MemorySharedBytes < base.MemoryOwnBytes {
		t.Errorf("it has %d bytes of its own and %d shared, its base %d", info.MemoryOwnBytes, info.MemorySharedBytes, base.MemoryOwnBytes)
	}
	id := f.forkOf(tag, 1)[0].ID
	if got := f.eval(id, "int(also), np.__name__, __import__('os').environ.get('HOME')"); !strings.Contains(got, "45, 'numpy'") {
		t.Errorf("what was warm is %s", got)
	}
	if got := f.run("exec", id, "--", "sh", "-c", "cat /root/one /root/two; stat -c %U /etc/added; echo $ADDED"); got != "one\ntwo\ndaemon\nyes\n" {
		t.Errorf("it has %q", got)
	}
	two := strings.Replace(recipe, "echo two", "echo zwei", 1)
	r = f.try("build", recipeText(t, two), "-t", tag, "--replace")
	if r.code == 0 {
		t.Errorf("a snapshot with a sandbox was replaced")
	}
	f.run("kill", id)
	r = f.try("build", recipeText(t, two), "-t", tag, "--replace")
	if done, cached := ran(r.stderr); r.code != 0 || done != 1 || cached != 2 {
		t.Errorf("of a changed command %d steps were done and %d cached:\n%s", done, cached, r.stderr)
	}
	for text, want := range map[string]string{
		"base: snapshot:" + parentTag + "\nmachine: {cpus: 1, memory: 64GiB}\n": "memory",
		"base: snapshot:" + parentTag + "\npackages: [git]\n":                   "packages",
		"base: snapshot:no-such\n":                                              "no-such",
	} {
		if r := f.try("build", recipeText(t, text), "-t", "e2e-onx"); r.code != 1 || !strings.Contains(r.stderr, want) {
			t.Errorf("exit code %d, want %q in\n%s", r.code, want, r.stderr)
		}
	}
}

// TestBuildGoesOnAfterDaemon: a daemon that is killed in the middle of a build costs the step it was at.
func TestBuildGoesOnAfterDaemon(t *testing.T) {
	testenv.OncePerRun(t)
	f := builder(t)
	dir := dockerContext(t, "FROM image:"+parentTag+"\nRUN head -c 16 /dev/urandom | od -An -tx1 > /random\nRUN echo waiting; test -e /go || sleep 600\n", nil)
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(2*time.Minute))
	defer cancel()
	waiting := make(chan result, 1)
	go func() {
		waiting <- runIn(ctx, f.bin, f.home, f.env, nil, append(small(), "-f", filepath.Join(dir, "Dockerfile"), "-t", "killed", dir)...)
	}()
	awaitSteps(ctx, t, f, 2) // the booted machine, and the first step
	f.killDaemon()
	if r := <-waiting; r.code == 0 {
		t.Fatal("the build went on without its daemon")
	}
	rewrite(t, dir, "FROM image:"+parentTag+"\nRUN head -c 16 /dev/urandom | od -An -tx1 > /random\nRUN true\n")
	progress := f.buildIn(dir, "killed", small()[1:]...)
	if done, cached := ran(progress); done != 1 || cached != 1 {
		t.Errorf("%d steps were done and %d cached, want 1 and 1:\n%s", done, cached, progress)
	}
	var all []api.Snapshot
	f.json(&all, "snapshots", "--all")
	for _, s := range all {
		if s.Status != "ready" {
			t.Errorf("%s is %s", s.Tag, s.Status)
		}
	}
	if out := f.inOne("killed", "/bin/cat", "/random"); len(strings.Fields(out)) != 16 {
		t.Errorf("the first step left %q", out)
	}
}

// builder is the program with a home of its own that has the parent and its kernel, but no step of a machine that is small.
func builder(t *testing.T) *forkd {
	t.Helper()
	testenv.Need(t, "net", "keyring")
	f := copied(t)
	for _, sub := range []string{"cache/kernels", "cache/resolved"} {
		if err := os.CopyFS(filepath.Join(f.home, sub), os.DirFS(filepath.Join(suite.home, sub))); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func small() []string { return []string{"build", "--memory", "320MiB"} }

// awaitSteps returns when a daemon has so many steps of a small machine that are ready.
func awaitSteps(ctx context.Context, t *testing.T, f *forkd, n int) {
	t.Helper()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		var all []api.Snapshot
		f.json(&all, "snapshots", "--all")
		ready := 0
		for _, s := range all {
			if s.Step && s.Status == "ready" && s.MemoryBytes == 320<<20 {
				ready++
			}
		}
		if ready >= n {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%d steps, waited for %d", ready, n)
		}
	}
}

// TestBuildCancelled: who leaves takes the step with him, and its machine.
func TestBuildCancelled(t *testing.T) {
	testenv.OncePerRun(t)
	f := builder(t)
	dir := dockerContext(t, "FROM image:"+parentTag+"\nRUN true\nRUN echo waiting; sleep 600\n", nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runIn(ctx, f.bin, f.home, f.env, nil, append(small(), "-f", filepath.Join(dir, "Dockerfile"), "-t", "left", dir)...)
	}()
	awaitSteps(t.Context(), t, f, 2)
	cancel()
	<-ended
	deadline := time.After(testenv.Timeout(20 * time.Second))
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for len(machinesOf(f.home)) > 0 {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("machines %v run on", machinesOf(f.home))
		}
	}
}

// TestDockerfileOnLayout: a base that is a directory on the user's machine, with nothing in it that could run.
func TestDockerfileOnLayout(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	testenv.Need(t, "net", "keyring")
	dir := dockerContext(t, "FROM oci-layout:layout\nCOPY --chown=7:8 added /etc/added/\nWORKDIR /made\nENV MORE=$FROM_BASE-too\n", map[string]string{
		"added": "text", ".dockerignore": "layout",
	})
	writeLayout(t, filepath.Join(dir, "layout"), map[string]string{"etc/there": "of the layer"}, `"Env":["FROM_BASE=yes"],"User":"5"`)
	f.buildIn(dir, "e2e-dfl", "--memory", "128MiB")
	t.Cleanup(func() { f.try("rmi", "e2e-dfl") })
	id := f.forkOf("e2e-dfl", 1)[0].ID
	for path, want := range map[string]string{"/etc/added/added": "text", "/etc/there": "of the layer"} {
		to := filepath.Join(t.TempDir(), "got")
		f.run("cp", "-u", "root", id+":"+path, to)
		if got, err := os.ReadFile(to); err != nil || string(got) != want {
			t.Errorf("%s has %q (%v), want %q", path, got, err, want)
		}
	}
	to := filepath.Join(t.TempDir(), "image.json")
	f.run("cp", id+":/etc/forkd/image.json", to)
	got, err := os.ReadFile(to)
	for _, want := range []string{`"MORE": "yes-too"`, `"workdir": "/made"`, `"user": "5"`} {
		if err != nil || !strings.Contains(string(got), want) {
			t.Errorf("the machine's configuration lacks %s (%v):\n%s", want, err, got)
		}
	}
}

// writeLayout writes an OCI image layout of one layer.
func writeLayout(t *testing.T, dir string, files map[string]string, config string) {
	t.Helper()
	blobs := filepath.Join(dir, "blobs", "sha256")
	if err := os.MkdirAll(blobs, 0o700); err != nil {
		t.Fatal(err)
	}
	put := func(data []byte) string {
		sum := sha256.Sum256(data)
		digest := hex.EncodeToString(sum[:])
		rewriteFile(t, filepath.Join(blobs, digest), string(data))
		return "sha256:" + digest
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for name, text := range files {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(text)), Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	content := put(layer.Bytes())
	configText := fmt.Sprintf(`{"architecture":%q,"os":"linux","config":{%s},"rootfs":{"type":"layers","diff_ids":[%q]}}`, runtime.GOARCH, config, content)
	manifest := fmt.Sprintf(`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json",`+
		`"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":%q,"size":%d},`+
		`"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":%q,"size":%d}]}`,
		put([]byte(configText)), len(configText), content, layer.Len())
	rewriteFile(t, filepath.Join(dir, "oci-layout"), `{"imageLayoutVersion":"1.0.0"}`)
	rewriteFile(t, filepath.Join(dir, "index.json"), fmt.Sprintf(`{"schemaVersion":2,"manifests":[{`+
		`"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":%q,"size":%d}]}`, put([]byte(manifest)), len(manifest)))
}

// TestRecipeRun: the commands of a recipe are steps as well, and its image does not depend on them.
func TestRecipeRun(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	testenv.Need(t, "net", "keyring")
	recipe := parentRecipe(t) + "run:\n  - echo $LANG $HOME > /one; sleep 1000 &\n  - echo 2 > /two\nwarmup: {command: [cat, /one]}\n"
	r := f.try("build", recipeText(t, recipe), "-t", "e2e-run")
	t.Cleanup(func() { f.try("rmi", "e2e-run") })
	if done, cached := ran(r.stderr); r.code != 0 || done != 2 {
		t.Fatalf("%d steps were done and %d cached:\n%s", done, cached, r.stderr)
	}
	if got := f.inOne("e2e-run", "/bin/sh", "-c", "cat /one /two; cat /proc/[0-9]*/comm | grep -c sleep; true"); got != "C.UTF-8 /root\n2\n0" {
		t.Errorf("the machine has %q", got)
	}
	changed := strings.Replace(recipe, "echo 2", "false; echo 2", 1)
	r = f.try("build", recipeText(t, changed), "-t", "e2e-run2")
	if done, _ := ran(r.stderr); r.code != 1 || done != 0 || !strings.Contains(r.stderr, "run 2: false; echo 2") {
		t.Errorf("a command that fails: exit code %d\n%s", r.code, r.stderr)
	}
}
