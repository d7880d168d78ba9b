package call

import (
	"strings"
	"testing"
)

func TestText(t *testing.T) {
	for _, text := range []string{"", "abc", "aé€😀z", "\xff\xfe", "é\xc3", "\xf0\x9f\x98", "😀\xe2\x82x"} {
		for size := 1; size <= 5; size++ {
			var got strings.Builder
			w := &Text{Pass: func(s string) error {
				if s == "" {
					t.Errorf("%q by %d: nothing is passed", text, size)
				}
				got.WriteString(s)
				return nil
			}}
			for rest := text; rest != ""; {
				n := min(size, len(rest))
				if m, err := w.Write([]byte(rest[:n])); m != n || err != nil {
					t.Fatal(m, err)
				}
				rest = rest[n:]
			}
			if err := w.Flush(); err != nil {
				t.Fatal(err)
			}
			// How many U+FFFD stand for neighbouring bytes depends on the pieces.
			squeezed := func(s string) string {
				for strings.Contains(s, "\uFFFD\uFFFD") {
					s = strings.ReplaceAll(s, "\uFFFD\uFFFD", "\uFFFD")
				}
				return s
			}
			if want := strings.ToValidUTF8(text, "\uFFFD"); squeezed(got.String()) != squeezed(want) {
				t.Errorf("%q by %d: %q, want %q", text, size, got.String(), want)
			}
		}
	}
}
