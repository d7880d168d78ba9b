package wire

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestResultEncoding: the encoding by hand is what encoding/json reads, and as long as Size says at most.
func TestResultEncoding(t *testing.T) {
	for name, r := range map[string]Result{
		"empty": {},
		"all": {
			Text: "t\n\"\\\x01", HTML: "<b>&</b>", Markdown: "# é", SVG: "<svg/>", PNG: "AA==", JPEG: "AB==", PDF: "AC==", LaTeX: `\x`,
			JSON: json.RawMessage(`{"a":[1,null]}`), JavaScript: "1", Data: json.RawMessage(`{"a":[1]}`), Chart: json.RawMessage(`{"type":"line"}`),
			Extra: map[string]json.RawMessage{"application/x": json.RawMessage(`"y"`)}, Main: true,
			Omitted: []Omitted{{Format: "png", Bytes: 5, Limit: 4}},
		},
		"control characters": {Text: strings.Repeat("\x01", 1000)},
	} {
		b, err := Encode(&EvalEvent{Result: &r})
		if err != nil {
			t.Fatal(err)
		}
		var got EvalEvent
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, b)
		}
		if diff := cmp.Diff(&r, got.Result); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if len(b) > r.Size()+300 {
			t.Errorf("%s: %d bytes, Size says %d", name, len(b), r.Size())
		}
	}
}

func TestLargestRepresentation(t *testing.T) {
	r := Result{Text: "a", HTML: strings.Repeat("b", 100), Chart: json.RawMessage(`{"a":1}`)}
	for _, want := range []string{"html", "chart", "text"} {
		name, size, drop := r.Largest()
		if name != want || size == 0 {
			t.Fatalf("%s of %d bytes, want %s", name, size, want)
		}
		drop()
	}
	if _, size, _ := r.Largest(); size != 0 {
		t.Errorf("%d bytes are left", size)
	}
}
