package contexts

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMarshal(t *testing.T) {
	in := tuple{nil, true, false, 0, -1, 1<<31 - 1, "", "é", []byte{0, 255}, tuple{"x", tuple{}}}
	got, rest, err := parseValue(appendValue(nil, in), 0)
	if err != nil || len(rest) != 0 {
		t.Fatal(err, rest)
	}
	if diff := cmp.Diff(in, got); diff != "" {
		t.Error(diff)
	}
	// As CPython writes {'k': 'v'}.
	if got := string(appendValue(nil, map[string]string{"k": "v"})); got != "{u\x01\x00\x00\x00ku\x01\x00\x00\x00v0" {
		t.Errorf("%q", got)
	}
}

func TestMarshalRefuses(t *testing.T) {
	for _, b := range []string{"", "x", "i", "i\x00\x00", "u\xff\xff\xff\xff", "u\x05\x00\x00\x00abc", "(\xff\xff\xff\x7f", "(\x01\x00\x00\x00", "{", "{N0", "l\x00\x00\x00\x00"} {
		if v, _, err := parseValue([]byte(b), 0); err == nil {
			t.Errorf("%q gave %v", b, v)
		}
	}
	deep := []byte("N")
	for range 20 {
		deep = append([]byte("(\x01\x00\x00\x00"), deep...)
	}
	if _, _, err := parseValue(deep, 0); err == nil {
		t.Error("nesting is not bounded")
	}
}

func FuzzParseReply(f *testing.F) {
	f.Add(appendValue(nil, tuple{1, tuple{"text", nil}}))
	f.Add(appendValue(nil, tuple{1, tuple{nil, tuple{"E", "v", "t"}}}))
	f.Add([]byte("(\x02\x00\x00\x00i\x01\x00\x00\x00{u\x01\x00\x00\x00ki\x01\x00\x00\x000"))
	f.Add([]byte("(\xff\xff\xff\x7f"))
	f.Fuzz(func(_ *testing.T, b []byte) {
		if _, reply, err := parseReply(b); err == nil {
			parseFacts(reply)
		}
	})
}

func TestExpression(t *testing.T) {
	for code, want := range map[string]bool{
		"1+1":               true,
		"x\n":               true,
		"f(a=1)[2]":         true,
		"x == 1":            true,
		"x <= 1 != y":       true,
		"importance":        true,
		"await f()":         true,
		"not x":             true,
		"":                  true,
		"x = 1":             false,
		"x=1":               false,
		"x += 1":            false,
		"import numpy":      false,
		"from a import b":   false,
		"if x: 1":           false,
		"x; y":              false,
		"x\ny":              false,
		"def f(a=1): pass":  false,
		"del x":             false,
		"for i in x: print": false,
	} {
		if got := expression(code); got != want {
			t.Errorf("%q: %v", code, got)
		}
	}
}

// As CPython writes integers that do not fit into 32 bits.
func TestMarshalNumber(t *testing.T) {
	for _, tt := range []struct {
		in   number
		want string
	}{
		{number{1}, "l\x01\x00\x00\x00\x01\x00"},
		{number{}, "l\x00\x00\x00\x00"},
		{number{0, 0, 0}, "l\x00\x00\x00\x00"},
		{number{0xff, 0xff}, "l\x02\x00\x00\x00\xff\x7f\x01\x00"},
		{number{0, 0, 0, 0, 1}, "l\x03\x00\x00\x00\x00\x00\x00\x00\x04\x00"},
		{number{0xff, 0xff, 0xff, 0xff, 0, 0, 0}, "l\x03\x00\x00\x00\xff\x7f\xff\x7f\x03\x00"},
	} {
		if got := string(appendValue(nil, tt.in)); got != tt.want {
			t.Errorf("% x: % x, want % x", []byte(tt.in), got, tt.want)
		}
	}
}
