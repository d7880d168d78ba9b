package contexts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/agenttest"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

func value(r *wire.EvalResult) string {
	switch {
	case r.Error != nil:
		return r.Error.Name + ": " + r.Error.Value
	case r.Text == nil:
		return ""
	default:
		return *r.Text
	}
}

// run evaluates and returns the value or the error as text.
func run(t *testing.T, m *Manager, code string) string {
	t.Helper()
	r, _ := eval(t, m, code)
	return value(r)
}

// background evaluates beside the test and hands over what it prints as it comes.
type background struct {
	out    chan string
	result chan *wire.EvalResult
	err    chan error
}

func startEval(ctx context.Context, m *Manager, req *wire.EvalRequest) *background {
	b := &background{out: make(chan string, 1000), result: make(chan *wire.EvalResult, 1), err: make(chan error, 1)}
	go func() {
		r, err := m.Eval(ctx, req, func(_ wire.Kind, p []byte) error {
			if ctx.Err() != nil {
				return ctx.Err() // as a stream whose other end is gone
			}
			b.out <- string(p)
			return nil
		}, nil)
		b.err <- err
		b.result <- r
	}()
	return b
}

func (b *background) wait(t *testing.T) *wire.EvalResult {
	t.Helper()
	limit := time.NewTimer(testenv.Timeout(20 * time.Second))
	defer limit.Stop()
	select {
	case r := <-b.result:
		if err := <-b.err; err != nil {
			t.Fatal(err)
		}
		return r
	case <-limit.C:
		t.Fatal("the evaluation does not end")
		return nil
	}
}

func (b *background) printed(t *testing.T, want string) {
	t.Helper()
	limit := time.NewTimer(testenv.Timeout(20 * time.Second))
	defer limit.Stop()
	select {
	case got := <-b.out:
		if got != want {
			t.Fatalf("printed %q, want %q", got, want)
		}
	case <-limit.C:
		t.Fatalf("%q is not printed", want)
	}
}

func TestInterrupt(t *testing.T) {
	m := newManager(t)
	run(t, m, "import time")
	for _, code := range []string{
		"print('on')\nwhile True: pass",
		"print('on')\ntime.sleep(100)",
		"import subprocess\nprint('on')\nsubprocess.run(['sleep', '100'])",
		"import asyncio\nprint('on')\nawait asyncio.sleep(100)",
	} {
		b := startEval(t.Context(), m, &wire.EvalRequest{Code: code})
		b.printed(t, "on\n")
		if err := m.Interrupt(defaultID); err != nil {
			t.Fatal(err)
		}
		r := b.wait(t)
		if r.Error == nil || r.Error.Name != "KeyboardInterrupt" {
			t.Errorf("%q: %+v", code, r.Error)
			continue
		}
		if strings.Contains(r.Error.Traceback, "<forkd>") {
			t.Errorf("%q: driver in\n%s", code, r.Error.Traceback)
		}
	}
	if got := run(t, m, "1+1"); got != "2" {
		t.Errorf("afterwards: %s", got)
	}
	if err := m.Interrupt(defaultID); err != nil {
		t.Errorf("idle: %v", err)
	}
	if got := run(t, m, "1+2"); got != "3" {
		t.Errorf("after an interrupt while idle: %s", got)
	}
	if err := m.Interrupt("nobody"); agenttest.Code(err) != wire.CodeNotFound {
		t.Errorf("unknown context: %v", err)
	}
}

// TestInterruptRace: an interrupt at any moment ends that evaluation or nothing, never the next, never the context.
func TestInterruptRace(t *testing.T) {
	m := newManager(t)
	run(t, m, "pass")
	for i := range 200 {
		b := startEval(t.Context(), m, &wire.EvalRequest{Code: "for i in range(" + strconv.Itoa(i*50) + "): pass\n" + "'done'"})
		_ = m.Interrupt(defaultID)
		if got := value(b.wait(t)); got != "'done'" && got != "KeyboardInterrupt: " {
			t.Fatalf("round %d: %s", i, got)
		}
		if got := run(t, m, "'next'"); got != "'next'" {
			t.Fatalf("round %d, the next: %s", i, got)
		}
	}
}

func TestTimeout(t *testing.T) {
	m := newManager(t)
	r, _ := evalRequest(t, m, &wire.EvalRequest{Code: "while True: pass", TimeoutMS: 100})
	if r.Error == nil || r.Error.Name != "Timeout" || !strings.Contains(r.Error.Value, "the context lives") {
		t.Fatalf("%+v", r.Error)
	}
	if got := run(t, m, "x = 1\nx"); got != "1" {
		t.Errorf("afterwards: %s", got)
	}
	stubborn := "import time\nwhile True:\n    try: time.sleep(100)\n    except KeyboardInterrupt: pass"
	r, _ = evalRequest(t, m, &wire.EvalRequest{Code: stubborn, TimeoutMS: 100})
	if r.Error == nil || r.Error.Name != "Timeout" || !strings.Contains(r.Error.Value, "killed") {
		t.Fatalf("%+v", r.Error)
	}
	if got := run(t, m, "x"); !strings.HasPrefix(got, "ContextKilled: ") || !strings.Contains(got, "earlier") {
		t.Errorf("afterwards: %s", got)
	}
	if _, err := m.Create(t.Context(), wire.ContextConfig{}); err != nil {
		t.Fatal(err)
	}
	if got := run(t, m, "'x' in globals()"); got != "False" {
		t.Errorf("after create: %s", got)
	}
}

func TestKilled(t *testing.T) {
	m := newManager(t)
	for code, want := range map[string][]string{
		"import os, signal; os.kill(os.getpid(), signal.SIGKILL)": {"signal: killed", "out of memory", "restart the context"},
		"import os; os._exit(3)":                                  {"exit status 3", "os._exit"},
		"import os; os.close(3)":                                  {"exit status 1", "descriptor 3"},
		"import os; os.write(3, b'garbage!'*1000)":                {"signal: killed", "descriptor 3"},
		"import os; os.abort()":                                   {"signal: aborted"},
	} {
		r, out := eval(t, m, "print('before')\n"+code)
		if r.Error == nil || r.Error.Name != "ContextKilled" {
			t.Errorf("%q: %+v", code, r)
			continue
		}
		for _, w := range want {
			if !strings.Contains(r.Error.Value, w) {
				t.Errorf("%q: %q lacks %q", code, r.Error.Value, w)
			}
		}
		if out.stdout.String() != "before\n" {
			t.Errorf("%q: printed %q", code, &out.stdout)
		}
		list := m.List()
		if len(list) != 1 || list[0].Alive {
			t.Errorf("%q: list %+v", code, list)
		}
		if err := m.Remove(t.Context(), defaultID); err != nil {
			t.Error(err)
		}
	}
}

// TestKilledFromOutside: kill -9 while an evaluation runs and another waits.
func TestKilledFromOutside(t *testing.T) {
	m := newManager(t)
	run(t, m, "pass")
	b := startEval(t.Context(), m, &wire.EvalRequest{Code: "print('on')\nwhile True: pass"})
	b.printed(t, "on\n")
	waiting := startEval(t.Context(), m, &wire.EvalRequest{Code: "1"})
	if err := unix.Kill(m.List()[0].PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for _, b := range []*background{b, waiting} {
		if r := b.wait(t); r.Error == nil || r.Error.Name != "ContextKilled" || !strings.Contains(r.Error.Value, "signal: killed") {
			t.Errorf("%+v", r)
		}
	}
}

func TestBurst(t *testing.T) {
	m := newManager(t)
	const size = 200 << 20
	var got, largest int
	req := &wire.EvalRequest{Code: "b = b'x' * (1 << 20)\nimport sys\nfor i in range(200): _ = sys.stdout.buffer.write(b)\n'done'"}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	r, err := m.Eval(t.Context(), req, func(_ wire.Kind, b []byte) error {
		got += len(b)
		largest = max(largest, len(b))
		return nil
	}, nil)
	runtime.ReadMemStats(&after)
	if err != nil || value(r) != "'done'" {
		t.Fatalf("%v %v", r, err)
	}
	if got != size || largest > chunk {
		t.Errorf("%d bytes of %d, largest piece %d", got, size, largest)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 4<<20 {
		t.Errorf("allocated %d bytes on the way", n)
	}
}

// TestOrder: everything an evaluation prints comes before its result, in two streams and from its children too.
func TestOrder(t *testing.T) {
	m := newManager(t)
	run(t, m, "import sys, os, subprocess")
	for i := range 100 {
		code := fmt.Sprintf("print('a' * 5000, end='')\nsys.stderr.write('b' * 3000)\nos.write(1, b'c')\n%d", i)
		if i%20 == 0 {
			code = "_ = subprocess.run(['echo', 'child'])\n" + code
		}
		r, out := eval(t, m, code)
		want := 5001
		if i%20 == 0 {
			want += 6
		}
		if out.stdout.Len() != want || out.stderr.Len() != 3000 || value(r) != strconv.Itoa(i) {
			t.Fatalf("round %d: %d and %d bytes, %s", i, out.stdout.Len(), out.stderr.Len(), value(r))
		}
	}
}

func TestQueue(t *testing.T) {
	m := newManager(t)
	run(t, m, "l = []")
	b := startEval(t.Context(), m, &wire.EvalRequest{Code: "print('on')\nimport time\nwhile not l: time.sleep(0.01) if len(l) else l.append(0)"})
	b.printed(t, "on\n")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	hold := startEval(t.Context(), m, &wire.EvalRequest{Code: "print('hold')\nimport time\ntime.sleep(0.3)"})
	hold.printed(t, "hold\n")
	if _, err := m.Eval(ctx, &wire.EvalRequest{Code: "l.append('left')"}, nil, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller who left: %v", err)
	}
	b.wait(t)
	hold.wait(t)
	if got := run(t, m, "l"); got != "[0]" {
		t.Errorf("l is %s", got)
	}
}

// TestCallerLeaves: the evaluation runs on, its output goes nowhere, and the next one does not see it.
func TestCallerLeaves(t *testing.T) {
	m := newManager(t)
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o666); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	b := startEval(ctx, m, &wire.EvalRequest{Code: "print('on')\nx = open(" + strconv.Quote(fifo) + ").read()\nprint('off' * 100000)"})
	b.printed(t, "on\n")
	cancel()
	if err := os.WriteFile(fifo, []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.wait(t)
	r, out := eval(t, m, "x")
	if value(r) != "'text'" || out.stdout.Len() != 0 {
		t.Errorf("%s, printed %.100q", value(r), out.stdout.String())
	}
}

func TestBackgroundThread(t *testing.T) {
	m := newManager(t)
	code := `
import threading
go, done = threading.Event(), threading.Event()
def f():
    go.wait()
    print("late")
    done.set()
threading.Thread(target=f, daemon=True).start()
threading.Timer(0.05, go.set).start()
`
	run(t, m, code)
	_, out := eval(t, m, "_ = done.wait()")
	if out.stdout.String() != "late\n" {
		t.Errorf("printed %q", &out.stdout)
	}
}

func TestForkInUserCode(t *testing.T) {
	m := newManager(t)
	_, out := eval(t, m, "import os\npid = os.fork()\nif pid: print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if hasattr(os, 'waitstatus_to_exitcode') else 0)\n")
	if out.stdout.String() != "0\n" {
		t.Errorf("printed %q, %q", &out.stdout, &out.stderr)
	}
	r, out := eval(t, m, "pid = os.fork()\nif not pid: raise SystemExit(7)\nos.waitpid(pid, 0)[1] >> 8")
	if value(r) != "7" {
		t.Errorf("%s %q", value(r), &out.stderr)
	}
	r, _ = eval(t, m, "import multiprocessing as mp\nq = mp.get_context('fork').Queue()\ndef f(): q.put(5)\np = mp.get_context('fork').Process(target=f); p.start(); x = q.get(); p.join()\nx")
	if value(r) != "5" {
		t.Errorf("multiprocessing: %s", value(r))
	}
}

// TestChannelIsPrivate: programs that user code starts do not get the control channel.
func TestChannelIsPrivate(t *testing.T) {
	m := newManager(t)
	_, out := eval(t, m, "import subprocess\n_ = subprocess.run(['ls', '-l', '/proc/self/fd'], close_fds=False)")
	if strings.Contains(out.stdout.String(), "socket:") {
		t.Errorf("open in a child:\n%s", &out.stdout)
	}
}

func TestBigText(t *testing.T) {
	m := newManager(t)
	r, _ := eval(t, m, "'a' * (3 << 20)")
	if r.Text == nil || len(*r.Text) > 1<<20+100 || !strings.HasSuffix(*r.Text, "[2097154 more characters cut]") {
		t.Errorf("%d bytes", len(value(r)))
	}
	r, _ = eval(t, m, "raise ValueError('b' * (3 << 20))")
	if r.Error == nil || len(r.Error.Value) > 1<<16+100 || len(r.Error.Traceback) > 1<<20+100 {
		t.Errorf("%.100s", value(r))
	}
	if got := run(t, m, "len('"+strings.Repeat("é", 4<<20)+"')"); got != strconv.Itoa(4<<20) {
		t.Errorf("a large program: %.100s", got)
	}
}

func TestEnvironmentOfOneEval(t *testing.T) {
	m := newManager(t)
	r, _ := evalRequest(t, m, &wire.EvalRequest{Code: "import os\nos.environ['K']", Env: map[string]string{"K": "v"}})
	if value(r) != "'v'" {
		t.Error(value(r))
	}
	if got := run(t, m, "os.environ.get('K')"); got != "" {
		t.Errorf("afterwards %s", got)
	}
}

func TestModulesStayClean(t *testing.T) {
	m := newManager(t)
	code := `import sys
before = set(sys.modules)
import subprocess
plain = subprocess.check_output([sys.executable, "-c", "import sys; print(*sys.modules)"], text=True).split()
wanted = ("json", "random", "asyncio", "ast", "ssl", "threading", "subprocess", "signal", "numpy")
[n for n in wanted if n in before and n not in plain]`
	if got := run(t, m, code); got != "[]" {
		t.Errorf("loaded without being asked: %s", got)
	}
}

func TestCreate(t *testing.T) {
	m := newManager(t)
	dir := t.TempDir()
	info, err := m.Create(t.Context(), wire.ContextConfig{ID: "a", Language: "python", Cwd: dir, Env: map[string]string{"Z": "1"}})
	if err != nil || info.ID != "a" || info.Cwd != dir || !info.Alive || info.PID == 0 {
		t.Fatalf("%+v %v", info, err)
	}
	r, _ := evalRequest(t, m, &wire.EvalRequest{Context: "a", Code: "import os\nos.getcwd(), os.environ['Z'], os.environ['HOME'] != ''"})
	if value(r) != "('"+dir+"', '1', True)" {
		t.Error(value(r))
	}
	if n := len(m.PIDs()); n != 1 {
		t.Errorf("%d pids", n)
	}
	for name, tt := range map[string]struct {
		cfg  wire.ContextConfig
		code string
	}{
		"exists":   {wire.ContextConfig{ID: "a"}, wire.CodeExists},
		"language": {wire.ContextConfig{ID: "b", Language: "cobol"}, wire.CodeUnimplemented},
		"id":       {wire.ContextConfig{ID: "../b"}, wire.CodeInvalid},
		"long id":  {wire.ContextConfig{ID: strings.Repeat("a", 65)}, wire.CodeInvalid},
		"cwd":      {wire.ContextConfig{ID: "b", Cwd: "/no/such"}, wire.CodeInvalid},
		"user":     {wire.ContextConfig{ID: "b", User: "nobody-here"}, wire.CodeUnknownUser},
		"env":      {wire.ContextConfig{ID: "b", Env: map[string]string{"": ""}}, wire.CodeInvalid},
		"python":   {wire.ContextConfig{ID: "b", Env: map[string]string{"PATH": "/nowhere"}}, wire.CodePrecondition},
	} {
		_, err := m.Create(t.Context(), tt.cfg)
		if agenttest.Code(err) != tt.code {
			t.Errorf("%s: %v, want %s", name, err, tt.code)
		}
	}
	if len(m.List()) != 1 {
		t.Errorf("left over: %+v", m.List())
	}
	if err := m.Remove(t.Context(), "b"); agenttest.Code(err) != wire.CodeNotFound {
		t.Errorf("remove: %v", err)
	}
}

// TestStillborn: an interpreter that does not come up is explained by what it said.
func TestStillborn(t *testing.T) {
	m := newManager(t)
	dir := t.TempDir()
	for script, want := range map[string]string{
		"echo broken installation >&2; exit 9": "broken installation",
		"kill -SEGV $$":                        "segmentation fault",
		"exec sleep 100 <&3":                   "did not answer",
	} {
		if err := os.WriteFile(filepath.Join(dir, "python3"), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err := m.Create(ctx, wire.ContextConfig{Env: map[string]string{"PATH": dir + ":/usr/bin:/bin"}})
		cancel()
		if errors.Is(err, context.DeadlineExceeded) {
			continue // the caller's limit, not ours
		}
		if agenttest.Code(err) != wire.CodePrecondition || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", script, err)
		}
	}
}

func TestConcurrentCreation(t *testing.T) {
	m := newManager(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			r, err := m.Eval(t.Context(), &wire.EvalRequest{Code: strconv.Itoa(i)}, discard, nil)
			if err != nil || value(r) != strconv.Itoa(i) {
				t.Errorf("%d: %v %v", i, r, err)
			}
		})
	}
	wg.Wait()
	if list := m.List(); len(list) != 1 || list[0].Evals != 8 {
		t.Errorf("%+v", list)
	}
}

func TestHandlers(t *testing.T) {
	m := newManager(t)
	h := m.Handlers()
	var info wire.ContextInfo
	if err := agenttest.Unary(t, h[wire.MethodContextNew], wire.ContextConfig{ID: "x"}, &info); err != nil || info.ID != "x" {
		t.Fatalf("%+v %v", info, err)
	}
	s := agenttest.Call(t, h[wire.MethodContextEval], wire.EvalRequest{Context: "x", Code: "print('hi')\n4"})
	if kind, b, err := s.Recv(); kind != wire.KindStdout || string(b) != "hi\n" {
		t.Errorf("%q %q %v", byte(kind), b, err)
	}
	var r wire.EvalResult
	if err := s.RecvMessage(&r); err != nil || value(&r) != "4" || r.ExecutionCount != 1 {
		t.Errorf("%+v %v", r, err)
	}
	var list wire.ContextList
	if err := agenttest.Unary(t, h[wire.MethodContextList], struct{}{}, &list); err != nil || len(list.Contexts) != 1 || list.Contexts[0].Evals != 1 {
		t.Errorf("%+v %v", list, err)
	}
	if err := agenttest.Unary(t, h[wire.MethodContextStop], wire.ContextRequest{ID: "x"}, nil); err != nil {
		t.Error(err)
	}
	if err := agenttest.Unary(t, h[wire.MethodContextClose], wire.ContextRequest{ID: "x"}, nil); err != nil {
		t.Error(err)
	}
	if err := agenttest.Unary(t, h[wire.MethodContextClose], wire.ContextRequest{ID: "x"}, nil); agenttest.Code(err) != wire.CodeNotFound {
		t.Error(err)
	}
}

func TestAsUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	reaper := reap.New()
	m := New(Config{Reaper: reaper, Accounts: account.New("/", account.Defaults{User: "65534", Workdir: "/"})})
	t.Cleanup(func() {
		_ = m.Close(context.WithoutCancel(t.Context()))
		reaper.Wait()
	})
	if got := run(t, m, "import os\nos.getuid(), os.getgroups(), open('/dev/stdout', 'w').write('') "); got != "(65534, [], 0)" && got != "(65534, [65534], 0)" {
		t.Error(got)
	}
}

func TestRenew(t *testing.T) {
	m := newManager(t)
	run(t, m, "import random, ssl, tempfile, os\nrandom.seed(1)\nr = random.Random(5)\n_ = random.gauss(0, 1)\nn = tempfile.gettempdir() and next(tempfile._get_candidate_names())")
	quiesce(t, m)
	renew := func() ([]string, []wire.NotRenewed) {
		t.Helper()
		var thawed []string
		renewed, not, err := m.Renew(t.Context(), map[string]string{"SANDBOX": "s1"}, func(id string) error {
			thawed = append(thawed, id)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if len(thawed) != 1 || thawed[0] != defaultID {
			t.Errorf("thawed %q", thawed)
		}
		return renewed, not
	}
	renewed, not := renew()
	if got := strings.Join(renewed, " "); got != "context:default:random context:default:openssl context:default:tempfile" {
		t.Errorf("renewed %s", got)
	}
	var what []string
	for _, n := range not {
		what = append(what, n.What)
		if n.PID == 0 || n.Why == "" {
			t.Errorf("%+v", n)
		}
	}
	if got := strings.Join(what, " "); got != "hash_seed generator" {
		t.Errorf("not renewed: %+v", not)
	}
	if got := run(t, m, "os.environ['SANDBOX']"); got != "'s1'" {
		t.Error(got)
	}
	first := run(t, m, "random.random()")
	renew()
	if second := run(t, m, "random.random()"); first == second {
		t.Error("random was not renewed")
	}
}

func TestRenewBusyAndDead(t *testing.T) {
	m := newManager(t)
	for _, id := range []string{"busy", "dead", "idle"} {
		if _, err := m.Create(t.Context(), wire.ContextConfig{ID: id}); err != nil {
			t.Fatal(err)
		}
	}
	b := startEval(t.Context(), m, &wire.EvalRequest{Context: "busy", Code: "print('on')\nwhile True: pass"})
	b.printed(t, "on\n")
	if r, _ := evalRequest(t, m, &wire.EvalRequest{Context: "dead", Code: "import os; os._exit(1)"}); r.Error == nil {
		t.Fatal("it lives")
	}
	var thawed []string
	_, not, err := m.Renew(t.Context(), nil, func(id string) error {
		thawed = append(thawed, id)
		return nil
	})
	if err != nil || strings.Join(thawed, " ") != "busy idle" {
		t.Errorf("thawed %q, %v", thawed, err)
	}
	if len(not) == 0 || not[0].Name != "context busy" || !strings.Contains(not[0].Why, "middle of an evaluation") {
		t.Errorf("%+v", not)
	}
	if err := m.Interrupt("busy"); err != nil {
		t.Fatal(err)
	}
	b.wait(t)
}

// TestEvaluationInACopy: one that was in progress when the machine was frozen goes on in a copy of it, without its caller.
// The next one waits for its end and finds what it left, but for the random state.
func TestEvaluationInACopy(t *testing.T) {
	m := newManager(t)
	ctx, hangUp := context.WithCancel(t.Context())
	defer hangUp()
	marker, pipe := filepath.Join(t.TempDir(), "m"), filepath.Join(t.TempDir(), "p")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	done, err := os.OpenFile(pipe, os.O_RDWR, 0) // so that neither side waits for the other to open it
	if err != nil {
		t.Fatal(err)
	}
	defer done.Close()
	code := "import os, random\nrandom.seed(1)\nprint('on')\nwhile not os.path.exists('" + marker + "'): pass\n" +
		"x = 2\nos.write(os.open('" + pipe + "', os.O_WRONLY), b'.')\nwhile True: print('y' * 10000)"
	b := startEval(ctx, m, &wire.EvalRequest{Code: code})
	b.printed(t, "on\n")
	if err := m.Quiesce(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	hangUp() // as the new connection does
	_, not, err := m.Renew(t.Context(), map[string]string{"WHO": "the copy"}, func(string) error { return nil })
	if err != nil || len(not) == 0 || !strings.Contains(not[0].Why, "middle of an evaluation") {
		t.Errorf("%+v, %v", not, err)
	}
	if err := os.WriteFile(marker, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	out := &output{}
	next := make(chan *wire.EvalResult, 1)
	go func() {
		r, err := m.Eval(t.Context(), &wire.EvalRequest{Code: "x, os.environ['WHO'], random.random() == 0.13436424411240122"}, out.sink, nil)
		if err != nil {
			t.Error(err)
		}
		next <- r
	}()
	// Interrupted before, it would not leave what the next one looks for.
	if err := done.SetReadDeadline(time.Now().Add(testenv.Timeout(20 * time.Second))); err != nil {
		t.Fatal(err)
	}
	if _, err := done.Read(make([]byte, 1)); err != nil {
		t.Fatalf("it does not go on in the copy: %v", err)
	}
	select {
	case r := <-next:
		t.Fatalf("it did not wait: %+v", r)
	default:
	}
	if err := m.Interrupt("default"); err != nil {
		t.Fatal(err)
	}
	r := <-next
	if r == nil || r.Text == nil || *r.Text != "(2, 'the copy', False)" || out.stdout.Len() > 0 {
		t.Errorf("%s, and %d bytes of the other's output", value(r), out.stdout.Len())
	}
}

// TestRenewUnconfirmed: an interpreter that does not answer makes the clone unusable.
func TestRenewUnconfirmed(t *testing.T) {
	m := newManager(t)
	run(t, m, "pass")
	pid := m.List()[0].PID
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, _, err := m.Renew(ctx, nil, func(string) error { return nil }); err == nil || !strings.Contains(err.Error(), "no confirmation") {
		t.Errorf("%v", err)
	}
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if got := run(t, m, "2"); got != "2" {
		t.Errorf("afterwards %s", got)
	}
}

// quiesce asks interpreters what they hold until each has said it. A parent's are given a quarter of a second, in which a busy
// host may let them do nothing; and the report says so then.
func quiesce(t *testing.T, m *Manager) {
	t.Helper()
	silent := func(c *Context) bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.facts == nil
	}
	for limit := time.Now().Add(testenv.Timeout(20 * time.Second)); ; {
		if err := m.Quiesce(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(m.all(), silent) {
			return
		}
		if time.Now().After(limit) {
			t.Fatal("an interpreter does not say what it holds")
		}
	}
}

func TestFactsOfThreads(t *testing.T) {
	m := newManager(t)
	run(t, m, "import threading\ne = threading.Event()\nt = threading.Thread(target=e.wait, daemon=True); t.start()")
	quiesce(t, m)
	_, not, err := m.Renew(t.Context(), nil, func(string) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, n := range not {
		found = found || n.What == "threads" && strings.Contains(n.Name, "2 threads")
	}
	if !found {
		t.Errorf("%+v", not)
	}
}

func TestRenewNumpy(t *testing.T) {
	m := newManager(t)
	if got := run(t, m, "import numpy, numpy.random"); got != "" {
		t.Skipf("needs numpy: %s", got)
	}
	state := "numpy.random.seed(1)\ng = numpy.random.default_rng(1)\n_ = numpy.random.normal()\nnumpy.random.random(4).tolist()"
	first := run(t, m, state)
	if first != run(t, m, state) {
		t.Fatal("the seed does not fix the state")
	}
	quiesce(t, m)
	run(t, m, "numpy.random.seed(1)")
	renewed, not, err := m.Renew(t.Context(), nil, func(string) error { return nil })
	if err != nil || !strings.Contains(strings.Join(renewed, " "), "context:default:numpy.random") {
		t.Fatalf("%q %+v %v", renewed, not, err)
	}
	if !strings.Contains(fmt.Sprint(not), "numpy.random._generator.Generator") {
		t.Errorf("the generator is not named: %+v", not)
	}
	if got := run(t, m, "_ = numpy.random.normal()\nnumpy.random.random(4).tolist()"); got == first {
		t.Error("numpy.random was not renewed")
	}
	run(t, m, "numpy.random.mtrand._rand = 5")
	if _, not, err = m.Renew(t.Context(), nil, func(string) error { return nil }); err != nil || !strings.Contains(fmt.Sprint(not), "reseeding it failed") {
		t.Errorf("%+v %v", not, err)
	}
}

// TestHostileCode: whatever code does to its interpreter, the next evaluation has an answer.
func TestHostileCode(t *testing.T) {
	m := newManager(t)
	for _, tt := range []struct{ code, want, next string }{
		{"def f(): f()\n_ = f()", "RecursionError", "1"},
		{"import builtins\nfor n in dir(builtins):\n    if n[0] != '_' and n not in ('dir', 'delattr', 'builtins', 'type'):\n        delattr(builtins, n)", "", "1"},
		{"import os; os.close(1); os.close(2)", "", "1"},
		{"import sys; sys.stdout = sys.stderr = None", "", "1"},
		{"import sys; sys.stdout.close()", "", "1"},
		{"import sys; sys.exit('bye')", "SystemExit: bye", "1"},
		{"exit()", "SystemExit", "1"},
		{"input('?')", "EOFError", "1"},
		{"import asyncio\nasync def g(): pass\nawait g()\nasyncio.run(g())", "", "1"},
		{"import asyncio\nasync def g(): asyncio.run(asyncio.sleep(0))\nawait g()", "RuntimeError", "1"},
		{"import signal; _ = signal.signal(signal.SIGINT, signal.SIG_DFL)", "", "1"},
		{"import threading, time\ndef f():\n    while True: print('x' * 1000)\nthreading.Thread(target=f, daemon=True).start(); time.sleep(0.05)", "", "1"},
		{"import os\nif os.fork() == 0: os._exit(0)\n_ = os.wait()", "", "1"},
		{"import sys; sys.settrace(lambda *a: 1/0)", "ZeroDivisionError", ""},
		{"(" + strings.Repeat("[", 150), "SyntaxError", "1"},
		{"x = 1\n  y = 2", "IndentationError: unexpected indent (<eval", "1"},
		{"a = '''" + strings.Repeat("x", 1<<20) + "'''; len(a)", "1048576", "1"},
	} {
		r, _ := eval(t, m, tt.code)
		if got := value(r); !strings.Contains(got, tt.want) || tt.want == "" && got != "" {
			t.Errorf("%.60q: %.300s, want %q", tt.code, got, tt.want)
		}
		if tt.next != "" {
			r, _ := eval(t, m, "1")
			if value(r) != tt.next {
				t.Errorf("%.60q: the next gives %.300s", tt.code, value(r))
			}
		}
		if _, err := m.Restart(t.Context(), defaultID); err != nil {
			t.Fatal(err)
		}
	}
}
