package e2bapi

import (
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/guest/wire"
)

func TestNotebook(t *testing.T) {
	run := func(command string) string {
		return "(__import__('subprocess').run(" + command + ", shell=True), None)[1]"
	}
	for code, want := range map[string]string{
		"":                                      "",
		"x = 1":                                 "x = 1",
		"x = 1\nif x:\n    y = 2\n":             "x = 1\nif x:\n    y = 2\n",
		"\n  import a\n  if a:\n    b()\n":      "\nimport a\nif a:\n  b()\n",
		"\tx = 1\n\n\ty = 2":                    "x = 1\n\ny = 2",
		"  x = '''\n  in\n'''":                  "x = '''\nin\n'''",
		"!ls -l \"$HOME\"\n":                    run(`"ls -l \"$HOME\""`) + "\n",
		"if x:\n    !echo ä\ny":                 "if x:\n    " + run(`"echo \u00e4"`) + "\ny",
		"%pip install a":                        run(`"python3 -m pip install a"`),
		"%matplotlib inline\r\nx":               "pass\r\nx",
		"s = '''\n!no\n'''\n!yes":               "s = '''\n!no\n'''\n" + run(`"yes"`),
		"s = \"\"\"it's\\\"\"\"\n!no\n\"\"\"\n": "s = \"\"\"it's\\\"\"\"\n!no\n\"\"\"\n",
		"x = (1\n%pip\n)":                       "x = (1\n%pip\n)",
		"x = 5 \\\n%pip":                        "x = 5 \\\n%pip",
		"# it's a ( comment\n!yes":              "# it's a ( comment\n" + run(`"yes"`),
		"x = 'a\\'b'\n!yes":                     "x = 'a\\'b'\n" + run(`"yes"`),
		"%timeit x":                             "%timeit x",
		"a != b":                                "a != b",
	} {
		if diff := cmp.Diff(want, notebook(code)); diff != "" {
			t.Errorf("%q:\n%s", code, diff)
		}
	}
}

// TestPromise: what JavaScript gives is looked into alone, and only what is a promise as a whole is awaited.
func TestPromise(t *testing.T) {
	for _, c := range []struct {
		language, text string
		main, want     bool
	}{
		{"javascript", "Promise { 42 }", true, true},
		{"typescript", "Promise { <pending> }", true, true},
		{"javascript", "Promise { 42 }", false, false}, // shown on the way
		{"javascript", "[ Promise { 42 } ]", true, false},
		{"javascript", "'Promise { 42 }'", true, false},
		{"python", "Promise { 42 }", true, false},
	} {
		if got := isPromise(c.language, &wire.Result{Text: c.text, Main: c.main}); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

// FuzzNotebook: code without a line that is for the shell, and not indented, is left alone.
func FuzzNotebook(f *testing.F) {
	for _, seed := range []string{"!ls", "  x = 1", "'''\n!a", "\\", "'\\", "x\n%pip", "\"\"\"\\\"\"\"", "#\\\n!a", "\r\n \n!"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, code string) {
		got := notebook(code)
		if !strings.ContainsAny(code, "!%") && firstIndent(strings.SplitAfter(code, "\n")) == "" && got != code {
			t.Errorf("%q became %q", code, got)
		}
	})
}

// TestWritten: of what a client has written who watches is told that it was made and written to, as by envd.
func TestWritten(t *testing.T) {
	var w written
	w.note("sba", "/home/user/a.txt")
	create := wire.FileEvent{Name: "sub/a.txt", Type: wire.EventCreate}
	write := wire.FileEvent{Name: "sub/a.txt", Type: wire.EventWrite}
	other := wire.FileEvent{Name: "b.txt", Type: wire.EventCreate}
	if diff := cmp.Diff([]wire.FileEvent{create, write, other}, w.events("sba", []wire.FileEvent{create, other})); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]wire.FileEvent{create}, w.events("sbb", []wire.FileEvent{create})); diff != "" {
		t.Error(diff)
	}
	if got := w.events("sba", nil); got == nil {
		t.Error("none is null in JSON")
	}
	for n := range 3 * maxWritten {
		w.note("sbc", strconv.Itoa(n))
	}
	if len(w.names) > maxWritten {
		t.Errorf("%d names are kept", len(w.names))
	}
}
