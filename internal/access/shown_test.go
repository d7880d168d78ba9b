package access

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestShownID(t *testing.T) {
	s, err := Open(filepath.Join(t.TempDir(), "tokens.json"))
	if err != nil {
		t.Fatal(err)
	}
	token, secret, err := s.Create(Spec{Name: "a", Scope: Read, By: Owner()})
	if err != nil {
		t.Fatal(err)
	}
	if got := ShownID(secret); got == "" || got != token.ID {
		t.Errorf("the id in a token is %q, want %q", got, token.ID)
	}
	for _, other := range []string{"", "fkd_", "fkd_abc", "secret", "Fkd_abc_d", prefix + strings.Repeat("a", 99) + "_x", prefix + "a\nb_c", prefix + "_x"} {
		if got := ShownID(other); got != "" {
			t.Errorf("%q has id %q", other, got)
		}
	}
}
