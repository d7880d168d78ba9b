package process

import (
	"context"
	"slices"
	"sync"

	"forkd.dev/forkd/internal/guest/wire"
)

const (
	// keptBytes is how much output is kept that nobody was sent.
	keptBytes = 256 << 10
	// shownBytes is how much is kept of what somebody was sent, for those who come later.
	shownBytes = 64 << 10
	// ahead is how far a process may be ahead of the slowest of its attached readers.
	ahead = 64 << 10
	// joinBytes is up to what size small writes share a slice.
	joinBytes = 8 << 10
	// maxSpare is how many slices are kept for new chunks.
	maxSpare  = 3
	spareUnit = 16 << 10
)

// output is the newest part of what a process printed, stdout and stderr in one order, and whoever reads it. Positions
// are bytes since the process's start.
type output struct {
	mu      sync.Mutex
	room    sync.Cond // writers wait for readers, and a reader that leaves for a writer that sends for it
	chunks  []chunk   // from start to end without a gap
	start   int64
	end     int64
	sent    int64 // all before was sent to somebody who was attached
	readers []*reader
	spare   [][]byte         // of chunks that were forgotten, for new ones: much output would keep the collector busy
	last    *wire.ProcessEnd // nothing follows
}

type chunk struct {
	kind wire.Kind
	at   int64
	data []byte // never changed, only appended to
	all  []byte // with what was forgotten of it
}

// reader is a stream that gets the output.
type reader struct {
	stream  *wire.Stream
	observe bool
	noWait  bool
	at      int64         // the next it gets
	wake    chan struct{} // something changed

	// Guarded by the output's mutex.
	idle   bool // it waits, having got everything
	busy   bool // a writer sends for it
	failed bool // sending failed; its caller is gone
}

func newOutput() *output {
	o := &output{}
	o.room.L = &o.mu
	return o
}

// write takes what the process printed. It blocks while an attached reader is too far behind.
func (o *output) write(kind wire.Kind, data []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.last != nil {
		return // of a descendant that outlived the process
	}
	r := o.direct()
	o.add(kind, data)
	if r != nil {
		// The usual case, one reader that waits: it is sent for here, without waking its goroutine.
		r.busy, r.idle = true, false
		r.at = o.end
		o.mu.Unlock()
		err := r.stream.Send(kind, data)
		o.mu.Lock()
		r.busy = false
		if err != nil {
			r.failed = true
		} else {
			o.sent = max(o.sent, r.at)
		}
		if r.at == o.end && o.last == nil && !r.failed {
			r.idle = true
		} else {
			r.notify()
		}
		o.room.Broadcast()
	}
	for _, other := range o.readers {
		if other != r {
			other.idle = false
			other.notify()
		}
	}
	for o.last == nil && o.end-o.slowest() > ahead {
		o.room.Wait()
	}
}

// direct is the one reader there is, if it waits for what comes next.
func (o *output) direct() *reader {
	if len(o.readers) != 1 {
		return nil
	}
	if r := o.readers[0]; r.idle && !r.busy && !r.failed && !r.observe && r.at == o.end {
		return r
	}
	return nil
}

// slowest is the position up to which every attached reader has got everything.
func (o *output) slowest() int64 {
	at := o.end
	for _, r := range o.readers {
		if !r.observe && !r.failed {
			at = min(at, r.at)
		}
	}
	return at
}

func (o *output) attended() int {
	n := 0
	for _, r := range o.readers {
		if !r.observe && !r.failed {
			n++
		}
	}
	return n
}

func (o *output) add(kind wire.Kind, data []byte) {
	if n := len(o.chunks); n > 0 && o.chunks[n-1].kind == kind && len(o.chunks[n-1].data)+len(data) <= joinBytes {
		o.chunks[n-1].data = append(o.chunks[n-1].data, data...)
	} else {
		whole := append(o.empty(len(data)), data...)
		o.chunks = append(o.chunks, chunk{kind, o.end, whole, whole})
	}
	o.end += int64(len(data))
	floor := min(o.end-shownBytes, o.slowest())
	if o.attended() == 0 {
		floor = min(o.end-shownBytes, max(o.sent, o.end-keptBytes))
	}
	o.forget(floor)
}

// empty is an empty slice for so many bytes.
func (o *output) empty(n int) []byte {
	for i, spare := range o.spare {
		if cap(spare) >= n {
			o.spare = slices.Delete(o.spare, i, i+1)
			return spare
		}
	}
	if n > joinBytes {
		n = (n + spareUnit - 1) / spareUnit * spareUnit
	}
	return make([]byte, 0, n)
}

// forget drops what is before a position.
func (o *output) forget(floor int64) {
	for len(o.chunks) > 0 && o.start < floor {
		first := &o.chunks[0]
		if over := floor - first.at; over < int64(len(first.data)) {
			first.data = first.data[over:]
			first.at, o.start = floor, floor
			return
		}
		o.start = first.at + int64(len(first.data))
		if len(o.spare) < maxSpare && cap(first.all) > joinBytes && o.attended() == len(o.readers) {
			o.spare = append(o.spare, first.all[:0]) // only who observes may still be sending it
		}
		*first = chunk{} // the array behind the slice still refers to it
		o.chunks = o.chunks[1:]
	}
	if len(o.chunks) == 0 {
		o.chunks = nil
		o.start = o.end
	}
}

// from is what follows a position that is kept.
func (o *output) from(at int64) (wire.Kind, []byte) {
	lo, hi := 0, len(o.chunks)
	for lo < hi { // the last chunk that begins at or before it
		if mid := (lo + hi) / 2; o.chunks[mid].at <= at {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	c := o.chunks[lo-1]
	return c.kind, c.data[at-c.at:]
}

// attach adds a reader.
func (o *output) attach(s *wire.Stream, req *wire.ConnectRequest) *reader {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := &reader{stream: s, observe: req.Observe, noWait: req.NoWait, at: max(o.sent, o.start), wake: make(chan struct{}, 1)}
	if req.Replay {
		r.at = o.start
	}
	o.readers = append(o.readers, r)
	return r
}

// leave removes a reader; its stream is not in use afterwards.
func (o *output) leave(r *reader) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i, other := range o.readers {
		if other == r {
			o.readers = append(o.readers[:i:i], o.readers[i+1:]...)
			break
		}
	}
	o.room.Broadcast()
	for r.busy { // its send fails, the caller being gone
		o.room.Wait()
	}
}

// notify lets a reader look again.
func (r *reader) notify() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// serve sends a reader everything up to the end, or as far as it wants, or until its caller is gone.
func (o *output) serve(ctx context.Context, r *reader) error {
	for {
		n := o.next(r)
		var err error
		switch {
		case n.wait:
			select {
			case <-r.wake:
				continue
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		case n.event != nil:
			err = r.stream.SendMessage(n.event)
		case n.data != nil:
			err = r.stream.Send(n.kind, n.data)
		default:
			return nil
		}
		o.took(r, len(n.data), err)
		if err != nil || n.event != nil && n.event.End != nil {
			return err
		}
	}
}

// piece is what a reader gets next; nothing at all: it has what it wanted.
type piece struct {
	wait  bool // nothing yet
	event *wire.ProcessEvent
	kind  wire.Kind
	data  []byte
}

func (o *output) next(r *reader) piece {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case r.busy || r.failed:
		return piece{wait: true} // until its caller is gone, if it failed
	case r.at < o.start: // an observer that was too slow
		lost := o.start - r.at
		r.at = o.start
		return piece{event: &wire.ProcessEvent{Lost: lost}}
	case r.at < o.end:
		kind, data := o.from(r.at)
		return piece{kind: kind, data: data}
	case o.last != nil:
		return piece{event: &wire.ProcessEvent{End: o.last}}
	case r.noWait:
		return piece{}
	}
	r.idle = true
	return piece{wait: true}
}

func (o *output) took(r *reader, n int, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err != nil {
		r.failed = true
	} else {
		r.at += int64(n)
		if !r.observe {
			o.sent = max(o.sent, r.at)
		}
	}
	o.room.Broadcast()
}

// finish says how the process ended; unattended if nobody is attached who will be told.
func (o *output) finish(last *wire.ProcessEnd) (unattended bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last = last
	o.spare = nil
	for _, r := range o.readers {
		r.idle = false
		r.notify()
	}
	o.room.Broadcast()
	return o.attended() == 0
}

// kept is how many bytes there are for those who come.
func (o *output) kept() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return int(o.end - o.start)
}

// clear forgets what is kept of an ended process, but not what somebody is being sent.
func (o *output) clear() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.forget(o.slowest())
}
