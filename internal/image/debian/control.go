package debian

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Bounds on a control file. The longest line of Debian's own indexes is some 20 KiB (Provides of a Rust crate), the
// longest paragraph 150 KiB (the digests of a Release file, of which there are some 3000).
const (
	maxControlLine      = 1 << 20
	maxParagraphBytes   = 16 << 20
	maxParagraphFields  = 1000
	controlReaderBuffer = 64 << 10
)

// Field is one "Name: value" of a control paragraph. Continuation lines are kept in Value, each preceded by a newline
// and without its leading space.
type Field struct{ Name, Value string }

// Paragraph is one stanza of a control file, in file order.
type Paragraph []Field

// Get is the value of the named field, ignoring case, or "".
func (p Paragraph) Get(name string) string {
	for i := range p {
		if strings.EqualFold(p[i].Name, name) {
			return p[i].Value
		}
	}
	return ""
}

// List is the named field split at white space.
func (p Paragraph) List(name string) []string { return strings.Fields(p.Get(name)) }

// ReadControl calls fn for each paragraph of a Debian control file (deb822). Lines that start with '#' are comments.
// An error of fn ends the reading and is returned as it is.
func ReadControl(r io.Reader, fn func(Paragraph) error) error {
	return readControl(r, nil, fn)
}

// readControl is ReadControl that keeps only the fields for which keep (nil: all) is true, which makes a pass over an
// index of 60 000 packages several times cheaper.
func readControl(r io.Reader, keep func(name []byte) bool, fn func(Paragraph) error) error {
	br := bufio.NewReaderSize(r, controlReaderBuffer)
	var para Paragraph
	var value []byte // of the open field
	open := false    // a field is open for continuation lines
	kept := false    // and it is one that is kept
	seenAny := false // the paragraph has fields, perhaps none that is kept
	size, number := 0, 0
	closeField := func() {
		if open && kept {
			para[len(para)-1].Value = string(value)
		}
		open = false
	}
	flush := func() error {
		closeField()
		if !seenAny {
			return nil
		}
		done := para
		para, size, seenAny = nil, 0, false
		return fn(done)
	}
	for {
		line, err := readLine(br)
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("line %d: %w", number+1, err)
		}
		atEnd := err != nil
		if atEnd && len(line) == 0 {
			return flush()
		}
		number++
		size += len(line)
		if size > maxParagraphBytes {
			return fmt.Errorf("line %d: paragraph is larger than %d bytes", number, maxParagraphBytes)
		}
		switch {
		case len(bytes.TrimSpace(line)) == 0:
			if err := flush(); err != nil {
				return err
			}
		case line[0] == '#':
		case line[0] == ' ' || line[0] == '\t':
			if !open {
				return fmt.Errorf("line %d: continuation without a field", number)
			}
			if kept {
				value = append(append(value, '\n'), bytes.TrimRight(line[1:], " \t\r")...)
			}
		default:
			closeField()
			name, rest, ok := bytes.Cut(line, []byte(":"))
			if !ok || len(name) == 0 || bytes.ContainsAny(name, " \t\x00") {
				return fmt.Errorf("line %d: %q is not a field", number, clip(string(line)))
			}
			open, seenAny = true, true
			kept = keep == nil || keep(name)
			if kept {
				if len(para) >= maxParagraphFields {
					return fmt.Errorf("line %d: more than %d fields", number, maxParagraphFields)
				}
				para = append(para, Field{Name: string(name)})
				value = append(value[:0], bytes.TrimSpace(rest)...)
			}
		}
		if atEnd {
			return flush()
		}
	}
}

// readLine returns the next line without its newline, valid until the next call; io.EOF comes with the last one.
func readLine(br *bufio.Reader) ([]byte, error) {
	line, err := br.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		long := bytes.Clone(line)
		for errors.Is(err, bufio.ErrBufferFull) {
			line, err = br.ReadSlice('\n')
			if len(long)+len(line) > maxControlLine {
				return nil, fmt.Errorf("longer than %d bytes", maxControlLine)
			}
			long = append(long, line...)
		}
		line = long
	}
	return bytes.TrimSuffix(line, []byte("\n")), err
}

// clip shortens foreign text for a message.
func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "…"
	}
	return s
}
