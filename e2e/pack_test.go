package e2e

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// lineOf makes snapshots that stand on one another, each of a child of the one before it, with a state of its own in memory
// and on disk.
func (f *forkd) lineOf(n int) (tags []string) {
	f.t.Helper()
	from := parentTag
	for i := range n {
		id := f.forkOf(from, 1)[0].ID
		f.eval(id, fmt.Sprintf("level = %d; level", i))
		f.run("exec", id, "--", "sh", "-c", fmt.Sprintf("echo %d >> /root/levels", i))
		from = fmt.Sprintf("level-%d", i)
		f.branch(id, "-t", from, "--mode", diff)
		f.run("kill", id)
		tags = append(tags, from)
	}
	return tags
}

// takeKernels gives a copied home the kernels of the one that it was copied from, and returns their place in a home.
func (f *forkd) takeKernels() string {
	f.t.Helper()
	kernels := filepath.Join("cache", "kernels")
	if err := os.CopyFS(filepath.Join(f.home, kernels), os.DirFS(filepath.Join(suite.home, kernels))); err != nil {
		f.t.Fatal(err)
	}
	return kernels
}

// TestPackTravels: what is packed in one home is the same machine in another that has nothing: children are warm, a line of
// branches is whole, and the pack of a relative moves its own only.
func TestPackTravels(t *testing.T) {
	children, links := 1, 2
	if testenv.Soak() {
		children, links = 20, 5
	}
	here, there := copied(t), alone(t)
	kernels := here.takeKernels()
	tags := here.lineOf(links)
	last := tags[links-1]
	dir := t.TempDir()
	base, line := filepath.Join(dir, "base.forkd"), filepath.Join(dir, "line.forkd")
	here.run("pack", parentTag, "-o", base)
	here.run("pack", last, "--no-scrub", "-o", line)
	there.run("verify", line)

	var got api.Unpacked
	there.json(&got, "unpack", base)
	if !slices.Equal(got.New, []string{parentTag}) || got.FetchedBytes != got.Bytes || got.Scrub == nil || len(got.Scrub.Found) > 0 ||
		!slices.Equal(got.Scrub.Looked, []string{parentTag}) {
		t.Errorf("unpacked %+v", got)
	}
	var made api.Provenance
	here.json(&made, "snapshot-info", parentTag, "--provenance")
	content := made.Snapshots[0].KernelContent
	if _, err := os.Stat(filepath.Join(there.home, kernels, content, "kernel.json")); content == "" || err != nil {
		t.Errorf("the kernel %q did not come with it: %v", content, err)
	}
	for _, c := range there.forkOf(parentTag, children) {
		if out := there.eval(c.ID, `import sys; "numpy" in sys.modules, int(numpy.arange(5).sum())`); out != "(True, 10)" {
			t.Errorf("a child of what was unpacked says %q", out)
		}
	}

	var whole api.Unpacked
	there.json(&whole, "unpack", line)
	if !slices.Equal(whole.New, tags) || !slices.Equal(whole.Present, []string{parentTag}) {
		t.Errorf("unpacked %+v", whole)
	}
	if whole.Bytes-whole.FetchedBytes < got.Bytes*9/10 {
		t.Errorf("%d of %d bytes moved, although %d were there", whole.FetchedBytes, whole.Bytes, got.Bytes)
	}
	for i, tag := range tags {
		id := there.forkOf(tag, 1)[0].ID
		if out := there.eval(id, `level, open("/root/levels").read().split()`); out != fmt.Sprintf("(%d, %s)", i, levels(i)) {
			t.Errorf("a child of %s says %s", tag, out)
		}
		there.run("kill", id)
	}
	var info api.SnapshotInfo
	there.json(&info, "snapshot-info", last)
	if want := append([]string{parentTag}, tags[:links-1]...); !slices.Equal(info.Ancestors, want) {
		t.Errorf("it stands on %v, want %v", info.Ancestors, want)
	}
	var from api.Provenance
	there.json(&from, "snapshot-info", last, "--provenance")
	if len(from.Snapshots) != links+1 || from.Snapshots[0].RecipeDigest == "" || from.Snapshots[links].BranchedFrom == "" || len(from.Images) != 1 ||
		from.Snapshots[links].KernelContent != content {
		t.Errorf("provenance: %+v", from)
	}
	if ran := from.Snapshots[links].Ran; ran == nil || len(ran.Commands) != 1 || ran.Commands[0][2] != fmt.Sprintf("echo %d >> /root/levels", links-1) {
		t.Errorf("before it was branched ran %+v", ran)
	}
	if r := there.try("unpack", line, "-t", parentTag); r.code == 0 || !strings.Contains(r.stderr, "-t TAG") {
		t.Errorf("a tag that is taken: %+v", r)
	}
	there.run("verify", "--snapshot", last)
	if testenv.Soak() {
		bootsOffline(t, there)
	}
}

// bootsOffline builds on an image that was unpacked where no kernel can be fetched.
func bootsOffline(t *testing.T, f *forkd) {
	t.Helper()
	f.run("kill", "--all")
	f.run("daemon", "stop")
	bin := f.bin
	f.bin = filepath.Join(t.TempDir(), "offline")
	// A daemon that is started so has a network of its own, with nothing in it; a caller reaches it by its socket.
	if err := os.WriteFile(f.bin, []byte("#!/bin/sh\nexec unshare -rn "+bin+" \"$@\"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	recipe := filepath.Join(t.TempDir(), "offline.yaml")
	if err := os.WriteFile(recipe, []byte("base: image:"+parentTag+"\nrun: [echo booted > /booted]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := f.try("build", recipe, "-t", "offline"); r.code != 0 || !strings.Contains(r.stderr, "no kernel can be fetched") {
		t.Fatalf("a build on an image that came, without a network: %+v", r)
	}
	if out := f.inOne("offline", "cat", "/booted"); out != "booted" {
		t.Errorf("a child of it says %q", out)
	}
}

// levels is how Python prints the levels up to i.
func levels(i int) string {
	var all []string
	for k := range i + 1 {
		all = append(all, fmt.Sprintf("'%d'", k))
	}
	return "[" + strings.Join(all, ", ") + "]"
}

// TestPackScrubs: secrets that are found do not travel, nor do the layers that hold them; what is packed still works.
func TestPackScrubs(t *testing.T) {
	testenv.OncePerRun(t)
	here, there := copied(t), alone(t)
	token := "ghp" + "_" + strings.Repeat("a1B2", 9)
	key := strings.Repeat("made-up-key.", 5)
	id := here.one()
	here.eval(id, "kept = '"+token+"'; 0")
	here.run("exec", id, "--", "sh", "-c", "umask 077; echo 'curl -H secret' > /root/.bash_history; mkdir /root/.ssh; "+
		"echo "+key+" > /root/.ssh/id_rsa; echo pub > /root/.ssh/id_rsa.pub; printf 'A=1\\nTOKEN="+token+"\\n' > /root/settings.env; sync")
	here.branch(id, "-t", "dirty", "--mode", diff)
	// Removed from the head, but its layers have them.
	here.run("exec", id, "--", "sh", "-c", "rm /root/.ssh/id_rsa")
	here.branch(id, "-t", "head", "--mode", diff)
	var before, after []api.Snapshot // with the steps of the parent's build
	here.json(&before, "snapshots", "--all")
	file := filepath.Join(t.TempDir(), "head.forkd")
	out := here.run("pack", "head", "-o", file)
	for _, want := range []string{
		"dirty: /root/.ssh/id_rsa (private key", "head: /root/.bash_history (shell history", "head: /root/settings.env (GitHub token", "head: command 1 (GitHub token",
		"blocks may still be on the disk",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("the report lacks %q:\n%s", want, out)
		}
	}
	if strings.Contains(out, "shred") || strings.Contains(out, "was not overwritten") {
		t.Errorf("files or free memory were not overwritten:\n%s", out)
	}
	// The interpreter has the token, and the blocks of the key that was only removed have that.
	for file, where := range map[string]string{"head: /root/settings.env": "STILL in memory (", "dirty: /root/.ssh/id_rsa": "on the disk ("} {
		if i := strings.Index(out, file); i < 0 || !strings.Contains(strings.SplitN(out[i:], "\n", 2)[0], where) {
			t.Errorf("of %s the report does not say %q:\n%s", file, where, out)
		}
	}
	var got api.Unpacked
	there.json(&got, "unpack", file)
	if !slices.Equal(got.New, []string{"head"}) || !got.Scrub.Flat {
		t.Errorf("unpacked %+v", got)
	}
	child := there.forkOf("head", 1)[0].ID
	text := there.run("exec", child, "--", "sh", "-c", "ls -A /root /root/.ssh; cat /root/settings.env; stat -c %a%U /root/settings.env")
	if strings.Contains(text, "bash_history") || strings.Contains(text, token) || strings.Contains(text, "id_rsa\n") ||
		!strings.Contains(text, "id_rsa.pub") || !strings.Contains(text, "A=1\nTOKEN=****") || !strings.Contains(text, "600root") {
		t.Errorf("the child has\n%s", text)
	}
	if out := there.eval(child, "int(numpy.arange(5).sum())"); out != "10" {
		t.Errorf("it says %q", out)
	}
	if out := there.run("snapshot-info", "head", "--provenance"); strings.Contains(out, token) || !strings.Contains(out, "TOKEN=****") {
		t.Errorf("provenance has the token, or not the command:\n%s", out)
	}
	var list []api.Sandbox
	here.json(&list, "ls")
	here.json(&after, "snapshots", "--all")
	if len(list) != 1 || len(after) != len(before) {
		t.Errorf("packing has left something: %d sandboxes, %d snapshots and %d before", len(list), len(after), len(before))
	}
}

// TestUnpackKilled: a daemon that is killed while it unpacks leaves nothing to the next.
func TestUnpackKilled(t *testing.T) {
	here, there := copied(t), alone(t)
	kernels := here.takeKernels()
	file := filepath.Join(t.TempDir(), "base.forkd")
	here.run("pack", parentTag, "--no-scrub", "-o", file)
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	points := []int64{info.Size() / 2}
	if testenv.Soak() {
		points = append(points, 1<<10, info.Size()-1<<10, info.Size())
	}
	for _, point := range points {
		there.run("snapshots") // starts a daemon
		pid := there.status().PID
		f, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		r := &killer{r: io.LimitReader(f, point), kill: func() { _ = syscall.Kill(pid, syscall.SIGKILL) }}
		result := there.tryIn(r, "unpack", "-")
		_ = f.Close()
		var list []api.Snapshot
		there.json(&list, "snapshots", "--all")
		if point < info.Size() && (result.code == 0 || len(list) != 0) {
			t.Errorf("killed after %d bytes: exit code %d, %d snapshots", point, result.code, len(list))
		}
		for _, dir := range []string{"tmp", "unfinished"} {
			entries, err := os.ReadDir(filepath.Join(there.home, dir))
			if err != nil || len(entries) > 0 {
				t.Errorf("killed after %d bytes: %s holds %d things, %v", point, dir, len(entries), err)
			}
		}
		if len(list) > 0 { // it was faster
			continue
		}
		if maps, err := os.ReadDir(filepath.Join(there.home, "layers", "maps")); err != nil || len(maps) > 0 {
			t.Errorf("killed after %d bytes: %d layers are left, %v", point, len(maps), err)
		}
		if entries, err := os.ReadDir(filepath.Join(there.home, "images")); err != nil || len(entries) > 0 {
			t.Errorf("killed after %d bytes: %d images are left, %v", point, len(entries), err)
		}
		if entries, err := os.ReadDir(filepath.Join(there.home, kernels)); len(entries) > 0 {
			t.Errorf("killed after %d bytes: %d kernels are left, %v", point, len(entries), err)
		}
	}
	if there.try("unpack", file).code != 0 {
		t.Error("afterwards it cannot be unpacked")
	}
	there.run("verify", "--snapshot", parentTag)
}

// killer kills when everything was read.
type killer struct {
	r    io.Reader
	kill func()
}

func (k *killer) Read(p []byte) (int, error) {
	n, err := k.r.Read(p)
	if err != nil {
		k.kill()
	}
	return n, err
}
