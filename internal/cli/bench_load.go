package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
)

// Programs that run in the guest of a benchmark as a user's, in its Python. Each line they get on standard input they
// answer with one JSON list of what happened since the last.
const (
	// tickerProgram wakes a thousand times a second and remembers its longest gap, in ms. The guest's monotonic clock
	// stands still while the machine does, and its wall clock is put right before user processes run again: the longer
	// of both is what somebody outside would have seen.
	tickerProgram = `
import json, sys, threading, time
longest, ticks = 0, 0
def answer():
    global longest, ticks
    for _ in sys.stdin:
        now, longest = longest, 0
        count, ticks = ticks, 0
        print(json.dumps([now / 1e6, count]), flush=True)
threading.Thread(target=answer, daemon=True).start()
mono, wall = time.monotonic_ns(), time.time_ns()
print("[]", flush=True)
while True:
    time.sleep(0.001)
    m, w = time.monotonic_ns(), time.time_ns()
    gap = max(m - mono, w - wall)
    if gap > longest:
        longest = gap
    mono, wall = m, w
    ticks += 1
`
	// writerProgram holds so many MiB of random pages, and rewrites them round and round at so many MiB/s with content
	// that was never there before. It reports the MiB it wrote. What it could not write in time, it does not catch up on.
	writerProgram = `
import json, sys, threading, time
import numpy
used, rate = int(sys.argv[1]), float(sys.argv[2])
MIB = 1 << 17
rng = numpy.random.default_rng()
def block():
    return rng.integers(0, 1 << 63, MIB, dtype=numpy.uint64)
held = numpy.empty(used * MIB, dtype=numpy.uint64)
for i in range(used):
    held[i * MIB:(i + 1) * MIB] = block()
written = 0
def answer():
    global written
    for _ in sys.stdin:
        now, written = written, 0
        print(json.dumps([now]), flush=True)
threading.Thread(target=answer, daemon=True).start()
print("[]", flush=True)
if rate == 0:
    threading.Event().wait()
source, at, turn, start, done = block(), 0, 1, time.monotonic(), 0
while True:
    behind = (time.monotonic() - start) * rate - done
    if behind < 1:
        time.sleep((1 - behind) / rate)
        continue
    if behind > rate / 5 + 1:
        done += behind - 1
    numpy.add(source, turn, out=held[at * MIB:(at + 1) * MIB])
    at, turn, done, written = (at + 1) % used, turn + 1, done + 1, written + 1
`
)

// guestProgram is a running program of the guest that answers lines.
type guestProgram struct {
	name  string
	in    *io.PipeWriter
	lines *bufio.Reader
	stop  context.CancelFunc
	ended chan struct{}

	mu  sync.Mutex
	err error // why it ended
}

// startProgram starts one and waits for its first line, which says that it is ready.
func startProgram(ctx context.Context, g *client.Guest, name, code string, args ...string) (*guestProgram, error) {
	stdinR, stdinW := io.Pipe()
	stdoutR, stdoutW := io.Pipe()
	running, stop := context.WithCancel(ctx)
	p := &guestProgram{name: name, in: stdinW, lines: bufio.NewReader(stdoutR), stop: stop, ended: make(chan struct{})}
	yes := true
	req := wire.StartRequest{
		Process: wire.ProcessConfig{Cmd: "python3", Args: append([]string{"-c", code}, args...)}, Stdin: &yes,
	}
	go func() {
		defer close(p.ended)
		var stderr strings.Builder
		end, err := g.Run(running, req, stdinR, call.Output{Stdout: stdoutW, Stderr: &stderr}, nil)
		if err == nil {
			err = fmt.Errorf("it ended with code %d: %s", end.Code(), lastLines(stderr.String(), 3))
		}
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		_ = stdoutW.CloseWithError(err)
		_ = stdinR.CloseWithError(err)
	}()
	if _, err := p.read(); err != nil {
		p.end()
		return nil, err
	}
	return p, nil
}

// ask sends a line and reads the answer.
func (p *guestProgram) ask() ([]float64, error) {
	if _, err := io.WriteString(p.in, "\n"); err != nil {
		return nil, fmt.Errorf("ask the %s in the guest: %w", p.name, err)
	}
	return p.read()
}

func (p *guestProgram) read() ([]float64, error) {
	line, err := p.lines.ReadBytes('\n')
	if err != nil {
		return nil, fmt.Errorf("run the %s in the guest: %w", p.name, err)
	}
	var v []float64
	if err := json.Unmarshal(line, &v); err != nil {
		return nil, fmt.Errorf("run the %s in the guest: %w", p.name, err)
	}
	return v, nil
}

// end lets go of the program; it ends with its sandbox.
func (p *guestProgram) end() {
	p.stop()
	_ = p.in.Close()
	<-p.ended
}

// pinger asks a sandbox for a sign of life without a pause, as a client that waits for nothing would, and knows when
// each answer came.
type pinger struct {
	stop  context.CancelFunc
	ended chan struct{}

	mu    sync.Mutex
	times []time.Time
	err   error
	more  chan struct{} // closed at the next answer
}

func startPinger(ctx context.Context, c *client.Client, id string) *pinger {
	ctx, stop := context.WithCancel(ctx)
	p := &pinger{stop: stop, ended: make(chan struct{}), more: make(chan struct{})}
	go func() {
		defer close(p.ended)
		for p.answered(ctx, c.Ping(ctx, id)) {
		}
	}()
	return p
}

func (p *pinger) answered(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
	if err == nil {
		p.times = append(p.times, time.Now())
	}
	close(p.more)
	p.more = make(chan struct{})
	return err == nil
}

func (p *pinger) end() {
	p.stop()
	<-p.ended
}

// gap waits for an answer that came after to, and returns the longest time without one since from, in ms. It forgets
// older answers.
func (p *pinger) gap(ctx context.Context, from, to time.Time) (float64, error) {
	for {
		p.mu.Lock()
		gap, ok := longestGap(p.times, from, to)
		err, more := p.err, p.more
		if ok {
			p.times = p.times[len(p.times)-1:]
		}
		p.mu.Unlock()
		switch {
		case ok:
			return gap, nil
		case err != nil:
			return 0, fmt.Errorf("the source stopped answering: %w", err)
		}
		select {
		case <-more:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// longestGap is the longest time between two answers that follow each other, of which any part lies between from and to,
// in ms. It is not known before an answer has come after to.
func longestGap(times []time.Time, from, to time.Time) (float64, bool) {
	if len(times) == 0 || times[len(times)-1].Before(to) {
		return 0, false
	}
	longest := time.Duration(0)
	for i := 1; i < len(times); i++ {
		if times[i].After(from) && times[i-1].Before(to) {
			longest = max(longest, times[i].Sub(times[i-1]))
		}
	}
	return float64(longest.Microseconds()) / 1000, true
}

// load is what runs in the source of a series.
type load struct {
	ticker, holder *guestProgram
	pings          *pinger
}

// startLoad fills used MiB of the sandbox's memory, rewrites them at rate MiB/s (0: not at all), ticks and pings.
func startLoad(ctx context.Context, c *client.Client, id string, used int, rate float64) (*load, error) {
	g := c.Guest(id)
	if rate > 0 {
		used = max(used, 64) // something to write to
	}
	l := &load{}
	var err error
	if used > 0 {
		l.holder, err = startProgram(ctx, g, "writer", writerProgram, fmt.Sprint(used), fmt.Sprint(rate))
	}
	if err == nil {
		l.ticker, err = startProgram(ctx, g, "ticker", tickerProgram)
	}
	if err != nil {
		l.end()
		return nil, err
	}
	l.pings = startPinger(ctx, c, id)
	return l, nil
}

func (l *load) end() {
	if l.pings != nil {
		l.pings.end()
	}
	for _, p := range []*guestProgram{l.ticker, l.holder} {
		if p != nil {
			p.end()
		}
	}
}

// window is what the load felt between two moments.
type window struct {
	from time.Time

	clientGap, tickerGap float64 // ms
	written              float64 // MiB
	ticks                float64
}

// open begins a window.
func (l *load) open() (*window, error) {
	w := &window{}
	if err := l.read(w); err != nil {
		return nil, err
	}
	w.from = time.Now()
	return w, nil
}

// shut ends a window at to, once the client and the ticker have got beyond it.
func (l *load) shut(ctx context.Context, w *window, to time.Time) error {
	var err error
	if w.clientGap, err = l.pings.gap(ctx, w.from, to); err != nil {
		return err
	}
	return l.read(w)
}

func (l *load) read(w *window) error {
	v, err := l.ticker.ask()
	if err != nil {
		return err
	}
	if len(v) != 2 {
		return errors.New("the ticker in the guest does not answer in its words")
	}
	w.tickerGap, w.ticks = v[0], v[1]
	if l.holder == nil {
		return nil
	}
	if v, err = l.holder.ask(); err != nil {
		return err
	}
	if len(v) != 1 {
		return errors.New("the writer in the guest does not answer in its words")
	}
	w.written = v[0]
	return nil
}
