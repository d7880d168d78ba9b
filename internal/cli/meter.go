package cli

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/term"
)

// meter counts what is copied, and shows it where a person watches.
type meter struct {
	bytes atomic.Int64
	what  atomic.Pointer[string]
}

func (m *meter) name(s string) { m.what.Store(&s) }
func (m *meter) total() int64  { return m.bytes.Load() }

func (m *meter) reader(r io.Reader) io.Reader { return &meteredReader{r, m} }
func (m *meter) writer(w io.Writer) io.Writer { return &meteredWriter{w, m} }

type meteredReader struct {
	io.Reader
	m *meter
}

func (r *meteredReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.m.bytes.Add(int64(n))
	return n, err
}

type meteredWriter struct {
	io.Writer
	m *meter
}

func (w *meteredWriter) Write(p []byte) (int, error) {
	n, err := w.Writer.Write(p)
	w.m.bytes.Add(int64(n))
	return n, err
}

const (
	// firstShown is how long a copy takes before it is worth a word.
	firstShown = 500 * time.Millisecond
	showEvery  = 200 * time.Millisecond
)

// show shows progress until stop is called, on a terminal only.
func (m *meter) show(a *App) (stop func()) {
	f, ok := a.Err.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return func() {}
	}
	done := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() {
		began, shown := time.Now(), false
		tick := time.NewTicker(showEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if time.Since(began) < firstShown {
					continue
				}
				width, _, err := term.GetSize(int(f.Fd()))
				if err != nil {
					width = 80
				}
				fmt.Fprintf(f, "\r\x1b[K%s", m.line(time.Since(began), width))
				shown = true
			case <-done:
				if shown {
					fmt.Fprint(f, "\r\x1b[K")
				}
				return
			}
		}
	})
	return func() { close(done); running.Wait() }
}

// line is the state as one line. Names come from anywhere.
func (m *meter) line(since time.Duration, width int) string {
	n := m.total()
	text := fmt.Sprintf("%10s %10s/s  ", size(n), size(int64(float64(n)/since.Seconds())))
	if what := m.what.Load(); what != nil {
		name := []rune(strings.ReplaceAll(strings.ReplaceAll(printable(*what), "\n", " "), "\t", " "))
		if room := width - len(text) - 1; len(name) > room {
			name = name[len(name)-max(room, 0):]
		}
		text += string(name)
	}
	return text
}
