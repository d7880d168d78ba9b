package recipes

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
)

// TestFigures: children draw without saving anything, and the figures come with what they plot.
func TestFigures(t *testing.T) {
	heavy(t)
	f := built(t, "code-interpreter")
	children := f.fork("code-interpreter", 2)
	each(children, func(i int, id string) {
		var res api.EvalResponse
		f.json(&res, "eval", id, fmt.Sprintf("plt.plot([1, 2], [3, %d])\nplt.title('T')\nplt.show()\nprint('on')\npd.DataFrame({'a': [1, %d]})", i, i))
		if res.Error != nil || len(res.Results) != 2 || res.Stdout != "on\n" || res.Stderr != "" {
			t.Errorf("child %d: %+v", i, res)
			return
		}
		png, err := base64.StdEncoding.DecodeString(res.Results[0].PNG)
		if err != nil || !strings.HasPrefix(string(png), "\x89PNG") {
			t.Errorf("child %d: %.20q %v", i, png, err)
		}
		var chart struct {
			Type, Title string
			Elements    []struct{ Points [][]float64 }
		}
		if err := json.Unmarshal(res.Results[0].Chart, &chart); err != nil || chart.Type != "line" || chart.Title != "T" ||
			fmt.Sprint(chart.Elements) != fmt.Sprintf("[{[[1 3] [2 %d]]}]", i) {
			t.Errorf("child %d: %s %v", i, res.Results[0].Chart, err)
		}
		table := res.Results[1]
		var data struct{ A []int }
		if err := json.Unmarshal(table.Data, &data); err != nil || !table.Main || !strings.Contains(table.HTML, "<table") ||
			!slices.Equal(data.A, []int{1, i}) {
			t.Errorf("child %d: %+v", i, table)
		}
	})
}

// TestNodeContexts: TypeScript, and that nothing random that node keeps in store is the same in two children.
func TestNodeContexts(t *testing.T) {
	heavy(t)
	f := built(t, "node")
	children := f.fork("node", 3)
	drawn := map[string][]string{}
	codes := []string{
		"crypto.randomUUID()", "require('crypto').randomUUID()", "crypto.randomBytes(16).toString('hex')", "Math.random()",
		"await new Promise((done) => crypto.randomBytes(16, (_, b) => done(b.toString('hex'))))",
		"crypto.generateKeyPairSync('ed25519').publicKey.export({ format: 'jwk' }).x",
	}
	for _, c := range children {
		for _, code := range codes {
			drawn[code] = append(drawn[code], f.eval(c.ID, code))
		}
	}
	for code, values := range drawn {
		distinct(t, code, values)
	}
	id := children[0].ID
	var res api.EvalResponse
	f.json(&res, "eval", id, "--language", "typescript", "--", "enum E { X = 3 }\nconst v: { n: number } = { n: E.X }\nv")
	if res.Result == nil || *res.Result != "{ n: 3 }" {
		t.Errorf("%+v", res)
	}
}
