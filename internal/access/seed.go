package access

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// Seed makes tokens of sandboxes that can be told again: other programs' protocols want that, and a Store keeps none that it
// could tell. Each is of one sandbox and one purpose; nobody without the seed can make one from another. They end with
// their sandbox.
type Seed struct{ key [32]byte }

// OpenSeed reads the seed at path, and makes it when there is none.
func OpenSeed(path string) (*Seed, error) {
	s := &Seed{}
	key, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		_, _ = rand.Read(s.key[:])                          // never fails: it aborts the program instead
		if err := replaceFile(path, s.key[:]); err != nil { // from now on tokens made of it must stay good
			return nil, fmt.Errorf("write the seed of sandboxes' tokens: %w", err)
		}
		return s, nil
	case err != nil:
		return nil, fmt.Errorf("read the seed of sandboxes' tokens: %w", err)
	case len(key) != len(s.key):
		return nil, fmt.Errorf("read the seed of sandboxes' tokens: %w: %s has %d bytes, not %d; remove it, and clients connect anew",
			ErrCorrupt, path, len(key), len(s.key))
	}
	copy(s.key[:], key)
	return s, nil
}

// Token is a sandbox's for a purpose: 64 hexadecimal digits, always the same.
func (s *Seed) Token(purpose, sandbox string) string {
	mac := hmac.New(sha256.New, s.key[:])
	fmt.Fprintf(mac, "%s\x00%s", purpose, sandbox)
	return hex.EncodeToString(mac.Sum(nil))
}

// Is reports whether what was shown is that token. The time that it takes tells nothing of it.
func (s *Seed) Is(shown, purpose, sandbox string) bool {
	return hmac.Equal([]byte(shown), []byte(s.Token(purpose, sandbox)))
}
