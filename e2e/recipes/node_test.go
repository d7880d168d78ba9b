package recipes

import (
	"fmt"
	"testing"
)

// TestNode: children evaluate JavaScript in the warm context, with a state of their own, and run programs.
func TestNode(t *testing.T) {
	heavy(t)
	f := built(t, "node")
	children := f.fork("node", 3)
	drawn := make([]string, len(children))
	each(children, func(i int, id string) {
		drawn[i] = f.eval(id, `crypto.randomUUID() + Math.random()`)
		f.eval(id, fmt.Sprintf(`const mine = await Promise.resolve(%d)`, 40+i))
		if got, want := f.eval(id, `[mine, 1, 1].reduce((a, b) => a + b)`), fmt.Sprint(42+i); got != want {
			t.Errorf("child %d: got %q, want %q", i, got, want)
		}
		got := f.exec(id, `node -e 'console.log(require("crypto").createHash("sha256").update("x").digest("hex").slice(0, 8))'`)
		if got != "2d711642" {
			t.Errorf("child %d: a program prints %q", i, got)
		}
	})
	distinct(t, "what node drew", drawn)
	warm := f.firstAnswer("node", func(id string) { f.eval(id, `[1, 2, 3].map((x) => x * 14).at(-1)`) })
	cold := f.timed(func() { f.exec(children[0].ID, `node -p '[1, 2, 3].map((x) => x * 14).at(-1)'`) })
	t.Logf("first answer: %d ms by a fork; %d ms to start node in a child: %.1f times", warm.Milliseconds(), cold.Milliseconds(),
		float64(cold)/float64(warm))
}
