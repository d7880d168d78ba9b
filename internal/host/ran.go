package host

import (
	"strings"

	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/store"
)

// Bounds of what is kept of the commands of one sandbox.
const (
	maxRan      = 64
	maxRanBytes = 16 << 10
)

// cutMark ends what is not all of a command.
const cutMark = "…"

// NoteCommand keeps in mind that a command is about to be run in a sandbox, so that its branches know what made them: the
// first ones as they are shown, cut if that is not all, and of the others how many there were. An id that is nobody's is ignored.
func (h *Host) NoteCommand(id string, shown []string, cut bool) {
	s, err := h.find(id)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ran = addCommand(s.ran, shown, cut)
}

// addCommand returns another record: a branch may have the one that there was.
func addCommand(r store.Ran, shown []string, cut bool) store.Ran {
	size := 0
	for _, c := range r.Commands {
		size += bytesOf(c)
	}
	if len(shown) == 0 || len(r.Commands) == maxRan || r.More > 0 || size+bytesOf(shown) > maxRanBytes {
		r.More++
		return r
	}
	all := make([][]string, 0, len(r.Commands)+1)
	argv := make([]string, 0, len(shown)+1)
	for _, arg := range shown {
		argv = append(argv, strings.ToValidUTF8(arg, "\ufffd")) // as it will be read
	}
	if cut {
		argv = append(argv, cutMark)
	}
	r.Commands = append(append(all, r.Commands...), argv)
	return r
}

func bytesOf(argv []string) (n int) {
	for _, arg := range argv {
		n += len(arg) + 1
	}
	return n
}

// commandsRun is what has been run in s until now.
func (s *sandbox) commandsRun() *store.Ran {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.ran
	return &r
}

// redactRan is a branch's record whose commands have no tokens in them.
func redactRan(b *store.Branch, tokens *pack.Tokens) *store.Branch {
	if b == nil || b.Ran == nil {
		return b
	}
	out, ran := *b, *b.Ran
	ran.Commands = nil
	for _, argv := range b.Ran.Commands {
		ran.Commands = append(ran.Commands, redactArgv(argv, tokens))
	}
	out.Ran = &ran
	return &out
}

// redactArgv looks at the whole as well: what makes a token of a word may be in the one before it.
func redactArgv(argv []string, tokens *pack.Tokens) []string {
	whole := string(tokens.Redact([]byte(strings.Join(argv, " "))))
	out := make([]string, len(argv))
	at := 0
	for i, arg := range argv {
		out[i] = whole[at : at+len(arg)] // Redact keeps lengths
		at += len(arg) + 1
	}
	return out
}
