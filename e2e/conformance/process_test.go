package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

func shell(script string) wire.StartRequest {
	return wire.StartRequest{Process: wire.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", script}}}
}

func output(stdout, stderr io.Writer) call.Output { return call.Output{Stdout: stdout, Stderr: stderr} }

// process is a stream to a process, as a client sees it.
type process struct {
	*wire.Stream
	g                   *guest
	pid                 uint32
	pty                 bool
	stdout, stderr, tty bytes.Buffer
	largest             int
	lost                int64
	end                 *wire.ProcessEnd
}

// start starts a process and takes the first message.
func (g *guest) start(req wire.StartRequest) *process {
	g.t.Helper()
	return g.begun(g.open(wire.MethodProcessStart, req))
}

func (g *guest) connect(req wire.ConnectRequest) *process {
	g.t.Helper()
	return g.begun(g.open(wire.MethodProcessConnect, req))
}

func (g *guest) begun(s *wire.Stream) *process {
	g.t.Helper()
	var e wire.ProcessEvent
	if err := s.RecvMessage(&e); err != nil {
		g.t.Fatalf("first message: %v", err)
	}
	if e.Start == nil || e.Start.PID == 0 {
		g.t.Fatalf("first message %+v, want start", e)
	}
	p := &process{Stream: s, g: g, pid: e.Start.PID, pty: e.Start.PTY}
	g.t.Cleanup(func() {
		if p.end != nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(g.t.Context()), testenv.Timeout(5*time.Second))
		defer cancel()
		_ = call.Signal(ctx, g, wire.SendSignalRequest{Process: byPID(p.pid), Signal: 9, Tree: true})
	})
	return p
}

func byPID(pid uint32) wire.ProcessSelector { return wire.ProcessSelector{PID: pid} }

// next takes one frame; false at the end of the call.
func (p *process) next() bool {
	p.g.t.Helper()
	stop := context.AfterFunc(p.g.ctx, func() { _ = p.Close() })
	defer stop()
	kind, b, err := p.Recv()
	if errors.Is(err, io.EOF) {
		return false
	}
	if err != nil {
		p.g.t.Fatalf("process %d: %v; stdout %q stderr %q terminal %q", p.pid, err, tail(&p.stdout), tail(&p.stderr), tail(&p.tty))
	}
	p.largest = max(p.largest, len(b))
	switch kind {
	case wire.KindStdout:
		p.stdout.Write(b)
	case wire.KindStderr:
		p.stderr.Write(b)
	case wire.KindPTY:
		p.tty.Write(b)
	case wire.KindMessage:
		var e wire.ProcessEvent
		if err := json.Unmarshal(b, &e); err != nil {
			p.g.t.Fatal(err)
		}
		p.lost += e.Lost
		if e.End != nil {
			p.end = e.End
		}
	default:
		p.g.t.Fatalf("frame %q", byte(kind))
	}
	return true
}

func tail(b *bytes.Buffer) string {
	text := b.Bytes()
	return string(text[max(0, len(text)-200):])
}

// wait reads to the end of the call.
func (p *process) wait() *process {
	p.g.t.Helper()
	for p.next() {
	}
	return p
}

// until reads until the output, of whatever kind, has a text.
func (p *process) until(text string) *process {
	p.g.t.Helper()
	for !strings.Contains(p.stdout.String()+p.stderr.String()+p.tty.String(), text) {
		if !p.next() {
			p.g.t.Fatalf("the end without %q: stdout %q stderr %q terminal %q", text, &p.stdout, &p.stderr, &p.tty)
		}
	}
	return p
}

func (p *process) send(kind wire.Kind, text string) {
	p.g.t.Helper()
	if err := p.Send(kind, []byte(text)); err != nil {
		p.g.t.Fatal(err)
	}
}

// refused is what a call that must be refused says.
func (g *guest) refused(method string, req any) *wire.Error {
	g.t.Helper()
	s := g.open(method, req)
	stop := context.AfterFunc(g.ctx, func() { _ = s.Close() })
	defer stop()
	kind, b, err := s.Recv()
	e, ok := errors.AsType[*wire.Error](err)
	if !ok {
		g.t.Fatalf("%s %+v: not refused: %q %q %v", method, req, byte(kind), b, err)
	}
	return e
}

func (g *guest) wantRefused(want, method string, req any) {
	g.t.Helper()
	if e := g.refused(method, req); e.Code != want {
		g.t.Errorf("%s %s: %s; want %s", method, e.Code, e.Message, want)
	}
}

// want compares.
func want[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// eventually polls for what happens in the guest without an event.
func (g *guest) eventually(what string, cond func() bool) {
	g.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-g.ctx.Done():
			g.t.Fatalf("it never came to be that %s", what)
		}
	}
}

func (g *guest) alive(pid string) bool {
	g.t.Helper()
	return g.sh("test -d /proc/"+strings.TrimSpace(pid)+" && ! grep -q '^State:.Z' /proc/"+strings.TrimSpace(pid)+"/status && echo yes || true") != ""
}

// kase is one line of the protocol.
type kase struct {
	section string // of e2b-protocol.md
	name    string
	run     func(t *testing.T, g *guest)
}

func runCases(t *testing.T, cases []kase) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.section+"/"+c.name, func(t *testing.T) { c.run(t, newGuest(t)) })
	}
}

func (g *guest) wantEnd(script string, want wire.ProcessEnd) {
	g.t.Helper()
	if end := g.start(shell(script)).wait().end; end == nil || *end != want {
		g.t.Errorf("%s: %+v, want %+v", script, end, want)
	}
}

// TestStart has §5's Start and its events.
func TestStart(t *testing.T) {
	runCases(t, []kase{
		{"5", "first message is start with the pid", func(t *testing.T, g *guest) {
			p := g.start(shell("echo $$")).wait()
			want(t, "pid", p.stdout.String(), fmt.Sprintln(p.pid))
		}},
		{"5", "stdout is bytes", func(t *testing.T, g *guest) {
			want(t, "stdout", g.sh(`printf 'a\000\377\n'`), "a\x00\xff\n")
		}},
		{"5", "stderr is apart", func(t *testing.T, g *guest) {
			p := g.start(shell("echo out; echo err >&2")).wait()
			want(t, "stdout", p.stdout.String(), "out\n")
			want(t, "stderr", p.stderr.String(), "err\n")
		}},
		{"5", "exit 0", func(_ *testing.T, g *guest) {
			g.wantEnd("exit 0", wire.ProcessEnd{Exited: true, Status: "exit status 0"})
		}},
		{"5", "exit 1", func(_ *testing.T, g *guest) {
			g.wantEnd("exit 1", wire.ProcessEnd{ExitCode: 1, Exited: true, Status: "exit status 1", Error: "exit status 1"})
		}},
		{"5", "exit 255", func(_ *testing.T, g *guest) {
			g.wantEnd("exit 255", wire.ProcessEnd{ExitCode: 255, Exited: true, Status: "exit status 255", Error: "exit status 255"})
		}},
		{"5", "exit code is -1 on a signal", func(_ *testing.T, g *guest) {
			g.wantEnd("kill -KILL $$", wire.ProcessEnd{ExitCode: -1, Status: "signal: killed", Error: "signal: killed", Signal: 9})
		}},
		{"5", "signal terminated", func(_ *testing.T, g *guest) {
			g.wantEnd("kill -TERM $$", wire.ProcessEnd{ExitCode: -1, Status: "signal: terminated", Error: "signal: terminated", Signal: 15})
		}},
		{"5", "signal quit", func(_ *testing.T, g *guest) {
			g.wantEnd("ulimit -c 0; exec sh -c 'kill -QUIT $$'", wire.ProcessEnd{ExitCode: -1, Status: "signal: quit", Error: "signal: quit", Signal: 3})
		}},
		{"5", "nothing follows the end", func(t *testing.T, g *guest) {
			p := g.start(shell("echo x"))
			for p.end == nil && p.next() {
			}
			if p.end == nil || p.next() {
				t.Errorf("end %+v, and more", p.end)
			}
		}},
		{"5", "chunks of pipes are at most 32 KiB", func(t *testing.T, g *guest) {
			p := g.start(shell("head -c 1000000 /dev/zero")).wait()
			want(t, "bytes", p.stdout.Len(), 1000000)
			if p.largest > 32<<10 {
				t.Errorf("a chunk of %d", p.largest)
			}
		}},
		{"5", "chunks of terminals are at most 16 KiB", func(t *testing.T, g *guest) {
			req := shell("stty -opost; head -c 200000 /dev/zero")
			req.PTY = &wire.PTY{}
			p := g.start(req).wait()
			want(t, "bytes", p.tty.Len(), 200000)
			if p.largest > 16<<10 {
				t.Errorf("a chunk of %d", p.largest)
			}
		}},
		{"5", "all output comes before the end", func(t *testing.T, g *guest) {
			p := g.start(shell("seq 1 20000 | tail -n 1; echo last >&2")).wait()
			want(t, "stdout", p.stdout.String(), "20000\n")
			want(t, "stderr", p.stderr.String(), "last\n")
		}},
		{"5", "stdin is a pipe by default", func(t *testing.T, g *guest) {
			p := g.start(shell("read x; echo $x; readlink /proc/$$/fd/0"))
			p.send(wire.KindStdin, "in\n")
			if got := p.wait().stdout.String(); !strings.HasPrefix(got, "in\npipe:") {
				t.Errorf("%q", got)
			}
		}},
		{"5", "stdin false is /dev/null", func(t *testing.T, g *guest) {
			req := shell("cat; readlink /proc/self/fd/0")
			req.Stdin = new(false)
			want(t, "stdout", g.start(req).wait().stdout.String(), "/dev/null\n")
		}},
		{"5", "half-close ends stdin", func(t *testing.T, g *guest) {
			p := g.start(shell("cat; echo end"))
			p.send(wire.KindStdin, "x\n")
			if err := p.HalfClose(); err != nil {
				t.Fatal(err)
			}
			want(t, "stdout", p.wait().stdout.String(), "x\nend\n")
		}},
		{"5", "a client that leaves does not kill", func(_ *testing.T, g *guest) {
			p := g.start(shell("echo ready; read x; exit 4")).until("ready")
			_ = p.Close()
			q := g.connect(wire.ConnectRequest{Process: byPID(p.pid)})
			q.send(wire.KindStdin, "\n")
			want(g.t, "exit code", q.wait().end.ExitCode, 4)
			p.end = q.end
		}},
		{"5", "the time limit kills, and says so", func(t *testing.T, g *guest) {
			req := shell("sleep 100")
			req.TimeoutMS = 200
			end := g.start(req).wait().end
			if !end.TimedOut || end.Signal != 9 || end.ExitCode != -1 || end.Exited || !strings.Contains(end.Error, "time limit") {
				t.Errorf("%+v", end)
			}
		}},
		{"5", "the time limit kills the group", func(_ *testing.T, g *guest) {
			req := shell("sleep 100 & echo $!; wait")
			req.TimeoutMS = 300
			p := g.start(req).wait()
			g.eventually("the child ends", func() bool { return !g.alive(p.stdout.String()) })
		}},
		{"5", "a kill is no time limit", func(t *testing.T, g *guest) {
			req := shell("kill -KILL $$")
			req.TimeoutMS = 60_000
			want(t, "timed out", g.start(req).wait().end.TimedOut, false)
		}},
		{"5", "time limit 0 is none", func(t *testing.T, g *guest) {
			req := shell("sleep 0.3; echo done")
			want(t, "stdout", g.start(req).wait().stdout.String(), "done\n")
		}},
		{"5", "a negative time limit", func(_ *testing.T, g *guest) {
			req := shell("true")
			req.TimeoutMS = -1
			g.wantRefused(wire.CodeInvalid, wire.MethodProcessStart, req)
		}},
		{"5", "a process leads a session and a group", func(t *testing.T, g *guest) {
			f := strings.Fields(g.sh("cut -d' ' -f1,5,6 /proc/$$/stat"))
			if len(f) != 3 || f[0] != f[1] || f[0] != f[2] {
				t.Errorf("pid, group, session: %v", f)
			}
		}},
		{"5", "no signal is ignored or blocked", func(t *testing.T, g *guest) {
			p := g.start(wire.StartRequest{Process: wire.ProcessConfig{Cmd: "grep", Args: []string{"-E", "^Sig(Ign|Blk):", "/proc/self/status"}}}).wait()
			want(t, "signals", p.stdout.String(), "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n")
		}},
		{"5", "no descriptor is inherited", func(t *testing.T, g *guest) {
			p := g.start(wire.StartRequest{Process: wire.ProcessConfig{Cmd: "ls", Args: []string{"/proc/self/fd"}}}).wait()
			want(t, "descriptors", p.stdout.String(), "0\n1\n2\n3\n")
		}},
		{"5", "the umask is 022", func(t *testing.T, g *guest) { want(t, "umask", g.sh("umask"), "0022\n") }},
		{"5", "a descendant that keeps the output open does not delay the end", func(t *testing.T, g *guest) {
			begin := time.Now()
			p := g.start(shell("sleep 60 & echo $!")).wait()
			if d := time.Since(begin); d > testenv.Timeout(3*time.Second) {
				t.Errorf("it took %s", d)
			}
			want(t, "the descendant lives", g.alive(p.stdout.String()), true)
			g.sh("kill " + p.stdout.String())
		}},
		{"9", "commands.run", func(t *testing.T, g *guest) {
			req := wire.StartRequest{Process: wire.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", "echo hi"}}, Stdin: new(false), TimeoutMS: 60000}
			want(t, "stdout", g.start(req).wait().stdout.String(), "hi\n")
		}},
		{"9", "commands.run with stdin, envs and cwd", func(t *testing.T, g *guest) {
			req := wire.StartRequest{Process: wire.ProcessConfig{
				Cmd: "/bin/bash", Args: []string{"-l", "-c", "echo $A; pwd"}, Envs: map[string]string{"A": "1"}, Cwd: new("/tmp"),
			}, Stdin: new(true), User: "root"}
			want(t, "stdout", g.start(req).wait().stdout.String(), "1\n/tmp\n")
		}},
		{"10", "an unknown method", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeUnimplemented, "process.NoSuch", struct{}{})
		}},
		{"10", "unknown fields are accepted", func(t *testing.T, g *guest) {
			s := g.open(wire.MethodProcessStart, map[string]any{"process": map[string]any{"cmd": "true", "new": 1}, "newer": true})
			want(t, "exit code", g.begun(s).wait().end.ExitCode, 0)
		}},
		{"10", "a request that is no object", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeInvalid, wire.MethodProcessStart, []int{1})
		}},
	})
}

// TestWhat has the command, and what is wrong with it.
func TestWhat(t *testing.T) {
	start := func(cmd string, args ...string) wire.StartRequest {
		return wire.StartRequest{Process: wire.ProcessConfig{Cmd: cmd, Args: args}}
	}
	refused := func(req wire.StartRequest) func(*testing.T, *guest) {
		return func(_ *testing.T, g *guest) { g.wantRefused(wire.CodeInvalid, wire.MethodProcessStart, req) }
	}
	runCases(t, []kase{
		{"5", "an empty command", refused(start(""))},
		{"5", "a command that is not in PATH", refused(start("no-such-command"))},
		{"5", "a path that does not exist", refused(start("/no/such"))},
		{"5", "a directory", refused(start("/tmp"))},
		{"5", "NUL in an argument", refused(start("echo", "a\x00b"))},
		{"5", "arguments that are too large", refused(start("true", strings.Repeat("x", 3<<20)))},
		{"5", "a file that is not executable", func(_ *testing.T, g *guest) {
			dir := g.dir()
			g.sh("echo > " + dir + "/plain")
			g.wantRefused(wire.CodeInvalid, wire.MethodProcessStart, start(dir+"/plain"))
		}},
		{"5", "a script whose interpreter is missing", func(_ *testing.T, g *guest) {
			dir := g.dir()
			g.sh("printf '#!/no/such\\n' > " + dir + "/x; chmod +x " + dir + "/x")
			g.wantRefused(wire.CodeInvalid, wire.MethodProcessStart, start(dir+"/x"))
		}},
		{"5", "a file of no format", func(_ *testing.T, g *guest) {
			dir := g.dir()
			g.sh("printf '\\001\\002' > " + dir + "/x; chmod +x " + dir + "/x")
			g.wantRefused(wire.CodeInvalid, wire.MethodProcessStart, start(dir+"/x"))
		}},
		{"5", "PATH of the request finds the command", func(t *testing.T, g *guest) {
			dir := g.dir()
			g.sh("printf '#!/bin/sh\\necho mine\\n' > " + dir + "/mine; chmod +x " + dir + "/mine")
			req := start("mine")
			req.Process.Envs = map[string]string{"PATH": dir + ":/usr/bin:/bin"}
			want(t, "stdout", g.start(req).wait().stdout.String(), "mine\n")
		}},
		{"5", "a relative path is below cwd", func(t *testing.T, g *guest) {
			dir := g.dir()
			g.sh("mkdir " + dir + "/sub; printf '#!/bin/sh\\npwd\\n' > " + dir + "/sub/x; chmod +x " + dir + "/sub/x")
			req := start("sub/x")
			req.Process.Cwd = &dir
			want(t, "stdout", g.start(req).wait().stdout.String(), dir+"\n")
		}},
		{"5", "arguments are kept as they are", func(t *testing.T, g *guest) {
			want(t, "stdout", g.start(start("printf", "%s|", "a b", "", "*", "ü", "\xff")).wait().stdout.String(), "a b||*|ü|�|")
		}},
		{"5", "the first argument is the command as given", func(t *testing.T, g *guest) {
			p := g.start(start("sh", "-c", "tr '\\0' ' ' < /proc/$$/cmdline")).wait()
			want(t, "argv", p.stdout.String(), "sh -c tr '\\0' ' ' < /proc/$$/cmdline ")
		}},
		{"5", "refusals say what to do", func(t *testing.T, g *guest) {
			if e := g.refused(wire.MethodProcessStart, start("no-such-command")); !strings.Contains(e.Message, "no-such-command") || !strings.Contains(e.Message, "PATH") {
				t.Error(e.Message)
			}
		}},
	})
}

// TestWhere has environment, directory and user.
func TestWhere(t *testing.T) {
	inDir := func(dir string) wire.StartRequest {
		req := shell("pwd")
		req.Process.Cwd = &dir
		return req
	}
	as := func(user, script string) wire.StartRequest {
		req := shell(script)
		req.User = user
		return req
	}
	// An account with two more groups, in files that have been edited by hand.
	account := func(g *guest) {
		g.sh(`grep -q ^conform: /etc/passwd || {
			echo 'conform:x:4100:4101:,,,:/home/conform:/bin/sh' >> /etc/passwd
			printf 'conform:x:4101:\nextra:x:4102:other,conform\nmore:x:4103:conform\n' >> /etc/group
			mkdir -p /home/conform; chown 4100:4101 /home/conform; }`)
	}
	env := wire.StartRequest{Process: wire.ProcessConfig{Cmd: "env"}}
	lines := func(g *guest, req wire.StartRequest) []string {
		return strings.Split(strings.TrimSpace(g.start(req).wait().stdout.String()), "\n")
	}
	runCases(t, []kase{
		{"5", "env begins with PATH, HOME, USER, LOGNAME", func(t *testing.T, g *guest) {
			got := lines(g, env)
			var names []string
			for _, line := range got[:min(4, len(got))] {
				name, _, _ := strings.Cut(line, "=")
				names = append(names, name)
			}
			if !slices.Equal(names, []string{"PATH", "HOME", "USER", "LOGNAME"}) {
				t.Errorf("%v", got)
			}
		}},
		{"5", "env has nothing of the agent's", func(t *testing.T, g *guest) {
			for _, line := range lines(g, env) {
				if strings.HasPrefix(line, "GODEBUG=") || strings.HasPrefix(line, "forkd.") {
					t.Error(line)
				}
			}
		}},
		{"5", "the sandbox's env", func(t *testing.T, g *guest) {
			want(t, "value", g.sh("echo $CONFORMANCE_SANDBOX"), "sandbox\n")
		}},
		{"5", "the request's env goes before the sandbox's", func(t *testing.T, g *guest) {
			req := shell("echo $CONFORMANCE_LAYER $CONFORMANCE_SANDBOX")
			req.Process.Envs = map[string]string{"CONFORMANCE_LAYER": "request"}
			want(t, "values", g.start(req).wait().stdout.String(), "request sandbox\n")
		}},
		{"5", "the request's env goes before HOME and USER", func(t *testing.T, g *guest) {
			req := shell("echo $HOME $USER")
			req.Process.Envs = map[string]string{"HOME": "/elsewhere", "USER": "else"}
			want(t, "values", g.start(req).wait().stdout.String(), "/elsewhere else\n")
		}},
		{"5", "an env value may have anything but NUL", func(t *testing.T, g *guest) {
			req := shell(`printf %s "$A"`)
			req.Process.Envs = map[string]string{"A": "a=b\nc d"}
			want(t, "value", g.start(req).wait().stdout.String(), "a=b\nc d")
		}},
		{"5", "an env name with =", func(_ *testing.T, g *guest) {
			req := shell("true")
			req.Process.Envs = map[string]string{"A=B": "c"}
			g.wantRefused(wire.CodeInvalid, wire.MethodProcessStart, req)
		}},
		{"5", "an env value with NUL", func(_ *testing.T, g *guest) {
			req := shell("true")
			req.Process.Envs = map[string]string{"A": "b\x00"}
			g.wantRefused(wire.CodeInvalid, wire.MethodProcessStart, req)
		}},
		{"5", "cwd", func(t *testing.T, g *guest) {
			want(t, "pwd", g.start(inDir("/usr/bin")).wait().stdout.String(), "/usr/bin\n")
		}},
		{"5", "cwd that is missing", func(t *testing.T, g *guest) {
			e := g.refused(wire.MethodProcessStart, inDir("/no/such"))
			if e.Code != wire.CodeInvalid || !strings.Contains(e.Message, "cwd '/no/such' does not exist") {
				t.Errorf("%s: %s", e.Code, e.Message)
			}
		}},
		{"5", "cwd that is a file", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeInvalid, wire.MethodProcessStart, inDir("/etc/passwd"))
		}},
		{"5", "cwd ~ is the home", func(t *testing.T, g *guest) { want(t, "pwd", g.start(inDir("~")).wait().stdout.String(), "/root\n") }},
		{"5", "cwd that is relative is below the home", func(t *testing.T, g *guest) {
			g.sh("mkdir -p /root/conform-rel")
			want(t, "pwd", g.start(inDir("conform-rel")).wait().stdout.String(), "/root/conform-rel\n")
		}},
		{"5", "cwd by default is the home", func(t *testing.T, g *guest) { want(t, "pwd", g.sh("pwd"), "/root\n") }},
		{"5", "cwd by default of a user without a home", func(t *testing.T, g *guest) {
			want(t, "pwd", g.start(as("nobody", "pwd")).wait().stdout.String(), "/\n")
		}},
		{"5", "user by name, with groups", func(t *testing.T, g *guest) {
			account(g)
			want(t, "ids", g.start(as("conform", "id -u; id -g; id -G")).wait().stdout.String(), "4100\n4101\n4101 4102 4103\n")
		}},
		{"5", "user by number, with groups", func(t *testing.T, g *guest) {
			account(g)
			want(t, "ids", g.start(as("4100", "id -un; id -G")).wait().stdout.String(), "conform\n4101 4102 4103\n")
		}},
		{"5", "user's HOME, USER, LOGNAME and cwd", func(t *testing.T, g *guest) {
			account(g)
			p := g.start(as("conform", "echo $HOME-$USER-$LOGNAME; pwd")).wait()
			want(t, "names", p.stdout.String(), "/home/conform-conform-conform\n/home/conform\n")
		}},
		{"5", "user with a group", func(t *testing.T, g *guest) {
			account(g)
			want(t, "ids", g.start(as("conform:extra", "id -u; id -G")).wait().stdout.String(), "4100\n4102\n")
		}},
		{"5", "user by a number that has no account", func(t *testing.T, g *guest) {
			want(t, "ids", g.start(as("54321", "id -u; id -g; id -G; echo $HOME")).wait().stdout.String(), "54321\n0\n0\n/\n")
		}},
		{"5", "user that does not exist", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeUnknownUser, wire.MethodProcessStart, as("nosuchuser", "true"))
		}},
		{"5", "group that does not exist", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeUnknownUser, wire.MethodProcessStart, as("root:nosuchgroup", "true"))
		}},
		{"5", "a user's process can open its own output again", func(t *testing.T, g *guest) {
			want(t, "stdout", g.start(as("nobody", "echo x > /dev/stdout")).wait().stdout.String(), "x\n")
		}},
		{"5", "a user has no privileges", func(t *testing.T, g *guest) {
			p := g.start(as("nobody", "grep CapEff /proc/self/status; cat /etc/shadow")).wait()
			want(t, "capabilities", p.stdout.String(), "CapEff:\t0000000000000000\n")
			if p.end.ExitCode == 0 {
				t.Error("read /etc/shadow")
			}
		}},
		{"5", "a directory that the user may not enter", func(_ *testing.T, g *guest) {
			dir := g.dir()
			g.sh("mkdir -m 700 " + dir + "/private")
			req := as("nobody", "pwd")
			req.Process.Cwd = new(dir + "/private")
			g.wantRefused(wire.CodeInvalid, wire.MethodProcessStart, req)
		}},
	})
}

// TestConnect has §5's Connect and List, and what is kept for those who come late.
func TestConnect(t *testing.T) {
	selected := func(pid uint32) wire.ConnectRequest { return wire.ConnectRequest{Process: byPID(pid)} }
	tagged := func(tag, script string) wire.StartRequest {
		req := shell(script)
		req.Tag = &tag
		return req
	}
	launch := func(g *guest, req wire.StartRequest) uint32 {
		g.t.Helper()
		start, err := call.Launch(g.ctx, g, req)
		if err != nil {
			g.t.Fatal(err)
		}
		g.t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(g.t.Context()), testenv.Timeout(5*time.Second))
			defer cancel()
			_ = call.Signal(ctx, g, wire.SendSignalRequest{Process: byPID(start.PID), Signal: 9, Tree: true})
		})
		return start.PID
	}
	listed := func(g *guest, pid uint32) *wire.ProcessInfo {
		g.t.Helper()
		list, err := call.AllProcesses(g.ctx, g)
		if err != nil {
			g.t.Fatal(err)
		}
		for _, p := range list {
			if p.PID == pid {
				return &p
			}
		}
		return nil
	}
	ended := func(g *guest, pid uint32) {
		g.t.Helper()
		g.eventually("it ends", func() bool { p := listed(g, pid); return p == nil || p.End != nil })
	}
	runCases(t, []kase{
		{"5", "connect begins with start", func(t *testing.T, g *guest) {
			p := g.start(shell("read x"))
			want(t, "pid", g.connect(selected(p.pid)).pid, p.pid)
		}},
		{"5", "connect to a missing pid", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeNotFound, wire.MethodProcessConnect, selected(4_000_000))
		}},
		{"5", "connect to a pid that was not started here", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeNotFound, wire.MethodProcessConnect, selected(1))
		}},
		{"5", "connect to a missing tag", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeNotFound, wire.MethodProcessConnect, wire.ConnectRequest{Process: wire.ProcessSelector{Tag: "no-such-tag"}})
		}},
		{"5", "connect without a selector", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeUnimplemented, wire.MethodProcessConnect, wire.ConnectRequest{})
		}},
		{"5", "connect by tag", func(t *testing.T, g *guest) {
			p := g.start(tagged("by-tag", "read x"))
			want(t, "pid", g.connect(wire.ConnectRequest{Process: wire.ProcessSelector{Tag: "by-tag"}}).pid, p.pid)
		}},
		{"5", "of one tag the newest that runs is meant", func(t *testing.T, g *guest) {
			first := g.start(tagged("twice", "read x; exit 1"))
			second := g.start(tagged("twice", "read x; exit 2"))
			sel := wire.ConnectRequest{Process: wire.ProcessSelector{Tag: "twice"}}
			want(t, "pid of two", g.connect(sel).pid, second.pid)
			second.send(wire.KindStdin, "\n")
			second.wait()
			want(t, "pid of one", g.connect(sel).pid, first.pid)
			first.send(wire.KindStdin, "\n")
			first.wait()
			want(t, "pid of none", g.connect(sel).pid, second.pid)
		}},
		{"5", "connect gets what comes", func(t *testing.T, g *guest) {
			p := g.start(shell("echo before; read x; echo after; exit 3")).until("before")
			q := g.connect(selected(p.pid))
			p.send(wire.KindStdin, "\n")
			q.wait()
			want(t, "stdout", q.stdout.String(), "after\n")
			want(t, "exit code", q.end.ExitCode, 3)
			want(t, "the first reader's stdout", p.wait().stdout.String(), "before\nafter\n")
		}},
		{"5", "connect gives input", func(t *testing.T, g *guest) {
			p := g.start(shell("read x; echo got $x"))
			g.connect(selected(p.pid)).send(wire.KindStdin, "it\n")
			want(t, "stdout", p.wait().stdout.String(), "got it\n")
		}},
		{"5", "five readers get the same", func(t *testing.T, g *guest) {
			p := g.start(shell("read x; seq 1 20000"))
			var all []*process
			for range 5 {
				all = append(all, g.connect(selected(p.pid)))
			}
			p.send(wire.KindStdin, "\n")
			done := make(chan string)
			for _, q := range all {
				go func() { done <- drained(q) }()
			}
			whole := p.wait().stdout.String()
			for range all {
				if got := <-done; got != whole {
					t.Errorf("%d bytes, want %d", len(got), len(whole))
				}
			}
		}},
		{"5", "an exit is retained", func(t *testing.T, g *guest) {
			p := g.start(tagged("retained", "echo x; exit 6")).wait()
			q := g.connect(selected(p.pid)).wait()
			want(t, "exit code", q.end.ExitCode, 6)
			want(t, "stdout", q.stdout.String(), "")
			r := g.connect(wire.ConnectRequest{Process: wire.ProcessSelector{Tag: "retained"}}).wait()
			want(t, "exit code by tag", r.end.ExitCode, 6)
		}},
		{"5", "what nobody was sent is kept, with the exit", func(t *testing.T, g *guest) {
			pid := launch(g, shell("echo out; echo err >&2; exit 8"))
			ended(g, pid)
			p := g.connect(selected(pid)).wait()
			want(t, "stdout", p.stdout.String(), "out\n")
			want(t, "stderr", p.stderr.String(), "err\n")
			want(t, "exit code", p.end.ExitCode, 8)
		}},
		{"5", "the newest 256 KiB are kept, and the process goes on", func(t *testing.T, g *guest) {
			pid := launch(g, shell("seq 1 200000"))
			ended(g, pid)
			p := g.connect(selected(pid)).wait()
			if n := p.stdout.Len(); n > 256<<10 || n < 200<<10 || !strings.HasSuffix(p.stdout.String(), "\n199999\n200000\n") {
				t.Errorf("%d bytes, the last %q", n, tail(&p.stdout))
			}
		}},
		{"ours", "replay begins with what others were sent", func(t *testing.T, g *guest) {
			p := g.start(shell("echo before; read x; echo after")).until("before")
			req := selected(p.pid)
			req.Replay = true
			q := g.connect(req)
			p.send(wire.KindStdin, "\n")
			want(t, "stdout", q.wait().stdout.String(), "before\nafter\n")
		}},
		{"ours", "replay after the end", func(t *testing.T, g *guest) {
			p := g.start(shell("echo x; exit 6")).wait()
			req := selected(p.pid)
			req.Replay = true
			q := g.connect(req).wait()
			want(t, "stdout", q.stdout.String(), "x\n")
			want(t, "exit code", q.end.ExitCode, 6)
		}},
		{"ours", "who observes takes nothing", func(t *testing.T, g *guest) {
			pid := launch(g, shell("echo kept; sleep 60"))
			look := wire.ConnectRequest{Process: byPID(pid), Replay: true, Observe: true}
			want(t, "observed", g.connect(look).until("kept\n").stdout.String(), "kept\n")
			want(t, "attached", g.connect(selected(pid)).until("kept\n").stdout.String(), "kept\n")
		}},
		{"ours", "who observes does not hold the process back", func(t *testing.T, g *guest) {
			pid := launch(g, shell("read x < /dev/null; sleep 0.5; head -c 8000000 /dev/zero; exit 5"))
			q := g.connect(wire.ConnectRequest{Process: byPID(pid), Observe: true}) // and does not read
			ended(g, pid)
			q.wait()
			if q.end.ExitCode != 5 || q.lost == 0 || q.lost+int64(q.stdout.Len()) != 8000000 {
				t.Errorf("end %+v, %d bytes, %d lost", q.end, q.stdout.Len(), q.lost)
			}
		}},
		{"ours", "no wait ends with what there is", func(t *testing.T, g *guest) {
			pid := launch(g, shell("echo there; sleep 60"))
			g.eventually("it has printed", func() bool { return listed(g, pid).Output > 0 })
			p := g.connect(wire.ConnectRequest{Process: byPID(pid), Replay: true, Observe: true, NoWait: true}).wait()
			want(t, "stdout", p.stdout.String(), "there\n")
			want(t, "ended", p.end == nil, true)
			p.end = &wire.ProcessEnd{} // it is launch's to end
		}},
		{"5", "an attached reader holds the process back, and blocks no other", func(t *testing.T, g *guest) {
			p := g.start(shell("head -c 8000000 /dev/zero; echo end")) // not read
			g.eventually("it is held back", func() bool {
				before := listed(g, p.pid).Output
				time.Sleep(100 * time.Millisecond) //nolint:forbidigo // that nothing happens has no event
				return before > 0 && listed(g, p.pid).Output == before
			})
			if out := listed(g, p.pid).Output; out > 2<<20 {
				t.Errorf("%d bytes were taken", out)
			}
			q := g.connect(wire.ConnectRequest{Process: byPID(p.pid), Observe: true, NoWait: true})
			q.wait()
			q.end = &wire.ProcessEnd{}
			want(t, "bytes", p.wait().stdout.Len(), 8000004)
		}},
		{"5", "a reader that left holds nothing back", func(t *testing.T, g *guest) {
			p := g.start(shell("head -c 8000000 /dev/zero; exit 9"))
			_ = p.Close()
			ended(g, p.pid)
			q := g.connect(selected(p.pid)).wait()
			want(t, "exit code", q.end.ExitCode, 9)
			p.end = q.end
		}},
		{"5", "list has config, pid and tag", func(t *testing.T, g *guest) {
			req := tagged("listed", "read x")
			req.Process.Envs = map[string]string{"A": "1"}
			req.Process.Cwd = new("/tmp")
			p := g.start(req)
			var list wire.ProcessList
			if err := g.unary(wire.MethodProcessList, struct{}{}, &list); err != nil {
				t.Fatal(err)
			}
			i := slices.IndexFunc(list.Processes, func(i wire.ProcessInfo) bool { return i.PID == p.pid })
			if i < 0 {
				t.Fatalf("not in %+v", list)
			}
			got := list.Processes[i]
			c := got.Config
			if c.Cmd != "/bin/bash" || !slices.Equal(c.Args, []string{"-c", "read x"}) || c.Envs["A"] != "1" || c.Cwd == nil || *c.Cwd != "/tmp" || got.Tag == nil || *got.Tag != "listed" {
				t.Errorf("%+v", got)
			}
		}},
		{"5", "list has what runs, and only that", func(t *testing.T, g *guest) {
			p := g.start(shell("true")).wait()
			list, err := call.Processes(g.ctx, g)
			if err != nil {
				t.Fatal(err)
			}
			for _, i := range list {
				if i.PID == p.pid || i.End != nil {
					t.Errorf("%+v", i)
				}
			}
		}},
		{"5", "list leaves out tag and cwd that were not given", func(t *testing.T, g *guest) {
			info := listed(g, launch(g, shell("sleep 60")))
			if info.Tag != nil || info.Config.Cwd != nil {
				t.Errorf("%+v", info)
			}
		}},
		{"ours", "list shows ends, users, terminals and readers", func(t *testing.T, g *guest) {
			req := shell("read x; exit 2")
			req.PTY, req.User = &wire.PTY{}, "nobody"
			p := g.start(req)
			info := listed(g, p.pid)
			if info == nil || info.User != "nobody" || !info.PTY || info.Readers != 1 || info.End != nil {
				t.Fatalf("%+v", info)
			}
			p.send(wire.KindPTY, "\n")
			p.wait()
			if info = listed(g, p.pid); info == nil || info.End == nil || info.End.ExitCode != 2 || info.Readers != 0 {
				t.Errorf("%+v", info)
			}
		}},
	})
}

// drained is the output of a process whose test runs elsewhere.
func drained(p *process) string {
	var b strings.Builder
	for {
		kind, data, err := p.Recv()
		if err != nil {
			return b.String()
		}
		if kind == wire.KindStdout {
			b.Write(data)
		}
		if kind == wire.KindMessage && bytes.Contains(data, []byte(`"end"`)) {
			p.end = &wire.ProcessEnd{}
		}
	}
}

// TestInput has §5's SendInput, StreamInput and CloseStdin.
func TestInput(t *testing.T) {
	stdin := func(pid uint32, text string) wire.SendInputRequest {
		return wire.SendInputRequest{Process: byPID(pid), Stdin: []byte(text)}
	}
	onTTY := func(script string) wire.StartRequest {
		req := shell(script)
		req.PTY = &wire.PTY{}
		return req
	}
	do := func(g *guest, method string, req any) {
		g.t.Helper()
		if err := g.unary(method, req, nil); err != nil {
			g.t.Fatal(err)
		}
	}
	runCases(t, []kase{
		{"5", "SendInput", func(t *testing.T, g *guest) {
			p := g.start(shell("read a; read b; echo $a-$b"))
			do(g, wire.MethodProcessSendInput, stdin(p.pid, "one\n"))
			do(g, wire.MethodProcessSendInput, stdin(p.pid, "two\n"))
			want(t, "stdout", p.wait().stdout.String(), "one-two\n")
		}},
		{"5", "SendInput of nothing", func(t *testing.T, g *guest) {
			p := g.start(shell("read a; echo $a"))
			do(g, wire.MethodProcessSendInput, map[string]any{"process": map[string]any{"pid": p.pid}, "stdin": ""})
			do(g, wire.MethodProcessSendInput, stdin(p.pid, "x\n"))
			want(t, "stdout", p.wait().stdout.String(), "x\n")
		}},
		{"5", "SendInput to a terminal", func(t *testing.T, g *guest) {
			p := g.start(onTTY("read a; echo got-$a"))
			do(g, wire.MethodProcessSendInput, wire.SendInputRequest{Process: byPID(p.pid), PTY: []byte("x\n")})
			if got := p.wait().tty.String(); !strings.Contains(got, "got-x\r\n") {
				t.Errorf("%q", got)
			}
		}},
		{"5", "SendInput of stdin to a terminal", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodePrecondition, wire.MethodProcessSendInput, stdin(g.start(onTTY("read x")).pid, "x"))
		}},
		{"5", "SendInput of pty to a pipe", func(_ *testing.T, g *guest) {
			req := wire.SendInputRequest{Process: byPID(g.start(shell("read x")).pid), PTY: []byte("x")}
			g.wantRefused(wire.CodePrecondition, wire.MethodProcessSendInput, req)
		}},
		{"5", "SendInput without input", func(_ *testing.T, g *guest) {
			req := wire.SendInputRequest{Process: byPID(g.start(shell("read x")).pid)}
			g.wantRefused(wire.CodeUnimplemented, wire.MethodProcessSendInput, req)
		}},
		{"5", "SendInput without stdin", func(_ *testing.T, g *guest) {
			req := shell("sleep 60")
			req.Stdin = new(false)
			g.wantRefused(wire.CodePrecondition, wire.MethodProcessSendInput, stdin(g.start(req).pid, "x"))
		}},
		{"5", "SendInput to a missing pid", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeNotFound, wire.MethodProcessSendInput, stdin(4_000_000, "x"))
		}},
		{"5", "SendInput after the end", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeNotFound, wire.MethodProcessSendInput, stdin(g.start(shell("true")).wait().pid, "x"))
		}},
		{"5", "SendInput to who closed its stdin", func(_ *testing.T, g *guest) {
			p := g.start(shell("exec <&-; echo closed; sleep 60")).until("closed")
			g.wantRefused(wire.CodePrecondition, wire.MethodProcessSendInput, stdin(p.pid, "x"))
		}},
		{"5", "StreamInput keeps the order", func(t *testing.T, g *guest) {
			p := g.start(shell("sha256sum"))
			s := g.open(wire.MethodProcessInput, wire.StreamInputRequest{Process: byPID(p.pid)})
			for i := range 2000 {
				if err := s.Send(wire.KindStdin, bytes.Repeat([]byte{byte(i)}, 1000)); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.HalfClose(); err != nil {
				t.Fatal(err)
			}
			for {
				if _, _, err := s.Recv(); err != nil {
					want(t, "end of the stream", err, io.EOF)
					break
				}
			}
			do(g, wire.MethodProcessCloseStdin, wire.CloseStdinRequest{Process: byPID(p.pid)})
			script := `python3 -c 'import hashlib;print(hashlib.sha256(b"".join(bytes([i%256])*1000 for i in range(2000))).hexdigest(), " -")'`
			want(t, "digest", p.wait().stdout.String(), g.sh(script))
		}},
		{"5", "StreamInput's end is not stdin's", func(t *testing.T, g *guest) {
			p := g.start(shell("read a; read b; echo $a-$b"))
			for _, text := range []string{"one\n", "two\n"} {
				s := g.open(wire.MethodProcessInput, wire.StreamInputRequest{Process: byPID(p.pid)})
				if err := errors.Join(s.Send(wire.KindStdin, []byte(text)), s.HalfClose()); err != nil {
					t.Fatal(err)
				}
				for {
					if _, _, err := s.Recv(); err != nil {
						want(t, "end of the stream", err, io.EOF)
						break
					}
				}
			}
			want(t, "stdout", p.wait().stdout.String(), "one-two\n")
		}},
		{"5", "StreamInput to a missing pid", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeNotFound, wire.MethodProcessInput, wire.StreamInputRequest{Process: byPID(4_000_000)})
		}},
		{"5", "StreamInput of the wrong kind", func(t *testing.T, g *guest) {
			p := g.start(shell("read x"))
			s := g.open(wire.MethodProcessInput, wire.StreamInputRequest{Process: byPID(p.pid)})
			if err := s.Send(wire.KindPTY, []byte("x")); err != nil {
				t.Fatal(err)
			}
			_, _, err := s.Recv()
			want(t, "code", code(err), wire.CodePrecondition)
		}},
		{"5", "CloseStdin", func(t *testing.T, g *guest) {
			p := g.start(shell("cat; echo end"))
			do(g, wire.MethodProcessCloseStdin, wire.CloseStdinRequest{Process: byPID(p.pid)})
			want(t, "stdout", p.wait().stdout.String(), "end\n")
		}},
		{"5", "CloseStdin twice", func(_ *testing.T, g *guest) {
			p := g.start(shell("sleep 60"))
			for range 2 {
				do(g, wire.MethodProcessCloseStdin, wire.CloseStdinRequest{Process: byPID(p.pid)})
			}
			g.wantRefused(wire.CodePrecondition, wire.MethodProcessSendInput, stdin(p.pid, "x"))
		}},
		{"5", "CloseStdin of a terminal", func(t *testing.T, g *guest) {
			e := g.refused(wire.MethodProcessCloseStdin, wire.CloseStdinRequest{Process: byPID(g.start(onTTY("read x")).pid)})
			if e.Code != wire.CodePrecondition || !strings.Contains(e.Message, "0x04") {
				t.Errorf("%s: %s", e.Code, e.Message)
			}
		}},
		{"5", "CloseStdin of a missing tag", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeNotFound, wire.MethodProcessCloseStdin, wire.CloseStdinRequest{Process: wire.ProcessSelector{Tag: "no-such"}})
		}},
	})
}

// TestSignal has §5's SendSignal.
func TestSignal(t *testing.T) {
	sig := func(pid uint32, n int) wire.SendSignalRequest {
		return wire.SendSignalRequest{Process: byPID(pid), Signal: n}
	}
	do := func(g *guest, req wire.SendSignalRequest) {
		g.t.Helper()
		if err := call.Signal(g.ctx, g, req); err != nil {
			g.t.Fatal(err)
		}
	}
	// A child in its own session beside one in the process's group, both named in the output.
	const family = `setsid sh -c 'echo apart $$; exec sleep 60' & sleep 60 & echo beside $!; wait`
	children := func(p *process) (apart, beside string) {
		p.g.t.Helper()
		f := strings.Fields(p.until("apart ").until("beside ").stdout.String())
		if len(f) != 4 {
			p.g.t.Fatalf("%q", f)
		}
		if f[0] == "apart" {
			return f[1], f[3]
		}
		return f[3], f[1]
	}
	runCases(t, []kase{
		{"5", "SIGKILL", func(t *testing.T, g *guest) {
			p := g.start(shell("trap '' TERM; echo ready; sleep 60")).until("ready")
			do(g, sig(p.pid, 9))
			want(t, "signal", p.wait().end.Signal, 9)
		}},
		{"5", "SIGTERM", func(t *testing.T, g *guest) {
			p := g.start(shell("exec sleep 60"))
			do(g, sig(p.pid, 15))
			want(t, "status", p.wait().end.Status, "signal: terminated")
		}},
		{"5", "SIGTERM can be caught", func(t *testing.T, g *guest) {
			p := g.start(shell("trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.05; done")).until("ready")
			do(g, sig(p.pid, 15))
			p.wait()
			want(t, "exit code", p.end.ExitCode, 3)
			want(t, "stdout", p.stdout.String(), "ready\ncaught\n")
		}},
		{"ours", "any signal", func(t *testing.T, g *guest) {
			p := g.start(shell("trap 'echo usr1; exit' USR1; echo ready; while :; do sleep 0.05; done")).until("ready")
			do(g, sig(p.pid, 10))
			want(t, "stdout", p.wait().stdout.String(), "ready\nusr1\n")
		}},
		{"5", "by tag", func(t *testing.T, g *guest) {
			req := shell("sleep 60")
			req.Tag = new("to-signal")
			p := g.start(req)
			do(g, wire.SendSignalRequest{Process: wire.ProcessSelector{Tag: "to-signal"}, Signal: 9})
			want(t, "signal", p.wait().end.Signal, 9)
		}},
		{"5", "SIGNAL_UNSPECIFIED", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeUnimplemented, wire.MethodProcessSendSignal, sig(g.start(shell("sleep 60")).pid, 0))
		}},
		{"5", "a signal that does not exist", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeUnimplemented, wire.MethodProcessSendSignal, sig(g.start(shell("sleep 60")).pid, 65))
		}},
		{"5", "to a missing pid", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeNotFound, wire.MethodProcessSendSignal, sig(4_000_000, 9))
		}},
		{"5", "to a pid that was not started here", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeNotFound, wire.MethodProcessSendSignal, sig(1, 9))
		}},
		{"5", "to one that has ended", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeNotFound, wire.MethodProcessSendSignal, sig(g.start(shell("true")).wait().pid, 9))
		}},
		{"5", "SIGTERM is for the process alone", func(t *testing.T, g *guest) {
			p := g.start(shell(family))
			_, beside := children(p)
			do(g, sig(p.pid, 15))
			p.wait()
			want(t, "the child lives", g.alive(beside), true)
			do(g, wire.SendSignalRequest{Process: byPID(p.pid), Signal: 9, Tree: true})
		}},
		{"ours", "SIGKILL is for the group", func(t *testing.T, g *guest) {
			p := g.start(shell(family))
			apart, beside := children(p)
			do(g, sig(p.pid, 9))
			p.wait()
			g.eventually("the child ends", func() bool { return !g.alive(beside) })
			want(t, "the one apart lives", g.alive(apart), true)
			do(g, wire.SendSignalRequest{Process: byPID(p.pid), Signal: 9, Tree: true})
		}},
		{"ours", "any signal to the group", func(_ *testing.T, g *guest) {
			p := g.start(shell(family))
			_, beside := children(p)
			do(g, wire.SendSignalRequest{Process: byPID(p.pid), Signal: 15, Group: true})
			p.wait()
			g.eventually("the child ends", func() bool { return !g.alive(beside) })
			do(g, wire.SendSignalRequest{Process: byPID(p.pid), Signal: 9, Tree: true})
		}},
		{"ours", "SIGKILL to the tree", func(_ *testing.T, g *guest) {
			p := g.start(shell(family))
			apart, beside := children(p)
			do(g, wire.SendSignalRequest{Process: byPID(p.pid), Signal: 9, Tree: true})
			p.wait()
			g.eventually("both children end", func() bool { return !g.alive(apart) && !g.alive(beside) })
		}},
		{"ours", "SIGTERM to the tree", func(_ *testing.T, g *guest) {
			p := g.start(shell(family))
			apart, beside := children(p)
			do(g, wire.SendSignalRequest{Process: byPID(p.pid), Signal: 15, Tree: true})
			p.wait()
			g.eventually("both children end", func() bool { return !g.alive(apart) && !g.alive(beside) })
		}},
		{"ours", "to the tree after the end", func(_ *testing.T, g *guest) {
			p := g.start(shell("setsid sleep 60 >/dev/null 2>&1 & echo $!")).wait()
			daemon := p.stdout.String()
			want(g.t, "the daemon lives", g.alive(daemon), true)
			do(g, wire.SendSignalRequest{Process: byPID(p.pid), Signal: 9, Tree: true})
			g.eventually("the daemon ends", func() bool { return !g.alive(daemon) })
		}},
		{"ours", "to a tree of which nothing is left", func(_ *testing.T, g *guest) {
			p := g.start(shell("true")).wait()
			g.eventually("it is gone", func() bool {
				e := g.refused(wire.MethodProcessSendSignal, wire.SendSignalRequest{Process: byPID(p.pid), Signal: 15, Tree: true})
				return e.Code == wire.CodeNotFound
			})
		}},
	})
}

// TestPTY has §5's terminals.
func TestPTY(t *testing.T) {
	on := func(script string, size wire.PTYSize) wire.StartRequest {
		req := shell(script)
		req.PTY = &wire.PTY{Size: size}
		return req
	}
	text := func(p *process) string { return strings.ReplaceAll(p.wait().tty.String(), "\r\n", "\n") }
	update := func(pid uint32, cols, rows uint32) wire.UpdateRequest {
		return wire.UpdateRequest{Process: byPID(pid), PTY: &wire.PTY{Size: wire.PTYSize{Cols: cols, Rows: rows}}}
	}
	runCases(t, []kase{
		{"5", "all three streams are the terminal", func(t *testing.T, g *guest) {
			p := g.start(on("for f in 0 1 2; do test -t $f && echo $f; done; echo err >&2", wire.PTYSize{}))
			want(t, "said to be one", p.pty, true)
			want(t, "terminal", text(p), "0\n1\n2\nerr\n")
		}},
		{"5", "size", func(t *testing.T, g *guest) {
			want(t, "size", text(g.start(on("stty size", wire.PTYSize{Cols: 100, Rows: 30}))), "30 100\n")
		}},
		{"5", "a size of 0 by 0 is 80 by 24", func(t *testing.T, g *guest) {
			want(t, "size", text(g.start(on("stty size", wire.PTYSize{}))), "24 80\n")
		}},
		{"5", "a size that is too large", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeInvalid, wire.MethodProcessStart, on("true", wire.PTYSize{Cols: 1 << 16, Rows: 1}))
		}},
		{"5", "Update resizes, and the process hears of it", func(t *testing.T, g *guest) {
			p := g.start(on("trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.05; done", wire.PTYSize{Cols: 100, Rows: 30})).until("ready")
			if err := g.unary(wire.MethodProcessUpdate, update(p.pid, 90, 20), nil); err != nil {
				t.Fatal(err)
			}
			want(t, "terminal", text(p), "ready\n20 90\n")
		}},
		{"5", "Update of a missing pid", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodeNotFound, wire.MethodProcessUpdate, update(4_000_000, 80, 24))
		}},
		{"5", "Update without a terminal", func(_ *testing.T, g *guest) {
			g.wantRefused(wire.CodePrecondition, wire.MethodProcessUpdate, update(g.start(shell("read x")).pid, 80, 24))
		}},
		{"5", "Update of nothing", func(t *testing.T, g *guest) {
			p := g.start(on("read x", wire.PTYSize{}))
			if err := g.unary(wire.MethodProcessUpdate, wire.UpdateRequest{Process: byPID(p.pid)}, nil); err != nil {
				t.Error(err)
			}
		}},
		{"5", "TERM by default", func(t *testing.T, g *guest) {
			want(t, "TERM", text(g.start(on("echo $TERM", wire.PTYSize{}))), "xterm-256color\n")
		}},
		{"5", "TERM of the request", func(t *testing.T, g *guest) {
			req := on("echo $TERM", wire.PTYSize{})
			req.Process.Envs = map[string]string{"TERM": "of-the-request"}
			want(t, "TERM", text(g.start(req)), "of-the-request\n")
		}},
		{"ours", "TERM of a terminal that the guest knows", func(t *testing.T, g *guest) {
			req := on("echo $TERM", wire.PTYSize{})
			req.PTY.Term = "screen-256color"
			want(t, "TERM", text(g.start(req)), "screen-256color\n")
		}},
		{"ours", "TERM of a terminal that the guest does not know", func(t *testing.T, g *guest) {
			req := on("echo $TERM", wire.PTYSize{})
			req.PTY.Term = "no-such-terminal"
			want(t, "TERM", text(g.start(req)), "xterm-256color\n")
		}},
		{"ours", "LANG is UTF-8", func(t *testing.T, g *guest) {
			want(t, "LANG", text(g.start(on("echo $LANG", wire.PTYSize{}))), "C.UTF-8\n")
		}},
		{"5", "it is the controlling terminal", func(t *testing.T, g *guest) {
			want(t, "terminal", text(g.start(on("echo via-tty > /dev/tty", wire.PTYSize{}))), "via-tty\n")
		}},
		{"5", "it belongs to the user", func(t *testing.T, g *guest) {
			req := on("echo x > $(tty); stat -c %U $(tty)", wire.PTYSize{})
			req.User = "nobody"
			want(t, "terminal", text(g.start(req)), "x\nnobody\n")
		}},
		{"5", "ctrl-c interrupts", func(t *testing.T, g *guest) {
			p := g.start(on("trap 'echo int; exit 5' INT; echo ready; while :; do sleep 0.05; done", wire.PTYSize{})).until("ready")
			p.send(wire.KindPTY, "\x03")
			want(t, "exit code", p.wait().end.ExitCode, 5)
		}},
		{"5", "ctrl-d ends the input", func(t *testing.T, g *guest) {
			p := g.start(on("echo ready; cat; echo end", wire.PTYSize{})).until("ready")
			p.send(wire.KindPTY, "\x04")
			if got := p.wait().tty.String(); !strings.HasSuffix(got, "end\r\n") {
				t.Errorf("%q", got)
			}
		}},
		{"5", "half-close does not end it", func(t *testing.T, g *guest) {
			p := g.start(on("read x; echo got $x", wire.PTYSize{}))
			if err := p.HalfClose(); err != nil {
				t.Fatal(err)
			}
			p.send(wire.KindPTY, "y\n")
			p.until("got y").wait()
		}},
		{"5", "whole characters are erased", func(t *testing.T, g *guest) {
			p := g.start(on("stty -echo; echo ready; read x; echo got-$x", wire.PTYSize{})).until("ready")
			p.send(wire.KindPTY, "aü\x7f\n")
			p.until("got-a\r\n").wait()
		}},
		{"5", "job control", func(_ *testing.T, g *guest) {
			req := wire.StartRequest{Process: wire.ProcessConfig{Cmd: "/bin/bash", Args: []string{"--norc", "-i"}, Envs: map[string]string{"PS1": "> "}}, PTY: &wire.PTY{}}
			p := g.start(req).until("> ")
			p.send(wire.KindPTY, "sleep 60\n")
			g.eventually("it sleeps, and has the terminal", func() bool {
				return g.sh(fmt.Sprintf("for child in $(cat /proc/%d/task/*/children); do cat /proc/$child/comm; done", p.pid)) == "sleep\n"
			})
			p.send(wire.KindPTY, "\x1a")
			p.until("Stopped")
			// For bash it is stopped until it is seen to have ended, and then neither wait nor exit does what it is told.
			p.send(wire.KindPTY, "bg; kill %1; wait; exit 3\n")
			want(g.t, "exit code", p.wait().end.ExitCode, 3)
		}},
		{"9", "pty.create", func(t *testing.T, g *guest) {
			p := g.start(wire.StartRequest{
				Process: wire.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-i", "-l"}, Envs: map[string]string{"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}},
				PTY:     &wire.PTY{Size: wire.PTYSize{Cols: 80, Rows: 24}},
			})
			p.send(wire.KindPTY, "shopt -q login_shell && echo log''in; echo $-; exit\n")
			got := p.wait().tty.String()
			if !strings.Contains(got, "login\r\n") || !strings.Contains(got, "himBHs") {
				t.Errorf("%q", got)
			}
		}},
		{"ours", "the user's shell", func(t *testing.T, g *guest) {
			req := wire.StartRequest{Shell: true, PTY: &wire.PTY{}}
			p := g.start(req)
			p.send(wire.KindPTY, "echo $0 $-; exit\n")
			if got := p.wait().tty.String(); !strings.Contains(got, "-bash himBHs") {
				t.Errorf("%q", got)
			}
		}},
		{"ours", "a shell for who has none", func(t *testing.T, g *guest) {
			p := g.start(wire.StartRequest{Shell: true, User: "nobody"}) // whose shell is nologin
			p.send(wire.KindStdin, "echo $0\n")
			if err := p.HalfClose(); err != nil {
				t.Fatal(err)
			}
			want(t, "shell", p.wait().stdout.String(), "-bash\n")
		}},
	})
}

// BenchmarkExec is the round trip of a command, as a client on this host sees it.
func BenchmarkExec(b *testing.B) {
	if suite.c == nil {
		b.Skip("run a test first, for its sandbox")
	}
	g := suite.c.Guest(suite.id)
	for b.Loop() {
		var out bytes.Buffer
		req := wire.StartRequest{Process: wire.ProcessConfig{Cmd: "/bin/true"}}
		if _, err := g.Run(b.Context(), req, nil, output(&out, &out), nil); err != nil {
			b.Fatal(err)
		}
	}
}
