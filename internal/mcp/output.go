package mcp

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"forkd.dev/forkd/api"
)

const (
	shownHead = 12 << 10 // bytes of an output that an answer begins with
	shownTail = 4 << 10  // and ends with
	maxKept   = 4 << 20  // of one output; what comes after is counted
	maxAll    = 64 << 20 // of a client's outputs together; the oldest go first
	maxRead   = 32 << 10 // of one read_output or read_file
)

// outputs keep what was too long for an answer.
type outputs struct {
	mu   sync.Mutex
	next int
	size int
	list []*output
}

type output struct {
	id    string
	parts map[string]string // by stream
	size  int
}

// keep stores texts under an id.
func (o *outputs) keep(parts map[string]string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.next++
	out := &output{id: fmt.Sprintf("out%d", o.next), parts: parts}
	for _, text := range parts {
		out.size += len(text)
	}
	o.list = append(o.list, out)
	o.size += out.size
	for o.size > maxAll && len(o.list) > 1 {
		o.size -= o.list[0].size
		o.list = slices.Delete(o.list, 0, 1)
	}
	return out.id
}

func (o *outputs) find(id, stream string) (text string, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	i := slices.IndexFunc(o.list, func(out *output) bool { return out.id == id })
	if i < 0 {
		return "", &api.Error{Code: api.CodeNotFound, Message: "output " + id + ": not kept, or no longer", Hint: "run it again"}
	}
	text, ok := o.list[i].parts[stream]
	if !ok {
		var have []string
		for name := range o.list[i].parts {
			have = append(have, name)
		}
		slices.Sort(have)
		return "", &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf("output %s has no stream %q; it has %s", id, stream, strings.Join(have, ", "))}
	}
	return text, nil
}

// shortened is a text that was too long.
type shortened struct {
	Head     string `json:"head"`
	Tail     string `json:"tail,omitempty"`
	Bytes    int    `json:"bytes"`
	OutputID string `json:"output_id"`
	Stream   string `json:"stream"`
	Note     string `json:"note"`
}

func (o *outputs) cut(stream, text string) shortened {
	head, end := ends(text)
	id := o.keep(map[string]string{stream: text})
	return shortened{
		Head: head, Tail: end, Bytes: len(text), OutputID: id, Stream: stream,
		Note: fmt.Sprintf("too long: read_output with output_id %q, stream %q and offset %d reads on", id, stream, len(head)),
	}
}

// ends are the beginning and the end of a text that is too long, both of whole characters.
func ends(text string) (head, end string) {
	return part(text, 0, shownHead), text[start(text, len(text)-shownTail):]
}

// part is at most n bytes from offset on, of whole characters.
func part(text string, offset, n int) string {
	if offset+n >= len(text) {
		return text[offset:]
	}
	cut := offset + n
	for cut > offset && !utf8.RuneStart(text[cut]) {
		cut--
	}
	return text[offset:cut]
}

// start is the first beginning of a character from offset on.
func start(text string, offset int) int {
	offset = min(max(offset, 0), len(text))
	for offset < len(text) && !utf8.RuneStart(text[offset]) {
		offset++
	}
	return offset
}

// captured is what a program prints: the first maxKept bytes.
type captured struct {
	text strings.Builder
	lost int64
}

func (c *captured) add(text string) {
	room := part(text, 0, max(0, maxKept-c.text.Len()))
	c.text.WriteString(room)
	c.lost += int64(len(text) - len(room))
}

type readOutputIn struct {
	OutputID string `json:"output_id" jsonschema:"from an earlier answer"`
	Stream   string `json:"stream,omitempty" jsonschema:"stdout (default), stderr, traceback or answer, as the answer says"`
	Offset   int    `json:"offset,omitempty" jsonschema:"in bytes; negative: so many before the end"`
	Limit    int    `json:"limit,omitempty" jsonschema:"bytes to read, 32768 at most and if not given"`
}

type readOutputOut struct {
	Text       string `json:"text"`
	Offset     int    `json:"offset"`
	NextOffset int    `json:"next_offset,omitempty"` // absent at the end
	Bytes      int    `json:"bytes"`                 // of the whole
}

func (s *server) readOutput(m *mcp.Server) {
	tool(s, m, "read_output", "Read on in output that was too long for an answer, by the output_id that the answer gave.", reads,
		func(_ context.Context, c *call, in readOutputIn) (any, error) {
			stream := in.Stream
			if stream == "" {
				stream = "stdout"
			}
			text, err := c.kept.find(in.OutputID, stream)
			if err != nil {
				return nil, err
			}
			offset := in.Offset
			if offset < 0 {
				offset += len(text)
			}
			offset = start(text, offset)
			out := readOutputOut{Text: part(text, offset, limit(in.Limit)), Offset: offset, Bytes: len(text)}
			if next := offset + len(out.Text); next < len(text) {
				out.NextOffset = next
			}
			return out, nil
		})
}

func limit(asked int) int {
	if asked <= 0 || asked > maxRead {
		return maxRead
	}
	return max(asked, utf8.UTFMax)
}
