// Package undo holds the reverse of each step of a many-step transaction and runs them, newest first, unless the
// transaction is kept. Anyone may import it.
package undo

// Stack is a list of reverse steps. The zero value is ready. Use it as
//
//	var u undo.Stack
//	defer u.Run()
//	… u.Add(func() { … }) right after each step …
//	u.Keep()
type Stack struct {
	steps []func()
}

// Add registers the reverse of the step just done.
func (s *Stack) Add(step func()) { s.steps = append(s.steps, step) }

// Keep forgets all steps: the transaction stands.
func (s *Stack) Keep() { s.steps = nil }

// Run runs the steps, newest first, once.
func (s *Stack) Run() {
	for len(s.steps) > 0 {
		last := len(s.steps) - 1
		step := s.steps[last]
		s.steps = s.steps[:last]
		step()
	}
}
