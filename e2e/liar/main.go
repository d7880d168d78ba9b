// Command liar is a guest agent that lies. Built into a forkd in the place of the real one, it is the real one until a
// fork of it is awakened; then it does what the variable LIE says. It is for tests, which build it.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent"
	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/contexts"
	"forkd.dev/forkd/internal/agent/process"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/mux"
	"forkd.dev/forkd/internal/guest/wire"
)

func main() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "liar is for a guest in a test")
		os.Exit(2) //nolint:forbidigo // it is a main of its own.
	}
	fmt.Fprintf(os.Stderr, "liar: %v\n", run(context.Background())) //nolint:forbidigo // it is a main of its own.
	off()
}

func off() { _ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF) }

// run is what the real agent does.
func run(ctx context.Context) error {
	phase, port, err := agent.Boot(ctx, os.Stderr)
	if err != nil {
		return err
	}
	accounts := account.New("/", account.Defaults{})
	groups := &agent.Cgroups{}
	if phase == agent.PhaseReady {
		if groups, err = agent.SetUp(accounts); err != nil {
			return err
		}
	}
	reaper := reap.NewInit()
	go reaper.Run(ctx)
	interpreters := contexts.New(contexts.Config{
		Reaper: reaper, Accounts: accounts, CgroupDir: groups.Context, Gone: func(string) {},
	})
	a := agent.New(agent.Config{
		Version: "liar", Phase: phase, System: agent.RealSystem(), Console: os.Stderr,
		Reaper: reaper, Accounts: accounts, Cgroups: groups, Contexts: interpreters,
		Services: []agent.Service{process.New(process.Config{Reaper: reaper, Accounts: accounts}), interpreters},
	}, "liar")
	return a.Serve(ctx, &trap{port: port})
}

// trap is the port until a fork's awakening arrives.
type trap struct {
	port io.ReadWriter
	seen []byte
}

func (t *trap) Write(p []byte) (int, error) { return t.port.Write(p) }

func (t *trap) Read(p []byte) (int, error) {
	n, err := t.port.Read(p)
	magic := (&wire.Preamble{}).Append(nil)[:wire.NonceSize]
	t.seen = append(t.seen, p[:n]...)
	if i := bytes.Index(t.seen, magic); i >= 0 && len(t.seen) > i+len(magic) && t.seen[i+len(magic)]&0x80 != 0 {
		if err := lie(t.port, io.MultiReader(bytes.NewReader(bytes.Clone(t.seen[i:])), t.port)); err != nil {
			fmt.Fprintf(os.Stderr, "liar: %v\n", err)
		}
		select {} // nothing more to say
	}
	t.seen = t.seen[max(0, len(t.seen)-64):]
	return n, err
}

// steering is what no terminal of a user's may be sent.
const steering = "\x1b]0;owned\a\x1b[2J\u009b31m\u202eevil\x00"

// liar is a conversation with the host, from the awakening on.
type liar struct {
	port     io.Writer
	receiver *wire.Receiver
	p        wire.Preamble
}

func (l *liar) Read(p []byte) (int, error) { return l.receiver.Read(p) }

func lie(port io.Writer, from io.Reader) error {
	l := &liar{port: port, receiver: wire.NewReceiver(from)}
	var err error
	if l.p, err = l.receiver.Await(); err != nil {
		return err
	}
	req, _, err := wire.ReadAwaken(l, nil)
	if err != nil {
		return err
	}
	full := bytes.Repeat([]byte{'x'}, wire.MaxPayload)
	mode := req.Env["LIE"]
	switch mode {
	case "silent":
		return nil
	case "garbage":
		return forever(port, bytes.Repeat([]byte{0xa5, 0, 0x5a}, 10<<10))
	case "version":
		return l.hello(&wire.Hello{Version: 1 << 40, Agent: steering, Generation: l.p.Generation})
	case "huge":
		if _, err := port.Write(append(wire.AppendAnswer(nil, l.p.Nonce, nil)[:32], 0xff, 0xff, 0xff, 0xff)); err != nil {
			return err
		}
		return forever(port, full)
	case "clock":
		return forever(port, wire.AppendAnswer(nil, l.p.Nonce, nil))
	case "refuse":
		h := l.honest()
		h.Refusal = &wire.Error{Code: steering, Message: "I will not " + steering}
		return l.hello(h)
	case "die":
		off()
		return nil
	case "report":
		h := l.honest()
		for range 400 {
			h.Awakened.NotRenewed = append(h.Awakened.NotRenewed, wire.NotRenewed{What: "process", Name: steering, Why: "a\nb"})
		}
		if err := l.hello(h); err != nil {
			return err
		}
		return l.calls(func(_ io.ReadWriter, s *wire.Stream) { _ = s.End() })
	case "console":
		if err := l.hello(l.honest()); err != nil {
			return err
		}
		go func() { _ = forever(os.Stderr, []byte(strings.Repeat(steering+"flood ", 200)+"\r\n")) }()
		return l.calls(func(_ io.ReadWriter, s *wire.Stream) { _ = s.End() })
	case "deaf":
		return l.hello(l.honest())
	case "opens":
		if err := l.hello(l.honest()); err != nil {
			return err
		}
		var id uint32
		for {
			id += 2
			if _, err := port.Write([]byte{0, 1, 0, 1, byte(id >> 24), byte(id >> 16), byte(id >> 8), byte(id), 0, 0, 0, 0}); err != nil {
				return err
			}
		}
	}
	if err := l.hello(l.honest()); err != nil {
		return err
	}
	return l.calls(func(raw io.ReadWriter, s *wire.Stream) {
		switch mode {
		case "mute":
			_, _ = io.Copy(io.Discard, raw)
		case "output":
			_ = s.SendMessage(wire.ProcessEvent{Start: &wire.ProcessStart{PID: 7}})
			for s.Send(wire.KindStdout, full) == nil {
			}
		case "parts":
			for s.Send('m', full) == nil {
			}
		case "entries":
			_ = s.Send(wire.KindMessage, []byte(`{"processes":[`+strings.Repeat("{},", 4<<20)+`{}]}`))
		case "error":
			_ = s.SendError(steering, strings.Repeat(steering, 10<<10))
		case "off":
			off()
		}
	})
}

func forever(w io.Writer, b []byte) error {
	for {
		if _, err := w.Write(b); err != nil && !errors.Is(err, io.ErrShortWrite) {
			return err
		}
	}
}

func (l *liar) honest() *wire.Hello {
	return &wire.Hello{
		Version: wire.Version, Agent: "liar", Features: []string{wire.FeatureThaw}, Generation: l.p.Generation, Phase: "ready",
		Awakened: &wire.AwakenReport{Renewed: []string{"kernel_entropy"}},
	}
}

func (l *liar) hello(h *wire.Hello) error {
	b, err := wire.Encode(h)
	if err != nil {
		return err
	}
	_, err = l.port.Write(wire.AppendAnswer(nil, l.p.Nonce, b))
	return err
}

// calls answers every call of the session, and of those after it.
func (l *liar) calls(answer func(raw io.ReadWriter, s *wire.Stream)) error {
	for {
		l.session(answer)
		var err error
		if l.p, err = l.receiver.Await(); err != nil {
			return err
		}
		if err := l.hello(l.honest()); err != nil {
			return err
		}
	}
}

func (l *liar) session(answer func(raw io.ReadWriter, s *wire.Stream)) {
	session := mux.NewServer(l.port, 1024, func(st *mux.Stream) {
		st.OnGone(st.Abort)
		go func() {
			s := wire.NewStream(st)
			if _, _, err := s.Recv(); err == nil {
				answer(st, s)
			}
			_ = s.Close()
		}()
	})
	defer session.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := l.Read(buf)
		if err != nil || session.Feed(buf[:n]) != nil {
			return
		}
	}
}
