package debian

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
)

// AptConf is the host's apt configuration as far as downloading needs it: keys in lower case, joined by "::".
type AptConf map[string]string

const maxAptConfFile = 1 << 20

// ReadAptConf reads etc/apt/apt.conf.d/* and etc/apt/apt.conf below root in apt's order. A host without apt has an
// empty configuration; a file that cannot be understood is an error, since a proxy setting may be what was lost.
func ReadAptConf(root fs.FS) (AptConf, error) {
	conf := AptConf{}
	names, err := listDir(root, "etc/apt/apt.conf.d")
	if err != nil {
		return nil, err
	}
	names = slices.DeleteFunc(names, func(name string) bool {
		ext := path.Ext(name)
		return ext != "" && ext != ".conf"
	})
	for _, name := range append(names, "etc/apt/apt.conf") {
		text, err := readSmall(root, name, maxAptConfFile)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read apt configuration: %w", err)
		}
		if err := conf.parse(string(text)); err != nil {
			return nil, fmt.Errorf("read apt configuration /%s: %w", name, err)
		}
	}
	return conf, nil
}

// listDir is the files of a directory, sorted; none when it does not exist.
func listDir(root fs.FS, dir string) ([]string, error) {
	entries, err := fs.ReadDir(root, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read apt configuration: %w", err)
	}
	var names []string
	for _, e := range entries {
		if !e.IsDir() && !strings.HasPrefix(e.Name(), ".") {
			names = append(names, path.Join(dir, e.Name()))
		}
	}
	return names, nil
}

// Bool is a setting, or fallback when it is not set.
func (c AptConf) Bool(key string, fallback bool) bool {
	switch strings.ToLower(c[strings.ToLower(key)]) {
	case "1", "true", "yes", "on", "with", "enable":
		return true
	case "0", "false", "no", "off", "without", "disable":
		return false
	default:
		return fallback
	}
}

// Get is a setting or "".
func (c AptConf) Get(key string) string { return c[strings.ToLower(key)] }

// ProxyFunc chooses the proxy of a request as apt does: a setting for the host before one for the scheme, "DIRECT" for
// none, and fallback (http.ProxyFromEnvironment) when apt has no opinion.
func (c AptConf) ProxyFunc(fallback func(*http.Request) (*url.URL, error)) func(*http.Request) (*url.URL, error) {
	return func(req *http.Request) (*url.URL, error) {
		key, value := c.proxySetting(req.URL)
		switch {
		case value == "":
			return fallback(req)
		case strings.EqualFold(value, "DIRECT") || strings.EqualFold(value, "false"):
			return nil, nil
		case !strings.Contains(value, "://"):
			value = "http://" + value
		}
		u, err := url.Parse(value)
		if err != nil {
			return nil, fmt.Errorf("apt setting %s: not a URL", key)
		}
		if u.Scheme == "socks5h" {
			u.Scheme = "socks5"
		}
		return u, nil
	}
}

func (c AptConf) proxySetting(u *url.URL) (key, value string) {
	keys := []string{"acquire::" + u.Scheme + "::proxy::" + u.Hostname(), "acquire::" + u.Scheme + "::proxy"}
	if u.Scheme == "https" { // apt's https method takes the http proxy when it has none of its own.
		keys = append(keys, "acquire::http::proxy::"+u.Hostname(), "acquire::http::proxy")
	}
	for _, key := range keys {
		if value := strings.TrimSpace(c[strings.ToLower(key)]); value != "" {
			return key, value
		}
	}
	return "", ""
}

// parse reads apt.conf(5) text: nested scopes, lists, comments; "#include" and "#clear" are honoured as far as they
// matter here (clear removes, include is refused: it may name anything).
func (c AptConf) parse(text string) error {
	tokens, err := aptTokens(text)
	if err != nil {
		return err
	}
	var scope []string
	for i := 0; i < len(tokens); {
		t := tokens[i]
		switch {
		case t.text == "}" && !t.quoted:
			if len(scope) == 0 {
				return fmt.Errorf("line %d: unexpected }", t.line)
			}
			scope = scope[:len(scope)-1]
			i++
		case t.text == ";" && !t.quoted:
			i++
		case t.text == "#clear" && !t.quoted:
			for i++; i < len(tokens) && tokens[i].text != ";"; i++ {
				c.clear(joinKey(scope, tokens[i].text))
			}
		case t.quoted: // a list item inside a scope.
			i++
		case i+1 < len(tokens) && tokens[i+1].text == "{" && !tokens[i+1].quoted:
			if len(scope) > 100 {
				return fmt.Errorf("line %d: nested too deeply", t.line)
			}
			scope = append(scope, strings.ToLower(t.text))
			i += 2
		case i+2 < len(tokens) && tokens[i+2].text == "{" && !tokens[i+2].quoted && tokens[i+1].text != ";":
			scope = append(scope, strings.ToLower(t.text)) // key "value" { … }: the value of the scope itself.
			i += 3
		case i+1 < len(tokens) && (tokens[i+1].quoted || tokens[i+1].text != ";" && tokens[i+1].text != "}"):
			if key := joinKey(scope, t.text); !strings.HasSuffix(key, "::") {
				c[key] = tokens[i+1].text
			}
			i += 2
		default:
			i++
		}
	}
	if len(scope) > 0 {
		return errors.New("unexpected end: a { is not closed")
	}
	return nil
}

func (c AptConf) clear(key string) {
	key = strings.TrimSuffix(key, "::")
	for k := range c {
		if k == key || strings.HasPrefix(k, key+"::") {
			delete(c, k)
		}
	}
}

func joinKey(scope []string, key string) string {
	return strings.ToLower(strings.Join(append(slices.Clone(scope), key), "::"))
}

type aptToken struct {
	text   string
	quoted bool
	line   int
}

func aptTokens(text string) ([]aptToken, error) {
	var tokens []aptToken
	line := 1
	for i := 0; i < len(text); {
		rest := text[i:]
		switch c := text[i]; {
		case c == '\n':
			line++
			i++
		case c == ' ' || c == '\t' || c == '\r':
			i++
		case strings.HasPrefix(rest, "//") || c == '#' && !strings.HasPrefix(rest, "#clear") && !strings.HasPrefix(rest, "#include"):
			i += lineEnd(rest)
		case strings.HasPrefix(rest, "#include"):
			return nil, fmt.Errorf("line %d: #include is not supported; name the proxy in a file of apt.conf.d", line)
		case strings.HasPrefix(rest, "/*"):
			end := strings.Index(rest, "*/")
			if end < 0 {
				return nil, fmt.Errorf("line %d: comment is not closed", line)
			}
			line += strings.Count(rest[:end], "\n")
			i += end + 2
		case c == '"':
			end := strings.IndexByte(rest[1:], '"')
			if end < 0 {
				return nil, fmt.Errorf("line %d: quote is not closed", line)
			}
			tokens = append(tokens, aptToken{rest[1 : 1+end], true, line})
			line += strings.Count(rest[1:1+end], "\n")
			i += end + 2
		case c == '{' || c == '}' || c == ';':
			tokens = append(tokens, aptToken{string(c), false, line})
			i++
		default:
			end := strings.IndexAny(rest, " \t\r\n{};\"")
			if end < 0 {
				end = len(rest)
			}
			tokens = append(tokens, aptToken{rest[:end], false, line})
			i += end
		}
	}
	return tokens, nil
}

func lineEnd(s string) int {
	if end := strings.IndexByte(s, '\n'); end >= 0 {
		return end
	}
	return len(s)
}
