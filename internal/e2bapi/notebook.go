package e2bapi

import (
	"strconv"
	"strings"
)

// notebook makes Python of what E2B's code interpreter takes as a notebook does: code that is indented as a whole, lines that
// begin with ! and go to the shell, %pip and %matplotlib. Whatever is Python already stays as it is.
func notebook(code string) string {
	lines := strings.SplitAfter(code, "\n")
	indent := firstIndent(lines)
	var b strings.Builder
	var in python
	for _, line := range lines {
		line = strings.TrimPrefix(line, indent)
		if in.between() {
			line = command(line)
		}
		in.read(line)
		b.WriteString(line)
	}
	return b.String()
}

// firstIndent is how the first line with anything on it begins.
func firstIndent(lines []string) string {
	for _, line := range lines {
		if text := strings.TrimLeft(line, " \t"); strings.TrimSpace(text) != "" {
			return line[:len(line)-len(text)]
		}
	}
	return ""
}

// command is a line of Python for one that is none, where a statement may begin.
func command(line string) string {
	text := strings.TrimLeft(line, " \t")
	indent := line[:len(line)-len(text)]
	text, end := strings.TrimRight(text, "\r\n"), text[len(strings.TrimRight(text, "\r\n")):]
	switch {
	case strings.HasPrefix(text, "!"):
		return indent + shellLine(strings.TrimLeft(text, "!")) + end
	case text == "%pip" || strings.HasPrefix(text, "%pip "):
		return indent + shellLine("python3 -m "+text[1:]) + end
	case text == "%matplotlib" || strings.HasPrefix(text, "%matplotlib "):
		return indent + "pass" + end // charts are shown whatever it says
	}
	return line
}

// shellLine runs a command with the output of the code; it has no value to be shown.
func shellLine(command string) string {
	return "(__import__('subprocess').run(" + strconv.QuoteToASCII(strings.TrimSpace(command)) + ", shell=True), None)[1]"
}

// python reads Python as far as to know where a statement may begin.
type python struct {
	quote  string // that ends the string it is in
	depth  int    // of brackets
	goesOn bool   // the line before ended in a backslash
}

func (p *python) between() bool { return p.quote == "" && p.depth == 0 && !p.goesOn }

// read takes a line with its end.
func (p *python) read(line string) {
	p.goesOn = false
	for i := 0; i < len(line); {
		rest := line[i:]
		if p.quote != "" {
			switch {
			case rest[0] == '\\':
				i += min(2, len(rest))
			case strings.HasPrefix(rest, p.quote):
				i += len(p.quote)
				p.quote = ""
			case rest[0] == '\n' && len(p.quote) == 1: // it is not closed, which is an error
				p.quote = ""
				i++
			default:
				i++
			}
			continue
		}
		switch c := rest[0]; c {
		case '#':
			return
		case '"', '\'':
			p.quote = rest[:1]
			if triple := strings.Repeat(p.quote, 3); strings.HasPrefix(rest, triple) {
				p.quote = triple
			}
			i += len(p.quote)
			continue
		case '(', '[', '{':
			p.depth++
		case ')', ']', '}':
			p.depth = max(0, p.depth-1)
		case '\\':
			p.goesOn = strings.TrimRight(rest[1:], "\r\n") == ""
		}
		i++
	}
}
