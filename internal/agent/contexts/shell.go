package contexts

import (
	"encoding/binary"
	"fmt"
	"sort"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/guest/wire"
)

// shell is the dialect of bash, or of sh where there is none: an interactive shell whose standard input is the control
// channel. It gets lines as if somebody typed them, which is what makes an interrupt, a syntax error or a failed
// redirection end the line and not the shell; and it answers on descriptor 3 in the protocol's JSON, of fixed length. The
// code itself has neither the channel nor its input.
type shell struct {
	spoken
	bash bool
}

// printing is a command that prints a frame. Text has no ' and \; its verbs have a fixed width.
func printing(text string, size int, args string) string {
	head := binary.BigEndian.AppendUint32(nil, uint32(size))
	var b strings.Builder
	b.WriteString("command printf '")
	for _, c := range head {
		fmt.Fprintf(&b, `\%03o`, c)
	}
	return b.String() + text + "' " + args + " >&3 2>/dev/null\n"
}

func (s shell) greeting() []byte {
	version := `"${BASH_VERSION:-sh}"`
	b := "unset PS1 PS2 PROMPT_COMMAND HISTFILE ENV TMOUT; set +H +o history +o vi +o emacs 2>/dev/null; "
	if !s.bash {
		b, version = "unset ENV TMOUT; ", `"sh"`
	}
	const text = `{"id":0,"ready":{"version":"%-40.40s","ops":["renew"]}}`
	return []byte(b + printing(text, len(text)-len("%-40.40s")+40, version))
}

// report has the shell tell the exit code of the line before.
func (shell) report(b []byte, sequence int) []byte {
	const text = `{"id":%10d,"status":%3d}`
	return append(b, printing(text, len(text)-len("%10d")-len("%3d")+13, strconv.Itoa(sequence)+` "$?"`)...)
}

func (s shell) evaluate(b []byte, sequence, _ int, req *wire.EvalRequest, _ bool) []byte {
	for _, k := range sortedKeys(req.Env) {
		b = appendQuoted(append(append(b, k...), '='), req.Env[k])
		b = append(b, ' ')
	}
	b = append(b, "command eval "...)
	b = appendQuoted(b, req.Code)
	b = append(b, " 3>&- </dev/null\n"...)
	return s.report(b, sequence)
}

func (s shell) renew(b []byte, sequence int, seed []byte, env map[string]string, _ bool) []byte {
	for _, k := range sortedKeys(env) {
		b = appendQuoted(append(append(append(b, "export "...), k...), '='), env[k])
		b = append(b, '\n')
	}
	if !s.bash {
		const text = `{"id":%10d}`
		return append(b, printing(text, len(text)-len("%10d")+10, strconv.Itoa(sequence))...)
	}
	b = append(b, "RANDOM="...)
	b = strconv.AppendUint(b, uint64(binary.NativeEndian.Uint32(seed)>>1), 10)
	b = append(b, '\n')
	const text = `{"id":%10d,"renewed":["RANDOM"]}`
	return append(b, printing(text, len(text)-len("%10d")+10, strconv.Itoa(sequence))...)
}

func (shell) facts(b []byte, _ int, _ bool) []byte { return b }

func (shell) ack(b []byte) []byte { return b }

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

// appendQuoted makes one word of a text, whatever is in it.
func appendQuoted(b []byte, text string) []byte {
	b = append(b, '\'')
	for i := range len(text) {
		if text[i] == '\'' {
			b = append(b, `'\''`...)
		} else {
			b = append(b, text[i])
		}
	}
	return append(b, '\'')
}

// validName is what a shell can assign to.
func validName(s string) bool {
	for i, c := range []byte(s) {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}
