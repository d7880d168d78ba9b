package cli

import (
	"bytes"
	"testing"

	"forkd.dev/forkd/api"
)

const mib = 1 << 20

func family() []api.TreeNode {
	return []api.TreeNode{
		{
			Kind: "image", Name: "python-numpy@338871ecfc98", OwnBytes: 80 * mib, DiskOwnBytes: 310 * mib, Children: []api.TreeNode{
				{
					Kind: "snapshot", Name: "python-numpy", State: "ready", OwnBytes: 28 * mib, MemoryOwnBytes: 105 * mib, DiskOwnBytes: mib,
					DiskSharedBytes: 310 * mib, Children: []api.TreeNode{
						{
							Kind: "snapshot", Name: "checkpoint-1", State: "ready", OwnBytes: 3 * mib, MemoryOwnBytes: 9 * mib,
							MemorySharedBytes: 105 * mib, DiskOwnBytes: 4096, DiskSharedBytes: 311 * mib, Children: []api.TreeNode{
								{Kind: "snapshot", Name: "checkpoint-2", State: "writing"},
								{
									Kind: "sandbox", Name: "sbaaaaaaaaaaaaa", State: "paused", MemoryOwnBytes: 31 * mib, MemorySharedBytes: 60 * mib,
									DiskOwnBytes: 65536, DiskSharedBytes: 311 * mib,
								},
							},
						},
						{Kind: "sandbox", Name: "sbbbbbbbbbbbbbb\x1b[31m", State: "running", MemoryOwnBytes: 1536 * mib},
					},
				},
				{Kind: "snapshot", Name: "alone", State: "failed"},
			},
		},
		{Kind: "image", Name: "minimal@8183d99ff949", OwnBytes: 40 * mib},
	}
}

func TestTree(t *testing.T) {
	for name, b := range map[string]branchSet{"tree_unicode.txt": unicodeBranches(), "tree_ascii.txt": asciiBranches()} {
		var out bytes.Buffer
		if err := printTree(&out, family(), b); err != nil {
			t.Fatal(err)
		}
		golden(t, name, out.Bytes())
	}
}

func TestTreeIsDrawnInWhatTheLocaleCan(t *testing.T) {
	for _, tt := range []struct {
		env     map[string]string
		unicode bool
	}{
		{map[string]string{}, false}, // nothing is known, and the output is no terminal
		{map[string]string{"LANG": "de_DE.UTF-8"}, true},
		{map[string]string{"LANG": "C.utf8"}, true},
		{map[string]string{"LANG": "C"}, false},
		{map[string]string{"LC_ALL": "C", "LANG": "de_DE.UTF-8"}, false},
		{map[string]string{"LC_CTYPE": "en_US.UTF-8", "LANG": "C"}, true},
		{map[string]string{"TERM": "dumb", "LANG": "de_DE.UTF-8"}, false},
	} {
		a := App{Out: &bytes.Buffer{}, Getenv: func(name string) string { return tt.env[name] }}
		if got := a.branches() == unicodeBranches(); got != tt.unicode {
			t.Errorf("%v: Unicode %t, want %t", tt.env, got, tt.unicode)
		}
	}
}
