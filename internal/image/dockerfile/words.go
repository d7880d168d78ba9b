package dockerfile

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
)

// rawWords splits at white space outside of quotes and escapes, which it keeps.
func rawWords(s string, escape byte) []string {
	var words []string
	var b strings.Builder
	quote := byte(0)
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case c == escape && quote != '\'' && i+1 < len(s):
			b.WriteByte(c)
			i++
			b.WriteByte(s[i])
			continue
		case quote != 0:
			if c == quote {
				quote = 0
			}
		case c == '"' || c == '\'':
			quote = c
		case c == ' ' || c == '\t' || c == '\n':
			if b.Len() > 0 {
				words = append(words, b.String())
				b.Reset()
			}
			continue
		}
		b.WriteByte(c)
	}
	if b.Len() > 0 {
		words = append(words, b.String())
	}
	return words
}

// pairs reads NAME=VALUE words, or the older form of a name and the rest of the line; quotes and variables stay as
// they are.
func pairs(s string, escape byte) ([][2]string, error) {
	words := rawWords(s, escape)
	if len(words) == 0 {
		return nil, errors.New("it needs a name and a value")
	}
	if !strings.Contains(words[0], "=") {
		_, value, _ := strings.Cut(s, words[0])
		if value = strings.TrimSpace(value); value == "" {
			return nil, fmt.Errorf("%s has no value", shorten(words[0]))
		}
		return [][2]string{{words[0], value}}, nil
	}
	var out [][2]string
	for _, w := range words {
		name, value, ok := strings.Cut(w, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("%s: write NAME=VALUE; a value with spaces needs quotes", shorten(w))
		}
		out = append(out, [2]string{name, value})
	}
	return out, nil
}

// lexer substitutes variables and removes quotes.
type lexer struct {
	s      string
	i      int
	escape byte
	get    func(name string) (string, bool)
	keep   bool // quotes and escapes stay: for documents
	depth  int
}

const (
	maxNesting = 20
	// maxExpanded bounds a word: each line of ENV A=$A$A would double it.
	maxExpanded = 128 << 10
)

var errTooLong = fmt.Errorf("longer than %d bytes when its variables are substituted", maxExpanded)

// expandDocument substitutes the variables of a document: an escape keeps its meaning only before $.
func expandDocument(s string, escape byte, get func(string) (string, bool)) (string, error) {
	l := &lexer{s: s, escape: escape, get: get, keep: true}
	return l.until("")
}

// expand substitutes the variables of a word and removes its quotes and escapes.
func expand(s string, escape byte, get func(string) (string, bool)) (string, error) {
	l := &lexer{s: s, escape: escape, get: get}
	return l.until("")
}

// until reads up to one of the characters in stop, which it leaves.
func (l *lexer) until(stop string) (string, error) {
	if l.depth++; l.depth > maxNesting {
		return "", errors.New("variables are nested too deeply")
	}
	defer func() { l.depth-- }()
	var b strings.Builder
	for l.i < len(l.s) {
		if b.Len() > l.most() {
			return "", errTooLong
		}
		c := l.s[l.i]
		switch {
		case stop != "" && strings.IndexByte(stop, c) >= 0:
			return b.String(), nil
		case c == '\'' && !l.keep:
			if err := l.single(&b); err != nil {
				return "", err
			}
		case c == '"' && !l.keep:
			if err := l.double(&b); err != nil {
				return "", err
			}
		case c == '$':
			v, err := l.variable()
			if err != nil {
				return "", err
			}
			b.WriteString(v)
		case c == l.escape && l.keep:
			l.i++
			if l.i < len(l.s) && l.s[l.i] == '$' {
				b.WriteByte('$')
				l.i++
				continue
			}
			b.WriteByte(c)
		case c == l.escape:
			l.i++
			if l.i < len(l.s) {
				b.WriteByte(l.s[l.i])
				l.i++
			} else {
				b.WriteByte(c)
			}
		default:
			b.WriteByte(c)
			l.i++
		}
	}
	switch {
	case b.Len() > l.most():
		return "", errTooLong
	case stop != "":
		return "", errors.New("a ${ has no }")
	}
	return b.String(), nil
}

// most is how long a result may be; what is long without variables stays what it is.
func (l *lexer) most() int { return max(maxExpanded, len(l.s)) }

func (l *lexer) single(b *strings.Builder) error {
	end := strings.IndexByte(l.s[l.i+1:], '\'')
	if end < 0 {
		return errors.New("a ' is not closed")
	}
	b.WriteString(l.s[l.i+1 : l.i+1+end])
	l.i += end + 2
	return nil
}

func (l *lexer) double(b *strings.Builder) error {
	for l.i++; l.i < len(l.s); {
		if b.Len() > l.most() {
			return errTooLong
		}
		c := l.s[l.i]
		switch c {
		case '"':
			l.i++
			return nil
		case '$':
			v, err := l.variable()
			if err != nil {
				return err
			}
			b.WriteString(v)
		case l.escape:
			if l.i+1 < len(l.s) && strings.IndexByte("\"$"+string(l.escape), l.s[l.i+1]) >= 0 {
				l.i++
			}
			b.WriteByte(l.s[l.i])
			l.i++
		default:
			b.WriteByte(c)
			l.i++
		}
	}
	return errors.New(`a " is not closed`)
}

// variable reads $NAME or ${NAME…}.
func (l *lexer) variable() (string, error) {
	l.i++
	if l.i < len(l.s) && l.s[l.i] == '{' {
		l.i++
		return l.braced()
	}
	name := l.name()
	if name == "" {
		return "$", nil
	}
	v, _ := l.get(name)
	return v, nil
}

func (l *lexer) name() string {
	start := l.i
	for l.i < len(l.s) {
		c := rune(l.s[l.i])
		if c != '_' && (c > unicode.MaxASCII || !unicode.IsLetter(c)) && (l.i == start || !unicode.IsDigit(c)) {
			break
		}
		l.i++
	}
	return l.s[start:l.i]
}

func (l *lexer) braced() (string, error) {
	name := l.name()
	if name == "" {
		return "", errors.New("a ${ is not followed by a name")
	}
	value, set := l.get(name)
	if l.i >= len(l.s) {
		return "", errors.New("a ${ has no }")
	}
	op := l.s[l.i]
	empty := op == ':'
	if empty {
		l.i++
		if l.i >= len(l.s) {
			return "", errors.New("a ${ has no }")
		}
		op = l.s[l.i]
	}
	if op == '}' && !empty {
		l.i++
		return value, nil
	}
	if strings.IndexByte("-+?", op) < 0 {
		return "", fmt.Errorf("${%s…}: only :- - :+ + :? and ? may follow the name", shorten(name))
	}
	l.i++
	word, err := l.until("}")
	if err != nil {
		return "", err
	}
	l.i++
	has := set && (!empty || value != "")
	switch {
	case op == '+' && has:
		return word, nil
	case op == '+':
		return "", nil
	case has:
		return value, nil
	case op == '-':
		return word, nil
	}
	if word == "" {
		word = "it is not set"
	}
	return "", fmt.Errorf("%s: %s", name, shorten(word))
}
