package cli

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/guest/wire"
)

const steering = "\x1b]0;owned\a\x1b[2J\u009b31mx\u202e\ue000\U000e0041\tcell\nrow\x00é\u2028"

// TestTableOfAGuestsNames: what a guest calls its things moves neither the terminal nor the table.
func TestTableOfAGuestsNames(t *testing.T) {
	var b bytes.Buffer
	if err := table(&b, "NAME | STATE", [][]string{{steering, "running"}, {"", "failed\n"}}); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	if len(lines) != 3 || !strings.HasSuffix(lines[1], "  running") || !strings.HasPrefix(lines[2], "-  ") {
		t.Errorf("got %q", b.String())
	}
	if strings.ContainsFunc(b.String(), wire.Steers) {
		t.Errorf("steers: %q", b.String())
	}
}

// TestJSONOfAGuestsNames: JSON keeps what a guest says, and shows it escaped.
func TestJSONOfAGuestsNames(t *testing.T) {
	var b bytes.Buffer
	a := &App{Out: &b, json: true}
	if err := a.show(map[string]string{"name": steering}, nil); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsFunc(b.String(), wire.Steers) {
		t.Errorf("steers: %q", b.String())
	}
	var back map[string]string
	if err := json.Unmarshal(b.Bytes(), &back); err != nil || back["name"] != steering {
		t.Errorf("%v: %q became %q", err, steering, back["name"])
	}
}
