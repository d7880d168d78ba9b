// Package qmp is a client of QEMU's control protocol: commands with ids, their answers, and events. It knows no
// particular command beyond the opening handshake. It starts no process; package qemu is its only user. Tests run
// against a scripted peer, without QEMU.
package qmp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// maxLine bounds one message. QEMU's largest answers (the command list, ~25 KiB) stay far below; without a bound a
// misbehaving peer could make the daemon grow for ever.
const maxLine = 1 << 20

// eventBacklog is how many events wait for a reader that is slow. Further ones are dropped: a guest can cause events
// (its serial port opened and closed) at any rate and must not make the daemon grow.
const eventBacklog = 64

// ErrClosed is wrapped by calls on a connection that has ended.
var ErrClosed = errors.New("connection to QEMU closed")

// Error is QEMU's refusal of a command.
type Error struct {
	Command string
	Class   string
	Desc    string
}

func (e *Error) Error() string { return fmt.Sprintf("QEMU refused %s: %s", e.Command, e.Desc) }

// Event is something QEMU reported by itself.
type Event struct {
	Name string          `json:"event"`
	Data json.RawMessage `json:"data"`
}

// Command is one request. File, if set, travels beside it (getfd).
type Command struct {
	Name string
	Args any
	File *os.File
}

// Client speaks to one QEMU. It is safe for concurrent use.
type Client struct {
	conn   *net.UnixConn
	events chan Event
	done   chan struct{} // closed when the reader ended; err is set before

	writeMu sync.Mutex // held while writing, so that commands and their files leave in one piece

	mu      sync.Mutex
	err     error
	nextID  uint64
	pending map[string]chan answer
}

type answer struct {
	value json.RawMessage
	err   *Error
}

type message struct {
	ID     string          `json:"id"`
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	QMP json.RawMessage `json:"QMP"`
	Event
}

// New takes over conn and starts reading. The peer's greeting may still be on its way: commands are queued behind it,
// beginning with qmp_capabilities, which the first Do sends along. Close ends it.
func New(conn *net.UnixConn) *Client {
	c := &Client{
		conn:    conn,
		events:  make(chan Event, eventBacklog),
		done:    make(chan struct{}),
		pending: map[string]chan answer{},
	}
	go c.read()
	return c
}

// Events delivers what QEMU reports; the channel is closed when the connection has ended. Events nobody takes are
// dropped once a few dozen wait.
func (c *Client) Events() <-chan Event { return c.events }

// Done is closed when the connection has ended.
func (c *Client) Done() <-chan struct{} { return c.done }

// Close ends the connection and waits for the reader. It is idempotent.
func (c *Client) Close() error {
	err := c.conn.Close()
	<-c.done
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Capabilities is the command that leaves the negotiation mode every QMP connection starts in. With the out-of-band
// capability QEMU reads commands on while it executes earlier ones. It reads a byte at a time, some 10 µs each, so that a
// batch sent to be executed at once would have gaps of a millisecond otherwise.
func Capabilities() Command {
	return Command{Name: "qmp_capabilities", Args: map[string]any{"enable": []string{"oob"}}}
}

// Handshake leaves the negotiation mode.
func (c *Client) Handshake(ctx context.Context) error {
	return c.Do(ctx, Capabilities(), nil)
}

// Do runs one command and decodes its answer into out, unless that is nil. The error is an *Error when QEMU refused,
// and wraps ErrClosed when QEMU went away. A command whose ctx ends may still be executed.
func (c *Client) Do(ctx context.Context, cmd Command, out any) error {
	return c.Batch(ctx, []Command{cmd}, out)
}

// Batch sends several commands in one write and returns the first refusal, or nil when all were accepted; out
// receives the answer of the last. QEMU executes them in order, and goes on after one that it refuses.
func (c *Client) Batch(ctx context.Context, cmds []Command, out any) error {
	var first error
	err := c.exchange(ctx, cmds, func(i int, a answer) bool {
		switch {
		case a.err != nil:
			first = a.err
		case out != nil && i == len(cmds)-1:
			if err := json.Unmarshal(a.value, out); err != nil {
				first = fmt.Errorf("decode QEMU's answer to %s: %w", cmds[i].Name, err)
			}
		}
		return first == nil
	})
	return errors.Join(first, err)
}

// Each is Batch that tells of every command whether it was refused. A command whose answer did not come has the reason
// for that as its error; it may have been executed.
func (c *Client) Each(ctx context.Context, cmds []Command) []error {
	errs := make([]error, len(cmds))
	answered := 0
	err := c.exchange(ctx, cmds, func(i int, a answer) bool {
		answered++
		if a.err != nil {
			errs[i] = a.err
		}
		return true
	})
	for i := answered; i < len(errs); i++ {
		errs[i] = err
	}
	return errs
}

// exchange sends commands in one write and passes on the answers, in order, until each returns false.
func (c *Client) exchange(ctx context.Context, cmds []Command, each func(int, answer) bool) error {
	waits := make([]chan answer, len(cmds))
	ids := make([]string, len(cmds))
	defer c.forget(ids)
	if err := c.send(ctx, cmds, ids, waits); err != nil {
		return err
	}
	for i, wait := range waits {
		a, err := c.await(ctx, wait)
		if err != nil {
			return fmt.Errorf("wait for QEMU's answer to %s: %w", cmds[i].Name, err)
		}
		if a.err != nil {
			a.err.Command = cmds[i].Name
		}
		if !each(i, a) {
			return nil
		}
	}
	return nil
}

func (c *Client) await(ctx context.Context, wait chan answer) (answer, error) {
	select {
	case a := <-wait:
		return a, nil
	case <-ctx.Done():
		return answer{}, context.Cause(ctx)
	case <-c.done:
	}
	// The answer may have been the last thing read.
	select {
	case a := <-wait:
		return a, nil
	default:
		return answer{}, c.cause()
	}
}

func (c *Client) send(ctx context.Context, cmds []Command, ids []string, waits []chan answer) error {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	// A QEMU that does not read (its main thread hangs) must not hang the caller. Only a write that was cut in the middle
	// makes the connection useless: a caller that gives up otherwise must not cost the machine its monitor.
	expired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(expired)
		_ = c.conn.SetWriteDeadline(time.Unix(1, 0))
	})
	defer func() {
		if !stop() {
			<-expired
			_ = c.conn.SetWriteDeadline(time.Time{})
		}
	}()
	var buf bytes.Buffer
	for i, cmd := range cmds {
		ids[i], waits[i] = c.expect()
		line, err := json.Marshal(struct {
			Execute   string `json:"execute"`
			Arguments any    `json:"arguments,omitempty"`
			ID        string `json:"id"`
		}{cmd.Name, cmd.Args, ids[i]})
		if err != nil {
			return fmt.Errorf("encode %s: %w", cmd.Name, err)
		}
		buf.Write(append(line, '\n'))
		if cmd.File == nil && i < len(cmds)-1 && cmds[i+1].File == nil {
			continue
		}
		// QEMU keeps the last descriptors it received until a getfd takes them, so one must arrive with its command.
		var oob []byte
		if cmd.File != nil {
			oob = unix.UnixRights(int(cmd.File.Fd()))
		}
		n, _, err := c.conn.WriteMsgUnix(buf.Bytes(), oob, nil)
		if err != nil && n == 0 && ctx.Err() != nil {
			return context.Cause(ctx) // What was sent before is whole.
		}
		if err != nil {
			_ = c.conn.Close()
			return fmt.Errorf("send %s to QEMU: %w", cmd.Name, c.closedBecause(err))
		}
		buf.Reset()
	}
	return nil
}

func (c *Client) expect() (string, chan answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nextID++
	id := strconv.FormatUint(c.nextID, 10)
	wait := make(chan answer, 1)
	c.pending[id] = wait
	return id, wait
}

func (c *Client) forget(ids []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range ids {
		delete(c.pending, id)
	}
}

func (c *Client) closedBecause(err error) error {
	return fmt.Errorf("%w: %w", ErrClosed, err)
}

func (c *Client) cause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *Client) read() {
	err := c.readLines()
	c.mu.Lock()
	c.err = c.closedBecause(err)
	c.mu.Unlock()
	_ = c.conn.Close()
	close(c.done)
	close(c.events)
}

func (c *Client) readLines() error {
	s := bufio.NewScanner(c.conn)
	s.Buffer(make([]byte, 0, 4096), maxLine)
	for s.Scan() {
		var m message
		if err := json.Unmarshal(s.Bytes(), &m); err != nil {
			return fmt.Errorf("a message that is no JSON: %w", err)
		}
		c.dispatch(&m)
	}
	if err := s.Err(); err != nil {
		return err
	}
	return io.EOF
}

func (c *Client) dispatch(m *message) {
	if m.Name != "" {
		select {
		case c.events <- m.Event:
		default:
		}
		return
	}
	a := answer{value: m.Return}
	if m.Error != nil {
		a.err = &Error{Class: m.Error.Class, Desc: m.Error.Desc}
	}
	c.mu.Lock()
	wait := c.pending[m.ID]
	delete(c.pending, m.ID)
	c.mu.Unlock()
	if wait != nil {
		wait <- a // Never blocks: room for one, and only the first answer to an id finds it.
	}
}
