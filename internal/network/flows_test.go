package network

import "testing"

// TestBudgetRaised: bytes that were held against a budget before it became larger do not make the larger one a spent one.
func TestBudgetRaised(t *testing.T) {
	f := newFlows(Limits{}.withDefaults(), 100, nil)
	f.setBudget(50)
	if f.ask() == "" {
		t.Error("a spent budget lets a question pass")
	}
	f.setBudget(1000)
	if f.breaks() { // As pay does that has still seen the smaller one.
		t.Error("the larger budget counts as spent")
	}
	if reason := f.ask(); reason != "" {
		t.Error(reason)
	}
}
