package recipes

import (
	"fmt"
	"testing"
)

// plotCode draws, and prints the size of the picture.
const plotCode = `
import io
x = np.linspace(0, 6, %d)
figure, axes = plt.subplots()
axes.plot(x, np.sin(x), label="sin")
axes.set_title("child %d")
axes.legend()
out = io.BytesIO()
figure.savefig(out, format="png")
plt.close(figure)
out.getvalue()[:8] == b"\x89PNG\r\n\x1a\n" and len(out.getvalue()) > 5000`

// analysisCode answers with numbers of pandas and scipy that are the child's own.
const analysisCode = `
import scipy.stats
frame = pd.DataFrame({"city": ["a", "b"] * 10, "n": range(%[1]d, %[1]d + 20)})
fit = scipy.stats.linregress(frame.n, 2 * frame.n + 1)
int(frame.groupby("city").n.sum()["a"]), round(float(fit.slope), 6)`

// TestCodeInterpreter: children compute with numpy, pandas and scipy and draw, each with a state of its own.
func TestCodeInterpreter(t *testing.T) {
	heavy(t)
	f := built(t, "code-interpreter")
	children := f.fork("code-interpreter", 4)
	drawn := make([]string, len(children))
	each(children, func(i int, id string) {
		if got := f.eval(id, fmt.Sprintf(plotCode, 100+i, i)); got != "True" {
			t.Errorf("child %d draws %q", i, got)
		}
		if got, want := f.eval(id, fmt.Sprintf(analysisCode, i)), fmt.Sprintf("(%d, 2.0)", 90+10*i); got != want {
			t.Errorf("child %d answers %q, want %q", i, got, want)
		}
		if got := f.eval(id, `len(x)`); got != fmt.Sprint(100+i) {
			t.Errorf("child %d has the x of another: %q", i, got)
		}
		drawn[i] = f.eval(id, `import scipy.stats, random; (float(np.random.random()), random.random(), float(scipy.stats.norm.rvs()))`)
	})
	distinct(t, "what scipy drew", drawn)

	plot := f.firstAnswer("code-interpreter", func(id string) { f.eval(id, fmt.Sprintf(plotCode, 50, 0)) })
	t.Logf("first figure: %d ms by a fork", plot.Milliseconds())
	// What a fork saves is measured where nothing is warm: by another interpreter in a child.
	cold := f.timed(func() {
		f.exec(children[0].ID, `python3 -c 'import numpy, pandas, scipy.stats, matplotlib.pyplot as p; p.plot([1, 2]); p.savefig("/tmp/x.png")'`)
	})
	t.Logf("first figure: %d ms by a new interpreter: %.1f times", cold.Milliseconds(), float64(cold)/float64(plot))
}
