package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// TestTenTakeLittle: ten snapshots of one machine with small differences, and ten more that stand on nothing, take less than 1.3
// times the room of one.
func TestTenTakeLittle(t *testing.T) {
	if !testenv.Soak() {
		t.Skip("ten builds; the layers of ten are measured in internal/layer")
	}
	const n = 10
	f := copied(t)
	f.run("gc")
	one := f.storeBytes()
	dir := t.TempDir()
	var flat []string
	for i := range n {
		recipe := filepath.Join(dir, fmt.Sprintf("%d.yaml", i))
		text := fmt.Sprintf("name: ten\nbase: snapshot:%s\nwarmup:\n  context: python\n  code: |\n    level = %d\n    some = [str(k) for k in range(%d)]\n",
			parentTag, i, 100*i)
		if err := os.WriteFile(recipe, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		tag := fmt.Sprintf("ten-%d", i)
		f.run("build", recipe, "-t", tag)
		f.run("compact", tag, "-t", "flat-"+tag)
		flat = append(flat, "flat-"+tag)
	}
	all := f.storeBytes()
	t.Logf("one takes %.1f MiB, twenty more %.1f MiB: %.3f times", mib(one), mib(all-one), float64(all)/float64(one))
	if all*10 > one*13 {
		t.Errorf("%d bytes are more than 1.3 times %d", all, one)
	}
	// They are whole without what they were made of, and leave the home without what is others'.
	f.run("rmi", "--cascade", parentTag)
	for i, tag := range flat {
		if out := f.eval(f.forkOf(tag, 1)[0].ID, "level, len(some), int(numpy.arange(5).sum())"); out != fmt.Sprintf("(%d, %d, 10)", i, 100*i) {
			t.Errorf("a child of %s says %s", tag, out)
		}
	}
	pack := filepath.Join(dir, "flat.forkd")
	f.run("pack", flat[n-1], "--no-scrub", "-o", pack)
	there := alone(t)
	there.run("unpack", pack)
	if out := there.eval(there.forkOf(flat[n-1], 1)[0].ID, "level"); out != fmt.Sprint(n-1) {
		t.Errorf("a child elsewhere says %s", out)
	}
}

// TestTenBuildsTakeLittle: ten snapshots that are built of one recipe with small differences, each by itself, take less than 1.3
// times the room of one, although none stands on another. They are copies of one booted machine, which their records do not
// tell and their children cannot: it may go, and builds go on without it.
func TestTenBuildsTakeLittle(t *testing.T) {
	if !testenv.Soak() {
		t.Skip("ten builds; the layers of ten are measured in internal/layer")
	}
	testenv.Need(t, "net", "keyring")
	const n = 10
	f := copied(t)
	steps := func() (tags []string) {
		var list []api.Snapshot
		f.json(&list, "snapshots", "--all")
		for _, s := range list {
			if strings.HasPrefix(s.Tag, ".step-") {
				tags = append(tags, s.Tag)
			}
		}
		return tags
	}
	for _, tag := range steps() { // what the parent was booted as does not count
		f.run("rmi", tag)
	}
	f.run("gc")
	one := f.storeBytes()
	text, err := os.ReadFile(filepath.Join(testenv.Root(t), "recipes", parentTag, "recipe.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var tags []string
	for i := range n {
		recipe := strings.TrimRight(string(text), "\n") +
			fmt.Sprintf("\n    import os\n    level, drawn = %d, os.urandom(8).hex()\n    some = [str(k) for k in range(%d)]\n", i, 100*i)
		tags = append(tags, fmt.Sprintf("built-%d", i))
		f.run("build", recipeText(t, recipe), "-t", tags[i])
	}
	f.run("gc")
	all := f.storeBytes()
	t.Logf("one takes %.1f MiB, ten more %.1f MiB: %.3f times", mib(one), mib(all-one), float64(all)/float64(one))
	if all*10 > one*13 {
		t.Errorf("%d bytes are more than 1.3 times %d", all, one)
	}
	root := steps()
	if len(root) != 1 {
		t.Fatalf("the steps are %v, not one booted machine", root)
	}
	f.run("rmi", root[0])
	drawn := map[string]bool{}
	for i, tag := range tags {
		var s api.SnapshotInfo
		if f.json(&s, "snapshot-info", tag); s.Parent != "" || s.MemorySharedBytes != 0 {
			t.Errorf("%s stands on %q", tag, s.Parent)
		}
		for _, c := range f.forkOf(tag, 2) {
			if out := f.eval(c.ID, "level, len(some), int(numpy.arange(5).sum())"); out != fmt.Sprintf("(%d, %d, 10)", i, 100*i) {
				t.Errorf("a child of %s says %s", tag, out)
			}
			drawn[f.eval(c.ID, "os.urandom(8).hex()")] = true
			drawn[f.eval(c.ID, "drawn")] = true
		}
	}
	if len(drawn) != 3*n {
		t.Errorf("%d builds and their %d children have drawn %d different values", n, 2*n, len(drawn))
	}
	f.run("verify", tags[0])

	// Where the cache may hold nothing, a build leaves no booted machine behind.
	f.run("daemon", "stop", "--kill")
	f.env = []string{"FORKD_STEP_MAX_BYTES=1"}
	f.run("build", parentTag, "-t", "built-alone")
	if left := steps(); len(left) > 0 {
		t.Errorf("steps are left: %v", left)
	}
	f.forkOf("built-alone", 1)
}
