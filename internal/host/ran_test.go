package host

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/store"
)

// TestRan: a branch knows what was run in its sandbox before it, and nothing of what came after.
func TestRan(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	id := forkOneOf(t, h, fakeTag)
	ranBefore := func(tag string) *store.Ran {
		t.Helper()
		if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: tag}); err != nil {
			t.Fatal(err)
		}
		m, err := h.snapshot(tag)
		if err != nil {
			t.Fatal(err)
		}
		return m.Branch.Ran
	}
	check := func(tag string, want store.Ran) {
		t.Helper()
		if diff := cmp.Diff(&want, ranBefore(tag)); diff != "" {
			t.Errorf("%s: %s", tag, diff)
		}
	}
	check("nothing", store.Ran{})
	h.NoteCommand("sbnobody", []string{"x"}, false)
	h.NoteCommand(id, []string{"sh", "-c", "echo \xff"}, false)
	h.NoteCommand(id, []string{"secret-program"}, true)
	want := [][]string{{"sh", "-c", "echo \ufffd"}, {"secret-program", "…"}}
	check("two", store.Ran{Commands: want})
	h.NoteCommand(id, nil, true) // what the host does not write down
	h.NoteCommand(id, []string{"last"}, false)
	check("four", store.Ran{Commands: want, More: 2})
	m, err := h.snapshot("two")
	if err != nil || len(m.Branch.Ran.Commands) != 2 || m.Branch.Ran.More != 0 {
		t.Errorf("the earlier branch has become %+v, %v", m.Branch.Ran, err)
	}
}

// TestRanIsBounded: neither many commands nor long ones make a record large.
func TestRanIsBounded(t *testing.T) {
	for name, arg := range map[string]string{"many": "x", "long": strings.Repeat("x", 1000)} {
		var r store.Ran
		for range 1000 {
			r = addCommand(r, []string{"program", arg}, false)
		}
		size := 0
		for _, c := range r.Commands {
			size += bytesOf(c)
		}
		if len(r.Commands) > maxRan || size > maxRanBytes || len(r.Commands) < 10 || len(r.Commands)+r.More != 1000 {
			t.Errorf("%s: %d commands of %d bytes and %d more", name, len(r.Commands), size, r.More)
		}
	}
}

// TestRanHasNoTokens: neither in a word nor in two that make one.
func TestRanHasNoTokens(t *testing.T) {
	token := "ghp" + "_" + strings.Repeat("a1B2", 9)
	b := &store.Branch{Ran: &store.Ran{Commands: [][]string{
		{"curl", "-H", "Authorization: " + token, "https://example.com"}, {"aws_secret_access_key", "=", strings.Repeat("Ab1c", 10)}, {"", "plain", ""},
	}}}
	found := inCommands(store.Snapshot{Tag: "x", Branch: b}, pack.NewTokens())
	if len(found) != 2 || found[0].Path != "command 1" || found[0].What != "GitHub token" {
		t.Errorf("found %+v", found)
	}
	clean := redactRan(b, pack.NewTokens())
	got := clean.Ran.Commands
	if got[0][2] != "Authorization: "+strings.Repeat("*", len(token)) || got[0][3] != "https://example.com" || strings.Contains(got[1][2], "Ab1c") ||
		cmp.Diff(got[2], []string{"", "plain", ""}) != "" {
		t.Errorf("left: %q", got)
	}
	if !strings.Contains(b.Ran.Commands[0][2], token) {
		t.Error("the record itself was changed")
	}
}
