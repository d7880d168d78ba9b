package lineage

import (
	"encoding/base32"
	"errors"
	"fmt"
	"strings"
)

// ErrName is wrapped by every refusal of a name.
var ErrName = errors.New("bad name")

// MaxName is the longest tag, in characters.
const MaxName = 64

// CheckTag says whether s can name a snapshot: the one rule for every way in (command line, API, packs). A tag is a
// directory name, so neither "." nor ".." nor a separator can be one.
func CheckTag(s string) error { return checkName("tag", s) }

// CheckWorkspace says whether s can name a workspace. The rule is that of tags, for the same reason.
func CheckWorkspace(s string) error { return checkName("workspace name", s) }

func checkName(what, s string) error {
	if s == "" {
		return fmt.Errorf("%w: a %s cannot be empty", ErrName, what)
	}
	if len(s) > MaxName {
		return fmt.Errorf("%w: %s %q… has %d characters, at most %d are allowed", ErrName, what, clip(s), len(s), MaxName)
	}
	for i, r := range s {
		ok := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' ||
			i > 0 && (r == '.' || r == '-')
		if !ok {
			return fmt.Errorf("%w: %s %q has %q at position %d; allowed are letters, digits and _ . - "+
				"(the first a letter, digit or _)", ErrName, what, clip(s), r, i+1)
		}
	}
	return nil
}

func clip(s string) string {
	if len(s) > 40 {
		return s[:40]
	}
	return s
}

// idPrefix marks sandbox ids. They are lower-case letters and digits only: they serve as host names, and as the
// label of a host name that other protocols parse at dashes.
const idPrefix = "sb"

// idEncoding has no 0, 1, 8, 9: 5 bits a character, nothing easily confused.
var idEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// SandboxID makes an id from 8 random bytes.
func SandboxID(random [8]byte) string {
	return idPrefix + idEncoding.EncodeToString(random[:])
}

// CheckSandboxID says whether s can be a sandbox's id or the beginning of one.
func CheckSandboxID(s string) error {
	if s == "" {
		return fmt.Errorf("%w: a sandbox id cannot be empty", ErrName)
	}
	if len(s) > MaxName {
		return fmt.Errorf("%w: sandbox id %q… is too long", ErrName, clip(s))
	}
	if strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
		return fmt.Errorf("%w: sandbox id %q: ids are lower-case letters and digits", ErrName, clip(s))
	}
	return nil
}
