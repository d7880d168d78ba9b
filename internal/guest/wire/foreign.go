package wire

import (
	"strings"
	"sync"
	"unicode/utf8"
)

// What a peer that lies may cost. A message's bytes are bounded by MaxMessage; here is what bounds what becomes of them.
const (
	// plainMessage is decoded as it is: whatever it is made of cannot become much.
	plainMessage = 4 << 10
	// Two bytes of JSON can become a few hundred of memory. So a larger message has one object or list in so many bytes,
	// no more than so many of them, and of values; ours stay below that by far.
	perContainer  = 16
	maxContainers = 128 << 10
	maxValues     = 1 << 20
	maxDepth      = 512
	// maxErrorText is of an error's message.
	maxErrorText = 8 << 10
	maxJSONError = 256
)

// plausible refuses a message that would become out of proportion when decoded. In a result of a program's everything may
// be of any form: it is not taken apart.
func plausible(b []byte, v any) error {
	if len(b) <= plainMessage {
		return nil
	}
	most := min(plainMessage/perContainer+len(b)/perContainer, maxContainers)
	switch v.(type) {
	case *EvalResult, *EvalEvent:
		most = maxContainers
	}
	if containers, values, depth := parts(b, most); containers > most || values > maxValues || depth > maxDepth {
		return Errorf(CodeExhausted, "a message of %d bytes has too many parts: more than %d values, or %d lists and objects, or %d inside one another",
			len(b), maxValues, most, maxDepth)
	}
	return nil
}

// parts counts what JSON is made of, and how deep, until it is too much.
func parts(b []byte, most int) (containers, values, deepest int) {
	depth := 0
	for i := 0; i < len(b) && containers <= most && values <= maxValues && deepest <= maxDepth; i++ {
		switch b[i] {
		case '"':
			for i++; i < len(b) && b[i] != '"'; i++ {
				if b[i] == '\\' {
					i++
				}
			}
		case '{', '[':
			containers++
			depth++
			deepest = max(deepest, depth)
		case '}', ']':
			depth--
		case ',':
			values++
		}
	}
	return containers, values, deepest
}

// Budget bounds what the large messages of several streams take together.
type Budget struct {
	mu   sync.Mutex
	left int
}

// NewBudget is one of n bytes.
func NewBudget(n int) *Budget { return &Budget{left: n} }

func (b *Budget) take(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n > b.left {
		return false
	}
	b.left -= n
	return true
}

func (b *Budget) give(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left += n
}

// Limit bounds what is received: each message to most bytes, and those larger than a frame to what the budget has left,
// together with those of other streams. Call it before the first Recv.
func (s *Stream) Limit(most int, budget *Budget) { s.most, s.budget = most, budget }

// afford makes sure that a message may grow to n bytes.
func (s *Stream) afford(n int) error {
	most := MaxMessage
	if s.most > 0 {
		most = s.most
	}
	if n > most {
		return Errorf(CodeExhausted, "message of more than %d bytes", most)
	}
	if s.budget == nil || n <= MaxPayload {
		return nil
	}
	return s.charge(2 * n) // its buffer doubles
}

// perPart is what an object or list becomes when it is decoded, with what a list wastes while it grows.
const perPart = 512

// affordDecoded makes sure that a message may be decoded, whatever into.
func (s *Stream) affordDecoded(b []byte) error {
	if s.budget == nil || len(b) <= plainMessage {
		return nil
	}
	containers, _, _ := parts(b, maxContainers)
	return s.charge(2*len(b) + perPart*containers)
}

// charge sees to it that the stream has so much of the budget.
func (s *Stream) charge(total int) error {
	s.heldMu.Lock()
	defer s.heldMu.Unlock()
	if more := total - s.held; more > 0 {
		if s.released || !s.budget.take(more) {
			return Errorf(CodeExhausted, "the messages of all calls that are open take too much together; try again")
		}
		s.held += more
	}
	return nil
}

// release gives back what messages took; last for good.
func (s *Stream) release(last bool) {
	if s.budget == nil {
		return
	}
	s.heldMu.Lock()
	defer s.heldMu.Unlock()
	s.released = s.released || last
	if s.held > 0 {
		s.budget.give(s.held)
		s.held = 0
	}
}

// Printable is text from a guest without what could steer a terminal, or make it show something else than is there:
// escape sequences, control characters but line feeds and tabs, marks that turn the direction of writing, characters that
// cannot be seen, bytes that are no UTF-8.
func Printable(s string) string {
	if printable(s) {
		return s
	}
	var b strings.Builder
	b.Grow(len(s))
	for len(s) > 0 {
		if n := escape(s); n > 0 {
			s = s[n:]
			continue
		}
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == '\r':
			// The end of a line, or what would write over it.
			if !strings.HasPrefix(s[n:], "\n") && len(s) > n {
				b.WriteByte('\n')
			}
		case r == utf8.RuneError && n == 1:
			b.WriteRune(utf8.RuneError)
		case !Steers(r):
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return b.String()
}

func printable(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < 0x20 && c != '\n' && c != '\t') || c >= 0x7f {
			return false
		}
	}
	return true
}

// Steers reports whether a character does something instead of showing.
func Steers(r rune) bool {
	switch {
	case r == '\n' || r == '\t':
		return false
	case r < 0x20 || r >= 0x7f && r <= 0x9f:
		return true
	case r >= 0x200b && r <= 0x200f, r >= 0x2028 && r <= 0x202e, r >= 0x2060 && r <= 0x206f, r == 0xfeff, r == 0x061c, r == 0x180e:
		return true
	}
	return r >= 0xe0000 && r <= 0xe0fff || r >= 0xfff9 && r <= 0xfffb
}

// escape is the length of an escape sequence at the beginning of s, or 0. One that does not end on its line is only its
// introducer.
func escape(s string) int {
	const maxSequence = 4 << 10
	intro := 0
	switch {
	case strings.HasPrefix(s, "\x1b") && len(s) > 1:
		intro = 2
	case strings.HasPrefix(s, "\u009b"), strings.HasPrefix(s, "\u009d"), strings.HasPrefix(s, "\u0090"):
		intro = 2
	case strings.HasPrefix(s, "\x1b"):
		return 1
	default:
		return 0
	}
	kind := s[1]
	if s[0] != 0x1b {
		kind -= 0x40
	}
	rest := s[intro:min(len(s), maxSequence)]
	switch kind {
	case '[':
		for i := range len(rest) {
			if c := rest[i]; c >= 0x40 && c <= 0x7e {
				return intro + i + 1
			} else if c < 0x20 || c > 0x3f {
				return intro + i
			}
		}
		return len(s[:intro+len(rest)])
	case ']', 'P', 'X', '^', '_':
		for i := range len(rest) {
			switch {
			case rest[i] == '\a':
				return intro + i + 1
			case strings.HasPrefix(rest[i:], "\x1b\\"), strings.HasPrefix(rest[i:], "\u009c"):
				return intro + i + 2
			case rest[i] == '\n':
				return intro
			}
		}
		return intro
	}
	if kind >= 0x20 && kind <= 0x2f && len(s) > 2 { // one more byte: character sets
		return 3
	}
	if kind < 0x20 || kind > 0x7e {
		return 1
	}
	return intro
}

// Cut is the printable form of a text from a guest, of at most n bytes.
func Cut(s string, n int) string {
	cut := len(s) > n
	if cut {
		s = s[:n]
	}
	s = Printable(s)
	if cut || len(s) > n {
		s = strings.ToValidUTF8(s[:min(len(s), n)], "") + "…"
	}
	return s
}

// connectCode reports whether an error may have a code: Connect's.
func connectCode(code string) bool {
	switch code {
	case CodeInvalid, CodeNotFound, CodeExists, CodeDenied, CodeUnimplemented, CodeExhausted, CodePrecondition, CodeDeadline,
		CodeUnavailable, CodeInternal, "canceled", "unknown", "aborted", "out_of_range", "data_loss", "unauthenticated":
		return true
	}
	return false
}
