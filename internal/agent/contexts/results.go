package contexts

import (
	"bytes"
	"encoding/json"
	"fmt"

	"forkd.dev/forkd/internal/guest/wire"
)

// maxResult bounds a result on the wire: below what a message may have, with room for what JSON needs in between.
const maxResult = 12 << 20

// maxLists and maxValues bound what is structured in it: the host refuses messages of too many parts.
const (
	maxLists  = 100 << 10
	maxValues = 512 << 10
)

// bounded is the event of a result, without the representations that would make it too large.
func bounded(r *wire.Result) *wire.EvalEvent {
	for _, f := range []*json.RawMessage{&r.JSON, &r.Data, &r.Chart} {
		if bytes.Count(*f, []byte("["))+bytes.Count(*f, []byte("{")) > maxLists || bytes.Count(*f, []byte(",")) > maxValues {
			r.Omitted = append(r.Omitted, wire.Omitted{Format: "json", Bytes: int64(len(*f)), Limit: maxResult})
			*f = nil
		}
	}
	total := r.Size()
	for total > maxResult {
		format, size, drop := r.Largest()
		if size == 0 {
			break
		}
		drop()
		total -= size
		r.Omitted = append(r.Omitted, wire.Omitted{Format: format, Bytes: int64(size), Limit: maxResult})
		note := fmt.Sprintf("[%s of %.1f MiB left out: a result holds %d MiB]", format, float64(size)/(1<<20), maxResult>>20)
		if r.Text != "" {
			note = r.Text + "\n" + note
		}
		if format == "text" {
			note = note[len(note)-min(len(note), 200):]
		}
		r.Text = note
	}
	return &wire.EvalEvent{Result: r}
}

// unsure says that nobody here knows why a process was killed.
func (c *Context) unsure() bool { return c.oracle == nil }
