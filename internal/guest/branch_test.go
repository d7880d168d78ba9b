package guest_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agent"
	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/process"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// source is a guest with real processes and a cgroup tree whose kernel agrees with everything. A copy of it is the same
// thing on the next connection: that is how a copy finds itself.
type source struct {
	*harness
	dir string

	mu    sync.Mutex
	clock time.Time
}

type noContexts struct{}

func (noContexts) Quiesce(context.Context, bool) error { return nil }
func (noContexts) Renew(context.Context, map[string]string, func(string) error) ([]string, []wire.NotRenewed, error) {
	return nil, nil, nil
}
func (noContexts) PIDs() map[int]string { return nil }

func startSource(t *testing.T) *source {
	t.Helper()
	testenv.Need(t, "root") // as the agent always is
	s := &source{harness: &harness{port: newPort(t)}, dir: t.TempDir()}
	groups, err := agent.NewCgroups(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"cgroup.freeze": "0", "cgroup.events": "populated 1\nfrozen 1\n", "cgroup.procs": ""} {
		s.put(t, "user/proc/"+name, content)
	}
	s.put(t, "root/boot_id", "")
	reaper := reap.New()
	accounts := account.New("/", account.Defaults{User: "0", Workdir: t.TempDir()})
	processes := process.New(process.Config{Reaper: reaper, Accounts: accounts})
	s.agent = agent.New(agent.Config{
		Version: "test", Phase: agent.PhaseReady, Console: io.Discard, Reaper: reaper, Accounts: accounts,
		Cgroups: groups, Contexts: noContexts{}, Services: []agent.Service{processes},
		System: agent.System{
			Root: filepath.Join(s.dir, "root"), BootIDFile: filepath.Join(s.dir, "root/boot_id"),
			Entropy: func([]byte) error { return nil }, SetHostname: func(string) error { return nil },
			SetClock: func(now time.Time) error {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.clock = now
				return nil
			},
		},
	}, "boot")
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.agent.Serve(t.Context(), s.port)
	}()
	t.Cleanup(func() {
		s.close()
		<-done
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), testenv.Timeout(10*time.Second))
		defer cancel()
		if err := processes.Close(ctx); err != nil {
			t.Error(err)
		}
		reaper.Wait()
	})
	return s
}

func (s *source) put(t *testing.T, name, content string) {
	t.Helper()
	path := filepath.Join(s.dir, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
}

func (s *source) frozen(t *testing.T) bool {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(s.dir, "user/proc/cgroup.freeze"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b) == "1"
}

func (s *source) awaken(t *testing.T, c *guest.Conn, id string) {
	t.Helper()
	if _, err := c.Awaken(t.Context(), identity(id)); err != nil {
		t.Fatal(err)
	}
}

func identity(id string) *wire.AwakenRequest {
	return &wire.AwakenRequest{
		SandboxID: id, Hostname: id, MachineID: strings.Repeat("0a", 16), BootID: "01234567-89ab-4def-8123-456789abcdef",
		Entropy: make([]byte, 64),
	}
}

// inHandshake awakens in the first exchange, byCall in the session.
func (s *source) inHandshake(t *testing.T, id string) *guest.Conn {
	t.Helper()
	c, report, err := guest.AwakenFirst(t.Context(), s.dial, 2, identity(id))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if len(report.Renewed) == 0 || c.Hello().Generation != 2 {
		t.Errorf("%+v, %+v", report, c.Hello())
	}
	return c
}

func (s *source) byCall(t *testing.T, id string) *guest.Conn {
	t.Helper()
	c := s.connect(t, 2)
	s.awaken(t, c, id)
	return c
}

func appears(t *testing.T, path string) {
	t.Helper()
	deadline := time.Now().Add(testenv.Timeout(20 * time.Second))
	for {
		if _, err := os.Stat(path); err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not appear", filepath.Base(path))
		}
		<-time.After(2 * time.Millisecond)
	}
}

func shell(tag, script string) wire.StartRequest {
	return wire.StartRequest{Process: wire.ProcessConfig{Cmd: "sh", Args: []string{"-c", script}}, Tag: &tag}
}

func TestQuiesceAndThaw(t *testing.T) {
	s := startSource(t)
	c := s.connect(t, 1)
	s.awaken(t, c, "sb-1")
	for range 3 {
		if err := c.Quiesce(t.Context(), wire.QuiesceRequest{}); err != nil || !s.frozen(t) {
			t.Fatalf("%v, frozen: %v", err, s.frozen(t))
		}
		// A start waits for the thaw.
		out := &strings.Builder{}
		ended := make(chan error, 1)
		go func() {
			_, err := call.Run(t.Context(), c, shell("x", "echo ran"), nil, call.Output{Stdout: out}, nil)
			ended <- err
		}()
		if list, err := call.Processes(t.Context(), c); err != nil || len(list) > 0 {
			t.Errorf("%v, %v", list, err)
		}
		report, err := c.Thaw(t.Context(), "sb-1")
		if err != nil || !report.Thawed || s.frozen(t) {
			t.Fatalf("%+v, %v", report, err)
		}
		if err := <-ended; err != nil || out.String() != "ran\n" {
			t.Errorf("%q, %v", out, err)
		}
		if report, err = c.Thaw(t.Context(), "sb-1"); err != nil || report.Thawed {
			t.Errorf("again: %+v, %v", report, err)
		}
	}
}

// TestThawOnANewConnection: a daemon that was started again thaws what it adopts; in a copy only awakening does.
func TestThawOnANewConnection(t *testing.T) {
	s := startSource(t)
	first := s.connect(t, 1)
	s.awaken(t, first, "sb-1")
	if err := first.Quiesce(t.Context(), wire.QuiesceRequest{}); err != nil {
		t.Fatal(err)
	}
	second := s.connect(t, 2)
	var refusal *wire.Error
	if _, err := second.Thaw(t.Context(), "sb-2"); !errors.As(err, &refusal) || refusal.Code != wire.CodePrecondition || !s.frozen(t) {
		t.Errorf("a copy: %v, frozen: %v", err, s.frozen(t))
	}
	if report, err := second.Thaw(t.Context(), "sb-1"); err != nil || !report.Thawed || s.frozen(t) {
		t.Errorf("adopted: %+v, %v", report, err)
	}
}

// TestStreamsInACopy: what ran goes on and can be attached to; what had not begun does not begin.
func TestStreamsInACopy(t *testing.T) {
	t.Run("awakened in the handshake", func(t *testing.T) { streamsInACopy(t, (*source).inHandshake) })
	t.Run("awakened by a call", func(t *testing.T) { streamsInACopy(t, (*source).byCall) })
}

func streamsInACopy(t *testing.T, awaken func(*source, *testing.T, string) *guest.Conn) {
	s := startSource(t)
	first := s.connect(t, 1)
	s.awaken(t, first, "sb-1")
	marker := filepath.Join(t.TempDir(), "m")
	started := make(chan uint32, 1)
	broken := make(chan error, 2)
	before, output := io.Pipe()
	stdin, keep := io.Pipe()
	defer keep.Close()
	go func() {
		_, err := call.Run(t.Context(), first, shell("job", "echo before; read x; echo $x; echo late >&2; touch "+marker+"; read y; echo $y; exit 3"), stdin,
			call.Output{Stdout: output}, func(pid uint32) { started <- pid })
		broken <- err
	}()
	_ = started
	pid := <-started
	said := make([]byte, len("before\n"))
	if _, err := io.ReadFull(before, said); err != nil || string(said) != "before\n" {
		t.Fatalf("%q, %v", said, err)
	}
	if err := first.Quiesce(t.Context(), wire.QuiesceRequest{}); err != nil {
		t.Fatal(err)
	}
	second := filepath.Join(t.TempDir(), "second")
	go func() {
		_, err := call.Run(t.Context(), first, shell("not", "touch "+second), nil, call.Output{}, nil)
		broken <- err
	}()
	if err := first.Ping(t.Context()); err != nil { // the start has arrived, or does not matter
		t.Fatal(err)
	}

	c := awaken(s, t, "sb-2")
	for range 2 {
		if err := <-broken; err == nil {
			t.Error("a call of the first connection ended well")
		}
	}
	if s.frozen(t) {
		t.Error("still frozen")
	}
	// It is a machine like another from then on.
	if err := c.Quiesce(t.Context(), wire.QuiesceRequest{}); err != nil || !s.frozen(t) {
		t.Errorf("%v, frozen: %v", err, s.frozen(t))
	}
	if report, err := c.Thaw(t.Context(), "sb-2"); err != nil || !report.Thawed || s.frozen(t) {
		t.Errorf("%+v, %v", report, err)
	}
	list, err := call.Processes(t.Context(), c)
	if err != nil || len(list) != 1 || list[0].PID != pid || list[0].Tag == nil || *list[0].Tag != "job" {
		t.Fatalf("%+v, %v", list, err)
	}
	input := wire.SendInputRequest{Process: wire.ProcessSelector{PID: pid}, Stdin: []byte("since\n")}
	if err := call.Unary(t.Context(), c, wire.MethodProcessSendInput, input, nil); err != nil {
		t.Fatal(err)
	}
	appears(t, marker) // it ran on with nobody attached
	var stdout, stderr strings.Builder
	end, err := call.Attach(t.Context(), c, wire.ConnectRequest{Process: wire.ProcessSelector{Tag: "job"}},
		call.Session{Stdin: strings.NewReader("last\n"), Output: call.Output{Stdout: &stdout, Stderr: &stderr}})
	if err != nil || end.Code() != 3 || stdout.String() != "since\nlast\n" || stderr.String() != "late\n" {
		t.Errorf("%+v, %v: %q, %q", end, err, stdout.String(), stderr.String())
	}
	// The end can be asked for a while longer.
	again := wire.ConnectRequest{Process: wire.ProcessSelector{PID: pid}}
	if end, err := call.Attach(t.Context(), c, again, call.Session{}); err != nil || end.Code() != 3 {
		t.Errorf("%+v, %v", end, err)
	}
	if _, err := os.Stat(second); err == nil {
		t.Error("the source's caller's command ran in the copy")
	}
}

// TestOldAgentIsNotFrozen: one that cannot thaw must not freeze what is to run on.
func TestOldAgentIsNotFrozen(t *testing.T) {
	p := newPort(t)
	t.Cleanup(p.close)
	go func() {
		r := wire.NewReceiver(p)
		preamble, err := r.Await()
		if err != nil {
			return
		}
		_, _ = p.Write(wire.AppendAnswer(nil, preamble.Nonce, []byte(`{"version":1,"agent":"0.1","features":[],"generation":1}`)))
		_, _ = io.Copy(io.Discard, r)
	}()
	c, err := guest.Dial(t.Context(), p.dial, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Quiesce(t.Context(), wire.QuiesceRequest{}); !errors.Is(err, guest.ErrProtocol) || !strings.Contains(err.Error(), "0.1") {
		t.Errorf("got %v", err)
	}
}
