package enginetest

import (
	"sync"
	"testing"
	"time"
)

// Pinger asks a guest without pause, as a busy client would, and notes the longest time without an answer.
type Pinger struct {
	stop chan struct{}
	done chan struct{}

	mu      sync.Mutex
	last    time.Time
	longest time.Duration
	answers int
	err     error
}

// Ping starts asking; until Stop nobody else may use g.
func Ping(t testing.TB, g *Guest) *Pinger {
	t.Helper()
	p := &Pinger{stop: make(chan struct{}), done: make(chan struct{}), last: time.Now()}
	go p.run(g)
	t.Cleanup(p.halt)
	return p
}

func (p *Pinger) run(g *Guest) {
	defer close(p.done)
	for {
		select {
		case <-p.stop:
			return
		default:
		}
		_, err := g.Ask("get nothing")
		now := time.Now()
		p.mu.Lock()
		p.longest = max(p.longest, now.Sub(p.last))
		p.last = now
		p.answers++
		p.err = err
		p.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// Take is the longest gap since the last call, and how many answers came.
func (p *Pinger) Take(t testing.TB) (time.Duration, int) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		t.Fatal(p.err)
	}
	d, n := max(p.longest, time.Since(p.last)), p.answers
	p.longest, p.answers = 0, 0
	return d, n
}

func (p *Pinger) halt() {
	select {
	case <-p.stop:
	default:
		close(p.stop)
	}
	<-p.done
}

// Stop ends the asking.
func (p *Pinger) Stop(t testing.TB) {
	t.Helper()
	p.halt()
	if p.err != nil {
		t.Fatal(p.err)
	}
}
