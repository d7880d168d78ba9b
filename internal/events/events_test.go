package events

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func emit(b *Bus, n int) {
	for i := range n {
		b.Emit(Event{Type: SandboxForked, Sandbox: fmt.Sprint(i)})
	}
}

// take is what a subscription has now, as "sequence" or "lost n".
func take(s *Subscription) []string {
	var got []string
	for e, ok := s.Now(); ok; e, ok = s.Now() {
		if e.Type == Lost {
			got = append(got, fmt.Sprintf("lost %d before %d", e.Lost, e.Sequence+1))
			continue
		}
		got = append(got, fmt.Sprint(e.Sequence))
	}
	return got
}

func TestSubscriptions(t *testing.T) {
	for _, tt := range []struct {
		name  string
		told  int
		begin func(b *Bus) *Subscription
		then  int // told after that
		want  string
	}{
		{"nothing", 0, func(b *Bus) *Subscription { return b.Kept(10) }, 0, "[]"},
		{"from now on", 3, func(b *Bus) *Subscription { return b.Kept(0) }, 2, "[103 104]"},
		{"what is kept", 3, func(b *Bus) *Subscription { return b.Kept(10) }, 1, "[100 101 102 103]"},
		{"the last two", 3, func(b *Bus) *Subscription { return b.Kept(2) }, 1, "[101 102 103]"},
		{"more than is kept", 9, func(b *Bus) *Subscription { return b.Kept(100) }, 0, "[105 106 107 108]"},
		{"after one seen", 3, func(b *Bus) *Subscription { return b.After(101) }, 1, "[102 103]"},
		{"after the last", 3, func(b *Bus) *Subscription { return b.After(102) }, 1, "[103]"},
		{"after one that is no longer kept", 9, func(b *Bus) *Subscription { return b.After(101) }, 0, "[lost 3 before 105 105 106 107 108]"},
		{"too slow", 1, func(b *Bus) *Subscription { return b.Kept(1) }, 6, "[lost 3 before 103 103 104 105 106]"},
		{"before the first", 2, func(b *Bus) *Subscription { return b.After(99) }, 0, "[100 101]"},
		{"of an earlier daemon", 2, func(b *Bus) *Subscription { return b.After(50) }, 0, "[lost 0 before 100 100 101]"},
		{"of a later one", 2, func(b *Bus) *Subscription { return b.After(500) }, 0, "[lost 0 before 100 100 101]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := New(4, 100)
			emit(b, tt.told)
			s := tt.begin(b)
			emit(b, tt.then)
			if got := fmt.Sprint(take(s)); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

// TestNobodyIsWaitedFor: a listener that takes nothing holds up neither who tells nor who listens, and each listener that
// keeps up gets all of them, in order.
func TestNobodyIsWaitedFor(t *testing.T) {
	const most = 2000
	b := New(most, 1)
	stuck := b.Kept(0)
	var wg sync.WaitGroup
	for range 4 {
		s := b.Kept(0)
		wg.Go(func() {
			for want := uint64(1); want <= most; want++ {
				e, err := s.Next(t.Context())
				if err != nil || e.Sequence != want {
					t.Errorf("got %d, %v; want %d", e.Sequence, err, want)
					return
				}
			}
		})
	}
	var tellers sync.WaitGroup
	for range 4 {
		tellers.Go(func() { emit(b, most/4) })
	}
	tellers.Wait()
	wg.Wait()
	emit(b, 5)
	if e, ok := stuck.Now(); !ok || e.Type != Lost || e.Lost != 5 {
		t.Errorf("the slow one got %+v, %t", e, ok)
	}
}

func TestNextWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(4, 1)
		s := b.Kept(0)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		go func() {
			<-time.After(time.Second)
			b.Emit(Event{Type: DaemonStarted})
		}()
		if e, err := s.Next(ctx); err != nil || e.Type != DaemonStarted {
			t.Errorf("got %+v, %v", e, err)
		}
		if _, err := s.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("without another event: %v", err)
		}
	})
}

func BenchmarkEmit(b *testing.B) {
	bus := New(4096, 1)
	for b.Loop() {
		bus.Emit(Event{Type: SandboxForked, Sandbox: "sb"})
	}
}
