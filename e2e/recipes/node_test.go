package recipes

import "testing"

// TestNode: children run JavaScript.
func TestNode(t *testing.T) {
	f := built(t, "node")
	children := f.fork("node", 3)
	drawn := make([]string, len(children))
	each(children, func(i int, id string) {
		got := f.exec(id, `node -e 'const {createHash} = require("crypto"); console.log([1, 2, 3].map(x => x * 14).at(-1), createHash("sha256").update("x").digest("hex").slice(0, 8))'`)
		if want := "42 2d711642"; got != want {
			t.Errorf("child %d: got %q, want %q", i, got, want)
		}
		drawn[i] = f.exec(id, `node -p 'crypto.randomUUID() + Math.random()'`)
	})
	distinct(t, "what node drew", drawn)
}
