package call

import (
	"context"
	"errors"
	"fmt"

	"forkd.dev/forkd/internal/guest/transpile"
	"forkd.dev/forkd/internal/guest/wire"
)

// Evaluation takes what an evaluation produces, in the order in which the code does. Show is given every result that the
// code displays and what its trailing expression is worth, in all representations there are; a value that is nothing but
// its text comes last, with the end. Nil: results are discarded.
type Evaluation struct {
	Output
	Show func(*wire.Result) error
}

// Eval evaluates code and returns what it gave. TypeScript is made JavaScript first if the guest cannot do that itself.
func Eval(ctx context.Context, o Opener, req wire.EvalRequest, out Output) (*wire.EvalResult, error) {
	return Evaluate(ctx, o, req, Evaluation{Output: out})
}

// Evaluate is Eval for those who want results.
func Evaluate(ctx context.Context, o Opener, req wire.EvalRequest, out Evaluation) (*wire.EvalResult, error) {
	if !typeScript(req.Language) {
		res, err := evaluate(ctx, o, req, out)
		if e, ok := errors.AsType[*wire.Error](err); !ok || e.Message != wire.NeedsJavaScript {
			return res, err
		}
		// The context is one of TypeScript, which the request need not say.
	}
	code, problem := transpile.TypeScript(req.Code)
	if problem != nil {
		return &wire.EvalResult{Error: &wire.EvalError{Name: "SyntaxError", Value: problem.Message, Traceback: problem.Text}}, nil
	}
	req.Code, req.Compiled = code, true
	return evaluate(ctx, o, req, out)
}

func typeScript(language string) bool { return language == "typescript" || language == "ts" }

func evaluate(ctx context.Context, o Opener, req wire.EvalRequest, out Evaluation) (*wire.EvalResult, error) {
	ctx, cancel := limited(ctx, req.TimeoutMS)
	defer cancel()
	var res *wire.EvalResult
	err := with(ctx, o, wire.MethodContextEval, req, func(s *wire.Stream) error {
		mainShown := false
		for {
			kind, payload, err := s.Recv()
			if err != nil {
				return unexpected(err)
			}
			if kind != wire.KindMessage {
				if err := out.write(kind, payload); err != nil {
					return err
				}
				continue
			}
			if event := shown(payload); event != nil {
				mainShown = mainShown || event.Main
				if err := out.show(event); err != nil {
					return err
				}
				continue
			}
			res = &wire.EvalResult{}
			if err := wire.Decode(payload, res); err != nil {
				return err
			}
			if res.Text != nil && !mainShown {
				return out.show(&wire.Result{Text: *res.Text, Main: true})
			}
			return nil
		}
	})
	return res, err
}

// shown is the result that a message has, or nil: then it is the end.
func shown(payload []byte) *wire.Result {
	const head = `{"result":`
	if len(payload) < len(head) || string(payload[:len(head)]) != head {
		return nil
	}
	var e wire.EvalEvent
	if wire.Decode(payload, &e) != nil {
		return &wire.Result{Text: "[a result that cannot be decoded]"}
	}
	return e.Result
}

func (e Evaluation) show(r *wire.Result) error {
	if e.Show == nil || r == nil {
		return nil
	}
	if err := e.Show(r); err != nil {
		return fmt.Errorf("%w: %w", ErrOutput, err)
	}
	return nil
}

// Contexts lists a sandbox's contexts.
func Contexts(ctx context.Context, o Opener) ([]wire.ContextInfo, error) {
	var list wire.ContextList
	if err := Unary(ctx, o, wire.MethodContextList, struct{}{}, &list); err != nil {
		return nil, err
	}
	return list.Contexts, nil
}

// CreateContext starts one.
func CreateContext(ctx context.Context, o Opener, cfg wire.ContextConfig) (*wire.ContextInfo, error) {
	info := &wire.ContextInfo{}
	return info, Unary(ctx, o, wire.MethodContextNew, cfg, info)
}

// RestartContext starts one anew as it was started first.
func RestartContext(ctx context.Context, o Opener, which wire.ContextRequest) (*wire.ContextInfo, error) {
	info := &wire.ContextInfo{}
	return info, Unary(ctx, o, wire.MethodContextAgain, which, info)
}

// InterruptContext raises an interrupt in what one evaluates.
func InterruptContext(ctx context.Context, o Opener, which wire.ContextRequest) error {
	return Unary(ctx, o, wire.MethodContextStop, which, nil)
}

// RemoveContext kills and forgets one.
func RemoveContext(ctx context.Context, o Opener, which wire.ContextRequest) error {
	return Unary(ctx, o, wire.MethodContextClose, which, nil)
}
