package cli

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestParseDetachKeys(t *testing.T) {
	for text, want := range map[string]string{
		"": "\x10\x11", "ctrl-p,ctrl-q": "\x10\x11", "none": "", "a": "a", "ctrl-a,d": "\x01d", "Ctrl-]": "\x1d", "ctrl-@,~,.": "\x00~.",
	} {
		if got, err := parseDetachKeys(text); err != nil || string(got) != want {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
	for _, text := range []string{"ctrl-", "ctrl-1", "ctrl-pp", "ab", "a,,b", ",", "ctrl p", "ü", "\x10"} {
		if got, err := parseDetachKeys(text); err == nil {
			t.Errorf("%q: %q", text, got)
		}
	}
}

// chunked gives one part a Read.
type chunked [][]byte

func (c *chunked) Read(p []byte) (int, error) {
	if len(*c) == 0 {
		return 0, io.EOF
	}
	n := copy(p, (*c)[0])
	*c = (*c)[1:]
	return n, nil
}

func TestDetachReader(t *testing.T) {
	for _, tt := range []struct {
		keys     string
		in       []string
		out      string
		detached bool
	}{
		{"\x10\x11", []string{"abc"}, "abc", false},
		{"\x10\x11", []string{"a\x10\x11b"}, "a", true},
		{"\x10\x11", []string{"a\x10", "\x11b"}, "a", true},
		{"\x10\x11", []string{"\x10", "x", "\x10\x10", "\x11"}, "\x10x\x10", true},
		{"\x10\x11", []string{"\x10\x10\x10", "y"}, "\x10\x10\x10y", false},
		{"\x10\x11", []string{"end\x10"}, "end\x10", false},
		{"aab", []string{"aa", "ab"}, "a", true},
		{"abab", []string{"abaabab"}, "aba", true},
		{"", []string{"\x10\x11"}, "\x10\x11", false},
		{"~", []string{"x~y"}, "x", true},
	} {
		in := chunked{}
		for _, part := range tt.in {
			in = append(in, []byte(part))
		}
		detached := false
		r := newDetachReader(&in, []byte(tt.keys), func() { detached = true }, func() {})
		var out bytes.Buffer
		_, err := io.Copy(&out, struct{ io.Reader }{r})
		if out.String() != tt.out || detached != tt.detached || tt.detached != errors.Is(err, errDetached) {
			t.Errorf("%q of %q: %q, detached %v, %v", tt.keys, tt.in, &out, detached, err)
		}
	}
	// Whatever comes, nothing is lost.
	text := strings.Repeat("\x10x\x10\x10y", 50000)
	r := newDetachReader(strings.NewReader(text), []byte("\x10\x11"), func() {}, func() {})
	if got, err := io.ReadAll(r); err != nil || string(got) != text {
		t.Errorf("%d bytes of %d, %v", len(got), len(text), err)
	}
}

func TestLastOf(t *testing.T) {
	for _, tt := range []struct {
		text  string
		lines int
		want  string
	}{
		{"a\nb\nc\n", 2, "b\nc\n"}, {"a\nb\nc", 2, "b\nc"}, {"a\n", 5, "a\n"}, {"", 3, ""}, {"a\nb\n", 0, ""}, {"a\nb\n", -1, "a\nb\n"}, {"\n\n", 1, "\n"},
	} {
		if got := string(lastOf([]byte(tt.text), tt.lines)); got != tt.want {
			t.Errorf("%q, %d: %q, want %q", tt.text, tt.lines, got, tt.want)
		}
	}
}
