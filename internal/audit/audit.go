// Package audit writes down who asked the daemon for what: one JSON object a line, appended, in files that are rotated by size.
// It knows neither HTTP nor sandboxes; package httpapi fills in the entries, package daemon says where they go. What it
// writes is docs/operations.md's "Audit log".
package audit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Entry is one line.
type Entry struct {
	Time       time.Time `json:"time"`            // of the request
	Phase      Phase     `json:"phase,omitempty"` // "": the request has been answered
	RequestID  string    `json:"request_id"`
	Principal  string    `json:"principal"` // "owner", "root", a token's name; "nobody": no token, or none that is good
	Token      string    `json:"token,omitempty"`
	Remote     string    `json:"remote"` // "unix", or an address
	Method     string    `json:"method"`
	Route      string    `json:"route"`             // with its parameters' names, such as /v1/sandboxes/{id}
	Call       string    `json:"call,omitempty"`    // of the guest's protocol, such as process.Start
	Touched    Objects   `json:"touched,omitempty"` // what the request names
	Created    Objects   `json:"created,omitempty"` // what it has made
	Argv       []string  `json:"argv,omitempty"`    // of a command, as far as it is to be written
	ArgvCut    bool      `json:"argv_cut,omitempty"`
	Status     int       `json:"status,omitempty"` // of the answer
	Code       string    `json:"code,omitempty"`   // of an error
	DurationMS float64   `json:"duration_ms"`
}

// Phase tells the line that is written before a request acts from the one after it.
type Phase string

// Begin is of a line written before its request acts.
const Begin Phase = "begin"

// Objects are ids by kind, such as "sandbox".
type Objects map[string][]string

// Add adds ids; the zero value may be added to.
func (o *Objects) Add(kind string, ids ...string) {
	if len(ids) == 0 {
		return
	}
	if *o == nil {
		*o = Objects{}
	}
	(*o)[kind] = append((*o)[kind], ids...)
}

// Argv says how much of a command is written.
type Argv string

// Argvs.
const (
	Full    Argv = "full"
	Program Argv = "program" // its name only, and that there was more
	None    Argv = "none"
)

// maxArgv bounds what is written of one command.
const maxArgv = 16 << 10

// Of is what is written of a command, and whether something was left out.
func (a Argv) Of(argv []string) (shown []string, cut bool) {
	switch {
	case len(argv) == 0:
		return nil, false
	case a == None:
		return nil, true
	case a == Program:
		return argv[:1], len(argv) > 1
	}
	room := maxArgv
	for i, arg := range argv {
		if room -= len(arg); room < 0 {
			return append(shown, argv[i][:len(arg)+room]), true
		}
		shown = append(shown, arg)
	}
	return shown, false
}

// Config says where entries go.
type Config struct {
	Path     string
	MaxBytes int64 // a file is rotated before it gets larger; 0: never
	Keep     int   // older files: Path.1 is the newest of them
	Argv     Argv  // "": Full
	// Required has a request that changes something refused when it cannot be written down first.
	Required bool
	// Trouble is told what went wrong beside the writing itself: a file that could not be rotated. May be nil.
	Trouble func(error)
}

// Log is safe for concurrent use.
type Log struct {
	cfg Config

	mu     sync.Mutex
	file   *os.File // nil: it could not be opened again
	size   int64
	torn   bool // the last line has no end: the next write makes one first
	stuck  bool // it could not be rotated, which has been told
	failed int64
}

// Open opens the log, or begins one. The caller closes it.
func Open(cfg Config) (*Log, error) {
	if cfg.Trouble == nil {
		cfg.Trouble = func(error) {}
	}
	if cfg.Argv == "" {
		cfg.Argv = Full
	}
	l := &Log{cfg: cfg}
	if err := l.open(); err != nil {
		return nil, fmt.Errorf("open the audit log: %w", err)
	}
	return l, nil
}

// Required reports whether what cannot be written down must not be done.
func (l *Log) Required() bool { return l.cfg.Required }

// Argv is what is to be written of commands.
func (l *Log) Argv() Argv { return l.cfg.Argv }

// Failed is how many entries could not be written.
func (l *Log) Failed() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failed
}

// open replaces the file by what is at the path. The caller holds mu, or is alone.
func (l *Log) open() error {
	// Whoever reads along must not be waited for: a pipe without a reader fails here.
	f, err := os.OpenFile(l.cfg.Path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no regular file", l.cfg.Path)
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	if l.file != nil {
		_ = l.file.Close()
	}
	l.file, l.size = f, info.Size()
	l.torn = l.size > 0 && !endsLine(l.cfg.Path, l.size)
	return nil
}

// endsLine reports whether a file's last byte ends a line: a crash, or a full disk, may have left half of one.
func endsLine(path string, size int64) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	var last [1]byte
	_, err = f.ReadAt(last[:], size-1)
	return err == nil && last[0] == '\n'
}

// Write appends an entry. On error it is not there, or not whole.
func (l *Log) Write(e Entry) error {
	line, err := encode(e)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.write(line); err != nil {
		l.failed++
		return fmt.Errorf("write the audit log: %w", err)
	}
	return nil
}

// write appends a line. The caller holds mu.
func (l *Log) write(line []byte) error {
	if l.file == nil {
		if err := l.open(); err != nil {
			return err
		}
	}
	if l.cfg.MaxBytes > 0 && l.size > 0 && l.size+int64(len(line)) > l.cfg.MaxBytes {
		err := l.rotate()
		if err != nil && !l.stuck { // a file too long is better than a line too few
			l.cfg.Trouble(fmt.Errorf("rotate the audit log: %w; it grows beyond %d bytes", err, l.cfg.MaxBytes))
		}
		l.stuck = err != nil
	}
	if l.torn {
		line = append([]byte{'\n'}, line...)
	}
	n, err := l.file.Write(line)
	l.size += int64(n)
	if n > 0 {
		l.torn = n < len(line)
	}
	return err
}

func encode(e Entry) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(e); err != nil {
		return nil, fmt.Errorf("encode an entry of the audit log: %w", err)
	}
	return b.Bytes(), nil
}

// rotate moves the file out of the way, and those before it, and begins another. The caller holds mu.
func (l *Log) rotate() error {
	if _, err := os.Lstat(l.cfg.Path); errors.Is(err, os.ErrNotExist) {
		return l.open() // somebody else has moved it
	}
	older := func(n int) string { return l.cfg.Path + "." + strconv.Itoa(n) }
	if l.cfg.Keep <= 0 {
		if err := os.Remove(l.cfg.Path); err != nil {
			return err
		}
		return l.open()
	}
	for n := l.cfg.Keep - 1; n >= 1; n-- {
		if err := os.Rename(older(n), older(n+1)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := os.Rename(l.cfg.Path, older(1)); err != nil {
		return err
	}
	return l.open()
}

// Reopen opens what is at the path now: somebody has moved the file away. On error the old one is written on.
func (l *Log) Reopen() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.open(); err != nil {
		return fmt.Errorf("open the audit log again: %w", err)
	}
	return nil
}

// Close closes the file; what is written after that opens it again.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return nil
	}
	err := l.file.Close()
	l.file = nil
	return err
}
