package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestInstallMCP: the change is shown first, and made only when that was said; what is in the file stays, and a file that is
// no plain JSON is left alone. A token is written, and not shown.
func TestInstallMCP(t *testing.T) {
	const token = "fkd_tk0000_secret"
	home := t.TempDir()
	install := func(args ...string) (code int, said string) {
		in, other, err := os.Pipe() // nobody who could be asked
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		if err := other.Close(); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		env := map[string]string{"HOME": home, "FORKD_TOKEN": token, "FORKD_HOST": "https://h:1"}
		a := &App{In: in, Out: &out, Err: &out, Self: "/opt/forkd", Name: "forkd", Getenv: func(name string) string { return env[name] }}
		code = a.Main(t.Context(), append([]string{"mcp", "install"}, args...))
		if strings.Contains(out.String(), token) {
			t.Errorf("%q shows the token:\n%s", args, &out)
		}
		return code, out.String()
	}
	file := filepath.Join(home, ".cursor", "mcp.json")
	code, said := install("cursor")
	if _, err := os.Stat(file); code == 0 || err == nil || !strings.Contains(said, `+     "forkd": {`) || !strings.Contains(said, "--yes") {
		t.Errorf("exit code %d, file: %v\n%s", code, err, said)
	}
	if code, said = install("cursor", "--yes"); code != 0 {
		t.Fatalf("exit code %d\n%s", code, said)
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v: %v", info, err)
	}
	if text := read(t, file); !strings.Contains(text, token) || !strings.Contains(text, `"FORKD_HOST": "https://h:1"`) {
		t.Error(text)
	}
	if code, said = install("cursor"); code != 0 || !strings.Contains(said, "has it already") {
		t.Errorf("once more: exit code %d\n%s", code, said)
	}

	other := filepath.Join(home, "other.json")
	write(t, other, `{"theme": "dark", "mcpServers": {"x": {"command": "y"}}}`)
	if code, said = install("claude-desktop", "--yes", "--file", other); code != 0 {
		t.Errorf("exit code %d\n%s", code, said)
	}
	text := read(t, other)
	if info, err := os.Stat(other); err != nil || info.Mode().Perm() != 0o644 || !strings.Contains(text, `"dark"`) || !strings.Contains(text, `"y"`) {
		t.Errorf("%v %v\n%s", info, err, text)
	}

	const broken = "{\n  // mine\n  \"servers\": {}\n}"
	write(t, other, broken)
	code, said = install("vscode", "--yes", "--file", other)
	if code == 0 || read(t, other) != broken || !strings.Contains(said, "by hand") || !strings.Contains(said, `"stdio"`) {
		t.Errorf("exit code %d\n%s\n%s", code, said, read(t, other))
	}
	for _, args := range [][]string{{"emacs"}, {}, {"cursor", "vscode"}} {
		if code, said = install(args...); code == 0 {
			t.Errorf("%q: %s", args, said)
		}
	}
	for _, name := range []string{"claude-code", "cline", "vscode", "claude-desktop"} {
		if code, said = install(name, "--yes"); code != 0 {
			t.Errorf("%s: exit code %d\n%s", name, code, said)
		}
	}
	if left, err := filepath.Glob(filepath.Join(home, ".forkd-*")); err != nil || len(left) != 0 {
		t.Errorf("left: %q, %v", left, err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil { //nolint:gosec // Its mode is to be kept.
		t.Fatal(err)
	}
}
