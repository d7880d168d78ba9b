package access

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// clock is a time that tests set.
type clock struct{ t time.Time }

func (c *clock) now() time.Time { return c.t }

func testStore(t *testing.T) (*Store, *clock, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tokens.json")
	c := &clock{time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)}
	s, err := open(path, c.now)
	if err != nil {
		t.Fatal(err)
	}
	return s, c, path
}

func create(t *testing.T, s *Store, spec Spec) (Token, string) {
	t.Helper()
	if spec.By.Scope == None {
		spec.By = Owner()
	}
	token, secret, err := s.Create(spec)
	if err != nil {
		t.Fatal(err)
	}
	return token, secret
}

func TestToken(t *testing.T) {
	s, c, path := testStore(t)
	token, secret := create(t, s, Spec{Name: "ci", Scope: Manage, TTL: time.Hour})
	if got, _, err := s.Check(secret); err != nil || got.Principal() != (Principal{Name: "ci", Scope: Manage, TokenID: token.ID}) {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, wrong := range []string{
		"", "x", secret[:len(secret)-1], secret + "x", " " + secret, strings.ToUpper(secret), token.ID, strings.Repeat("x", 1<<20),
		"fkd_" + token.ID + "_", string(s.byID[token.ID].hash[:]),
	} {
		if _, _, err := s.Check(wrong); !errors.Is(err, ErrUnknown) {
			t.Errorf("Check(%.80q): %v", wrong, err)
		}
	}
	if !regexp.MustCompile(`^fkd_tk[0-9a-f]{8}_[a-z2-7]{52}$`).MatchString(secret) {
		t.Errorf("%q", secret)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if part := secret[strings.LastIndex(secret, "_")+1:]; bytes.Contains(text, []byte(part)) {
		t.Error("the token is in the file")
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}

	again, err := open(path, c.now)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := again.Check(secret); err != nil {
		t.Error("after a restart:", err)
	}
	if diff := cmp.Diff(s.List(""), again.List(""), cmpopts.IgnoreFields(Token{}, "Used")); diff != "" {
		t.Error(diff)
	}
	c.t = c.t.Add(time.Hour)
	if _, _, err := s.Check(secret); !errors.Is(err, ErrExpired) {
		t.Error(err)
	}
	if s.Usable() {
		t.Error("one that has expired is usable")
	}
	c.t = c.t.Add(keepExpired)
	create(t, s, Spec{Scope: Read})
	if n := len(s.List("")); n != 1 {
		t.Errorf("%d tokens: the old one is kept for ever", n)
	}
}

func TestRevoke(t *testing.T) {
	s, c, path := testStore(t)
	token, secret := create(t, s, Spec{Scope: Use, Sandbox: "sba"})
	other, otherSecret := create(t, s, Spec{Scope: Use, Sandbox: "sbb"})
	_, gone, err := s.Check(secret)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range [][2]string{{"tk", ""}, {"", ""}, {token.ID, "sbb"}, {secret, ""}} {
		if err := s.Revoke(tt[0], tt[1]); !errors.Is(err, ErrMissing) {
			t.Errorf("%v: %v", tt, err)
		}
	}
	if err := s.Revoke(token.ID, "sba"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-gone:
	default:
		t.Error("whoever is at work with it is not told")
	}
	again, err := open(path, c.now)
	if err != nil {
		t.Fatal(err)
	}
	for _, store := range []*Store{s, again} {
		if _, _, err := store.Check(secret); !errors.Is(err, ErrUnknown) {
			t.Error(err)
		}
		if _, _, err := store.Check(otherSecret); err != nil {
			t.Error(err)
		}
	}
	if err := s.Prune(func(id string) bool { return id == "sbb" }); err != nil {
		t.Fatal(err)
	}
	if err := s.Revoke(other.ID, ""); !errors.Is(err, ErrMissing) {
		t.Error("the token of a sandbox that is gone:", err)
	}
}

// TestRevokedOnFullDisk: a token that was revoked opens nothing, whatever the disk says.
func TestRevokedOnFullDisk(t *testing.T) {
	s, _, path := testStore(t)
	token, secret := create(t, s, Spec{Scope: Use})
	s.path = filepath.Join(filepath.Dir(path), "missing", "tokens.json")
	if err := s.Revoke(token.ID, ""); err == nil {
		t.Error("no error, and nothing was written")
	}
	if _, _, err := s.Check(secret); !errors.Is(err, ErrUnknown) {
		t.Error(err)
	}
	if _, _, err := s.Create(Spec{Scope: Use, By: Owner()}); err == nil {
		t.Error("a token that the next daemon does not know")
	}
	if len(s.List("")) != 0 {
		t.Error("it is there all the same")
	}
}

func TestParents(t *testing.T) {
	s, c, _ := testStore(t)
	parent, _ := create(t, s, Spec{Scope: Manage, TTL: time.Hour})
	child, secret := create(t, s, Spec{Scope: Use, Sandbox: "sba", By: parent.Principal()})
	if child.Parent != parent.ID || !child.Expires.Equal(c.t.Add(time.Hour)) {
		t.Errorf("%+v", child)
	}
	if err := s.Revoke(parent.ID, ""); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Check(secret); !errors.Is(err, ErrUnknown) {
		t.Error("its child lives on:", err)
	}
	if _, _, err := s.Create(Spec{Scope: Use, Sandbox: "sba", By: parent.Principal()}); !errors.Is(err, ErrUnknown) {
		t.Error("it has children after its end:", err)
	}
	admin, _ := create(t, s, Spec{Scope: Admin})
	if made, _ := create(t, s, Spec{Scope: Use, By: admin.Principal()}); made.Parent != "" {
		t.Errorf("%+v", made)
	}
}

func TestSpecs(t *testing.T) {
	s, _, _ := testStore(t)
	for _, tt := range []struct {
		spec Spec
		want error
	}{
		{Spec{}, ErrInvalid},
		{Spec{Scope: Admin + 1}, ErrInvalid},
		{Spec{Scope: Admin, Sandbox: "sba"}, ErrInvalid},
		{Spec{Scope: Use, TTL: -1}, ErrInvalid},
		{Spec{Scope: Use, TTL: maxTTL + 1}, ErrInvalid},
		{Spec{Scope: Use, Name: "owner"}, ErrInvalid},
		{Spec{Scope: Use, Name: "root"}, ErrInvalid},
		{Spec{Scope: Use, Name: "tk1"}, ErrInvalid},
		{Spec{Scope: Use, Name: "a b"}, ErrInvalid},
		{Spec{Scope: Use, Name: "-a"}, ErrInvalid},
		{Spec{Scope: Use, Name: "a\n"}, ErrInvalid},
		{Spec{Scope: Use, Name: "é"}, ErrInvalid},
		{Spec{Scope: Use, Name: strings.Repeat("a", 65)}, ErrInvalid},
		{Spec{Scope: Admin, By: Principal{Scope: Manage}}, ErrDenied},
		{Spec{Scope: Use, Sandbox: "sba", By: Principal{Scope: Manage, Sandbox: "sba"}}, ErrDenied},
	} {
		if tt.spec.By.Scope == None {
			tt.spec.By = Owner()
		}
		if _, _, err := s.Create(tt.spec); !errors.Is(err, tt.want) {
			t.Errorf("%+v: %v, want %v", tt.spec, err, tt.want)
		}
	}
	create(t, s, Spec{Scope: Use, Name: "alice@example.org/laptop-1.a_b"})
}

func TestDamagedFiles(t *testing.T) {
	hash := strings.Repeat("ab", 32)
	one := func(s string) string { return `{"version":1,"tokens":[` + s + `]}` }
	good := fmt.Sprintf(`{"id":"tk1","name":"n","scope":"use","created":"2030-01-02T03:04:05Z","sha256":%q}`, hash)
	for _, text := range []string{
		"", "x", "{}", `{"version":2,"tokens":[]}`, one("{}"), one(good + "," + good), one(good) + `x`,
		one(strings.Replace(good, "use", "root", 1)), one(strings.Replace(good, "ab", "AB", 1)), one(strings.Replace(good, "ab", "", 1)),
		one(strings.Replace(good, "ab", "zz", 1)), one(strings.Replace(good, "tk1", "", 1)), one(strings.Replace(good, `"name"`, `"nom"`, 1)),
	} {
		path := filepath.Join(t.TempDir(), "tokens.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(path); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", text, err)
		}
	}
	path := filepath.Join(t.TempDir(), "tokens.json")
	left := filepath.Join(filepath.Dir(path), ".tokens.json-123")
	for _, f := range []string{path, left} {
		if err := os.WriteFile(f, []byte(one(good)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, err := Open(path)
	if err != nil || len(s.List("")) != 1 {
		t.Error(err)
	}
	if _, err := os.Stat(left); err == nil {
		t.Error("what a killed daemon left is still there")
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"version":1,"tokens":[{"id":"tk1","name":"n","scope":"use","created":"2030-01-02T03:04:05Z","expires":"2031-01-02T03:04:05Z","sandbox":"sba","sha256":"` + strings.Repeat("ab", 32) + `"}]}`))
	f.Add([]byte(`{"version":1,"tokens":[]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		records, err := decode(text)
		if err != nil {
			return
		}
		for _, r := range records {
			if r.ID == "" || r.Scope <= None || r.Scope > Admin || r.revoked == nil {
				t.Errorf("%+v", r)
			}
		}
	})
}

// TestNoSecretPrints: no way to print a record shows what opens anything.
func TestNoSecretPrints(t *testing.T) {
	s, _, _ := testStore(t)
	token, secret := create(t, s, Spec{Scope: Use})
	text, err := json.Marshal(token)
	if err != nil {
		t.Fatal(err)
	}
	_, _, wrong := s.Check(secret + "x")
	for _, shown := range []string{fmt.Sprintf("%+v", token), string(text), wrong.Error()} {
		if strings.Contains(shown, secret[len(secret)-20:]) {
			t.Error(shown)
		}
	}
}
