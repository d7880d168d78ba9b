package wire

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"
)

// FuzzNames: every name survives being text, also inside JSON; every text is either a name's or refused.
func FuzzNames(f *testing.F) {
	for _, s := range []string{"", "plain", "grün", "caf\xe9", "\xff\xfe", "\xed\xa0\x80", "a\x00e9b", "\x0041", "\x00c3\x00a9", "\x00", "\x00e", "\x00E9"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if name, err := DecodeName(s); err == nil {
			if utf8.ValidString(s) && EncodeName(name) != s {
				t.Errorf("%q is taken for %q, which is written %q", s, name, EncodeName(name))
			}
		} else if _, ok := errors.AsType[*Error](err); !ok {
			t.Errorf("%q: %v", s, err)
		}
		if strings.ContainsRune(s, 0) {
			return // no name
		}
		text := EncodeName(s)
		b, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		var through string
		if err := json.Unmarshal(b, &through); err != nil {
			t.Fatal(err)
		}
		if got, err := DecodeName(through); err != nil || got != s {
			t.Errorf("%q came back as %q, %v", s, got, err)
		}
	})
}
