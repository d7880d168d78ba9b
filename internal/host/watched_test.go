package host

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
)

func TestAudience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a audience
		ctx, cancel := context.WithCancel(t.Context())
		began := 0
		var last context.Context // of the newest wait
		go func() {
			for {
				watched, done, err := a.wait(ctx)
				if err != nil {
					return
				}
				began, last = began+1, watched
				<-watched.Done()
				done()
			}
		}()
		synctest.Wait()
		if began != 0 {
			t.Fatal("something is watched for nobody")
		}
		first, second := a.join(), a.join()
		synctest.Wait()
		first()
		first() // leaving again is nothing
		synctest.Wait()
		if began != 1 || last.Err() != nil {
			t.Fatalf("with somebody left: begun %d times, %v", began, last.Err())
		}
		second()
		synctest.Wait()
		if !errors.Is(last.Err(), context.Canceled) {
			t.Fatal("nobody is left, and it is watched")
		}
		third := a.join()
		synctest.Wait()
		if began != 2 || last.Err() != nil {
			t.Fatalf("with somebody else: begun %d times, %v", began, last.Err())
		}
		third()
		cancel()
		synctest.Wait()
	})
}

// TestPortsPace: a guest that opens and closes ports as fast as it can does not fill the log of events.
func TestPortsPace(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	s := &sandbox{id: "sbhostile"}
	many := &wire.PortsReply{}
	for i := range 3 * maxPorts {
		many.Ports = append(many.Ports, wire.Port{Port: i + 1})
	}
	from := h.Events().Kept(0)
	var known []wire.Port
	began := time.Now()
	for range 2 {
		for _, reply := range []*wire.PortsReply{many, {}} {
			if err := h.changedPorts(t.Context(), s, &known, reply); err != nil {
				t.Fatal(err)
			}
			if len(known) > maxPorts {
				t.Errorf("%d ports are kept", len(known))
			}
		}
	}
	if took := time.Since(began); took < 4*portsPace {
		t.Errorf("four changes took %s", took)
	}
	if got := len(told(from)); got != 4*maxPortsTold {
		t.Errorf("%d events", got)
	}
	stopped, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.changedPorts(stopped, s, &known, many); err == nil {
		t.Error("it goes on when nobody listens")
	}
}
