package host

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestForkEnv: each child has the variables that were asked for, and its own id where that is.
func TestForkEnv(t *testing.T) {
	given := map[string]string{"A": "1", "ID": "of another"}
	spec := ForkSpec{Env: given, IDIn: "ID"}
	if diff := cmp.Diff(map[string]string{"A": "1", "ID": "sba"}, spec.env("sba")); diff != "" || given["ID"] != "of another" {
		t.Errorf("%s\n%v", diff, given)
	}
	spec.IDIn = ""
	if diff := cmp.Diff(given, spec.env("sba")); diff != "" {
		t.Error(diff)
	}
	s := &sandbox{id: "sba", env: spec.env("sba")}
	k := s.kept()
	if diff := cmp.Diff(given, k.sandbox("sba").view().Env); diff != "" {
		t.Errorf("a later daemon: %s", diff)
	}
}
