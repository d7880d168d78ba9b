package image

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// decoder walks a YAML document by hand. A library's own decoding stops at the first fault, says which Go type it
// wanted, and lets aliases multiply: a recipe has none of that.
type decoder struct {
	faults []Fault
}

// node is a YAML node.
type node yaml.Node

func (n *node) isMapping() bool { return n.Kind == yaml.MappingNode }
func (n *node) isList() bool    { return n.Kind == yaml.SequenceNode }
func (n *node) isScalar() bool  { return n.Kind == yaml.ScalarNode && n.Tag != "!!null" }

// has reports whether a mapping has the key.
func (n *node) has(key string) bool { return n.key(key) != nil }

// key is the value of a mapping's key, or nil.
func (n *node) key(key string) *node {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return (*node)(n.Content[i+1])
		}
	}
	return nil
}

const maxFaults = 100

func (d *decoder) fault(n *node, format string, args ...any) {
	f := Fault{Message: fmt.Sprintf(format, args...)}
	if n != nil {
		f.Line, f.Column = n.Line, n.Column
	}
	if len(d.faults) < maxFaults {
		d.faults = append(d.faults, f)
	}
}

var yamlLine = regexp.MustCompile(`^(?:yaml: )?line (\d+): (.*)`)

// document parses the text into its one document's root.
func (d *decoder) document(text []byte) *node {
	if len(text) > maxRecipeBytes {
		d.fault(nil, "recipe is larger than %d bytes", maxRecipeBytes)
		return nil
	}
	if bytes.IndexByte(text, 0) >= 0 {
		d.fault(nil, "recipe contains a NUL byte: it is not a text file")
		return nil
	}
	y := yaml.NewDecoder(bytes.NewReader(text))
	var doc yaml.Node
	if err := y.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			d.fault(nil, "recipe is empty; it needs at least \"base\"")
			return nil
		}
		d.syntax(err)
		return nil
	}
	var more yaml.Node
	if err := y.Decode(&more); !errors.Is(err, io.EOF) {
		if err != nil {
			d.syntax(err)
			return nil
		}
		d.fault((*node)(&more), "recipe has more than one document")
		return nil
	}
	if doc.Kind != yaml.DocumentNode || len(doc.Content) != 1 {
		d.fault(nil, "recipe is empty; it needs at least \"base\"")
		return nil
	}
	return (*node)(doc.Content[0])
}

func (d *decoder) syntax(err error) {
	message := strings.TrimPrefix(err.Error(), "yaml: ")
	f := Fault{Message: message}
	if m := yamlLine.FindStringSubmatch(message); m != nil {
		f.Line, _ = strconv.Atoi(m[1])
		f.Message = m[2]
		// The library counts from 0 in its parser's errors and from 1 in its scanner's.
		if strings.HasPrefix(f.Message, "did not find expected") {
			f.Line++
		}
	}
	d.faults = append(d.faults, f)
}

// plain refuses what a recipe has no use for: aliases and custom tags.
func (d *decoder) plain(n *node) bool {
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		d.fault(n, "anchors and aliases are not supported")
		return false
	}
	if n.Tag != "" && !strings.HasPrefix(n.Tag, "!!") {
		d.fault(n, "tag %q is not supported", short(n.Tag))
		return false
	}
	return true
}

// entries calls fn for each entry of a mapping with string keys; duplicates are faults.
func (d *decoder) entries(n *node, fn func(key string, k, v *node)) {
	if !d.plain(n) {
		return
	}
	if !n.isMapping() {
		d.fault(n, "must be a mapping (key: value), not %s", kindName(n))
		return
	}
	if len(n.Content) > 2*maxListLength {
		d.fault(n, "more than %d entries", maxListLength)
		return
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := (*node)(n.Content[i]), (*node)(n.Content[i+1])
		if !d.plain(k) {
			continue
		}
		if !k.isScalar() || k.Tag == "!!merge" {
			d.fault(k, "key must be a string, not %s", kindName(k))
			continue
		}
		if line, dup := seen[k.Value]; dup {
			d.fault(k, "key %q is given twice, first in line %d", short(k.Value), line)
			continue
		}
		seen[k.Value] = k.Line
		fn(k.Value, k, v)
	}
}

// mapping reads a mapping whose keys are known.
func (d *decoder) mapping(n *node, fields map[string]func(*node)) {
	d.entries(n, func(key string, k, v *node) {
		read, ok := fields[key]
		if !ok {
			d.fault(k, "key %q is not known%s", short(key), suggestion(key, fields))
			return
		}
		read(v)
	})
}

// suggestion names the known keys, or the one that was probably meant.
func suggestion(key string, fields map[string]func(*node)) string {
	var known []string
	for name := range fields {
		known = append(known, name)
	}
	slices.Sort(known)
	for _, name := range known {
		if similar(key, name) {
			return fmt.Sprintf("; did you mean %q?", name)
		}
	}
	return "; known here: " + strings.Join(known, ", ")
}

// similar: same letters but for case and separators, or one is most of the other.
func similar(a, b string) bool {
	fold := func(s string) string { return strings.NewReplacer("_", "", "-", "").Replace(strings.ToLower(s)) }
	a, b = fold(a), fold(b)
	if a == b || a == b+"s" || a+"s" == b {
		return true
	}
	if len(a) < 3 || len(b) < 3 || len(a)-len(b) > 1 || len(b)-len(a) > 1 {
		return false
	}
	i, j := 0, 0
	for i < len(a) && i < len(b) && a[i] == b[i] {
		i++
	}
	for j < len(a)-i && j < len(b)-i && a[len(a)-1-j] == b[len(b)-1-j] {
		j++
	}
	return max(len(a), len(b))-i-j <= 2
}

// list calls fn for each item of a sequence.
func (d *decoder) list(n *node, fn func(*node)) {
	if !d.plain(n) {
		return
	}
	if !n.isList() {
		d.fault(n, "must be a list (- item), not %s", kindName(n))
		return
	}
	if len(n.Content) > maxListLength {
		d.fault(n, "more than %d items", maxListLength)
		return
	}
	for _, item := range n.Content {
		fn((*node)(item))
	}
}

// scalar is the text of a scalar of any type: 1, "1" and true are all text where text is wanted.
func (d *decoder) scalar(n *node) (string, bool) {
	if !d.plain(n) {
		return "", false
	}
	if !n.isScalar() {
		d.fault(n, "must be a single value, not %s", kindName(n))
		return "", false
	}
	return n.Value, true
}

// text is a string that is neither empty nor longer than limit, without control characters other than white space.
func (d *decoder) text(n *node, limit int) (string, bool) {
	s, ok := d.scalar(n)
	if !ok {
		return "", false
	}
	if n.Tag != "!!str" {
		d.fault(n, "must be a string; put %s in quotes", short(s))
		return "", false
	}
	if s == "" {
		d.fault(n, "must not be empty")
		return "", false
	}
	if len(s) > limit {
		d.fault(n, "%q is longer than %d bytes", short(s), limit)
		return "", false
	}
	if i := strings.IndexFunc(s, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' && r != '\r' || r == 0x7f }); i >= 0 {
		d.fault(n, "%q has a control character", short(s))
		return "", false
	}
	return s, true
}

func (d *decoder) integer(n *node, what string, least, most int64) int64 {
	s, ok := d.scalar(n)
	if !ok {
		return 0
	}
	v, err := strconv.ParseInt(s, 10, 64)
	if err != nil || v < least || v > most {
		d.fault(n, "%s %q: must be a whole number from %d to %d", what, short(s), least, most)
		return 0
	}
	return v
}

func kindName(n *node) string {
	switch {
	case n.isMapping():
		return "a mapping"
	case n.isList():
		return "a list"
	case n.isScalar():
		return fmt.Sprintf("%q", short(n.Value))
	default:
		return "nothing"
	}
}

// short clips foreign text for a message.
func short(s string) string {
	if len(s) > maxReportedText {
		return s[:maxReportedText] + "…"
	}
	return s
}
