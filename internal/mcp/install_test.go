package mcp

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestConfigure: this server's entry is written, and everything else stays as it is, in its order.
func TestConfigure(t *testing.T) {
	p := Program{Command: "/opt/forkd", Args: []string{"mcp"}, Env: map[string]string{"FORKD_HOME": "/h<1>"}}
	clients := map[string]Client{}
	for _, c := range Clients("/home/u", "linux") {
		clients[c.Name] = c
	}
	entry := `{
      "command": "/opt/forkd",
      "args": [
        "mcp"
      ],
      "env": {
        "FORKD_HOME": "/h<1>"
      }
    }`
	for _, c := range []struct{ name, client, before, after string }{
		{"no file", "cursor", "", "{\n  \"mcpServers\": {\n    \"forkd\": " + entry + "\n  }\n}\n"},
		{"another type", "vscode", "{}", strings.Replace("{\n  \"servers\": {\n    \"forkd\": "+entry+"\n  }\n}\n", "{\n      \"command\"", "{\n      \"type\": \"stdio\",\n      \"command\"", 1)},
		{
			"others stay", "cline", `{"z": 1e3, "mcpServers": {"b": {"command": "x"}, "forkd": {"command": "old"}, "a": {}}, "y": "<ü>"}`,
			"{\n  \"z\": 1e3,\n  \"mcpServers\": {\n    \"b\": {\n      \"command\": \"x\"\n    },\n    \"forkd\": " + entry + ",\n    \"a\": {}\n  },\n  \"y\": \"<ü>\"\n}\n",
		},
		{
			"what the user said of it stays", "cursor",
			`{"mcpServers": {"forkd": {"disabled": true, "command": "old", "env": {"FORKD_HOST": "gone", "MINE": "1"}, "alwaysAllow": ["tree"]}}}`,
			"{\n  \"mcpServers\": {\n    \"forkd\": {\n      \"disabled\": true,\n      \"command\": \"/opt/forkd\",\n      \"env\": {\n        \"MINE\": \"1\",\n" +
				"        \"FORKD_HOME\": \"/h<1>\"\n      },\n      \"alwaysAllow\": [\n        \"tree\"\n      ],\n      \"args\": [\n        \"mcp\"\n      ]\n    }\n  }\n}\n",
		},
		{"an entry that is none", "cursor", `{"mcpServers": {"forkd": 7}}`, "{\n  \"mcpServers\": {\n    \"forkd\": " + entry + "\n  }\n}\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := clients[c.client]
			got, err := client.Configure([]byte(c.before), p)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.after, string(got)); diff != "" {
				t.Error(diff)
			}
			again, err := client.Configure(got, p)
			if err != nil || string(again) != string(got) {
				t.Errorf("once more: %v\n%s", err, again)
			}
		})
	}
	for _, before := range []string{"// a comment\n{}", "[]", `{"mcpServers": []}`, `{"mcpServers": {}`, "{} {}", `{"a": }`} {
		client := clients["cursor"]
		if got, err := client.Configure([]byte(before), p); !errors.Is(err, ErrForeign) {
			t.Errorf("%q: %s, %v; it is left alone", before, got, err)
		}
	}
}

func TestClients(t *testing.T) {
	seen := map[string]bool{}
	for _, system := range []string{"linux", "darwin"} {
		for _, c := range Clients("/home/u", system) {
			if !strings.HasPrefix(c.File, "/home/u/") || !strings.HasSuffix(c.File, ".json") {
				t.Errorf("%s on %s: %s", c.Name, system, c.File)
			}
			seen[c.Name] = true
		}
	}
	if len(seen) != 5 {
		t.Errorf("clients: %v", seen)
	}
}
