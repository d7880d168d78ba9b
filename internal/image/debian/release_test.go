package debian

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/ProtonMail/go-crypto/openpgp"

	"forkd.dev/forkd/internal/image/debian/debiantest"
)

const releaseText = "Origin: Debian\nCodename: bookworm\nSuite: stable\nDate: Sun, 01 Mar 2026 12:00:00 UTC\n" +
	"Valid-Until: Sun, 08 Mar 2026 12:00:00 UTC\nAcquire-By-Hash: yes\nSHA256:\n" +
	" 515e692f2c4121c6fcec444ef100cc18f79a991910615f3a88c8b7becfc94d2f 50060337 main/binary-amd64/Packages\n"

func TestParseInRelease(t *testing.T) {
	now := debiantest.Now()
	key, other := debiantest.Key(t, now.Add(-time.Hour)), debiantest.Key(t, now.Add(-time.Hour))
	good := debiantest.Sign(t, key, releaseText, now)
	both := twoSignatures(t, good, debiantest.Sign(t, other, releaseText, now))
	tests := []struct {
		name string
		data []byte
		keys openpgp.EntityList
		at   time.Time
		want string
	}{
		{"good", good, openpgp.EntityList{key}, now, ""},
		{"second of two signatures", both, openpgp.EntityList{other}, now, ""},
		{"wrong key", good, openpgp.EntityList{other}, now, "not in the archive keyring"},
		{"no keys", good, nil, now, "not in the archive keyring"},
		{"tampered", bytes.Replace(good, []byte("50060337"), []byte("50060338"), 1), openpgp.EntityList{key}, now, "archive signature by key"},
		{"signed in the future", good, openpgp.EntityList{key}, now.Add(-48 * time.Hour), "archive signature by key"},
		{"text before", append([]byte("Origin: Evil\n"), good...), openpgp.EntityList{key}, now, "outside the signed part"},
		{"text after", append(bytes.Clone(good), "Origin: Evil\n"...), openpgp.EntityList{key}, now, "outside the signed part"},
		{"not signed", []byte(releaseText), openpgp.EntityList{key}, now, "not a signed Release file"},
		{"a web page", []byte("<html><body>Log in"), openpgp.EntityList{key}, now, "captive portal"},
		{"empty", nil, openpgp.EntityList{key}, now, "not a signed Release file"},
		{"no digests", debiantest.Sign(t, key, "Origin: Debian\n", now), openpgp.EntityList{key}, now, "no SHA256"},
		{"two paragraphs", debiantest.Sign(t, key, releaseText+"\nOrigin: x\n", now), openpgp.EntityList{key}, now, "more than one paragraph"},
		{
			"file leaves archive", debiantest.Sign(t, key, strings.Replace(releaseText, "main/", "../", 1), now),
			openpgp.EntityList{key},
			now,
			"bad file name",
		},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			rel, err := ParseInRelease(c.data, c.keys, c.at)
			if c.want != "" {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Fatalf("got %v, want %q", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			file := rel.Files["main/binary-amd64/Packages"]
			if rel.Codename != "bookworm" || !rel.ByHash || file.Size != 50060337 || !rel.ValidUntil.Equal(now.AddDate(0, 0, 7)) {
				t.Errorf("read %+v", rel)
			}
		})
	}
}

// twoSignatures joins the signatures of two clear-signed copies of a text, as the archive does.
func twoSignatures(t *testing.T, a, b []byte) []byte {
	t.Helper()
	var packets []byte
	for _, one := range [][]byte{a, b} {
		packets = append(packets, dearmor(t, one)...)
	}
	head, _, _ := bytes.Cut(a, []byte("-----BEGIN PGP SIGNATURE-----"))
	return append(bytes.Clone(head), rearmor(t, packets)...)
}

func TestExpiredKeyIsRefused(t *testing.T) {
	now := debiantest.Now()
	key := debiantest.Key(t, now.Add(-time.Hour))
	life := uint32(60)
	for _, id := range key.Identities {
		id.SelfSignature.KeyLifetimeSecs = &life
	}
	signed := debiantest.Sign(t, key, releaseText, now)
	if _, err := ParseInRelease(signed, openpgp.EntityList{key}, now); !errors.Is(err, ErrSignature) {
		t.Errorf("got %v", err)
	}
}

func TestReadKeyringsSaysWhatToInstall(t *testing.T) {
	_, err := ReadKeyrings(fstest.MapFS{})
	if !errors.Is(err, ErrSignature) || !strings.Contains(err.Error(), "install the package debian-archive-keyring") {
		t.Errorf("got %v", err)
	}
	key := debiantest.Key(t, debiantest.Now())
	root := fstest.MapFS{"usr/share/keyrings/debian-archive-keyring.pgp": {Data: debiantest.Keyring(t, key)}}
	if keys, err := ReadKeyrings(root, "/etc/apt/keyrings/missing.gpg"); err != nil || len(keys) != 1 {
		t.Errorf("got %v, %v", keys, err)
	}
}

func FuzzParseInRelease(f *testing.F) {
	now := debiantest.Now()
	key := debiantest.Key(f, now.Add(-time.Hour))
	f.Add(debiantest.Sign(f, key, releaseText, now))
	f.Add([]byte("-----BEGIN PGP SIGNED MESSAGE-----\n\n-----BEGIN PGP SIGNATURE-----\n\n-----END PGP SIGNATURE-----\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		rel, err := ParseInRelease(data, openpgp.EntityList{key}, now)
		if err == nil && rel.Origin != "Debian" {
			t.Error("a signature of another text was accepted")
		}
	})
}

func FuzzParseRelease(f *testing.F) {
	f.Add([]byte(releaseText))
	f.Fuzz(func(t *testing.T, data []byte) {
		rel, err := parseRelease(data)
		if err != nil {
			return
		}
		for name := range rel.Files {
			if !safePath(name) {
				t.Errorf("unsafe name %q", name)
			}
		}
	})
}
