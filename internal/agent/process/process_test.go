package process

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/agenttest"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

type fixture struct {
	*Manager
	handlers map[string]wire.Handler
	accounts *account.Table
}

func newFixture(t *testing.T, retain time.Duration) *fixture {
	t.Helper()
	reaper := reap.New()
	accounts := account.New("/", account.Defaults{User: strconv.Itoa(os.Getuid()), Workdir: t.TempDir()})
	m := New(Config{Reaper: reaper, Accounts: accounts, Retain: retain})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), testenv.Timeout(10*time.Second))
		defer cancel()
		if err := m.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
		reaper.Wait()
	})
	return &fixture{Manager: m, handlers: m.Handlers(), accounts: accounts}
}

func shell(script string) wire.StartRequest {
	return wire.StartRequest{Process: wire.ProcessConfig{Cmd: "sh", Args: []string{"-c", script}}}
}

// run is what a whole call brought.
type run struct {
	pid            uint32
	stdout, stderr bytes.Buffer
	pty            bytes.Buffer
	end            *wire.ProcessEnd
	largest        int
	lost           int64
	err            error
}

// start begins a call and takes the start message.
func (f *fixture) start(t *testing.T, req wire.StartRequest) (*wire.Stream, uint32) {
	t.Helper()
	s := agenttest.Call(t, f.handlers[wire.MethodProcessStart], req)
	return s, started(t, s)
}

func (f *fixture) connect(t *testing.T, pid uint32) *wire.Stream {
	t.Helper()
	s := agenttest.Call(t, f.handlers[wire.MethodProcessConnect], wire.ConnectRequest{Process: wire.ProcessSelector{PID: pid}})
	if got := started(t, s); got != pid {
		t.Fatalf("connect says pid %d, want %d", got, pid)
	}
	return s
}

func started(t *testing.T, s *wire.Stream) uint32 {
	t.Helper()
	event := wire.ProcessEvent{}
	if err := s.RecvMessage(&event); err != nil {
		t.Fatalf("start message: %v", err)
	}
	if event.Start == nil || event.Start.PID == 0 {
		t.Fatalf("the first message is %+v, want start", event)
	}
	return event.Start.PID
}

// follow reads to the end, and nothing may be lost.
func follow(t *testing.T, s *wire.Stream) *run {
	t.Helper()
	r := observe(t, s)
	if r.lost != 0 {
		t.Fatalf("%d bytes were lost", r.lost)
	}
	return r
}

// observe reads to the end.
func observe(t *testing.T, s *wire.Stream) *run {
	t.Helper()
	r := &run{}
	for {
		kind, b, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return r
		}
		if err != nil {
			r.err = err
			return r
		}
		r.largest = max(r.largest, len(b))
		switch kind {
		case wire.KindStdout:
			r.stdout.Write(b)
		case wire.KindStderr:
			r.stderr.Write(b)
		case wire.KindPTY:
			r.pty.Write(b)
		case wire.KindMessage:
			event := wire.ProcessEvent{}
			if err := json.Unmarshal(b, &event); err != nil || event.End == nil && event.Lost == 0 {
				t.Fatalf("message %s, want end (%v)", b, err)
			}
			r.end = event.End
			r.lost += event.Lost
		default:
			t.Fatalf("frame %q", byte(kind))
		}
	}
}

func (f *fixture) run(t *testing.T, req wire.StartRequest) *run {
	t.Helper()
	s, pid := f.start(t, req)
	r := follow(t, s)
	r.pid = pid
	if r.err != nil || r.end == nil {
		t.Fatalf("%v: error %v, end %v", req.Process, r.err, r.end)
	}
	return r
}

func TestExit(t *testing.T) {
	f := newFixture(t, 0)
	for _, tt := range []struct {
		script string
		want   wire.ProcessEnd
	}{
		{"exit 0", wire.ProcessEnd{Exited: true, Status: "exit status 0"}},
		{"exit 1", wire.ProcessEnd{ExitCode: 1, Exited: true, Status: "exit status 1", Error: "exit status 1"}},
		{"exit 255", wire.ProcessEnd{ExitCode: 255, Exited: true, Status: "exit status 255", Error: "exit status 255"}},
		{"kill -KILL $$", wire.ProcessEnd{ExitCode: -1, Status: "signal: killed", Error: "signal: killed", Signal: 9}},
		{"kill -TERM $$", wire.ProcessEnd{ExitCode: -1, Status: "signal: terminated", Error: "signal: terminated", Signal: 15}},
	} {
		if got := f.run(t, shell(tt.script)).end; *got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.script, *got, tt.want)
		}
	}
	if pids := f.PIDs(); len(pids) != 0 {
		t.Errorf("still running: %v", pids)
	}
}

func TestOutputAndInput(t *testing.T) {
	f := newFixture(t, 0)
	s, _ := f.start(t, shell("cat; echo done >&2"))
	for _, b := range []string{"one\n", "two\n"} {
		if err := s.Send(wire.KindStdin, []byte(b)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.HalfClose(); err != nil {
		t.Fatal(err)
	}
	r := follow(t, s)
	if r.stdout.String() != "one\ntwo\n" || r.stderr.String() != "done\n" || r.end == nil {
		t.Errorf("stdout %q stderr %q end %v error %v", &r.stdout, &r.stderr, r.end, r.err)
	}
}

func TestNoStdin(t *testing.T) {
	f := newFixture(t, 0)
	req := shell("cat; readlink /proc/self/fd/0")
	req.Stdin = new(bool)
	if got := f.run(t, req).stdout.String(); got != "/dev/null\n" {
		t.Errorf("stdin is %q", got)
	}
}

// TestBurst: nothing is lost of what a process writes before it exits, frames are bounded, and a slow reader holds it.
func TestBurst(t *testing.T) {
	f := newFixture(t, 0)
	const size = 200 << 20
	s, _ := f.start(t, shell("head -c "+strconv.Itoa(size)+" /dev/zero"))
	var got, largest int
	for {
		kind, b, err := s.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if kind == wire.KindStdout {
			got += len(b)
			largest = max(largest, len(b))
		}
	}
	if got != size || largest > pipeChunk {
		t.Errorf("got %d bytes of %d, largest frame %d", got, size, largest)
	}
}

// TestGrandchildHoldsOutput: a background descendant neither delays the end nor is killed by it.
func TestGrandchildHoldsOutput(t *testing.T) {
	f := newFixture(t, 0)
	dir := t.TempDir()
	release := filepath.Join(dir, "release")
	if err := unix.Mkfifo(release, 0o600); err != nil {
		t.Fatal(err)
	}
	survived := filepath.Join(dir, "survived")
	if err := unix.Mkfifo(survived, 0o600); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	r := f.run(t, shell("(read x < "+release+"; echo more; echo alive > "+survived+") & echo out"))
	if r.stdout.String() != "out\n" || r.end.ExitCode != 0 {
		t.Errorf("stdout %q end %+v", &r.stdout, r.end)
	}
	if d := time.Since(start); d > testenv.Timeout(2*time.Second) {
		t.Errorf("the end took %v", d)
	}
	if err := os.WriteFile(release, []byte("x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	// Its write to the abandoned output must not have ended it.
	if b, err := os.ReadFile(survived); string(b) != "alive\n" {
		t.Errorf("descendant: %q, %v", b, err)
	}
}

func TestPipelineOutputIsWhole(t *testing.T) {
	f := newFixture(t, 0)
	for range 20 {
		if got := f.run(t, shell("seq 1 20000 | tail -n 1")).stdout.String(); got != "20000\n" {
			t.Fatalf("got %q", got)
		}
	}
}

func TestDisconnectThenConnect(t *testing.T) {
	f := newFixture(t, 0)
	s, pid := f.start(t, shell("echo before; read x; echo got $x; exit 7"))
	if _, b, err := s.Recv(); err != nil || string(b) != "before\n" {
		t.Fatalf("%q %v", b, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	second := f.connect(t, pid)
	if err := second.Send(wire.KindStdin, []byte("it\n")); err != nil {
		t.Fatal(err)
	}
	r := follow(t, second)
	if r.stdout.String() != "got it\n" || r.end == nil || r.end.ExitCode != 7 {
		t.Errorf("stdout %q end %+v err %v", &r.stdout, r.end, r.err)
	}
	late := follow(t, f.connect(t, pid))
	if late.end == nil || late.end.ExitCode != 7 || late.stdout.Len() != 0 {
		t.Errorf("late: %+v", late)
	}
}

// TestUnattendedOutput: without anybody attached the process is not held back and the newest output is kept.
func TestUnattendedOutput(t *testing.T) {
	f := newFixture(t, 0)
	s, pid := f.start(t, shell("read x; seq 1 200000; echo over >&2; read x"))
	second := f.connect(t, pid)
	if err := second.Send(wire.KindStdin, []byte("go\n")); err != nil {
		t.Fatal(err)
	}
	_ = s.Close()
	_ = second.Close()
	end := agenttest.Call(t, f.handlers[wire.MethodProcessSendInput], struct{}{})
	_ = end.Close()
	// It reaches its second read only if nothing held it. Its two pipes are read independently, and what is read after
	// the next caller came is sent to it in addition: all must have been read before.
	printed := int64(len("over\n"))
	for i := 1; i <= 200000; i++ {
		printed += int64(len(strconv.Itoa(i)) + 1)
	}
	waitFor(t, func() bool {
		b, _ := os.ReadFile("/proc/" + strconv.Itoa(int(pid)) + "/syscall")
		return strings.HasPrefix(string(b), "0 0x0 ") && f.readOf(pid) == printed
	})
	third := f.connect(t, pid)
	if err := third.Send(wire.KindStdin, []byte("end\n")); err != nil {
		t.Fatal(err)
	}
	r := follow(t, third)
	if n := r.stdout.Len() + r.stderr.Len(); n != keptBytes {
		t.Errorf("kept %d bytes, want %d", n, keptBytes)
	}
	if !strings.HasSuffix(r.stdout.String(), "\n199999\n200000\n") || r.end == nil {
		t.Errorf("the newest is missing; end %v", r.end)
	}
}

// readOf is how much of a process's output was read from its pipes.
func (f *fixture) readOf(pid uint32) int64 {
	f.mu.Lock()
	p := f.procs[pid]
	f.mu.Unlock()
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	return p.out.end
}

// waitFor polls: what it waits for happens in another process and has no event.
func waitFor(t *testing.T, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	limit := time.NewTimer(testenv.Timeout(10 * time.Second))
	defer limit.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-limit.C:
			t.Fatal("it did not come to be")
		}
	}
}

func TestSeveralAttached(t *testing.T) {
	f := newFixture(t, 0)
	first, pid := f.start(t, shell("read x; echo hello"))
	second := f.connect(t, pid)
	if err := first.Send(wire.KindStdin, []byte("\n")); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*wire.Stream{first, second} {
		if r := follow(t, s); r.stdout.String() != "hello\n" || r.end == nil {
			t.Errorf("stdout %q end %v err %v", &r.stdout, r.end, r.err)
		}
	}
}

func TestRetention(t *testing.T) {
	f := newFixture(t, 50*time.Millisecond)
	r := f.run(t, shell("exit 0"))
	waitFor(t, func() bool {
		s := agenttest.Call(t, f.handlers[wire.MethodProcessConnect], wire.ConnectRequest{Process: wire.ProcessSelector{PID: r.pid}})
		_, _, err := s.Recv()
		return agenttest.Code(err) == wire.CodeNotFound
	})
}

func TestTimeLimit(t *testing.T) {
	f := newFixture(t, 0)
	req := shell("sleep 100 & sleep 100")
	req.TimeoutMS = 200
	r := f.run(t, req)
	if r.end.Signal != 9 || r.end.ExitCode != -1 || !strings.Contains(r.end.Error, "time limit of 200ms") {
		t.Errorf("%+v", r.end)
	}
}

func TestCodes(t *testing.T) {
	f := newFixture(t, 0)
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	plain := file("plain", "#!/bin/sh\n", 0o644)
	noInterpreter := file("nointerp", "#!/no/such/interpreter\n", 0o755)
	noFormat := file("noformat", "\x00\x01\x02", 0o755)
	start := func(edit func(*wire.StartRequest)) error {
		req := shell("exit 0")
		edit(&req)
		_, _, err := agenttest.Call(t, f.handlers[wire.MethodProcessStart], req).Recv()
		return err
	}
	str := func(s string) *string { return &s }
	for name, tt := range map[string]struct {
		err  error
		code string
	}{
		"empty command":   {start(func(r *wire.StartRequest) { r.Process.Cmd = "" }), wire.CodeInvalid},
		"missing command": {start(func(r *wire.StartRequest) { r.Process.Cmd = "no-such-command" }), wire.CodeInvalid},
		"missing path":    {start(func(r *wire.StartRequest) { r.Process.Cmd = "/no/such" }), wire.CodeInvalid},
		"directory":       {start(func(r *wire.StartRequest) { r.Process.Cmd = "/tmp" }), wire.CodeInvalid},
		"not executable":  {start(func(r *wire.StartRequest) { r.Process.Cmd = plain }), wire.CodeInvalid},
		"no interpreter":  {start(func(r *wire.StartRequest) { r.Process.Cmd = noInterpreter }), wire.CodeInvalid},
		"no format":       {start(func(r *wire.StartRequest) { r.Process.Cmd = noFormat }), wire.CodeInvalid},
		"NUL in argument": {start(func(r *wire.StartRequest) { r.Process.Args = []string{"a\x00b"} }), wire.CodeInvalid},
		"missing cwd":     {start(func(r *wire.StartRequest) { r.Process.Cwd = str("/no/such") }), wire.CodeInvalid},
		"file as cwd":     {start(func(r *wire.StartRequest) { r.Process.Cwd = str(plain) }), wire.CodeInvalid},
		"unknown user":    {start(func(r *wire.StartRequest) { r.User = "no-such-user" }), wire.CodeUnknownUser},
		"bad variable":    {start(func(r *wire.StartRequest) { r.Process.Envs = map[string]string{"A=B": ""} }), wire.CodeInvalid},
		"negative limit":  {start(func(r *wire.StartRequest) { r.TimeoutMS = -1 }), wire.CodeInvalid},
		"too long":        {start(func(r *wire.StartRequest) { r.Process.Args = []string{strings.Repeat("a", 4<<20)} }), wire.CodeInvalid},
		"huge terminal":   {start(func(r *wire.StartRequest) { r.PTY = &wire.PTY{Size: wire.PTYSize{Cols: 1 << 20}} }), wire.CodeInvalid},
		"no selector":     {f.unary(t, wire.MethodProcessSendSignal, wire.SendSignalRequest{Signal: 9}, nil), wire.CodeUnimplemented},
		"bad signal":      {f.unary(t, wire.MethodProcessSendSignal, wire.SendSignalRequest{Process: wire.ProcessSelector{PID: 1}, Signal: 99}, nil), wire.CodeUnimplemented},
		"foreign pid":     {f.unary(t, wire.MethodProcessSendSignal, wire.SendSignalRequest{Process: wire.ProcessSelector{PID: 1}, Signal: 9}, nil), wire.CodeNotFound},
		"unknown tag":     {f.unary(t, wire.MethodProcessCloseStdin, wire.CloseStdinRequest{Process: wire.ProcessSelector{Tag: "x"}}, nil), wire.CodeNotFound},
		"not JSON":        {f.unary(t, wire.MethodProcessSendSignal, "x", nil), wire.CodeInvalid},
	} {
		if got := agenttest.Code(tt.err); got != tt.code {
			t.Errorf("%s: %q (%v), want %s", name, got, tt.err, tt.code)
		}
	}
}

func (f *fixture) unary(t *testing.T, method string, req, out any) error {
	t.Helper()
	return agenttest.Unary(t, f.handlers[method], req, out)
}

func TestControl(t *testing.T) {
	f := newFixture(t, 0)
	req := shell("trap 'echo term; exit 3' TERM; echo ready; cat; while :; do sleep 0.05; done")
	tag := "tagged"
	req.Tag = &tag
	s, pid := f.start(t, req)
	if _, b, err := s.Recv(); err != nil || string(b) != "ready\n" {
		t.Fatalf("%q %v", b, err)
	}
	var list wire.ProcessList
	if err := f.unary(t, wire.MethodProcessList, struct{}{}, &list); err != nil {
		t.Fatal(err)
	}
	if len(list.Processes) != 1 || list.Processes[0].PID != pid || *list.Processes[0].Tag != tag || list.Processes[0].Config.Cmd != "sh" {
		t.Errorf("list: %+v", list)
	}
	sel := wire.ProcessSelector{Tag: tag}
	if err := f.unary(t, wire.MethodProcessSendInput, wire.SendInputRequest{Process: sel, Stdin: []byte("in\n")}, nil); err != nil {
		t.Error(err)
	}
	if err := f.unary(t, wire.MethodProcessSendInput, wire.SendInputRequest{Process: sel, PTY: []byte("in\n")}, nil); agenttest.Code(err) != wire.CodePrecondition {
		t.Errorf("pty input without a pty: %v", err)
	}
	if _, b, err := s.Recv(); err != nil || string(b) != "in\n" {
		t.Fatalf("%q %v", b, err)
	}
	if err := f.unary(t, wire.MethodProcessUpdate, wire.UpdateRequest{Process: sel, PTY: &wire.PTY{}}, nil); agenttest.Code(err) != wire.CodePrecondition {
		t.Errorf("resize without a pty: %v", err)
	}
	for range 2 { // the second does no harm
		if err := f.unary(t, wire.MethodProcessCloseStdin, wire.CloseStdinRequest{Process: sel}, nil); err != nil {
			t.Error(err)
		}
	}
	if err := f.unary(t, wire.MethodProcessSendInput, wire.SendInputRequest{Process: sel, Stdin: []byte("in\n")}, nil); agenttest.Code(err) != wire.CodePrecondition {
		t.Errorf("input after close: %v", err)
	}
	if err := f.unary(t, wire.MethodProcessSendSignal, wire.SendSignalRequest{Process: sel, Signal: int(unix.SIGTERM)}, nil); err != nil {
		t.Error(err)
	}
	if r := follow(t, s); r.stdout.String() != "term\n" || r.end == nil || r.end.ExitCode != 3 {
		t.Errorf("stdout %q end %+v", &r.stdout, r.end)
	}
	if err := f.unary(t, wire.MethodProcessSendSignal, wire.SendSignalRequest{Process: sel, Signal: 9}, nil); agenttest.Code(err) != wire.CodeNotFound {
		t.Errorf("signal to an ended process: %v", err)
	}
}

// TestInputBackPressure: input that the process does not read holds the caller, and its end frees the caller.
func TestInputBackPressure(t *testing.T) {
	f := newFixture(t, 0)
	s, pid := f.start(t, shell("exec sleep 100"))
	sent := make(chan error, 1)
	go func() {
		block := make([]byte, 32<<10)
		for range 1000 {
			if err := s.Send(wire.KindStdin, block); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	select {
	case err := <-sent:
		t.Fatalf("32 MB were taken by a process that reads nothing (%v)", err)
	case <-ctx.Done():
	}
	if err := f.unary(t, wire.MethodProcessSendSignal, wire.SendSignalRequest{Process: wire.ProcessSelector{PID: pid}, Signal: 9}, nil); err != nil {
		t.Fatal(err)
	}
	if r := follow(t, s); r.end == nil || r.end.Signal != 9 {
		t.Errorf("end %+v err %v", r.end, r.err)
	}
	if err := <-sent; err == nil {
		t.Error("32 MB were taken")
	}
}

func TestPTY(t *testing.T) {
	f := newFixture(t, 0)
	req := shell("tty >/dev/null && echo tty; stty size; read x; stty size; echo $TERM; echo err >&2")
	req.PTY = &wire.PTY{Size: wire.PTYSize{Cols: 100, Rows: 30}}
	s, pid := f.start(t, req)
	var got bytes.Buffer
	for !strings.Contains(got.String(), "30 100") {
		_, b, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		got.Write(b)
	}
	sel := wire.ProcessSelector{PID: pid}
	if err := f.unary(t, wire.MethodProcessUpdate, wire.UpdateRequest{Process: sel, PTY: &wire.PTY{Size: wire.PTYSize{Cols: 90, Rows: 20}}}, nil); err != nil {
		t.Fatal(err)
	}
	if err := f.unary(t, wire.MethodProcessSendInput, wire.SendInputRequest{Process: sel, Stdin: []byte("x")}, nil); agenttest.Code(err) != wire.CodePrecondition {
		t.Errorf("stdin to a terminal: %v", err)
	}
	if err := f.unary(t, wire.MethodProcessCloseStdin, wire.CloseStdinRequest{Process: sel}, nil); agenttest.Code(err) != wire.CodePrecondition {
		t.Errorf("close a terminal: %v", err)
	}
	if err := s.Send(wire.KindPTY, []byte("\n")); err != nil {
		t.Fatal(err)
	}
	r := follow(t, s)
	got.Write(r.pty.Bytes())
	text := strings.ReplaceAll(got.String(), "\r\n", "\n")
	if want := "tty\n30 100\n\n20 90\nxterm-256color\nerr\n"; text != want {
		t.Errorf("terminal %q, want %q", text, want)
	}
	if r.end == nil || r.end.ExitCode != 0 || r.largest > ptyChunk {
		t.Errorf("end %+v, largest frame %d", r.end, r.largest)
	}
}

func TestPTYOutputIsWhole(t *testing.T) {
	f := newFixture(t, 0)
	for range 10 {
		req := shell("seq 1 20000")
		req.PTY = &wire.PTY{}
		text := strings.ReplaceAll(f.run(t, req).pty.String(), "\r\n", "\n")
		if lines := strings.Split(text, "\n"); len(lines) != 20001 || lines[19999] != "20000" {
			t.Fatalf("%d lines", len(lines))
		}
	}
}

func TestPTYInterrupt(t *testing.T) {
	f := newFixture(t, 0)
	req := shell("trap 'echo int; exit 5' INT; echo ready; while :; do sleep 0.05; done")
	req.PTY = &wire.PTY{}
	s, _ := f.start(t, req)
	if _, b, err := s.Recv(); err != nil || !strings.HasPrefix(string(b), "ready") {
		t.Fatalf("%q %v", b, err)
	}
	if err := s.Send(wire.KindPTY, []byte{3}); err != nil {
		t.Fatal(err)
	}
	if r := follow(t, s); r.end == nil || r.end.ExitCode != 5 {
		t.Errorf("end %+v %q", r.end, &r.pty)
	}
}

func TestEnvironment(t *testing.T) {
	f := newFixture(t, 0)
	dir := t.TempDir()
	f.accounts.SetDefaults(account.Defaults{User: strconv.Itoa(os.Getuid()), Workdir: dir, Env: map[string]string{"A": "image", "B": "image", "C": "image"}})
	f.accounts.SetEnv(map[string]string{"B": "sandbox", "C": "sandbox"})
	req := wire.StartRequest{Process: wire.ProcessConfig{Cmd: "env", Envs: map[string]string{"C": "request", "PATH": "/usr/bin:/bin"}}}
	got := strings.Split(strings.TrimSpace(f.run(t, req).stdout.String()), "\n")
	me, err := f.accounts.User(strconv.Itoa(os.Getuid()))
	if err != nil {
		t.Skip("the user who runs the tests has no account")
	}
	want := []string{"PATH=/usr/bin:/bin", "HOME=" + me.Home, "USER=" + me.Name, "LOGNAME=" + me.Name, "A=image", "B=sandbox", "C=request"}
	if !slices.Equal(got, want) {
		t.Errorf("environment %q, want %q", got, want)
	}
	if got := f.run(t, shell("pwd")).stdout.String(); got != dir+"\n" {
		t.Errorf("default directory %q, want %q", got, dir)
	}
}

func TestAsUser(t *testing.T) {
	if os.Getuid() != 0 {
		f := newFixture(t, 0)
		req := shell("id")
		req.User = "root"
		_, _, err := agenttest.Call(t, f.handlers[wire.MethodProcessStart], req).Recv()
		if agenttest.Code(err) != wire.CodeDenied {
			t.Errorf("as root: %v", err)
		}
		return
	}
	f := newFixture(t, 0)
	req := shell("id -u; id -g; echo out > /dev/stdout; id -G")
	req.User = "65534"
	req.Process.Cwd = new(string)
	*req.Process.Cwd = "/"
	got := f.run(t, req)
	if !strings.HasPrefix(got.stdout.String(), "65534\n") || !strings.Contains(got.stdout.String(), "out\n") {
		t.Errorf("%q %q", &got.stdout, &got.stderr)
	}
	tty := shell("echo hi > /dev/tty; echo there > $(tty)")
	tty.User, tty.Process.Cwd, tty.PTY = req.User, req.Process.Cwd, &wire.PTY{}
	if got := f.run(t, tty).pty.String(); got != "hi\r\nthere\r\n" {
		t.Errorf("terminal %q", got)
	}
}
