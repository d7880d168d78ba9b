package contexts

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/guest/wire"
)

// TestResults: what a value shows itself as, and display(), in the order of the code.
func TestResults(t *testing.T) {
	m := newManager(t)
	code := `
import sys
class Rich:
    def __repr__(self): return "<rich>"
    def _repr_html_(self): return "<b>rich & well</b>"
    def _repr_markdown_(self): return "**rich**"
    def _repr_latex_(self): return "$x$"
    def _repr_svg_(self): return "<svg/>"
    def _repr_png_(self): return b"\x89PNG"
    def _repr_jpeg_(self): return b"\xff\xd8", {"width": 1}
    def _repr_pdf_(self): return b"%PDF"
    def _repr_json_(self): return {"a": [1, float("nan")]}
class Bundle:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": "bundle", "text/html": "<i>", "application/vnd.x+json": {"k": 1}}, {}
class Own:
    def _ipython_display_(self): print("own")
class Broken:
    def __repr__(self): return "<broken>"
    def _repr_html_(self): raise ValueError("no html")
print("one")
display(Rich())
print("two", file=sys.stderr)
print("three", end="")
display(Bundle(), 5)
display(Own())
display({"text/html": "<hr>"}, raw=True)
print("four")
Rich()
`
	r, out := eval(t, m, code)
	if value(r) != "<rich>" {
		t.Fatal(value(r))
	}
	rich := wire.Result{
		Text: "<rich>", HTML: "<b>rich & well</b>", Markdown: "**rich**", LaTeX: "$x$", SVG: "<svg/>", PNG: "iVBORw==", JPEG: "/9g=", PDF: "JVBERg==",
		JSON: json.RawMessage(`{"a": [1, null]}`),
	}
	mainResult := rich
	mainResult.Main = true
	want := []*wire.Result{
		&rich,
		{Text: "bundle", HTML: "<i>", Extra: map[string]json.RawMessage{"application/vnd.x+json": json.RawMessage(`{"k": 1}`)}},
		{Text: "5"},
		{HTML: "<hr>"},
		&mainResult,
	}
	if diff := cmp.Diff(want, out.results); diff != "" {
		t.Error(diff)
	}
	order := []string{"out one\n", "result <rich>", "err two\n", "out three", "result bundle", "result 5", "out own\n", "result ", "out four\n", "result <rich>"}
	if diff := cmp.Diff(order, out.order); diff != "" {
		t.Error(diff)
	}
	r, out = eval(t, m, "Broken()")
	if value(r) != "<broken>" || !strings.Contains(out.stderr.String(), "ValueError: no html") || len(out.results) != 0 {
		t.Errorf("%s %q %v", value(r), out.stderr.String(), out.results)
	}
	r, out = eval(t, m, "Own()")
	if r.Text != nil || out.stdout.String() != "own\n" {
		t.Errorf("%s %q", value(r), out.stdout.String())
	}
	if r, out = eval(t, m, "Rich"); value(r) != "<class '__main__.Rich'>" || len(out.results) != 0 {
		t.Errorf("%s %v", value(r), out.results)
	}
}

// TestOrderOfStreams: what is printed to both streams arrives in the order of printing.
func TestOrderOfStreams(t *testing.T) {
	m := newManager(t)
	_, out := eval(t, m, "import sys\nfor i in range(100):\n    print(i)\n    print(i, file=sys.stderr)")
	var want []string
	for i := range 100 {
		want = append(want, "out "+strconv.Itoa(i)+"\n", "err "+strconv.Itoa(i)+"\n")
	}
	if diff := cmp.Diff(want, out.order); diff != "" {
		t.Error(diff)
	}
}

// TestLargeResult: what is too large is left out, and said to be.
func TestLargeResult(t *testing.T) {
	m := newManager(t)
	code := "class R:\n    def __repr__(self): return 'r'\n    def _repr_png_(self): return bytes(9 << 20)\n" +
		"    def _repr_html_(self): return '<' * (7 << 20)\n    def _repr_svg_(self): return 'x' * (2 << 20)\nR()"
	_, out := eval(t, m, code)
	if len(out.results) != 1 {
		t.Fatal(out.results)
	}
	r := out.results[0]
	if len(r.HTML) != 7<<20 || r.PNG != "" || r.SVG != "" || !strings.Contains(r.Text, "png of 9.0 MiB left out") || len(r.Omitted) != 2 {
		t.Errorf("%.200s %+v", r.Text, r.Omitted)
	}
	b, err := wire.Encode(&wire.EvalEvent{Result: r})
	if err != nil || len(b) > 8<<20 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	// Control characters take six bytes each.
	_, out = eval(t, m, "class S:\n    def _repr_html_(self): return chr(1) * (3 << 20)\n    def __repr__(self): return 's'\nS()")
	if r := out.results[0]; r.HTML != "" || len(r.Omitted) != 1 || !strings.Contains(r.Text, "left out") {
		t.Errorf("%.200s %+v", r.Text, r.Omitted)
	}
	if got := run(t, m, "1"); got != "1" {
		t.Error(got)
	}
}

func TestDisplayFromThreads(t *testing.T) {
	m := newManager(t)
	r, out := eval(t, m, "import threading\nts = [threading.Thread(target=display, args=(i,)) for i in range(5)]\n[t.start() for t in ts]\n[t.join() for t in ts]\n1")
	if value(r) != "1" || len(out.results) != 5 {
		t.Errorf("%s %v", value(r), out.results)
	}
	if got := run(t, m, "2"); got != "2" {
		t.Error(got)
	}
}

// TestStandIn: programs that import IPython's display work where it is not installed.
func TestStandIn(t *testing.T) {
	m := newManager(t)
	if got := run(t, m, "import importlib.util\nimportlib.util.find_spec('IPython.core.display') is not None"); got == "True" {
		t.Skip("IPython is installed")
	}
	_, out := eval(t, m, "from IPython.display import display, HTML, Markdown, Image, JSON, clear_output\nimport IPython.display as d\n"+
		"display(HTML('<p>'), Markdown('# x'), Image(b'\\x89PNG1234'))\nd.JSON({'a': 1})")
	var got []string
	for _, r := range out.results {
		got = append(got, strings.Join(r.Formats(), " "))
	}
	if diff := cmp.Diff([]string{"text html", "text markdown", "text png", "text json"}, got); diff != "" {
		t.Error(diff)
	}
}

// scientific is a directory that has matplotlib and pandas for the python3 of the tests.
func scientific(t *testing.T) string {
	t.Helper()
	dirs := filepath.SplitList(os.Getenv("FORKD_TEST_PYTHONPATH"))
	dirs = append(dirs, "")
	for _, dir := range dirs {
		cmd := exec.CommandContext(t.Context(), "python3", "-c", "import matplotlib, pandas")
		cmd.Env = append(os.Environ(), "PYTHONPATH="+dir)
		if cmd.Run() == nil {
			return dir
		}
	}
	t.Skip("needs matplotlib and pandas: install them, or name a directory that has them in FORKD_TEST_PYTHONPATH")
	return ""
}

func TestFigures(t *testing.T) {
	path := scientific(t)
	m := newManager(t)
	if _, err := m.Create(t.Context(), wire.ContextConfig{Env: map[string]string{"PYTHONPATH": path}}); err != nil {
		t.Fatal(err)
	}
	tests := []struct{ code, chart string }{
		{
			"plt.plot([1, 2], [3, 4.5], label='a')\nplt.plot([1, 2], [0, 1])\nplt.title('T'); plt.xlabel('time (s)'); plt.ylabel('v [m]'); plt.grid()\nplt.show()\nprint('after')",
			`{"type":"line","title":"T","elements":[{"label":"a","points":[[1,3],[2,4.5]]},{"label":"Line 1","points":[[1,0],[2,1]]}],` +
				`"x_label":"time (s)","x_unit":"s","y_label":"v [m]","y_unit":"m","x_scale":"linear","y_scale":"linear"}`,
		},
		{
			"plt.scatter([1, 2], [3, 4], label='s'); plt.xscale('log')",
			`{"type":"scatter","title":null,"elements":[{"label":"s","points":[[1,3],[2,4]]}],` +
				`"x_label":null,"x_unit":null,"y_label":null,"y_unit":null,"x_scale":"log","y_scale":"linear"}`,
		},
		{
			"plt.bar(['x', 'y'], [1, 2])\nplt.ylabel('n')",
			`{"type":"bar","title":null,"elements":[{"label":"x","group":"Group 0","value":1},{"label":"y","group":"Group 0","value":2}],` +
				`"x_label":null,"x_unit":null,"y_label":"n","y_unit":null}`,
		},
		{
			"plt.barh(['x', 'y'], [1, 2], label='g')",
			`{"type":"bar","title":null,"elements":[{"label":"x","group":"g","value":1},{"label":"y","group":"g","value":2}],` +
				`"x_label":null,"x_unit":null,"y_label":null,"y_unit":null}`,
		},
		{
			"_ = plt.pie([1, 3], labels=['p', 'q'])",
			`{"type":"pie","title":null,"elements":[{"label":"p","angle":90,"radius":1},{"label":"q","angle":270,"radius":1}]}`,
		},
		{
			"_ = plt.boxplot([[1, 2, 3, 4, 5, 50], [2, 2, 2, 2, 2, 2]])",
			`{"type":"box_and_whisker","title":null,"elements":[` +
				`{"label":"1","min":1,"first_quartile":2.25,"median":3.5,"third_quartile":4.75,"max":5,"outliers":[50]},` +
				`{"label":"2","min":2,"first_quartile":2,"median":2,"third_quartile":2,"max":2,"outliers":[]}],` +
				`"x_label":null,"x_unit":null,"y_label":null,"y_unit":null}`,
		},
		{
			"import datetime\nplt.plot([datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)], ['a', 'b'])",
			`{"type":"line","title":null,"elements":[{"label":"Line 0","points":[["2026-01-01","a"],["2026-01-02","b"]]}],` +
				`"x_label":null,"x_unit":null,"y_label":null,"y_unit":null,"x_scale":"datetime","y_scale":"categorical"}`,
		},
		{
			"f, (a, b) = plt.subplots(1, 2)\nf.suptitle('S')\na.plot([1], [1]); _ = b.bar(['z'], [2])\nf",
			`{"type":"superchart","title":"S","elements":[` +
				`{"type":"line","title":null,"elements":[{"label":"Line 0","points":[[1,1]]}],"x_label":null,"x_unit":null,"y_label":null,"y_unit":null,"x_scale":"linear","y_scale":"linear"},` +
				`{"type":"bar","title":null,"elements":[{"label":"z","group":"Group 0","value":2}],"x_label":null,"x_unit":null,"y_label":null,"y_unit":null}]}`,
		},
	}
	r, out := eval(t, m, "import os\nimport matplotlib.pyplot as plt\nimport matplotlib\nmatplotlib.get_backend().lower()")
	if value(r) != "'agg'" || out.stderr.Len() > 0 {
		t.Fatalf("%s %s", value(r), out.stderr.String())
	}
	for _, tt := range tests {
		r, out := eval(t, m, tt.code)
		if len(out.results) != 1 || out.results[0].PNG == "" || out.stderr.Len() > 0 {
			t.Errorf("%s: %s, %d results, %s", tt.code, value(r), len(out.results), out.stderr.String())
			continue
		}
		if i := slices.Index(out.order, "out after\n"); strings.Contains(tt.code, "after") && i != 1 {
			t.Errorf("%q", out.order)
		}
		if isMain := strings.HasSuffix(tt.code, "\nf"); out.results[0].Main != isMain {
			t.Errorf("%s: main result: %v", tt.code, !isMain)
		}
		var got map[string]any
		if err := json.Unmarshal(out.results[0].Chart, &got); err != nil {
			t.Error(err)
		}
		for _, c := range append([]any{got}, asList(got["elements"])...) {
			if c, ok := c.(map[string]any); ok { // ticks hang on the version
				for _, k := range []string{"x_ticks", "y_ticks", "x_tick_labels", "y_tick_labels"} {
					if v, ok := c[k]; ok && (len(asList(v)) == 0) {
						t.Errorf("%s: %s is %v", tt.code, k, v)
					}
					delete(c, k)
				}
			}
		}
		var want map[string]any
		if err := json.Unmarshal([]byte(tt.chart), &want); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", tt.code, diff)
		}
	}
	if got := run(t, m, "plt.get_fignums()"); got != "[]" {
		t.Errorf("open: %s", got)
	}
	// A figure comes also when the code fails after it.
	if r, out := eval(t, m, "plt.plot([1])\n1/0"); len(out.results) != 1 || r.Error == nil {
		t.Errorf("%d results, %s", len(out.results), value(r))
	}
	r, out = eval(t, m, "import pandas as pd\npd.DataFrame({'a': [1, 2], 'b': [0.5, None], 't': pd.to_datetime(['2026-01-01', '2026-01-02'])})")
	if len(out.results) != 1 {
		t.Fatal(value(r), out.stderr.String())
	}
	got := out.results[0]
	if !strings.HasPrefix(got.HTML, "<div>") || !got.Main || got.Text != *r.Text ||
		string(got.Data) != `{"a": [1, 2], "b": [0.5, null], "t": ["2026-01-01T00:00:00", "2026-01-02T00:00:00"]}` {
		t.Errorf("%+v", got)
	}
}

func asList(v any) []any {
	list, _ := v.([]any)
	return list
}
