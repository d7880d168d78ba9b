package lineage

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCheckTag(t *testing.T) {
	for _, good := range []string{"a", "python-numpy", "v1.2", "_x", "0", strings.Repeat("a", 64)} {
		if err := CheckTag(good); err != nil {
			t.Errorf("CheckTag(%q) = %v", good, err)
		}
	}
	bad := []string{
		"", ".", "..", "-x", ".hidden", "a/b", "../x", "a b", "a\x00b", "a\nb", "ä", strings.Repeat("a", 65),
		strings.Repeat("a", 300), "a:b", "\x1b[31m",
	}
	for _, s := range bad {
		err := CheckTag(s)
		if !errors.Is(err, ErrName) {
			t.Errorf("CheckTag(%q) = %v, want ErrName", s, err)
			continue
		}
		if strings.ContainsAny(err.Error(), "\x00\n\x1b") {
			t.Errorf("CheckTag(%q) echoes a control character: %q", s, err)
		}
	}
}

func TestSandboxIDsAreValidAndDiffer(t *testing.T) {
	a, b := SandboxID([8]byte{1}), SandboxID([8]byte{2})
	if a == b {
		t.Errorf("two ids are the same: %s", a)
	}
	for _, id := range []string{a, b} {
		if err := CheckSandboxID(id); err != nil {
			t.Error(err)
		}
	}
	for _, s := range []string{"", "SB1", "sb-1", "../sb", "sb\x00", strings.Repeat("a", 300)} {
		if err := CheckSandboxID(s); !errors.Is(err, ErrName) {
			t.Errorf("CheckSandboxID(%q) = %v, want ErrName", s, err)
		}
	}
}

func TestStates(t *testing.T) {
	all := []State{Running, Paused, Suspended, Failed}
	may := map[State][]State{Running: {Paused, Suspended, Failed}, Paused: {Running, Suspended, Failed}, Suspended: {Running, Failed}}
	for _, from := range all {
		for _, to := range all {
			err := from.To(to)
			if want := slices.Contains(may[from], to); (err == nil) != want {
				t.Errorf("%s → %s: %v, allowed is %v", from, to, err, want)
			}
			if err != nil && !errors.Is(err, ErrState) {
				t.Errorf("%s → %s: %v, want ErrState", from, to, err)
			}
		}
	}
}

func TestBegin(t *testing.T) {
	from := map[Work][]State{
		Branching: {Running, Paused}, Pausing: {Running, Paused}, Resuming: {Running, Paused}, Suspending: {Running, Paused, Suspended},
		Waking: {Suspended, Running}, Shortening: {Running, Paused}, Copying: {},
	}
	for work, states := range from {
		for _, s := range []State{Running, Paused, Suspended, Failed} {
			if err := Begin(s, "", work); (err == nil) != slices.Contains(states, s) {
				t.Errorf("%s of a sandbox that is %s: %v", work, s, err)
			}
			for doing := range from {
				if err := Begin(s, doing, work); !errors.Is(err, ErrState) || !strings.Contains(err.Error(), string(doing)) {
					t.Errorf("%s during %s: %v, want ErrState with the reason", work, doing, err)
				}
			}
		}
	}
}

func TestFamily(t *testing.T) {
	all := map[string]Snapshot{
		"root": {Tag: "root"}, "a": {Tag: "a", Parent: "root"}, "b": {Tag: "b", Parent: "a"},
		"x": {Tag: "x", Parent: "y"}, "y": {Tag: "y", Parent: "x"}, "orphan": {Tag: "orphan", Parent: "gone"},
	}
	if diff := cmp.Diff([]string{"root", "a"}, Ancestors("b", all)); diff != "" {
		t.Error(diff)
	}
	if got := Ancestors("x", all); len(got) != 1 {
		t.Errorf("a cycle gave %v", got)
	}
	if got := Ancestors("orphan", all); len(got) != 0 {
		t.Errorf("a missing parent gave %v", got)
	}
	if diff := cmp.Diff([]string{"a"}, Dependents("root", all)); diff != "" {
		t.Error(diff)
	}
}
