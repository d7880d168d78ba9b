package contexts

import (
	"context"

	"forkd.dev/forkd/internal/guest/wire"
)

// Handlers are the calls this package serves.
func (m *Manager) Handlers() map[string]wire.Handler {
	return map[string]wire.Handler{
		wire.MethodContextNew:   wire.Handle(m.handleCreate),
		wire.MethodContextEval:  wire.Handle(m.handleEval),
		wire.MethodContextStop:  wire.Handle(m.handleInterrupt),
		wire.MethodContextList:  wire.Handle(m.handleList),
		wire.MethodContextClose: wire.Handle(m.handleRemove),
		wire.MethodContextAgain: wire.Handle(m.handleRestart),
	}
}

func (m *Manager) handleCreate(ctx context.Context, s *wire.Stream, cfg *wire.ContextConfig) error {
	info, err := m.Create(ctx, *cfg)
	if err != nil {
		return err
	}
	return s.SendMessage(info)
}

func (m *Manager) handleEval(ctx context.Context, s *wire.Stream, req *wire.EvalRequest) error {
	result, err := m.Eval(ctx, req, s.Send, func(e *wire.EvalEvent) error { return s.SendMessage(e) })
	if err != nil {
		return err
	}
	return s.SendMessage(result)
}

func (m *Manager) handleInterrupt(_ context.Context, s *wire.Stream, req *wire.ContextRequest) error {
	if err := m.Interrupt(m.resolve(req.ID, req.Language)); err != nil {
		return err
	}
	return s.SendMessage(struct{}{})
}

func (m *Manager) handleList(_ context.Context, s *wire.Stream, _ *struct{}) error {
	return s.SendMessage(wire.ContextList{Contexts: m.List()})
}

func (m *Manager) handleRemove(ctx context.Context, s *wire.Stream, req *wire.ContextRequest) error {
	if err := m.Remove(ctx, m.resolve(req.ID, req.Language)); err != nil {
		return err
	}
	return s.SendMessage(struct{}{})
}

func (m *Manager) handleRestart(ctx context.Context, s *wire.Stream, req *wire.ContextRequest) error {
	info, err := m.Restart(ctx, m.resolve(req.ID, req.Language))
	if err != nil {
		return err
	}
	return s.SendMessage(info)
}
