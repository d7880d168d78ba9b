// Package transpile makes JavaScript of TypeScript, for guests whose node cannot: the types go, what has a meaning at run
// time (enums, namespaces, parameter properties) is translated, and everything else stays. It checks no types and looks at
// no files. Package call uses it before code is sent.
package transpile

import (
	"fmt"
	"strings"

	"github.com/evanw/esbuild/pkg/api"
)

// Problem is what is wrong with code.
type Problem struct {
	Message string
	Text    string // as node prints it: place, line, marker, message
}

// TypeScript translates code as it is entered at a prompt: names that it does not use stay, because what is entered next
// may. Lines are kept where nothing is translated.
func TypeScript(code string) (string, *Problem) {
	result := api.Transform(code, api.TransformOptions{
		Loader: api.LoaderTS,
		Target: api.ES2022,
		// Imports that nothing uses yet stay.
		TsconfigRaw: `{"compilerOptions": {"verbatimModuleSyntax": true, "experimentalDecorators": true, "useDefineForClassFields": true}}`,
		Charset:     api.CharsetUTF8,
		LogLevel:    api.LogLevelSilent,
		TreeShaking: api.TreeShakingFalse,
	})
	if len(result.Errors) == 0 {
		return string(result.Code), nil
	}
	m := result.Errors[0]
	p := &Problem{Message: m.Text, Text: "SyntaxError: " + m.Text}
	if l := m.Location; l != nil {
		// The column counts bytes; a marker below a line counts characters.
		before := l.LineText[:min(l.Column, len(l.LineText))]
		marker := strings.Repeat(" ", len([]rune(before))) + strings.Repeat("^", max(1, l.Length))
		p.Text = fmt.Sprintf("<eval>:%d\n%s\n%s\n\nSyntaxError: %s", l.Line, l.LineText, marker, m.Text)
	}
	return "", p
}
