package contexts

import (
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agent/agenttest"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// script is a conversation with a context.
type script []struct {
	code                 string
	text, stdout, stderr string // stderr: contained
	err                  string // "Name: value", contained
}

func (s script) run(t *testing.T, m *Manager, language string) {
	t.Helper()
	for _, tt := range s {
		r, out := evalRequest(t, m, &wire.EvalRequest{Language: language, Code: tt.code})
		text, err := "", ""
		if r.Text != nil {
			text = *r.Text
		}
		if r.Error != nil {
			err = r.Error.Name + ": " + r.Error.Value
		}
		if text != tt.text || out.stdout.String() != tt.stdout || !strings.Contains(out.stderr.String(), tt.stderr) || !strings.Contains(err, tt.err) || (err == "") != (tt.err == "") ||
			tt.stderr == "" && out.stderr.Len() > 0 && tt.err == "" {
			t.Errorf("%.200q: text %q stdout %.200q stderr %q error %q\nwant %q %.200q %q %q", tt.code, text, out.stdout.String(), out.stderr.String(), err, tt.text, tt.stdout, tt.stderr, tt.err)
		}
	}
}

func TestShell(t *testing.T) {
	// Where these tests run without a terminal, interrupts are ignored, and children would inherit that.
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	t.Cleanup(func() { signal.Stop(interrupts) })
	for _, name := range []string{"bash", "sh"} {
		t.Run(name, func(t *testing.T) {
			testenv.Need(t, name)
			m := newManager(t)
			if name == "sh" {
				dir := t.TempDir()
				for _, p := range []string{"sh", "cat", "ls", "sleep", "env"} {
					if err := os.Symlink("/bin/"+p, filepath.Join(dir, p)); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := m.Create(t.Context(), wire.ContextConfig{Language: "sh", Env: map[string]string{"PATH": dir}}); err != nil {
					t.Fatal(err)
				}
			}
			script{
				{code: "echo hi", stdout: "hi\n"},
				{code: "x=5; f() { echo \"f $1\"; }; cd /usr"},
				{code: "echo $x; f 'a b'; pwd", stdout: "5\nf a b\n/usr\n"},
				{code: "printf no >&2; false", stderr: "no", err: "ExitStatus: 1"},
				{code: "(exit 42)", err: "ExitStatus: 42"},
				{code: "no-such-command", stderr: "not found", err: "ExitStatus: 127"},
				{code: "if then", stderr: "yntax error", err: "ExitStatus: 2"},
				{code: "echo still", stdout: "still\n"},
				{code: "echo 'it''s' \"q\" \\\\\ncat <<E\na 'b' $x\nE", stdout: "its q \\\na 'b' 5\n"},
				{code: "read v; echo \"<$v>\"", stdout: "<>\n"},
				{code: "ls -l /proc/self/fd | cat", stdout: ""},
			}[:10].run(t, m, "shell")
			_, out := evalRequest(t, m, &wire.EvalRequest{Language: "bash", Code: "ls -l /proc/self/fd"})
			if strings.Contains(out.stdout.String(), "socket:") {
				t.Errorf("the channel is open in a child:\n%s", out.stdout.String())
			}
			r, out := evalRequest(t, m, &wire.EvalRequest{Language: "shell", Code: "echo $K; env | cat", Env: map[string]string{"K": "it's"}})
			if !strings.HasPrefix(out.stdout.String(), "it's\n") || !strings.Contains(out.stdout.String(), "K=it's\n") || r.Error != nil {
				t.Errorf("%q %+v", out.stdout.String(), r.Error)
			}
			script{{code: "echo \"<$K>\"", stdout: "<>\n"}}.run(t, m, "shell")
			// An interrupt ends the line, wherever it is.
			for _, code := range []string{"echo on; sleep 100; echo after", "echo on; while :; do :; done", "g() { echo on; sleep 100; }; g; echo after"} {
				b := startEval(t.Context(), m, &wire.EvalRequest{Language: "shell", Code: code})
				b.printed(t, "on\n")
				if err := m.Interrupt("shell"); err != nil {
					t.Fatal(err)
				}
				if r := b.wait(t); r.Error == nil || r.Error.Name != "KeyboardInterrupt" || r.ExitCode == nil || *r.ExitCode != 130 {
					t.Errorf("%s: %+v", code, r.Error)
				}
				script{{code: "echo $x", stdout: "5\n"}}.run(t, m, "shell")
			}
			r, _ = evalRequest(t, m, &wire.EvalRequest{Language: "shell", Code: "sleep 100", TimeoutMS: 100})
			if r.Error == nil || r.Error.Name != wire.ErrorTimeout {
				t.Errorf("%+v", r.Error)
			}
			script{
				{code: "echo $x; exit 3", stdout: "5\n", err: "its code called exit"},
				{code: "echo on", err: "ended earlier (exit status 3)"},
			}.run(t, m, "shell")
			info, err := m.Restart(t.Context(), "shell")
			if err != nil || info.Evals != 0 || info.Language != "shell" {
				t.Fatalf("%+v %v", info, err)
			}
			script{{code: "echo \"<$x>\"", stdout: "<>\n"}}.run(t, m, "shell")
		})
	}
}

func TestShellRenews(t *testing.T) {
	testenv.Need(t, "bash")
	m := newManager(t)
	script{{code: "RANDOM=1"}}.run(t, m, "shell")
	quiesce(t, m)
	renewed, not, err := m.Renew(t.Context(), map[string]string{"WHO": "it's me"}, func(string) error { return nil })
	if err != nil || strings.Join(renewed, " ") != "context:shell:RANDOM" || len(not) != 0 {
		t.Fatalf("%q %+v %v", renewed, not, err)
	}
	script{{code: "echo $WHO; echo $RANDOM > /dev/null; [ $RANDOM != 20814 ]", stdout: "it's me\n"}}.run(t, m, "shell")
}

func TestJavaScript(t *testing.T) {
	testenv.Need(t, "node")
	m := newManager(t)
	script{
		{code: "1 + 1", text: "2"},
		{code: "const x = 5; let y = {a: 1}; class A { b() { return x } }"},
		{code: "x + y.a + new A().b()", text: "11"},
		{code: "const x = 6, { a, c: [d] = [7] } = y; let y = 3; class A { b() { return 2 } }\n(x)", text: "6"},
		{code: "[x, a, d, y, new A().b()]", text: "[ 6, 1, 7, 3, 2 ]"},
		{code: "'a'", text: "'a'"},
		{code: "undefined"},
		{code: "null", text: "null"},
		{code: "{ a: 1, b: 'x' }", text: "{ a: 1, b: 'x' }"},
		{code: "console.log('hi', {a: 1}); console.error('no')", stdout: "hi { a: 1 }\n", stderr: "no\n"},
		{code: "await Promise.resolve(7)", text: "7"},
		{code: "const p = await Promise.resolve({ q: 8 }), r = 2\nfunction f() { return p.q }\nlet u\nf() + r", text: "10"},
		{code: "f() + p.q", text: "16"},
		{code: "const { q } = await p; const [z = await 1] = []\nq + z;", text: "9"},
		{code: "for (const i of [1, 2]) await null\nlet s = 0\nfor (let i = 0; i < 3; i++) {\n  s += await i\n}\ns", text: "3"},
		{code: "if (await true) {\n  const inner = 1\n}\ntypeof inner", text: "'undefined'"},
		{code: "import os from 'os'\nimport { join as j, sep } from 'node:path'\nimport * as fs2 from 'fs'\nj('a', sep, typeof os.cpus, typeof fs2.readFileSync)", text: "'a/function/function'"},
		{code: "const path = require('path'); path.join('a', 'b')", text: "'a/b'"},
		{code: "(await import('node:url')).URL.name", text: "'URL'"},
		{code: "const re = /[/'\"]{2}/; const t = `a${`b${1 + 1}`}c`; t.replace(/b/g, '/') + 4 / 2 / 1", text: "'a/2c2'"},
		{code: "let v = 1 // const v\n/* let w */ v", text: "1"},
		{code: "throw new TypeError('bad')", err: "TypeError: bad"},
		{code: "await Promise.reject(new Error('later'))", err: "Error: later"},
		{code: "throw 5", err: "Uncaught: 5"},
		{code: "let = = 1", err: "SyntaxError"},
		{code: "await (", err: "SyntaxError"},
		{code: "nope", err: "ReferenceError: nope is not defined"},
		{code: "process.stdout.write('a'); process.stderr.write('b'); process.stdout.write('c'); 1", text: "1", stdout: "ac", stderr: "b"},
		{code: "await new Promise(r => setTimeout(r, 10)); 'slept'", text: "'slept'"},
		{code: "setTimeout(() => console.log('late'), 1); await new Promise(r => setTimeout(r, 50))", stdout: "late\n"},
		{code: "new Promise(() => {})", text: "Promise { <pending> }"},
		{code: "export const e = 5; e", text: "5"},
		{code: "async function g() { return 3 }\nawait g()", text: "3"},
		{code: "var a1 = 1, b1 = 2; a1 + b1", text: "3"},
		{code: "'use strict'; await 1; 2", text: "2"},
		{code: "display({[Symbol.for('Jupyter.display')]: () => ({'text/html': '<b>', 'text/plain': 'b'})}); display([1])"},
		{code: "x", text: "6"},
	}.run(t, m, "javascript")
	r, out := evalRequest(t, m, &wire.EvalRequest{Language: "js", Code: "for (let i = 0; i < 20; i++) { console.log(i); console.error(i) }\ndisplay(1)\nconsole.log('z')"})
	if r.Error != nil || len(out.order) != 42 || out.order[0] != "out 0\n" || out.order[1] != "err 0\n" || out.order[39] != "err 19\n" || out.order[40] != "result 1" {
		t.Errorf("%+v %q", r, out.order)
	}
	r, _ = evalRequest(t, m, &wire.EvalRequest{Language: "js", Code: "function deep() {\n  return nothing\n}\ndeep()"})
	if r.Error == nil || !strings.Contains(r.Error.Traceback, "<eval 39>:2") || strings.Contains(r.Error.Traceback, "forkd") || strings.Contains(r.Error.Traceback, "node:") {
		t.Errorf("%+v", r.Error)
	}
	r, _ = evalRequest(t, m, &wire.EvalRequest{Language: "js", Code: "await 1\nfunction deep() {\n  return nothing\n}\ndeep()"})
	if r.Error == nil || !strings.Contains(r.Error.Traceback, "<eval 40>:3") {
		t.Errorf("%+v", r.Error)
	}
	r, _ = evalRequest(t, m, &wire.EvalRequest{Language: "js", Code: "process.env.K", Env: map[string]string{"K": "v"}})
	if value(r) != "'v'" {
		t.Error(value(r))
	}
	for _, code := range []string{"console.log('on'); while (true);", "console.log('on'); await new Promise(() => {})"} {
		b := startEval(t.Context(), m, &wire.EvalRequest{Language: "js", Code: code})
		b.printed(t, "on\n")
		time.Sleep(10 * time.Millisecond) //nolint:forbidigo // Into the loop.
		if err := m.Interrupt("javascript"); err != nil {
			t.Fatal(err)
		}
		if r := b.wait(t); r.Error == nil || r.Error.Name != "KeyboardInterrupt" {
			t.Errorf("%s: %+v", code, r)
		}
	}
	script{
		{code: "x", text: "6"},
		{code: "process.exit(4)", err: "process.exit"},
		{code: "1", err: "ended earlier (exit status 4)"},
	}.run(t, m, "javascript")
}

func TestTypeScript(t *testing.T) {
	testenv.Need(t, "node")
	m := newManager(t)
	if _, err := m.Create(t.Context(), wire.ContextConfig{Language: "ts"}); err != nil {
		t.Fatal(err)
	}
	c := m.lookup("typescript")
	_, err := m.Eval(t.Context(), &wire.EvalRequest{Language: "typescript", Code: "const x: number = 1; x"}, discard, nil)
	if !c.can(typescript) && (agenttest.Code(err) != wire.CodePrecondition || err.Error() != wire.NeedsJavaScript) {
		t.Errorf("%v", err)
	}
	r, _ := evalRequest(t, m, &wire.EvalRequest{Context: "typescript", Code: "const x = 1;\nx;\n", Compiled: true})
	if value(r) != "1" {
		t.Error(value(r))
	}
}

func TestJavaScriptRenews(t *testing.T) {
	testenv.Need(t, "node")
	m := newManager(t)
	var steps []time.Duration
	m.cfg.StepClock = func(d time.Duration) error { steps = append(steps, d); return nil }
	script{{code: "const crypto2 = require('crypto'); Math.random() < 1 && crypto2.randomUUID().length", text: "36"}}.run(t, m, "javascript")
	quiesce(t, m)
	renewed, not, err := m.Renew(t.Context(), map[string]string{"WHO": "me"}, func(string) error { return nil })
	if err != nil || !strings.Contains(strings.Join(renewed, " "), "context:javascript:crypto.randomUUID") || len(not) == 0 {
		t.Fatalf("%q %+v %v", renewed, not, err)
	}
	if len(steps) != 2 || steps[0] != -steps[1] || steps[0] < time.Hour {
		t.Errorf("the clock was stepped by %v", steps)
	}
	script{{code: "process.env.WHO", text: "'me'"}}.run(t, m, "javascript")
}

// perlDriver is the example of docs/contexts.md.
func perlDriver(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile("../../../docs/contexts.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(page), "```perl\n")
	text, _, ok2 := strings.Cut(rest, "```")
	if !ok || !ok2 {
		t.Fatal("docs/contexts.md has no driver in Perl")
	}
	return text
}

func TestInstalledDriver(t *testing.T) {
	testenv.Need(t, "perl", "python3")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "perl"), []byte(perlDriver(t)), 0o755); err != nil {
		t.Fatal(err)
	}
	reaper := reap.New()
	m := New(Config{Reaper: reaper, Accounts: accounts(t), DriverDirs: []string{dir}})
	t.Cleanup(func() {
		_ = m.Close(t.Context())
		reaper.Wait()
	})
	script{
		{code: "$x = 20; sub f { $_[0] * 2 } undef"},
		{code: "print \"hi\\n\"; f($x) + 2", stdout: "hi\n", text: "42"},
		{code: "die \"oh\\n\"", err: "Error: oh"},
		{code: "my $y = ;", err: "syntax error"},
		{code: "$x", text: "20"},
		{code: "\"<\\\"ü>\\n\"", text: "<\"ü>\n"},
	}.run(t, m, "perl")
	if _, err := m.Create(t.Context(), wire.ContextConfig{Language: "cobol"}); agenttest.Code(err) != wire.CodeUnimplemented {
		t.Error(err)
	}
	if _, err := m.Eval(t.Context(), &wire.EvalRequest{Context: "perl", Language: "python", Code: "1"}, discard, nil); agenttest.Code(err) != wire.CodeInvalid {
		t.Error(err)
	}
	_, not, err := m.Renew(t.Context(), nil, func(string) error { return nil })
	if err != nil || len(not) == 0 || !strings.Contains(not[0].Why, "cannot renew") {
		t.Errorf("%+v %v", not, err)
	}
	b := startEval(t.Context(), m, &wire.EvalRequest{Language: "perl", Code: "print \"on\\n\"; 1 while 1"})
	b.printed(t, "on\n")
	if err := m.Interrupt("perl"); err != nil {
		t.Fatal(err)
	}
	if r := b.wait(t); r.Error == nil || r.Error.Name != "KeyboardInterrupt" {
		t.Errorf("%+v", r)
	}
}
