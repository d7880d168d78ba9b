package debian

import (
	"fmt"
	"strings"
)

// CompareVersions orders two Debian versions (epoch:upstream-revision) as dpkg does: negative when a is older.
func CompareVersions(a, b string) int {
	ea, ua, ra := splitVersion(a)
	eb, ub, rb := splitVersion(b)
	if c := compareDigits(ea, eb); c != 0 {
		return c
	}
	if c := comparePart(ua, ub); c != 0 {
		return c
	}
	return comparePart(ra, rb)
}

func splitVersion(v string) (epoch, upstream, revision string) {
	v = strings.TrimSpace(v)
	if e, rest, ok := strings.Cut(v, ":"); ok {
		epoch, v = e, rest
	}
	if i := strings.LastIndexByte(v, '-'); i >= 0 {
		return epoch, v[:i], v[i+1:]
	}
	return epoch, v, ""
}

// comparePart is deb-version(7)'s order: alternating runs of non-digits, in which '~' sorts before the end and
// letters before everything else, and of digits, which compare as numbers of any size.
func comparePart(a, b string) int {
	for a != "" || b != "" {
		i, j := 0, 0
		for i < len(a) && !isDigit(a[i]) || j < len(b) && !isDigit(b[j]) {
			ca, cb := 0, 0
			if i < len(a) && !isDigit(a[i]) {
				ca = order(a[i])
			}
			if j < len(b) && !isDigit(b[j]) {
				cb = order(b[j])
			}
			if ca != cb {
				return ca - cb
			}
			i, j = min(i+1, len(a)), min(j+1, len(b))
		}
		a, b = a[i:], b[j:]
		i, j = 0, 0
		for i < len(a) && isDigit(a[i]) {
			i++
		}
		for j < len(b) && isDigit(b[j]) {
			j++
		}
		if c := compareDigits(a[:i], b[:j]); c != 0 {
			return c
		}
		a, b = a[i:], b[j:]
	}
	return 0
}

func compareDigits(a, b string) int {
	a, b = strings.TrimLeft(a, "0"), strings.TrimLeft(b, "0")
	if len(a) != len(b) {
		return len(a) - len(b)
	}
	return strings.Compare(a, b)
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

func order(c byte) int {
	switch {
	case c == '~':
		return -1
	case c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z':
		return int(c)
	default:
		return int(c) + 256
	}
}

// Dependency is one alternative of a dependency: a package name and a condition on its version.
type Dependency struct {
	Name    string
	Arch    string // qualifier after a colon: "any", "native", an architecture, or ""
	Op      string // "<<", "<=", "=", ">=", ">>" or "" for any version
	Version string
}

// String is the dependency as a control file writes it.
func (d Dependency) String() string {
	if d.Op == "" {
		return d.Name
	}
	return fmt.Sprintf("%s (%s %s)", d.Name, d.Op, d.Version)
}

// Satisfies reports whether version v meets the condition.
func (d Dependency) Satisfies(v string) bool {
	c := CompareVersions(v, d.Version)
	switch d.Op {
	case "<<":
		return c < 0
	case "<=":
		return c <= 0
	case "=":
		return c == 0
	case ">=":
		return c >= 0
	case ">>":
		return c > 0
	default:
		return true
	}
}

// ParseDependencies reads a relationship field: the result's groups are all needed, one alternative of each.
func ParseDependencies(field string) ([][]Dependency, error) {
	var groups [][]Dependency
	for group := range strings.SplitSeq(field, ",") {
		if strings.TrimSpace(group) == "" {
			continue
		}
		var alternatives []Dependency
		for text := range strings.SplitSeq(group, "|") {
			d, err := parseDependency(text)
			if err != nil {
				return nil, err
			}
			alternatives = append(alternatives, d)
		}
		groups = append(groups, alternatives)
	}
	return groups, nil
}

func parseDependency(text string) (Dependency, error) {
	var d Dependency
	rest := strings.TrimSpace(text)
	// Architecture and build-profile restrictions belong to source packages; binary ones carry them never.
	if i := strings.IndexAny(rest, "[<"); i >= 0 && !strings.Contains(rest[:i], "(") {
		return d, fmt.Errorf("dependency %q has a restriction list", clip(text))
	}
	name, condition, has := strings.Cut(rest, "(")
	name = strings.TrimSpace(name)
	d.Name, d.Arch, _ = strings.Cut(name, ":")
	if !validName(d.Name) {
		return d, fmt.Errorf("dependency %q names no package", clip(text))
	}
	if !has {
		return d, nil
	}
	condition, tail, ok := strings.Cut(condition, ")")
	if !ok || strings.TrimSpace(tail) != "" {
		return d, fmt.Errorf("dependency %q: no closing parenthesis", clip(text))
	}
	condition = strings.TrimSpace(condition)
	n := len(condition) - len(strings.TrimLeft(condition, "<=>"))
	d.Op, d.Version = condition[:n], strings.TrimSpace(condition[n:])
	switch d.Op {
	case "<": // archaic, means the same as "<=".
		d.Op = "<="
	case ">":
		d.Op = ">="
	case "<<", "<=", "=", ">=", ">>":
	default:
		return d, fmt.Errorf("dependency %q: unknown relation %q", clip(text), clip(d.Op))
	}
	if d.Version == "" {
		return d, fmt.Errorf("dependency %q: no version", clip(text))
	}
	return d, nil
}

// validName reports whether s is a package name of Debian policy §5.6.7.
func validName(s string) bool {
	if len(s) < 1 || len(s) > 200 {
		return false
	}
	for i := range len(s) {
		c := s[i]
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
		case i > 0 && (c == '+' || c == '-' || c == '.'):
		case c >= 'A' && c <= 'Z', i > 0 && c == '_': // not policy, but seen in third-party archives.
		default:
			return false
		}
	}
	return true
}

// ValidName reports whether s can be the name of a Debian package.
func ValidName(s string) bool { return validName(s) }
