package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
)

// terminal is this program's terminal, which a process in a guest uses for a while.
type terminal struct {
	in  *os.File
	out io.Writer

	mu  sync.Mutex
	old *term.State // nil: it is as it was found
}

// calm undoes what full-screen programs leave behind when they are cut off: alternate screen, hidden cursor, mouse
// reports, marked pastes, colours.
const calm = "\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[0m\r\n"

// raw passes every key on as it is.
func (t *terminal) raw() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.old != nil {
		return nil
	}
	old, err := term.MakeRaw(int(t.in.Fd()))
	if err != nil {
		return fmt.Errorf("prepare the terminal: %w", err)
	}
	t.old = old
	return nil
}

// restore puts it back; it can be called again.
func (t *terminal) restore() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.old != nil {
		_ = term.Restore(int(t.in.Fd()), t.old)
		t.old = nil
	}
}

// guard restores the terminal before a panic of this goroutine ends the program. It is to be deferred.
func (t *terminal) guard() {
	if r := recover(); r != nil {
		t.restore()
		panic(r)
	}
}

// size is what it has; a terminal that does not know has none, which the guest takes for 80 by 24.
func (t *terminal) size() wire.PTYSize {
	cols, rows, err := term.GetSize(int(t.in.Fd()))
	if err != nil || cols <= 0 || rows <= 0 {
		return wire.PTYSize{}
	}
	return wire.PTYSize{Cols: uint32(cols), Rows: uint32(rows)}
}

// errDetached says that the user left a process to itself.
var errDetached = errors.New("detached")

// hangUpLimit is how long the guest may take to be told that its terminal is gone.
const hangUpLimit = 2 * time.Second

// hangUpPause is between being told and being told again.
const hangUpPause = 300 * time.Millisecond

// onTerminal lends this program's terminal to a process, which begin starts or attaches to, with the environment that
// programs expect from a terminal, and puts the terminal back on every way out. With redraw the process was there before
// and should draw its screen.
func (a *App) onTerminal(
	ctx context.Context, c *client.Client, id, keys string, redraw bool,
	begin func(ctx context.Context, x call.Session, pty *wire.PTY) (*wire.ProcessEnd, error),
) error {
	sequence, err := parseDetachKeys(keys)
	if err != nil {
		return err
	}
	if !term.IsTerminal(int(a.In.Fd())) {
		return usage("--tty wants a terminal as standard input")
	}
	t := &terminal{in: a.In, out: a.Out}
	pty := &wire.PTY{Size: t.size(), Term: a.Getenv("TERM")}
	running, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	s := &ttySession{terminal: t, guest: c.Guest(id), nudge: redraw}
	if err := t.raw(); err != nil {
		return err
	}
	defer t.restore()
	defer t.guard()
	stop := s.watch(running)
	defer stop()
	// The terminal is gone, or this program has to go: so the process is told, as by any terminal.
	forget := context.AfterFunc(ctx, func() {
		defer t.guard()
		t.restore()
		s.hangUp(context.WithoutCancel(ctx))
		cancel(context.Cause(ctx))
	})
	defer forget()
	in := newDetachReader(a.In, sequence, func() { cancel(errDetached) }, t.guard)
	end, err := begin(running, call.Session{
		Stdin: in, Output: call.Output{Stdout: a.Out, Stderr: a.Out}, Started: s.started, Guard: t.guard,
	}, pty)
	t.restore()
	switch {
	case ctx.Err() != nil: // also when the end of what was hung up was heard of first
		return guestExitError(exitInterrupted)
	case err == nil:
		return a.exit(end)
	}
	if term.IsTerminal(int(a.In.Fd())) && a.Getenv("TERM") != "dumb" {
		_, _ = io.WriteString(a.Out, calm)
	}
	if errors.Is(err, errDetached) {
		if pid := s.pid(); pid != 0 {
			a.progress("detached; to come back: forkd attach %s %d", id, pid)
		}
		return nil
	}
	return a.lost(ctx, c, id, err)
}

// ttySession is a process that has this program's terminal.
type ttySession struct {
	*terminal
	guest *client.Guest
	nudge bool // the process was there before: it should draw its screen

	mu    sync.Mutex
	start *wire.ProcessStart
	begun chan struct{} // made by watch, closed by started
}

func (s *ttySession) started(start wire.ProcessStart) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.start == nil {
		s.start = &start
		close(s.begun)
	}
}

func (s *ttySession) pid() uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.start == nil {
		return 0
	}
	return s.start.PID
}

// watch passes the terminal's changes on until stop is called.
func (s *ttySession) watch(ctx context.Context) (stop func()) {
	s.begun = make(chan struct{})
	ctx, cancel := context.WithCancel(ctx)
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGWINCH, syscall.SIGTSTP)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer s.guard()
		select {
		case <-s.begun:
		case <-ctx.Done():
			return
		}
		if s.nudge {
			s.redraw(ctx)
		}
		for {
			select {
			case sig := <-signals:
				if sig == syscall.SIGTSTP { // from outside: the key is the guest's
					s.suspend()
				}
				s.resize(ctx, s.size())
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() {
		signal.Stop(signals)
		cancel()
		<-done
	}
}

// resize tells the guest. A size that does not arrive spoils nothing but the picture.
func (s *ttySession) resize(ctx context.Context, size wire.PTYSize) {
	if size.Cols == 0 || size.Rows == 0 {
		return // a terminal that is being taken down; what was stays
	}
	_ = call.Unary(ctx, s.guest, wire.MethodProcessUpdate, wire.UpdateRequest{
		Process: wire.ProcessSelector{PID: s.pid()}, PTY: &wire.PTY{Size: size},
	}, nil)
}

// redraw makes programs draw their screen for a terminal that shows nothing of it yet: the kernel tells them of a size
// only when it changes.
func (s *ttySession) redraw(ctx context.Context) {
	size := s.size()
	if size.Rows == 0 {
		size = wire.PTYSize{Cols: 80, Rows: 24}
	}
	other := size
	other.Rows++
	s.resize(ctx, other)
	s.resize(ctx, size)
}

// suspend stops this program with the terminal as it was found, and returns when it goes on.
func (s *ttySession) suspend() {
	s.restore()
	// The call returns before this thread has stopped.
	goesOn := make(chan os.Signal, 1)
	signal.Notify(goesOn, syscall.SIGCONT)
	defer signal.Stop(goesOn)
	if syscall.Kill(syscall.Getpid(), syscall.SIGSTOP) == nil {
		<-goesOn
	}
	_ = s.raw()
}

// hangUp tells the process that its terminal is gone.
func (s *ttySession) hangUp(ctx context.Context) {
	pid := s.pid()
	if pid == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, hangUpLimit)
	defer cancel()
	hup := wire.SendSignalRequest{Process: wire.ProcessSelector{PID: pid}, Signal: int(syscall.SIGHUP), Group: true}
	if call.Signal(ctx, s.guest, hup) != nil {
		return
	}
	// A shell that gets it just before it waits for a key remembers it, and waits: bash looks when something wakes it. On a
	// terminal that is gone reading would; on one that others may come back to, being told again does.
	select {
	case <-ctx.Done():
	case <-time.After(hangUpPause):
		_ = call.Signal(ctx, s.guest, hup)
	}
}

// envDetachKeys has the keys for those who always want others.
const envDetachKeys = "FORKD_DETACH_KEYS"

const defaultDetachKeys = "ctrl-p,ctrl-q"

func addDetachKeys(cmd *cobra.Command, keys *string, getenv func(string) string) {
	value := getenv(envDetachKeys)
	if value == "" {
		value = defaultDetachKeys
	}
	cmd.Flags().StringVar(keys, "detach-keys", value,
		"keys that leave a process with a terminal to itself: characters or ctrl-X, with commas between; none for none")
}

// parseDetachKeys reads "ctrl-p,ctrl-q".
func parseDetachKeys(text string) ([]byte, error) {
	switch text {
	case "none":
		return nil, nil
	case "":
		text = defaultDetachKeys
	}
	var keys []byte
	for name := range strings.SplitSeq(text, ",") {
		control, ok := strings.CutPrefix(strings.ToLower(name), "ctrl-")
		switch {
		case ok && len(control) == 1 && (control[0] >= 'a' && control[0] <= 'z'):
			keys = append(keys, control[0]-'a'+1)
		case ok && len(control) == 1 && strings.Contains(`@[\]^_`, control):
			keys = append(keys, control[0]-'@')
		case len(name) == 1 && name[0] > ' ' && name[0] < 0x7f:
			keys = append(keys, name[0])
		default:
			return nil, usage("--detach-keys %q: %q is no key; give characters or ctrl-X with commas between, as in ctrl-p,ctrl-q", text, name)
		}
	}
	return keys, nil
}

// detachPatience is how long the beginning of the detach keys is held back: it may be meant for the guest.
const detachPatience = 400 * time.Millisecond

// detachReader passes a terminal's input on but for the detach keys.
type detachReader struct {
	keys   []byte
	detach func()
	chunks <-chan []byte
	err    error // once chunks is closed

	held int    // how many of the keys have come
	rest []byte // to be passed on
	done bool
}

// newDetachReader reads in the background from now on; guard is deferred there.
func newDetachReader(in io.Reader, keys []byte, detach, guard func()) *detachReader {
	chunks := make(chan []byte)
	d := &detachReader{keys: keys, detach: detach, chunks: chunks}
	go func() {
		defer guard()
		defer close(chunks)
		for {
			buf := make([]byte, 16<<10)
			n, err := in.Read(buf)
			if n > 0 {
				chunks <- buf[:n]
			}
			if err != nil {
				d.err = err
				return
			}
		}
	}()
	return d
}

func (d *detachReader) Read(p []byte) (int, error) {
	for len(d.rest) == 0 {
		if d.done {
			return 0, errDetached
		}
		var patience <-chan time.Time
		if d.held > 0 {
			timer := time.NewTimer(detachPatience)
			defer timer.Stop()
			patience = timer.C
		}
		select {
		case chunk, ok := <-d.chunks:
			if !ok && d.held == 0 {
				return 0, d.err
			}
			if !ok {
				d.rest, d.held = d.keys[:d.held], 0
				break
			}
			if d.rest = d.pass(chunk); d.done {
				d.detach()
			}
		case <-patience:
			d.rest, d.held = d.keys[:d.held], 0
		}
	}
	n := copy(p, d.rest)
	d.rest = d.rest[n:]
	return n, nil
}

// pass is what of a chunk is for the guest; the beginning of the keys at its end is held back.
func (d *detachReader) pass(chunk []byte) []byte {
	if len(d.keys) == 0 {
		return chunk
	}
	out := make([]byte, 0, len(chunk)+len(d.keys))
	for i, b := range chunk {
		for d.held > 0 && b != d.keys[d.held] {
			// Not the keys after all: the longest end of what came that begins them again stays.
			keep := d.held - 1
			for keep > 0 && string(d.keys[d.held-keep:d.held]) != string(d.keys[:keep]) {
				keep--
			}
			out = append(out, d.keys[:d.held-keep]...)
			d.held = keep
		}
		if b != d.keys[d.held] {
			out = append(out, b)
			continue
		}
		if d.held++; d.held == len(d.keys) {
			d.done = true
			_ = chunk[i:] // what was typed after them is for nobody
			return out
		}
	}
	return out
}
