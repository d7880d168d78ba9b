package dockerfile

import (
	"path"
	"regexp"
	"strings"
)

// Ignore is a .dockerignore.
type Ignore struct {
	rules      []ignoreRule
	exceptions bool
}

type ignoreRule struct {
	match *regexp.Regexp
	keep  bool // an exception: begins with !
}

// ParseIgnore reads a .dockerignore: a pattern a line, the last that matches decides. A pattern that cannot be read matches
// nothing.
func ParseIgnore(text []byte) *Ignore {
	ig := &Ignore{}
	for line := range strings.Lines(strings.TrimPrefix(string(text), "\ufeff")) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		keep := line[0] == '!'
		if keep {
			line = strings.TrimSpace(line[1:])
		}
		p := strings.TrimPrefix(path.Clean("/"+line), "/")
		if p == "" {
			continue
		}
		re, err := regexp.Compile(`(?s)^` + patternText(p) + `$`)
		if err != nil {
			continue
		}
		ig.rules = append(ig.rules, ignoreRule{re, keep})
		ig.exceptions = ig.exceptions || keep
	}
	return ig
}

// patternText is a pattern as a regular expression: * and ? stay within a name, ** goes across them.
func patternText(p string) string {
	var b strings.Builder
	for i := 0; i < len(p); {
		c := p[i]
		switch {
		case strings.HasPrefix(p[i:], "**/"):
			b.WriteString(`(?:.*/)?`)
			i += 3
			continue
		case strings.HasPrefix(p[i:], "**"):
			b.WriteString(`.*`)
			i += 2
			continue
		case c == '*':
			b.WriteString(`[^/]*`)
		case c == '?':
			b.WriteString(`[^/]`)
		case c == '[':
			end := strings.IndexByte(p[i:], ']')
			if end < 2 {
				b.WriteString(`\[`)
				break
			}
			class := p[i+1 : i+end]
			negate := ""
			if class[0] == '^' || class[0] == '!' {
				negate, class = "^", class[1:]
			}
			if class == "" {
				b.WriteString(`\[`)
				break
			}
			b.WriteString("[" + negate + strings.NewReplacer(`\`, `\\`, `[`, `\[`).Replace(class) + "]")
			i += end + 1
			continue
		case c == '\\' && i+1 < len(p):
			i++
			b.WriteString(regexp.QuoteMeta(p[i : i+1]))
		default:
			// Bytes of a character of several are kept together.
			j := i + 1
			for j < len(p) && p[j]&0xC0 == 0x80 {
				j++
			}
			b.WriteString(regexp.QuoteMeta(p[i:j]))
			i = j
			continue
		}
		i++
	}
	return b.String()
}

// Match says whether a name is left out: by a rule for itself or for a directory above it.
func (ig *Ignore) Match(name string) bool {
	out := false
	for _, r := range ig.rules {
		if r.keep != out { // nothing would change
			continue
		}
		for p := name; p != "." && p != "/"; p = path.Dir(p) {
			if r.match.MatchString(p) {
				out = !r.keep
				break
			}
		}
	}
	return out
}

// Exceptions says whether something below a directory that is left out may be kept.
func (ig *Ignore) Exceptions() bool { return ig.exceptions }
