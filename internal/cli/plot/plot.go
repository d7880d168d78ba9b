// Package plot draws samples as an SVG: for every row a strip of dots over a common logarithmic axis, with marks at the
// median and the 99th percentile, so that outliers are seen and not averaged away. It knows nothing of what is measured
// and does no I/O but writing. The command line's benchmarks are its only user. It is a page of code where gonum/plot
// would be ten modules, fonts among them.
package plot

import (
	"bufio"
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Figure is a drawing: panels below each other.
type Figure struct {
	Title  string
	Notes  []string // small lines below the title: the conditions of the measurement
	Panels []Panel
}

// Panel has one axis.
type Panel struct {
	Title string
	Unit  string
	Rows  []Row
}

// Row is one strip. Values must be positive to have a place on the axis; others are drawn at its left end.
type Row struct {
	Label  string
	Values []float64
}

// Percentile is the value below or at which a share q of the sorted sample lies, by nearest rank; 0 of an empty one.
func Percentile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(math.Ceil(q*float64(len(sorted)))) - 1
	return sorted[min(max(rank, 0), len(sorted)-1)]
}

// Sizes in pixels.
const (
	width      = 980
	left       = 200 // labels
	right      = 190 // numbers
	rowHeight  = 30
	lineHeight = 18
	panelHead  = 30
	panelFoot  = 36
	margin     = 16
)

// Write draws the figure.
func (f *Figure) Write(w io.Writer) error {
	height := 2*margin + 28 + lineHeight*len(f.Notes)
	for _, p := range f.Panels {
		height += panelHead + rowHeight*len(p.Rows) + panelFoot
	}
	out := bufio.NewWriter(w)
	d := &drawing{w: out}
	d.printf(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`,
		width, height, width, height)
	d.printf(`<rect width="100%%" height="100%%" fill="#ffffff"/>`)
	y := float64(margin + 16)
	d.text(margin, y, "start", `font-size="17" font-weight="bold"`, f.Title)
	y += 6
	for _, note := range f.Notes {
		y += lineHeight
		d.text(margin, y, "start", `fill="#555555"`, note)
	}
	y += 6
	for _, p := range f.Panels {
		y = d.panel(p, y)
	}
	d.printf("</svg>")
	if d.err != nil {
		return fmt.Errorf("draw: %w", d.err)
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("draw: %w", err)
	}
	return nil
}

// drawing keeps the first error.
type drawing struct {
	w   io.Writer
	err error
}

func (d *drawing) printf(format string, args ...any) {
	if d.err == nil {
		_, d.err = fmt.Fprintf(d.w, format+"\n", args...)
	}
}

func (d *drawing) text(x, y float64, anchor, style, s string) {
	var b strings.Builder
	if err := xml.EscapeText(&b, []byte(s)); err != nil && d.err == nil {
		d.err = err
	}
	d.printf(`<text x="%.1f" y="%.1f" text-anchor="%s" %s>%s</text>`, x, y, anchor, style, b.String())
}

func (d *drawing) panel(p Panel, y float64) float64 {
	axis := newAxis(p.Rows)
	y += panelHead - 8
	d.text(left, y, "start", `font-weight="bold"`, p.Title)
	d.text(width-margin, y, "end", `fill="#555555"`, "median · 99 % · longest, "+p.Unit)
	y += 8
	top, bottom := y, y+float64(rowHeight*len(p.Rows))
	for _, t := range axis.ticks() {
		x := axis.place(t)
		d.printf(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#dddddd"/>`, x, top, x, bottom)
		d.text(x, bottom+15, "middle", `fill="#555555"`, number(t))
	}
	for _, r := range p.Rows {
		d.row(r, axis, y)
		y += rowHeight
	}
	return y + panelFoot
}

func (d *drawing) row(r Row, axis axis, y float64) {
	middle := y + rowHeight/2
	d.text(left-10, middle+4, "end", "", r.Label)
	if len(r.Values) == 0 {
		d.text(left+8, middle+4, "start", `fill="#999999"`, "no samples")
		return
	}
	for i, v := range r.Values {
		// The golden ratio spreads neighbours apart, the same way in every drawing.
		_, part := math.Modf(float64(i) * 0.6180339887)
		d.printf(`<circle cx="%.1f" cy="%.1f" r="2.4" fill="#2a6fb0" fill-opacity="0.45"/>`, axis.place(v), middle+(part-0.5)*(rowHeight-12))
	}
	sorted := slices.Sorted(slices.Values(r.Values))
	p50, p99 := Percentile(sorted, 0.5), Percentile(sorted, 0.99)
	for _, mark := range []struct {
		at    float64
		color string
	}{{p99, "#c0392b"}, {p50, "#111111"}} {
		x := axis.place(mark.at)
		d.printf(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-width="2"/>`, x, y+4, x, y+rowHeight-4, mark.color)
	}
	d.text(width-margin, middle+4, "end", "", number(p50)+" · "+number(p99)+" · "+number(sorted[len(sorted)-1]))
}

// axis is logarithmic from lo to hi, both 1, 2 or 5 times a power of ten.
type axis struct{ lo, hi float64 }

func newAxis(rows []Row) axis {
	lo, hi := math.Inf(1), 0.0
	for _, r := range rows {
		for _, v := range r.Values {
			if v > 0 && !math.IsInf(v, 0) {
				lo, hi = min(lo, v), max(hi, v)
			}
		}
	}
	if hi == 0 {
		return axis{1, 10}
	}
	a := axis{roundDown(lo), roundUp(hi)}
	if a.lo == a.hi {
		a.lo /= 10
	}
	return a
}

func (a axis) place(v float64) float64 {
	span := math.Log(a.hi / a.lo)
	at := math.Log(v/a.lo) / span
	if !(at > 0) { // also not a number
		at = 0
	}
	return left + min(at, 1)*(width-left-right)
}

func (a axis) ticks() []float64 {
	var fine, coarse []float64
	for e := math.Floor(math.Log10(a.lo)); e <= math.Ceil(math.Log10(a.hi)); e++ {
		for _, m := range []float64{1, 2, 5} {
			t := m * math.Pow(10, e)
			if t < a.lo*0.999 || t > a.hi*1.001 {
				continue
			}
			fine = append(fine, t)
			if m == 1 {
				coarse = append(coarse, t)
			}
		}
	}
	const most = 12
	if len(fine) > most && len(coarse) > 1 {
		return coarse
	}
	return fine
}

func roundDown(v float64) float64 {
	base := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{5, 2} {
		if m*base <= v {
			return m * base
		}
	}
	return base
}

func roundUp(v float64) float64 {
	base := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if v <= m*base {
			return m * base
		}
	}
	return 10 * base
}

// number writes three significant digits, and all of those before the point.
func number(v float64) string {
	if v >= 100 {
		return strconv.FormatFloat(math.Round(v), 'f', -1, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}
