package httpapi

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strconv"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
)

// TestErrorTable: every code of package api has its status in docs/api.md, which is the promise, and no other.
func TestErrorTable(t *testing.T) {
	text, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	promised := map[api.Code]int{}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 || !strings.HasPrefix(strings.TrimSpace(cells[1]), "`") {
			continue
		}
		if n, err := strconv.Atoi(strings.TrimSpace(cells[2])); err == nil {
			promised[api.Code(strings.Trim(strings.TrimSpace(cells[1]), "`"))] = n
		}
	}
	codes := allCodes(t)
	if len(codes) < 18 {
		t.Errorf("only %d codes were found", len(codes))
	}
	for _, code := range codes {
		if got, want := status(code), promised[code]; got != want {
			t.Errorf("%s: status %d, promised %d", code, got, want)
		}
		delete(promised, code)
	}
	if len(promised) > 0 {
		t.Errorf("promised, and no codes: %v", promised)
	}
	if status("nosuch") != 500 {
		t.Error("a code that nobody knows is our fault")
	}
}

// allCodes are the constants of type api.Code.
func allCodes(t *testing.T) []api.Code {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "../../api/api.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var codes []api.Code
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || fmt.Sprint(spec.Type) != "Code" {
			return true
		}
		for _, v := range spec.Values {
			if code, err := strconv.Unquote(v.(*ast.BasicLit).Value); err == nil {
				codes = append(codes, api.Code(code))
			}
		}
		return true
	})
	return codes
}

// TestSentinels: what the layers below decided on has a code, and the message is theirs.
func TestSentinels(t *testing.T) {
	for _, k := range kinds() {
		e := toAPI(fmt.Errorf("fork x: %w", k.is))
		if e.Code != k.code || e.Text != e.Message || !strings.HasPrefix(e.Message, "fork x: ") {
			t.Errorf("%v: %+v", k.is, e)
		}
	}
}
