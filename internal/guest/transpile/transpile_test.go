package transpile

import (
	"strings"
	"testing"
)

func TestTypeScript(t *testing.T) {
	for code, want := range map[string]string{
		"const x: number = 1":                         "const x = 1;\n",
		"let y = await f<string>(1 as any)":           "let y = await f(1);\n",
		"import { a } from 'b'":                       "import { a } from \"b\";\n",
		"import type { A } from 'b'":                  "",
		"interface A { x: number }\ntype B = A":       "",
		"function f(a?: string): void {}\nf":          "function f(a) {\n}\nf;\n",
		"class C<T> { constructor(private x: T) {} }": "class C {\n  constructor(x) {\n    this.x = x;\n  }\n  x;\n}\n",
	} {
		if got, problem := TypeScript(code); problem != nil || got != want {
			t.Errorf("%q: %q %v", code, got, problem)
		}
	}
	if got, problem := TypeScript("enum E { A = 1, B }\nE.B"); problem != nil || !strings.Contains(got, `E2["B"] = 2`) && !strings.Contains(got, `"B"`) {
		t.Errorf("%q %v", got, problem)
	}
	_, problem := TypeScript("const a = 1\nlet ü: = 5")
	if problem == nil || problem.Text != "<eval>:2\nlet ü: = 5\n       ^\n\nSyntaxError: Unexpected \"=\"" {
		t.Errorf("%+v", problem)
	}
}
