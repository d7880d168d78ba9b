// Package dockerfile reads Dockerfiles and says what they ask for: it parses the text, substitutes variables, and turns each
// stage into a list of operations and the configuration of what comes out. It matches paths against a build's context and
// makes the tar streams that copies are. It runs nothing, reads no file by name and knows neither machines nor snapshots:
// package host carries out the operations in a VM. Configurations, kinds of bases and faults are package image's. Only
// package host and the edges, which pack and receive a context, import it. The syntax is that of Docker's documentation;
// what cannot be had is refused with its line.
package dockerfile

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"forkd.dev/forkd/internal/image"
)

const (
	maxBytes     = 1 << 20
	maxLines     = 20_000
	maxOps       = 2000
	maxShownText = 120
)

// File is a parsed Dockerfile.
type File struct {
	Name   string
	Args   []Instruction // ARG lines before the first FROM
	Stages []Stage

	escape byte
}

// Stage is what begins with a FROM line.
type Stage struct {
	Name         string // AS name, in lower case; "" if it has none
	From         Instruction
	Instructions []Instruction
}

// Instruction is one instruction, its lines joined.
type Instruction struct {
	Line     int    // of its first line
	Name     string // in upper case
	Text     string // as it is shown: one line, shortened
	Rest     string // what follows name and flags
	JSON     []string
	Flags    []Flag
	Heredocs []Heredoc
}

// Flag is --Name=Value.
type Flag struct{ Name, Value string }

// Heredoc is a document that follows its instruction's line.
type Heredoc struct {
	Name    string
	Content string
	Expand  bool // variables in it are substituted where the instruction does that
}

// flag returns the last value of a flag.
func (in *Instruction) flag(name string) string {
	for _, f := range slices.Backward(in.Flags) {
		if f.Name == name {
			return f.Value
		}
	}
	return ""
}

// known are the instructions that can be carried out; the others are in refused.
var known = []string{
	"FROM", "RUN", "COPY", "ADD", "ENV", "WORKDIR", "USER", "ARG", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "SHELL",
}

// refused are those of Docker's that cannot, with what to do instead.
func refused(name string) string {
	switch name {
	case "HEALTHCHECK":
		return "a sandbox has no health check of its own; remove the line, and give a recipe's warmup a ready check instead"
	case "ONBUILD":
		return "triggers for later builds are not kept; remove the line, and write its instruction where it is needed"
	case "VOLUME":
		return "there are no volumes: a sandbox has one disk, which forks with it; remove the line"
	case "STOPSIGNAL":
		return "a sandbox is ended as a machine, not by a signal; remove the line"
	case "MAINTAINER":
		return `it is deprecated; write LABEL org.opencontainers.image.authors="…"`
	}
	return ""
}

// parser goes through the lines.
type parser struct {
	file   *File
	lines  []string
	at     int
	count  int
	faults []image.Fault
}

func (p *parser) fault(line int, format string, args ...any) {
	const most = 50
	if len(p.faults) < most {
		p.faults = append(p.faults, image.Fault{Line: line, Message: fmt.Sprintf(format, args...)})
	}
}

// Parse reads a Dockerfile. name is the file's, for messages. The error is an *image.FileError with every fault of the syntax.
func Parse(name string, text []byte) (*File, error) {
	p := &parser{file: &File{Name: name, escape: '\\'}}
	switch {
	case len(text) > maxBytes:
		p.fault(0, "longer than %d bytes", maxBytes)
	case !utf8.Valid(text) || strings.ContainsRune(string(text), 0):
		p.fault(0, "not a text file in UTF-8")
	default:
		s := strings.TrimPrefix(string(text), "\ufeff")
		p.lines = strings.Split(strings.ReplaceAll(s, "\r\n", "\n"), "\n")
		if len(p.lines) > maxLines {
			p.fault(0, "more than %d lines", maxLines)
			break
		}
		p.directives()
		p.all()
	}
	if len(p.faults) > 0 {
		return nil, &image.FileError{Name: name, Faults: p.faults}
	}
	return p.file, nil
}

var directive = regexp.MustCompile(`^#\s*([a-zA-Z][a-zA-Z0-9]*)\s*=\s*(.*?)\s*$`)

// directives are comments of a form of their own before everything else.
func (p *parser) directives() {
	for i, line := range p.lines {
		m := directive.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			return
		}
		switch strings.ToLower(m[1]) {
		case "escape":
			if m[2] != `\` && m[2] != "`" {
				p.fault(i+1, "escape %q: it is \\ or `", m[2])
				continue
			}
			p.file.escape = m[2][0]
		case "syntax", "check":
		default:
			return
		}
	}
}

// all reads the instructions.
func (p *parser) all() {
	for {
		in, ok := p.next()
		if !ok {
			break
		}
		p.enter(in)
	}
	if len(p.file.Stages) == 0 && len(p.faults) == 0 {
		p.fault(0, "it has no FROM line; for example: FROM debian:bookworm")
	}
}

func (p *parser) enter(in Instruction) {
	f := p.file
	switch why := refused(in.Name); {
	case why != "":
		p.fault(in.Line, "%s: %s", in.Name, why)
		return
	case !slices.Contains(known, in.Name):
		p.fault(in.Line, "unknown instruction %q", shorten(in.Name))
		return
	case in.Rest == "" && len(in.JSON) == 0:
		p.fault(in.Line, "%s needs arguments", in.Name)
		return
	}
	if p.count++; p.count > maxOps {
		if p.count == maxOps+1 {
			p.fault(in.Line, "more than %d instructions", maxOps)
		}
		return
	}
	p.checkFlags(&in)
	switch {
	case in.Name == "FROM":
		stage := Stage{From: in}
		words := strings.Fields(in.Rest)
		switch {
		case len(words) == 3 && strings.EqualFold(words[1], "AS"):
			stage.Name = strings.ToLower(words[2])
			if !stageName.MatchString(stage.Name) {
				p.fault(in.Line, "stage %q: a name is of letters, digits, - _ and ., and begins with a letter", shorten(words[2]))
			}
		case len(words) != 1:
			p.fault(in.Line, "write FROM IMAGE or FROM IMAGE AS NAME")
		}
		for _, s := range f.Stages {
			if stage.Name != "" && s.Name == stage.Name {
				p.fault(in.Line, "stage %s is there already, in line %d", stage.Name, s.From.Line)
			}
		}
		f.Stages = append(f.Stages, stage)
	case len(f.Stages) == 0 && in.Name == "ARG":
		f.Args = append(f.Args, in)
	case len(f.Stages) == 0:
		p.fault(in.Line, "%s before the first FROM; only ARG may stand there", in.Name)
	default:
		last := &f.Stages[len(f.Stages)-1]
		last.Instructions = append(last.Instructions, in)
	}
}

var stageName = regexp.MustCompile(`^[a-z][a-z0-9-_.]*$`)

// flags that an instruction may have; the value is what to say about one that cannot be had, "" for those that can.
func allowedFlags(instruction string) map[string]string {
	switch instruction {
	case "FROM":
		return map[string]string{"platform": ""}
	case "RUN":
		return map[string]string{
			"mount":   "mounts are not supported; copy what the command needs with COPY, and remove the flag (a cache mount only saves time: finished steps are kept as snapshots)",
			"network": "", "security": "the command runs in a machine of its own; remove the flag",
		}
	case "COPY":
		return map[string]string{
			"from": "", "chown": "", "chmod": "", "link": "",
			"parents": "not supported; copy each directory with a line of its own",
			"exclude": "not supported; list what to leave out in .dockerignore",
		}
	case "ADD":
		return map[string]string{
			"chown": "", "chmod": "", "link": "",
			"checksum": "it belongs to ADD of a URL, which is not supported", "keep-git-dir": "ADD of a repository is not supported",
			"exclude": "not supported; list what to leave out in .dockerignore",
		}
	}
	return nil
}

func (p *parser) checkFlags(in *Instruction) {
	allowed := allowedFlags(in.Name)
	for _, f := range in.Flags {
		why, ok := allowed[f.Name]
		switch {
		case !ok:
			p.fault(in.Line, "%s has no flag --%s", in.Name, shorten(f.Name))
		case why != "":
			p.fault(in.Line, "%s --%s: %s", in.Name, f.Name, why)
		}
	}
	if n := in.flag("network"); n != "" && n != "none" && n != "default" {
		p.fault(in.Line, "RUN --network=%s: only none and default are known", shorten(n))
	}
}

// next joins the lines of the next instruction.
func (p *parser) next() (Instruction, bool) {
	for p.at < len(p.lines) && blank(p.lines[p.at]) {
		p.at++
	}
	if p.at >= len(p.lines) {
		return Instruction{}, false
	}
	in := Instruction{Line: p.at + 1}
	var b strings.Builder
	for first := true; p.at < len(p.lines); first = false {
		line := p.lines[p.at]
		p.at++
		if !first && blank(line) { // comments and empty lines inside an instruction are not part of it
			continue
		}
		if first {
			line = strings.TrimLeftFunc(line, unicode.IsSpace)
		}
		head, more := p.continued(line)
		b.WriteString(head)
		if !more {
			break
		}
	}
	p.split(&in, strings.TrimSpace(b.String()))
	if in.Name == "RUN" || in.Name == "COPY" || in.Name == "ADD" {
		p.heredocs(&in)
	}
	in.Text = shownText(&in)
	return in, true
}

// continued says whether a line goes on in the next, and what of it counts.
func (p *parser) continued(line string) (string, bool) {
	trimmed := strings.TrimRightFunc(line, unicode.IsSpace)
	if !strings.HasSuffix(trimmed, string(p.file.escape)) {
		return line, false
	}
	return trimmed[:len(trimmed)-1], true
}

func blank(line string) bool {
	line = strings.TrimSpace(line)
	return line == "" || line[0] == '#'
}

// split takes an instruction apart: name, flags, the rest.
func (p *parser) split(in *Instruction, text string) {
	i := strings.IndexFunc(text, unicode.IsSpace)
	if i < 0 {
		i = len(text)
	}
	in.Name = strings.ToUpper(text[:i])
	rest := strings.TrimSpace(text[i:])
	for strings.HasPrefix(rest, "--") {
		word, after := rest, ""
		if j := strings.IndexFunc(rest, unicode.IsSpace); j >= 0 {
			word, after = rest[:j], strings.TrimSpace(rest[j:])
		}
		if word == "--" {
			rest = after
			break
		}
		name, value, has := strings.Cut(word[2:], "=")
		if !has {
			value = "true"
		}
		in.Flags = append(in.Flags, Flag{name, value})
		rest = after
	}
	in.Rest = rest
	if strings.HasPrefix(rest, "[") && takesJSON(in.Name) {
		var list []string
		if json.Unmarshal([]byte(rest), &list) == nil && len(list) > 0 {
			in.JSON = list
		}
	}
}

func takesJSON(name string) bool {
	return slices.Contains([]string{"RUN", "CMD", "ENTRYPOINT", "SHELL", "COPY", "ADD"}, name)
}

var heredocWord = regexp.MustCompile(`^[0-9]*<<(-?)([^<]+)$`)

// heredocs reads the documents that the words of the instruction announce.
func (p *parser) heredocs(in *Instruction) {
	if in.JSON != nil || !strings.Contains(in.Rest, "<<") {
		return
	}
	for _, word := range rawWords(in.Rest, p.file.escape) {
		m := heredocWord.FindStringSubmatch(word)
		if m == nil {
			continue
		}
		name := strings.NewReplacer(`"`, "", `'`, "").Replace(m[2])
		if name == "" || strings.ContainsAny(name, " \t$\\`;&|()") {
			continue
		}
		h := Heredoc{Name: name, Expand: name == m[2]}
		var content strings.Builder
		closed := false
		for p.at < len(p.lines) {
			line := p.lines[p.at]
			p.at++
			if m[1] == "-" {
				line = strings.TrimLeft(line, "\t")
			}
			if line == name {
				closed = true
				break
			}
			content.WriteString(line + "\n")
		}
		if !closed {
			p.fault(in.Line, "the document %s does not end: a line with only %s is missing", shorten(name), shorten(name))
		}
		h.Content = content.String()
		in.Heredocs = append(in.Heredocs, h)
	}
}

// shownText is an instruction on one line, without control characters.
func shownText(in *Instruction) string {
	words := []string{in.Name}
	for _, f := range in.Flags {
		words = append(words, "--"+f.Name+"="+f.Value)
	}
	text := strings.Join(append(words, strings.Fields(in.Rest)...), " ")
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
	if r := []rune(text); len(r) > maxShownText {
		return string(r[:maxShownText-1]) + "…"
	}
	return text
}

func shorten(s string) string {
	if r := []rune(s); len(r) > 60 {
		return string(r[:59]) + "…"
	}
	return s
}
