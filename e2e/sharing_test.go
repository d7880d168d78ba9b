package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

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
