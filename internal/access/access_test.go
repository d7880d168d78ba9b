package access

import "testing"

func TestMay(t *testing.T) {
	for _, tt := range []struct {
		name    string
		p       Principal
		need    Scope
		sandbox string
		want    bool
	}{
		{"the owner, anything", Owner(), Admin, "", true},
		{"less than needed", Principal{Scope: Use}, Manage, "sba", false},
		{"to pull", Principal{Scope: Pull}, Pull, "", true},
		{"a manager pulls", Principal{Scope: Manage}, Pull, "", true},
		{"who looks does not pull", Principal{Scope: Read}, Pull, "", false},
		{"who works in sandboxes does not pull", Principal{Scope: Use}, Pull, "", false},
		{"a sandbox's manager does not pull", Principal{Scope: Manage, Sandbox: "sba"}, Pull, "sba", false},
		{"who pulls does not look", Principal{Scope: Pull}, Read, "", false},
		{"as much as needed", Principal{Scope: Use}, Use, "sba", true},
		{"nobody, what needs nothing", Principal{}, None, "", true},
		{"nobody, a list", Principal{}, Read, "", false},
		{"a sandbox's token, its own", Principal{Scope: Use, Sandbox: "sba"}, Use, "sba", true},
		{"a sandbox's token, another", Principal{Scope: Use, Sandbox: "sba"}, Use, "sbb", false},
		{"a sandbox's token, a list of all", Principal{Scope: Use, Sandbox: "sba"}, Read, "", false},
	} {
		if got := tt.p.May(tt.need, tt.sandbox); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestScopeNames(t *testing.T) {
	for s := Read; s <= Admin; s++ {
		if got, err := ParseScope(s.String()); err != nil || got != s {
			t.Errorf("ParseScope(%q) = %v, %v", s, got, err)
		}
	}
	for _, bad := range []string{"", "none", "Read", "root"} {
		if _, err := ParseScope(bad); err == nil {
			t.Errorf("ParseScope(%q) succeeds", bad)
		}
	}
}
