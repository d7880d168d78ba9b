package undo

import (
	"slices"
	"testing"
)

func TestRunIsNewestFirstAndOnce(t *testing.T) {
	var got []int
	var s Stack
	s.Add(func() { got = append(got, 1) })
	s.Add(func() { got = append(got, 2) })
	s.Run()
	s.Run()
	if want := []int{2, 1}; !slices.Equal(got, want) {
		t.Errorf("ran %v, want %v", got, want)
	}
}

func TestKeepRunsNothing(t *testing.T) {
	var s Stack
	s.Add(func() { t.Error("a kept transaction was undone") })
	s.Keep()
	s.Run()
}
