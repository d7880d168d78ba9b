package netd

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/testenv"
)

// takenOver is a Client whose process is the test's: answer says what it answers, and nil that it has come to an end.
func takenOver(t *testing.T, answer func(req *request, n int) (*reply, []*os.File)) (*Client, *conn) {
	t.Helper()
	a, b := sockets(t)
	c := New(t.Context(), Config{Log: slog.New(slog.DiscardHandler)})
	ours, machine, err := pair()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll([]*os.File{ours, machine}) })
	c.links["sb1"] = &held{file: ours}
	c.conn = newConn(b, c.told)
	c.conn.has = map[string]bool{}
	t.Cleanup(c.conn.end)
	go func() {
		for {
			var req request
			files, err := a.receive(&req)
			if err != nil {
				return
			}
			closeAll(files)
			for n := 0; ; n++ {
				r, files := answer(&req, n)
				more := r != nil
				if !more {
					r = &reply{}
				}
				r.Seq, r.More = req.Seq, more
				err := a.send(r, files...)
				closeAll(files)
				if err != nil || !more {
					break
				}
			}
		}
	}()
	return c, c.conn
}

// TestTakenOver: what a process says that somebody has taken over fills neither the daemon's memory nor its descriptors.
func TestTakenOver(t *testing.T) {
	long := strings.Repeat("ä", 1<<12)
	const parts = 9
	c, conn := takenOver(t, func(req *request, n int) (*reply, []*os.File) {
		if n == parts {
			return nil, nil
		}
		r := &reply{}
		var files []*os.File
		for i := range 1000 {
			switch req.Op {
			case opFlows:
				f := network.Flow{Name: "short"} // a client under the race detector is slow
				if i == 0 {
					f.Name = long[:2050]
				}
				r.Flows = append(r.Flows, f)
			case opTotals:
				if r.Totals == nil {
					r.Totals = map[string]network.Totals{"sb1": {Sent: 7}}
				}
				if i < 100 {
					r.Totals[fmt.Sprint("other", n, "-", i)] = network.Totals{Sent: 1}
				}
			case opLinks:
				if i >= maxFiles {
					continue
				}
				ours, machine, err := pair()
				if err != nil {
					t.Error(err)
					continue
				}
				_ = machine.Close()
				files = append(files, ours)
				r.IDs = append(r.IDs, "other")
				if i%2 == 0 {
					r.IDs[i] = "sb1"
				}
			}
		}
		return r, files
	})
	flows, err := c.Flows(t.Context(), "sb1")
	if err != nil || len(flows) != maxFlows || len(flows[0].Name) > maxText {
		t.Errorf("%d flows, %v", len(flows), err)
	}
	totals, err := c.Totals(t.Context())
	if err != nil || len(totals) != 1 || totals["sb1"].Sent != 7 {
		t.Errorf("counters of %d links, %v", len(totals), err)
	}
	before := openFiles(t)
	have, err := conn.links(t.Context(), map[string]network.Attached{"sb1": {}})
	if err != nil || len(have.files) != 1 || len(have.others) != parts*maxFiles/2 {
		t.Errorf("%d links and %d others, %v", len(have.files), len(have.others), err)
	}
	if now := openFiles(t); now > before+1 {
		t.Errorf("%d descriptors are open, %d were before", now, before)
	}
	_ = have.files["sb1"].Close()
	c.told(&reply{ID: "sb1", Flow: &network.Flow{Name: long}}) // whom nobody watches
	if f := fit(network.Flow{Reason: long}); len(f.Reason) > maxText {
		t.Errorf("a reason of %d bytes", len(f.Reason))
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// TestEndedInTheMiddle: flows of a process that had to be ended while it handed its links over are lost, whatever it had handed over.
func TestEndedInTheMiddle(t *testing.T) {
	h := newHome(t)
	c := h.daemon()
	defer end(t, c)
	ours, machine, err := pair()
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	have := &foundLinks{files: map[string]*os.File{"sb1": ours}}
	if lost := c.adopt(nil, nil, have, map[string]network.Attached{"sb1": {}}); !slices.Equal(lost, []string{"sb1"}) {
		t.Errorf("lost %v", lost)
	}
}

// TestDeaf: who asks a process that stands still waits once, and not one after another.
func TestDeaf(t *testing.T) {
	h := newHome(t)
	c := h.daemon()
	defer end(t, c)
	attach(t, c, "sb1", egress.Policy{})
	if _, err := c.Totals(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.signal(unix.SIGSTOP)
	await(t, "its silence", func() bool { // A signal takes its time.
		_, err := c.Totals(t.Context())
		return errors.Is(err, ErrDown)
	})
	began := time.Now()
	for range 20 {
		if _, err := c.Totals(t.Context()); !errors.Is(err, ErrDown) {
			t.Errorf("it answers: %v", err)
		}
		if _, ok := c.TotalsOf(t.Context(), "sb1"); ok {
			t.Error("it answers for one")
		}
	}
	if took := time.Since(began); took > testenv.Timeout(time.Second) {
		t.Errorf("40 questions took %s", took)
	}
	h.signal(unix.SIGCONT)
	await(t, "an answer", func() bool {
		_, err := c.Totals(t.Context())
		return err == nil
	})
}

// TestToldFirst: nobody hears from a new process that a guest has not talked before it is told that the one before is gone.
func TestToldFirst(t *testing.T) {
	h := newHome(t)
	c := h.daemon()
	defer end(t, c)
	told := make(chan bool, 1)
	c.cfg.Restarted = func([]string, string) {
		c.mu.Lock()
		defer c.mu.Unlock()
		told <- c.conn != nil
	}
	attach(t, c, "sb1", egress.Policy{})
	if _, err := c.Totals(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.signal(unix.SIGKILL)
	if <-told {
		t.Error("the new process can be asked before")
	}
}

// TestRoom: a process gets no more links than it can hold, and who asks for one more is told what to do.
func TestRoom(t *testing.T) {
	c := New(t.Context(), Config{Log: slog.New(slog.DiscardHandler)})
	c.conn, c.tended, c.maxLinks = nil, true, 2 // Nothing is started.
	one := func(id string) error {
		machine, peer, err := c.Attach(id, egress.Policy{}, 0)
		if err == nil {
			closeAll([]*os.File{machine, peer})
		}
		return err
	}
	for _, id := range []string{"sb1", "sb2"} {
		if err := one(id); err != nil {
			t.Fatal(err)
		}
	}
	if err := one("sb3"); !errors.Is(err, network.ErrFull) || !strings.Contains(err.Error(), "LimitNOFILE") {
		t.Errorf("one more than there is room for: %v", err)
	}
	c.Detach("sb1")
	if err := one("sb3"); err != nil {
		t.Errorf("there is room again: %v", err)
	}
	for _, id := range []string{"sb2", "sb3"} {
		c.Detach(id)
	}
	for files, want := range map[uint64]int{0: 1 << 20, 8: 1, 1024: 112, 4096: 496, 1 << 20: 131056} {
		if got := linksOf(files); got != want {
			t.Errorf("%d files: %d links, want %d", files, got, want)
		}
	}
}

// TestLostFlows: who follows flows too slowly is told how many were not told.
func TestLostFlows(t *testing.T) {
	c := New(t.Context(), Config{Log: slog.New(slog.DiscardHandler)})
	c.links["sb1"] = &held{}
	w := &watcher{flows: make(chan network.Flow, 1), over: make(chan struct{})}
	c.watchers["sb1"] = map[*watcher]bool{w: true}
	for id := range uint64(5) {
		c.told(&reply{ID: "sb1", Flow: &network.Flow{ID: id + 1, Lost: int64(id)}}) // The process had lost some, too.
	}
	if f := <-w.flows; f.ID != 1 || f.Lost != 0 {
		t.Errorf("%+v", f)
	}
	c.told(&reply{ID: "sb1", Flow: &network.Flow{ID: 6}})
	if f := <-w.flows; f.ID != 6 || f.Lost != 1+2+3+4+4 {
		t.Errorf("%+v", f)
	}
	s := NewServer(nil, nil)
	se := &session{s: s, ready: make(chan struct{}, 1)}
	l := &link{id: "sb1", watched: true}
	s.told = se
	for id := range uint64(untold + 3) {
		s.tell(l, network.Flow{ID: id + 1})
	}
	se.queue = nil
	s.tell(l, network.Flow{ID: 1})
	s.tell(l, network.Flow{ID: 2})
	if len(se.queue) != 2 || se.queue[0].reply.Flow.Lost != 3 || se.queue[1].reply.Flow.Lost != 0 {
		t.Errorf("%d told, the first after %d that were not", len(se.queue), se.queue[0].reply.Flow.Lost)
	}
}
