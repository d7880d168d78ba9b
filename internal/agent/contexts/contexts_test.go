package contexts

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

// newManager makes a manager whose contexts are gone at the end of the test.
func newManager(t *testing.T) *Manager {
	t.Helper()
	testenv.Need(t, "python3")
	reaper := reap.New()
	m := New(Config{Reaper: reaper, Accounts: accounts(t)})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 20*time.Second)
		defer cancel()
		if err := m.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
		reaper.Wait()
	})
	return m
}

func accounts(t *testing.T) *account.Table {
	t.Helper()
	return account.New("/", account.Defaults{User: testUser, Workdir: t.TempDir(), Env: map[string]string{"PATH": os.Getenv("PATH")}})
}

// output collects what an evaluation prints.
type output struct {
	mu             sync.Mutex
	stdout, stderr strings.Builder
	results        []*wire.Result
	order          []string // "out x", "err x", "result text", in the order of arrival
}

func (o *output) show(e *wire.EvalEvent) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.results = append(o.results, e.Result)
	o.order = append(o.order, "result "+e.Result.Text)
	return nil
}

func (o *output) sink(kind wire.Kind, b []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if kind == wire.KindStdout {
		o.stdout.Write(b)
		o.order = append(o.order, "out "+string(b))
	} else {
		o.stderr.Write(b)
		o.order = append(o.order, "err "+string(b))
	}
	return nil
}

// eval runs code in the default context.
func eval(t *testing.T, m *Manager, code string) (*wire.EvalResult, *output) {
	t.Helper()
	return evalRequest(t, m, &wire.EvalRequest{Code: code})
}

func evalRequest(t *testing.T, m *Manager, req *wire.EvalRequest) (*wire.EvalResult, *output) {
	t.Helper()
	out := &output{}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	result, err := m.Eval(ctx, req, out.sink, out.show)
	if err != nil {
		t.Fatalf("eval %q: %v", req.Code, err)
	}
	return result, out
}

func TestEval(t *testing.T) {
	m := newManager(t)
	tests := []struct {
		code, text, stdout, stderr string
		errName, errValue          string
		traceback                  string // exact when it starts with "=", else contained
	}{
		{code: "1+1", text: "2"},
		{code: "x = 5"},
		{code: "x", text: "5"},
		{code: "x = 6\nx * 7", text: "42"},
		{code: "None"},
		{code: ""},
		{code: "# comment"},
		{code: "'a'", text: "'a'"},
		{code: "_", text: "'a'"},
		{code: "print('hi')", stdout: "hi\n"},
		{code: "print('hi', end='')", stdout: "hi"},
		{code: "import sys\nprint('no', file=sys.stderr)\n3", stderr: "no\n", text: "3"},
		{code: "for i in range(2):\n    print(i)\n", stdout: "0\n1\n"},
		{code: "1/0", errName: "ZeroDivisionError", errValue: "division by zero", traceback: "Traceback (most recent call last):\n  File \"<eval 14>\", line 1, in <module>\n    1/0\n"},
		{code: "def f():\n    raise ValueError('bad')\n"},
		{code: "f()", errName: "ValueError", errValue: "bad", traceback: "File \"<eval 15>\", line 2, in f\n    raise ValueError('bad')\nValueError: bad\n"},
		{code: "x = = 1", errName: "SyntaxError", errValue: "invalid syntax (<eval 17>, line 1)", traceback: "=  File \"<eval 17>\", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n"},
		{code: "import sys; sys.exit(3)", errName: "SystemExit", errValue: "3"},
		{code: "x", text: "6"},
		{code: "input()", errName: "EOFError"},
		{code: "__name__", text: "'__main__'"},
		{code: "import sys; sys.modules['__main__'].x", text: "6"},
		{code: "sorted(globals())[-1]", text: "'x'"},
		{code: "import asyncio\nawait asyncio.sleep(0, 'slept')", text: "'slept'"},
		{code: "async def g():\n    raise KeyError(1)\nawait g()", errName: "KeyError", errValue: "1", traceback: "=Traceback (most recent call last):\n  File \"<eval 25>\", line 3, in <module>\n    await g()\n  File \"<eval 25>\", line 2, in g\n    raise KeyError(1)\nKeyError: 1\n"},
		{code: "'\\ud800'", text: "'\\ud800'"},
		{code: "print('\\ud800é')", stdout: "\\ud800é\n"},
		{code: "class B:\n    def __repr__(self): raise RuntimeError('no repr')\nB()", errName: "RuntimeError", errValue: "no repr"},
		{code: "len('" + strings.Repeat("a", 300000) + "')", text: "300000"},
		{code: "import inspect\ninspect.getsource(f)", text: `"def f():\n    raise ValueError('bad')\n"`},
	}
	for _, tt := range tests {
		result, out := eval(t, m, tt.code)
		name := tt.code[:min(len(tt.code), 40)]
		text := ""
		if result.Text != nil {
			text = *result.Text
		}
		if text != tt.text || out.stdout.String() != tt.stdout || out.stderr.String() != tt.stderr {
			t.Errorf("%q: text %q stdout %q stderr %q, want %q %q %q", name, text, out.stdout.String(), out.stderr.String(), tt.text, tt.stdout, tt.stderr)
		}
		if result.Error == nil {
			if tt.errName != "" {
				t.Errorf("%q: no error, want %s", name, tt.errName)
			}
			continue
		}
		e := result.Error
		if e.Name != tt.errName || tt.errValue != "" && e.Value != tt.errValue {
			t.Errorf("%q: error %s: %s, want %s: %s\n%s", name, e.Name, e.Value, tt.errName, tt.errValue, e.Traceback)
		}
		if want, exact := strings.CutPrefix(tt.traceback, "="); exact && e.Traceback != want || !strings.Contains(e.Traceback, want) {
			t.Errorf("%q: traceback\n%s\nwant\n%s", name, e.Traceback, want)
		}
		if strings.Contains(e.Traceback, "<forkd>") {
			t.Errorf("%q: frames of the driver in\n%s", name, e.Traceback)
		}
	}
}
