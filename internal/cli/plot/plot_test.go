package plot

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
)

func TestPercentile(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	for _, tt := range []struct {
		sample []float64
		q      float64
		want   float64
	}{
		{nil, 0.5, 0},
		{[]float64{7}, 0.5, 7},
		{[]float64{7}, 0.99, 7},
		{[]float64{1, 2}, 0.5, 1},
		{[]float64{1, 2, 3}, 0.5, 2},
		{[]float64{1, 2, 3}, 0, 1},
		{[]float64{1, 2, 3}, 1, 3},
		{hundred, 0.5, 50},
		{hundred, 0.9, 90},
		{hundred, 0.99, 99},
		{hundred[:50], 0.99, 50},
	} {
		if got := Percentile(tt.sample, tt.q); got != tt.want {
			t.Errorf("Percentile of %d values at %g = %g, want %g", len(tt.sample), tt.q, got, tt.want)
		}
	}
}

func TestAxis(t *testing.T) {
	for _, tt := range []struct {
		values []float64
		lo, hi float64
	}{
		{nil, 1, 10},
		{[]float64{0}, 1, 10},
		{[]float64{3, 40}, 2, 50},
		{[]float64{1, 10}, 1, 10},
		{[]float64{5}, 0.5, 5},
		{[]float64{0, 7, 99}, 5, 100},
		{[]float64{0.03, 1234}, 0.02, 2000},
	} {
		a := newAxis([]Row{{Values: tt.values}})
		if math.Abs(a.lo-tt.lo) > 1e-9 || math.Abs(a.hi-tt.hi) > 1e-9 {
			t.Errorf("axis of %v goes from %g to %g, want %g to %g", tt.values, a.lo, a.hi, tt.lo, tt.hi)
		}
		if n := len(a.ticks()); n < 2 || n > 12 {
			t.Errorf("axis of %v has %d ticks: %v", tt.values, n, a.ticks())
		}
		for _, v := range append(tt.values, 0, -1, math.NaN(), math.Inf(1)) {
			if x := a.place(v); !(x >= left && x <= width-right) {
				t.Errorf("axis of %v places %g at %g, outside the panel", tt.values, v, x)
			}
		}
	}
}

func TestWriteIsWellFormed(t *testing.T) {
	f := Figure{
		Title: `a <title> & "quotes"`, Notes: []string{"note & < >", "control \x00 \x1b character"},
		Panels: []Panel{
			{Title: "gap", Unit: "ms", Rows: []Row{
				{"live, idle", []float64{1, 2, 3, 200}}, {"none <yet>", nil}, {"odd", []float64{0, -1, math.NaN(), math.Inf(1)}},
			}},
			{Title: "empty", Unit: "MiB"},
		},
	}
	var out bytes.Buffer
	if err := f.Write(&out); err != nil {
		t.Fatal(err)
	}
	dots := 0
	d := xml.NewDecoder(bytes.NewReader(out.Bytes()))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%v in:\n%s", err, out.String())
		}
		if e, ok := token.(xml.StartElement); ok && e.Name.Local == "circle" {
			dots++
		}
	}
	if dots != 8 {
		t.Errorf("%d dots are drawn, want 8: every sample is", dots)
	}
	if strings.Contains(out.String(), "NaN") || strings.Contains(out.String(), "Inf") {
		t.Logf("numbers that are none are written as text:\n%s", out.String())
	}
	for line := range strings.Lines(out.String()) {
		if strings.Contains(line, "<circle") && (strings.Contains(line, "NaN") || strings.Contains(line, "Inf")) {
			t.Errorf("a dot has no place: %s", line)
		}
	}
}

func TestWriteReportsErrors(t *testing.T) {
	f := Figure{Title: "x", Notes: make([]string, 1000)}
	if err := f.Write(brokenWriter{}); !errors.Is(err, errBroken) {
		t.Errorf("Write to a broken file: %v", err)
	}
}

var errBroken = errors.New("broken")

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, fmt.Errorf("write: %w", errBroken) }
