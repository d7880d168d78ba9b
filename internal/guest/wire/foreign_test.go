package wire

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"plain text\twith tab\n":             "plain text\twith tab\n",
		"grün — 日本 🙂":                        "grün — 日本 🙂",
		"\x1b[31mred\x1b[0m":                 "red",
		"\x1b]0;title\a after":               " after",
		"\x1b]8;;https://x\x1b\\link":        "link",
		"\x1b]0;never ended\nnext":           "0;never ended\nnext",
		"\x1b]0;never ended":                 "0;never ended",
		"\x1bPdcs\x1b\\x":                    "x",
		"\x1b(Bcharset":                      "charset",
		"\x1bcreset":                         "reset",
		"\x1b":                               "",
		"\x1b[":                              "",
		"\x1b[12;":                           "",
		"\x1b[12\x07;x":                      ";x",
		"\u009b31mred":                       "red",
		"\u009d0;t\u009cx":                   "x",
		"a\bb\x00c\x7fd\x0ee":                "abcde",
		"10%\r20%\r\nend\r":                  "10%\n20%\nend",
		"\u202egnp.exe":                      "gnp.exe",
		"zero\u200bwidth\ufeff":              "zerowidth",
		"line\u2028separator":                "lineseparator",
		"tag\U000e0041":                      "tag",
		"not \xff utf-8 \x9b31m":             "not \ufffd utf-8 \ufffd31m",
		"\x1b[31m\x1b[31m\x1b]0;\x1b[2J\a.":  ".",
		strings.Repeat("\x1b[", 3) + "31mok": "ok",
	} {
		if got := Printable(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

func FuzzPrintable(f *testing.F) {
	f.Add("\x1b]0;x\a\x1b[31m\u009b1mtext\r\n\xff")
	f.Fuzz(func(t *testing.T, in string) {
		out := Printable(in)
		if !utf8.ValidString(out) || strings.ContainsFunc(out, Steers) {
			t.Errorf("%q became %q", in, out)
		}
		if again := Printable(out); again != out {
			t.Errorf("%q became %q, and that %q", in, out, again)
		}
		if cut := Cut(in, 10); len(cut) > 13 || !utf8.ValidString(cut) {
			t.Errorf("cut to %q", cut)
		}
	})
}

func TestOutOfProportion(t *testing.T) {
	list := func(element string, n int) string { return "[" + strings.Repeat(element+",", n) + element + "]" }
	for name, c := range map[string]struct {
		json string
		into any
		ok   bool
	}{
		"small":                 {list("{}", 1000), new([]struct{}), true},
		"many empty objects":    {list("{}", 100_000), new([]struct{}), false},
		"many real entries":     {list(`{"name":"a file","type":"FILE_TYPE_FILE","path":"/a/file","size":"7"}`, 50_000), new([]EntryInfo), true},
		"many processes":        {list(`{"config":{"cmd":"sleep","args":["60"]},"pid":1234}`, 10_000), new([]ProcessInfo), true},
		"many values":           {list("1", 2<<20), new([]byte), false},
		"deep":                  {strings.Repeat("[", 10_000), new(any), false},
		"brackets in strings":   {`"` + strings.Repeat(`[{\"`, 100_000) + `"`, new(string), true},
		"a result with a table": {`{"text":"` + strings.Repeat("x", 5000) + `","t":` + list("[1,2]", 50_000) + `}`, new(EvalResult), true},
	} {
		err := Decode([]byte(c.json), c.into)
		if refusal, refused := errors.AsType[*Error](err); c.ok != (err == nil) || !c.ok && (!refused || refusal.Code != CodeExhausted) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestBudget(t *testing.T) {
	b := NewBudget(1 << 20)
	message := strings.Repeat("x", 300<<10)
	open := func() *Stream {
		var in strings.Builder
		w := NewStream(struct {
			*strings.Reader
			*strings.Builder
			nopClose
		}{nil, &in, nopClose{}})
		for range 2 {
			if err := w.Send(KindMessage, []byte(message)); err != nil {
				t.Fatal(err)
			}
		}
		s := NewStream(struct {
			*strings.Reader
			discard
			nopClose
		}{strings.NewReader(in.String()), discard{}, nopClose{}})
		s.Limit(MaxMessage, b)
		return s
	}
	first, second := open(), open()
	for range 2 { // what is read makes room for the next
		if _, _, err := first.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	var refusal *Error
	if _, _, err := second.Recv(); !errors.As(err, &refusal) || refusal.Code != CodeExhausted {
		t.Fatalf("the second message fits as well: %v", err)
	}
	_, _ = first.Close(), second.Close()
	if b.left != 1<<20 {
		t.Fatalf("%d bytes are left", b.left)
	}
	third := open()
	if _, _, err := third.Recv(); err != nil {
		t.Fatal(err)
	}
	_ = third.Close()
	small := open()
	small.Limit(100<<10, nil)
	if _, _, err := small.Recv(); !errors.As(err, &refusal) {
		t.Fatalf("beyond its limit: %v", err)
	}
}

type nopClose struct{}

func (nopClose) Close() error { return nil }

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }
