package contexts

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

// Eval runs code in a context, made when there is none of that id. Output goes to sink while it runs; when Eval returns
// all that the code wrote has been handed over and sink is out of use. The caller waits for the code even when nobody
// waits for the caller any more: a sink that fails is not used again, and ctx ends only what comes before the code. What
// ends the code (an exception, a time limit, the death of the interpreter) is in the result; an error means that it was
// not run.
func (m *Manager) Eval(
	ctx context.Context, req *wire.EvalRequest, sink func(wire.Kind, []byte) error, show func(*wire.EvalEvent) error,
) (*wire.EvalResult, error) {
	cfg := wire.ContextConfig{ID: m.resolve(req.Context, req.Language), Language: req.Language}
	if err := check(&cfg); err != nil {
		return nil, err
	}
	if req.Context == "" {
		m.choose(&cfg, req.Language)
	}
	if req.TimeoutMS < 0 || req.TimeoutMS > int64(100*365*24*time.Hour/time.Millisecond) {
		return nil, wire.Errorf(wire.CodeInvalid, "evaluate in %s: time limit of %d ms", cfg.ID, req.TimeoutMS)
	}
	for k, v := range req.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return nil, wire.Errorf(wire.CodeInvalid, "environment variable %q: names are not empty and without = and NUL, values without NUL", k)
		}
	}
	c, _, err := m.obtain(ctx, cfg, false)
	if err != nil {
		return nil, err
	}
	if c.cfg.Language != python || req.Language != "" {
		if req, err = c.accept(req, cfg.Language); err != nil {
			return nil, err
		}
	}
	select {
	case c.turn <- struct{}{}:
	default:
		select {
		case c.turn <- struct{}{}:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	c.setSink(sink, show)
	c.renewLate()
	result := c.evaluate(req)
	c.setSink(nil, nil)
	<-c.turn
	return result, nil
}

// choose finds the context of a request that names none. A recipe may have warmed the default one in another language:
// that is what code without a language is for, and code in that language.
func (m *Manager) choose(cfg *wire.ContextConfig, asked string) {
	const standard = "default"
	c := m.lookup(standard)
	switch {
	case c == nil || c.cfg.Language == python:
	case asked == "" || cfg.Language == c.cfg.Language:
		cfg.ID = standard
	case cfg.ID == standard:
		cfg.ID = python
	}
}

// accept looks whether a context can do what is asked of it, and makes the request what its driver expects.
func (c *Context) accept(req *wire.EvalRequest, language string) (*wire.EvalRequest, error) {
	own := c.cfg.Language
	if req.Language == "" {
		language = own
	}
	node := own == javascript || own == typescript
	if language != own && !(node && (language == javascript || language == typescript)) {
		return nil, wire.Errorf(wire.CodeInvalid, "context %s is one of %s, not of %s; name another context, or none", c.id, own, language)
	}
	if language == typescript && !req.Compiled && !c.can(typescript) {
		return nil, wire.Errorf(wire.CodePrecondition, wire.NeedsJavaScript)
	}
	if own == shellName {
		if strings.ContainsRune(req.Code, 0) {
			return nil, wire.Errorf(wire.CodeInvalid, "evaluate in %s: a shell takes no NUL", c.id)
		}
		for k := range req.Env {
			if !validName(k) {
				return nil, wire.Errorf(wire.CodeInvalid, "environment variable %q: a shell's have letters, digits and _ only", k)
			}
		}
	}
	r := *req
	r.Language = language
	return &r, nil
}

// evaluate needs the turn.
func (c *Context) evaluate(req *wire.EvalRequest) *wire.EvalResult {
	start := time.Now()
	run := &evaluation{}
	c.mu.Lock()
	c.evals++
	result := &wire.EvalResult{ExecutionCount: c.evals}
	run.sequence = c.sequence + 1
	c.running = run
	c.mu.Unlock()

	limit := time.Duration(req.TimeoutMS) * time.Millisecond
	stop := func() {}
	if limit > 0 {
		stop = c.limit(run, limit)
	}
	alive := c.alive()
	reply, err := c.exchange(req, result.ExecutionCount)
	stop()
	c.mu.Lock()
	c.running = nil
	timedOut := run.timedOut
	c.signalled = run.interrupted
	c.mu.Unlock()

	if err == nil {
		err = c.in.dialect.fill(result, reply)
	}
	switch {
	case err != nil:
		result.Error = c.obituary(err, alive, timedOut, limit)
	case run.interrupted && result.Error != nil && result.Error.Name == wire.ErrorExitStatus && *result.ExitCode == 128+int(unix.SIGINT):
		result.Error = &wire.EvalError{Name: wire.ErrorInterrupt}
	}
	if err == nil && timedOut && result.Error != nil && result.Error.Name == wire.ErrorInterrupt {
		result.Error.Name = wire.ErrorTimeout
		result.Error.Value = fmt.Sprintf("interrupted: it ran longer than its time limit of %v; the context lives", limit)
	}
	for _, o := range c.outs {
		o.Drain()
	}
	result.MS = float64(time.Since(start).Microseconds()) / 1000
	return result
}

// limit interrupts an evaluation when its time is up and kills the context when that does not end it.
func (c *Context) limit(run *evaluation, limit time.Duration) (stop func()) {
	after := func(d time.Duration, do func()) *time.Timer {
		return time.AfterFunc(d, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.running == run { // not the next one
				run.timedOut = true
				do()
			}
		})
	}
	interrupt := after(limit, func() { _ = c.interrupt() })
	kill := after(limit+killGrace, func() { _ = c.child.SignalGroup(unix.SIGKILL) })
	return func() {
		interrupt.Stop()
		kill.Stop()
	}
}

func (c *Context) exchange(req *wire.EvalRequest, count int) (any, error) {
	if !c.alive() {
		return nil, errGone
	}
	n, err := c.request(func(b []byte, n int) []byte { return c.in.dialect.evaluate(b, n, count, req, c.signalled) })
	if err != nil {
		return nil, err
	}
	return c.receive(n)
}

// expression guesses whether code is a single expression on one line. A wrong guess costs time only, so strings and
// nested brackets are not understood.
func expression(code string) bool {
	code = strings.TrimRight(code, "\n")
	if strings.ContainsAny(code, "\n;") {
		return false
	}
	word := code
	for i := range len(code) {
		if c := code[i]; (c < 'a' || c > 'z') && c != '_' {
			word = code[:i]
			break
		}
	}
	switch word {
	case "import", "from", "def", "class", "for", "while", "if", "with", "try", "raise", "assert", "del", "pass",
		"global", "nonlocal", "async", "return", "yield", "break", "continue":
		return false
	}
	depth := 0
	for i := range len(code) {
		switch code[i] {
		case '(', '[', '{':
			depth++
		case ')', ']', '}':
			depth--
		case '=':
			compares := i+1 < len(code) && code[i+1] == '=' || i > 0 && strings.IndexByte("=!<>", code[i-1]) >= 0
			if depth == 0 && !compares {
				return false
			}
		}
	}
	return true
}

// fill takes the driver's reply to an evaluation apart: text or None, and None or name, value and traceback of an error.
// More fields may follow.
func fill(result *wire.EvalResult, reply any) error {
	fields, ok := reply.(tuple)
	if !ok || len(fields) < 2 {
		return errMarshal
	}
	switch text := fields[0].(type) {
	case nil:
	case string:
		result.Text = &text
	default:
		return errMarshal
	}
	switch e := fields[1].(type) {
	case nil:
		return nil
	case tuple:
		if len(e) != 3 {
			return errMarshal
		}
		name, ok1 := e[0].(string)
		value, ok2 := e[1].(string)
		traceback, ok3 := e[2].(string)
		if !ok1 || !ok2 || !ok3 {
			return errMarshal
		}
		result.Error = &wire.EvalError{Name: name, Value: value, Traceback: traceback}
		return nil
	default:
		return errMarshal
	}
}

// exitPatience is how long an interpreter that closed its control channel has for ending by itself.
const exitPatience = time.Second

// obituary waits for the end of the process and says what it means for the evaluation.
// Alive is whether the process lived when the evaluation began.
func (c *Context) obituary(err error, alive, timedOut bool, limit time.Duration) *wire.EvalError {
	if !errors.Is(err, errGone) {
		_ = c.child.SignalGroup(unix.SIGKILL) // what it says is of no use any more
	}
	patience := time.NewTimer(exitPatience)
	defer patience.Stop()
	select {
	case <-c.child.Done():
	case <-patience.C:
		_ = c.child.SignalGroup(unix.SIGKILL)
		<-c.child.Done()
	}
	<-c.gone // then it is known whether the memory was out
	state := c.child.State()
	what := fmt.Sprintf("the interpreter of context %s ended (%v)", c.id, state)
	if !alive {
		what = fmt.Sprintf("the interpreter of context %s ended earlier (%v)", c.id, state)
	}
	again := "; its variables are gone: restart the context to go on"
	if timedOut && alive {
		return &wire.EvalError{
			Name: wire.ErrorTimeout,
			Value: fmt.Sprintf("killed: it ran longer than its time limit of %v and did not react to the interrupt for %v; %s%s",
				limit, killGrace, what, again),
		}
	}
	hint := ""
	c.mu.Lock()
	memory := c.memory
	c.mu.Unlock()
	switch {
	case memory:
		hint = "; the sandbox ran out of memory, and the kernel chose it"
	case errors.Is(err, errMarshal):
		hint = "; its code wrote into the control channel (descriptor 3)"
	case state.Signal() == unix.SIGKILL:
		hint = "; somebody killed it"
		if c.unsure() {
			hint = "; if nobody killed it, the sandbox ran out of memory"
		}
	case state.Exited() && c.cfg.Language == shellName:
		hint = "; its code called exit, or failed after set -e"
	case state.Exited() && (c.cfg.Language == javascript || c.cfg.Language == typescript):
		hint = "; its code called process.exit or closed descriptor 3"
	case state.Exited() && c.cfg.Language != python:
		hint = "; its code or its driver ended it"
	case state.Exited():
		hint = "; its code ended the process (os._exit) or closed descriptor 3"
	}
	return &wire.EvalError{Name: wire.ErrorKilled, Value: what + hint + again}
}
