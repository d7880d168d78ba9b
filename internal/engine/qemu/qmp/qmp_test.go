package qmp_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine/qemu/qmp"
	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

// peer plays QEMU.
type peer struct {
	t    *testing.T
	conn *net.UnixConn
	r    *bufio.Reader
}

type request struct {
	Execute   string         `json:"execute"`
	Arguments map[string]any `json:"arguments"`
	ID        string         `json:"id"`
}

func connect(t *testing.T) (*qmp.Client, *peer) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	conns := make([]*net.UnixConn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = c.(*net.UnixConn)
	}
	client, p := qmp.New(conns[0]), &peer{t: t, conn: conns[1], r: bufio.NewReader(conns[1])}
	t.Cleanup(func() {
		p.conn.Close()
		client.Close()
	})
	p.say(`{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}}, "capabilities": ["oob"]}}`)
	return client, p
}

func (p *peer) say(line string) {
	p.t.Helper()
	if _, err := io.WriteString(p.conn, line+"\r\n"); err != nil {
		p.t.Error(err)
	}
}

func (p *peer) hear() request {
	p.t.Helper()
	line, err := p.r.ReadString('\n')
	if err != nil {
		p.t.Error(err)
	}
	var r request
	if err := json.Unmarshal([]byte(line), &r); err != nil {
		p.t.Error(err)
	}
	return r
}

func TestAnswersFindTheirCommand(t *testing.T) {
	c, p := connect(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		first, second := p.hear(), p.hear()
		p.say(`{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "RESUME"}`)
		p.say(`{"return": {"who": "second"}, "id": "` + second.ID + `"}`)
		p.say(`{"return": {}, "id": "nobody asked"}`)
		p.say(`{"return": {"who": "first"}, "id": "` + first.ID + `"}`)
	}()
	var out struct{ Who string }
	err := c.Batch(t.Context(), []qmp.Command{{Name: "one"}, {Name: "two", Args: map[string]int{"n": 1}}}, &out)
	if err != nil {
		t.Fatal(err)
	}
	if out.Who != "second" {
		t.Errorf("Batch decoded the answer of %q, want that of the last command", out.Who)
	}
	if ev := <-c.Events(); ev.Name != "RESUME" {
		t.Errorf("event %q", ev.Name)
	}
	<-done
}

func TestRefusal(t *testing.T) {
	c, p := connect(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		a, b := p.hear(), p.hear()
		p.say(`{"error": {"class": "GenericError", "desc": "no such thing"}, "id": "` + a.ID + `"}`)
		p.say(`{"return": {}, "id": "` + b.ID + `"}`)
	}()
	err := c.Batch(t.Context(), []qmp.Command{{Name: "getfd"}, {Name: "cont"}}, nil)
	refused, ok := errors.AsType[*qmp.Error](err)
	if !ok || refused.Command != "getfd" || refused.Desc != "no such thing" {
		t.Errorf("error %v, want QEMU's refusal of getfd", err)
	}
	<-done
}

// TestEach: what was refused, what was done and what nobody knows of are told apart.
func TestEach(t *testing.T) {
	c, p := connect(t)
	go func() {
		a, b := p.hear(), p.hear()
		p.hear()
		p.say(`{"return": {}, "id": "` + a.ID + `"}`)
		p.say(`{"error": {"class": "GenericError", "desc": "no"}, "id": "` + b.ID + `"}`)
		p.conn.Close()
	}()
	errs := c.Each(t.Context(), []qmp.Command{{Name: "stop"}, {Name: "migrate"}, {Name: "cont"}})
	if refused, ok := errors.AsType[*qmp.Error](errs[1]); errs[0] != nil || !ok || refused.Command != "migrate" {
		t.Errorf("errors %v, want none of the first and a refusal of the second", errs)
	}
	if !errors.Is(errs[2], qmp.ErrClosed) {
		t.Errorf("the third has %v, want ErrClosed", errs[2])
	}
}

func TestPeerGone(t *testing.T) {
	c, p := connect(t)
	go func() {
		p.hear()
		p.conn.Close()
	}()
	if err := c.Do(t.Context(), qmp.Command{Name: "stop"}, nil); !errors.Is(err, qmp.ErrClosed) {
		t.Errorf("error %v, want ErrClosed", err)
	}
	<-c.Done()
	if err := c.Do(t.Context(), qmp.Command{Name: "stop"}, nil); !errors.Is(err, qmp.ErrClosed) {
		t.Errorf("after the end: %v, want ErrClosed", err)
	}
	for range c.Events() { // Must be closed.
	}
	if err := c.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
}

func TestContextEndsWaiting(t *testing.T) {
	c, p := connect(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	go func() {
		p.hear()
		cancel(why)
	}()
	if err := c.Do(ctx, qmp.Command{Name: "stop"}, nil); !errors.Is(err, why) || !strings.Contains(err.Error(), "stop") {
		t.Errorf("error %v, want the cause and the command", err)
	}
}

// TestCallerWhoGaveUp before anything was sent costs nobody the connection.
func TestCallerWhoGaveUp(t *testing.T) {
	c, p := connect(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	cancel(why)
	for range 100 {
		if err := c.Do(ctx, qmp.Command{Name: "stop"}, nil); !errors.Is(err, why) {
			t.Fatalf("error %v, want the cause", err)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.say(`{"return": {}, "id": "` + p.hear().ID + `"}`)
	}()
	if err := c.Do(t.Context(), qmp.Command{Name: "cont"}, nil); err != nil {
		t.Errorf("the next command: %v", err)
	}
	<-done
}

// TestEndlessPeer: a peer that never ends a line must not make the daemon grow, one that floods it with events must
// not stop it from hearing answers.
// TestCallersWhoGiveUpWhileSending: the end of a caller's context at the moment of a write costs the others nothing.
func TestCallersWhoGiveUpWhileSending(t *testing.T) {
	client, p := connect(t)
	go func() { _, _ = io.Copy(io.Discard, p.conn) }()
	for range 20000 {
		ctx, cancel := context.WithCancel(t.Context())
		go cancel()
		if err := client.Do(ctx, qmp.Command{Name: "query-status"}, nil); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
}

func TestEndlessPeer(t *testing.T) {
	c, p := connect(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := p.hear()
		for range 10_000 {
			p.say(`{"event": "VSERPORT_CHANGE", "data": {"open": true, "id": "x"}}`)
		}
		p.say(`{"return": {}, "id": "` + r.ID + `"}`)
		junk := strings.Repeat("x", 64<<10)
		for {
			if _, err := io.WriteString(p.conn, junk); err != nil {
				return
			}
		}
	}()
	if err := c.Do(t.Context(), qmp.Command{Name: "stop"}, nil); err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	<-done
}

// TestFileTravelsWithItsCommand: QEMU takes the descriptor that arrived last when it executes getfd.
func TestFileTravelsWithItsCommand(t *testing.T) {
	c, p := connect(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	got := make(chan error, 1)
	go func() {
		buf, oob := make([]byte, 4096), make([]byte, 64)
		var lines int
		fd := -1
		for lines < 3 {
			n, oobn, _, _, err := p.conn.ReadMsgUnix(buf, oob)
			if err != nil {
				got <- err
				return
			}
			if oobn > 0 {
				cmsg, _ := unix.ParseSocketControlMessage(oob[:oobn])
				fds, _ := unix.ParseUnixRights(&cmsg[0])
				fd = fds[0]
				if !strings.Contains(string(buf[:n]), "getfd") || strings.Contains(string(buf[:n]), "last") {
					got <- errors.New("the descriptor came with " + string(buf[:n]))
					return
				}
			}
			lines += strings.Count(string(buf[:n]), "\n")
		}
		f := os.NewFile(uintptr(fd), "pipe")
		_, err := io.WriteString(f, "hello")
		got <- errors.Join(err, f.Close())
		for _, id := range []string{"1", "2", "3"} {
			p.say(`{"return": {}, "id": "` + id + `"}`)
		}
	}()
	err = c.Batch(t.Context(), []qmp.Command{{Name: "first"}, {Name: "getfd", File: w}, {Name: "last"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	w.Close()
	if text, _ := io.ReadAll(r); string(text) != "hello" {
		t.Errorf("through the descriptor: %q", text)
	}
}

func FuzzMessages(f *testing.F) {
	for _, s := range []string{
		`{"return": {}, "id": "1"}`, `{"error": {}, "id": "1"}`, `{"error": {"desc": 1}}`, `{"event": "X", "data": []}`,
		`[]`, `null`, `{}`, `{"id": 1}`, `{"QMP": null}`, "\x00", `{"return": {}, "id": "1"}{"return": {}}`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		c, p := connect(t)
		go func() {
			p.hear()
			_, _ = io.WriteString(p.conn, line+"\n")
			p.conn.Close()
		}()
		_ = c.Do(t.Context(), qmp.Command{Name: "stop"}, nil)
		<-c.Done()
	})
}
