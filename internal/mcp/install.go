package mcp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

// Program is how a client starts this server.
type Program struct {
	Command string            `json:"command"`
	Args    []string          `json:"args"`
	Env     map[string]string `json:"env,omitempty"`
}

// Client is a program that can be told of servers in a file of its own.
type Client struct {
	Name string
	File string // its configuration
	key  string // of the object that has a member for each server
	kind string // the member "type", where it wants one
}

// Clients are those that are known, for a user with this home directory on this system ("linux", "darwin").
func Clients(home, system string) []Client {
	settings := filepath.Join(home, ".config")
	if system == "darwin" {
		settings = filepath.Join(home, "Library", "Application Support")
	}
	code := filepath.Join(settings, "Code", "User")
	return []Client{
		{Name: "claude-desktop", File: filepath.Join(settings, "Claude", "claude_desktop_config.json"), key: "mcpServers"},
		{Name: "claude-code", File: filepath.Join(home, ".claude.json"), key: "mcpServers", kind: "stdio"},
		{Name: "cursor", File: filepath.Join(home, ".cursor", "mcp.json"), key: "mcpServers"},
		{Name: "cline", File: filepath.Join(code, "globalStorage", "saoudrizwan.claude-dev", "settings", "cline_mcp_settings.json"), key: "mcpServers"},
		{Name: "vscode", File: filepath.Join(code, "mcp.json"), key: "servers", kind: "stdio"},
	}
}

const serverName = "forkd"

// ErrForeign means that a configuration is not plain JSON, such as one with comments, and was left alone.
var ErrForeign = errors.New("not plain JSON")

// Configure is a client's configuration with this server in it. What else is in it stays as it is, in its order.
func (c *Client) Configure(text []byte, p Program) ([]byte, error) {
	root := object{}
	if len(bytes.TrimSpace(text)) > 0 {
		if err := root.parse(text); err != nil {
			return nil, fmt.Errorf("%s: %w: %w", c.File, ErrForeign, err)
		}
	}
	servers := object{}
	if have := root.get(c.key); have != nil {
		if err := servers.parse(have); err != nil {
			return nil, fmt.Errorf("%s: %s: %w: %w", c.File, c.key, ErrForeign, err)
		}
	}
	entry, err := c.entry(p, servers.get(serverName))
	if err != nil {
		return nil, err
	}
	servers.set(serverName, entry)
	inner, err := servers.text()
	if err != nil {
		return nil, err
	}
	root.set(c.key, inner)
	whole, err := root.text()
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, whole, "", "  "); err != nil {
		return nil, fmt.Errorf("write %s: %w", c.File, err)
	}
	out.WriteByte('\n')
	return out.Bytes(), nil
}

// Snippet is what is to be written by hand where Configure cannot.
func (c *Client) Snippet(p Program) (string, error) {
	text, err := c.Configure(nil, p)
	return string(text), err
}

// entry is this server's. Of one that is there what the user has said stays: that it is disabled, which tools need no asking,
// variables of his own. How another daemon was reached does not.
func (c *Client) entry(p Program, have json.RawMessage) (json.RawMessage, error) {
	out := object{}
	if out.parse(have) != nil {
		out = object{}
	}
	env := object{}
	if env.parse(out.get("env")) != nil {
		env = object{}
	}
	env = slices.DeleteFunc(env, func(m member) bool { return strings.HasPrefix(m.name, "FORKD_") })
	for _, name := range slices.Sorted(maps.Keys(p.Env)) {
		value, err := plainJSON(p.Env[name])
		if err != nil {
			return nil, err
		}
		env.set(name, value)
	}
	for _, m := range []struct {
		name  string
		value any
	}{{"type", c.kind}, {"command", p.Command}, {"args", p.Args}} {
		if m.value == "" {
			continue
		}
		value, err := plainJSON(m.value)
		if err != nil {
			return nil, err
		}
		out.set(m.name, value)
	}
	out = slices.DeleteFunc(out, func(m member) bool { return m.name == "env" && len(env) == 0 || m.name == "url" })
	if len(env) == 0 {
		return out.text()
	}
	inner, err := env.text()
	if err != nil {
		return nil, err
	}
	out.set("env", inner)
	return out.text()
}

func plainJSON(v any) (json.RawMessage, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("encode the server's entry: %w", err)
	}
	return bytes.TrimSpace(b.Bytes()), nil
}

// object is a JSON object that keeps its order.
type object []member

type member struct {
	name  string
	value json.RawMessage
}

func (o *object) parse(text []byte) error {
	d := json.NewDecoder(bytes.NewReader(text))
	if open, err := d.Token(); err != nil {
		return err
	} else if open != json.Delim('{') {
		return errors.New("it is no object")
	}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return err
		}
		key, ok := name.(string)
		if !ok {
			return errors.New("a member without a name")
		}
		m := member{name: key}
		if err := d.Decode(&m.value); err != nil {
			return err
		}
		*o = append(*o, m)
	}
	if _, err := d.Token(); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is more behind its end")
	}
	return nil
}

func (o *object) get(name string) json.RawMessage {
	if i := o.find(name); i >= 0 {
		return (*o)[i].value
	}
	return nil
}

func (o *object) set(name string, value json.RawMessage) {
	if i := o.find(name); i >= 0 {
		(*o)[i].value = value
		return
	}
	*o = append(*o, member{name, value})
}

func (o *object) find(name string) int {
	return slices.IndexFunc(*o, func(m member) bool { return m.name == name })
}

func (o *object) text() (json.RawMessage, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range *o {
		if i > 0 {
			b.WriteByte(',')
		}
		name, err := plainJSON(m.name)
		if err != nil {
			return nil, err
		}
		b.Write(name)
		b.WriteByte(':')
		b.Write(m.value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}
