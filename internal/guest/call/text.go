package call

import (
	"strings"
	"unicode/utf8"
)

// Text passes on text that comes in pieces, without tearing characters: the beginning of one is held back until its end
// comes. What is not UTF-8 becomes U+FFFD.
type Text struct {
	Pass func(text string) error

	torn []byte
}

// Write implements io.Writer.
func (t *Text) Write(p []byte) (int, error) {
	text := append(t.torn, p...)
	whole := len(text) - tornTail(text)
	t.torn = append([]byte(nil), text[whole:]...)
	if err := t.pass(text[:whole]); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Flush passes on what was held back: its end will not come.
func (t *Text) Flush() error {
	b := t.torn
	t.torn = nil
	return t.pass(b)
}

func (t *Text) pass(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	return t.Pass(strings.ToValidUTF8(string(b), "\uFFFD"))
}

// tornTail is how many bytes at the end are the beginning of a character.
func tornTail(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if utf8.RuneStart(b[len(b)-n]) {
			if !utf8.FullRune(b[len(b)-n:]) {
				return n
			}
			return 0
		}
	}
	return 0
}
