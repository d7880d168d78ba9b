package netd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/network/networktest"
	"forkd.dev/forkd/internal/proc"
	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "netd" {
		if err := Main(context.Background(), slices.Contains(os.Args, "--outer")); err != nil {
			fmt.Fprintln(os.Stderr, "netd:", err)
			os.Exit(1) //nolint:forbidigo // it is a main of its own.
		}
		return
	}
	if len(os.Args) > 1 && os.Args[1] == attackWord {
		attack(os.Stdout)
		return
	}
	testenv.Main(m.Run)
}

// theWorld is what the tests' outside has: an address that is said to be good's, where an echo is.
const theWorld = "203.0.114.10"

// home is a daemon's place, whose outside is an echo on loopback.
type home struct {
	t         *testing.T
	dir       string
	log       *bytes.Buffer
	mu        sync.Mutex
	restarted []string // why, and whose
}

func newHome(t *testing.T) *home {
	t.Helper()
	h := &home{t: t, dir: t.TempDir(), log: &bytes.Buffer{}}
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			})
		}
	})
	stage, err := json.Marshal(Stage{
		Names: map[string][]netip.Addr{"good.example": {netip.MustParseAddr(theWorld)}},
		Hosts: map[string]netip.AddrPort{theWorld + ":7": netip.MustParseAddrPort(l.Addr().String())},
		Log:   filepath.Join(h.dir, "dials"),
	})
	if err == nil {
		err = os.WriteFile(h.stage(), stage, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *home) stage() string { return filepath.Join(h.dir, "stage.json") }

// daemon is another Client of the home, after the last has left.
func (h *home) daemon() *Client {
	ids := [2]uint32{}
	if os.Geteuid() == 0 {
		ids = [2]uint32{3_100_000_000, 3_100_000_000 + 1<<24 - 1}
	}
	return New(h.t.Context(), Config{
		Socket: filepath.Join(h.dir, "sock"), Record: filepath.Join(h.dir, "record"), First: ids[0], Last: ids[1], Stage: h.stage(),
		Log: slog.New(slog.DiscardHandler),
		Restarted: func(ids []string, reason string) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.restarted = append(h.restarted, fmt.Sprint(ids, " ", reason))
		},
	})
}

func (h *home) restarts() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.restarted)
}

// pid is the process that has the socket.
func (h *home) pid() int {
	h.t.Helper()
	var rec record
	text, err := os.ReadFile(filepath.Join(h.dir, "record"))
	if err == nil {
		err = json.Unmarshal(text, &rec)
	}
	if err != nil {
		h.t.Fatal(err)
	}
	return rec.PID
}

func (h *home) signal(s unix.Signal) {
	h.t.Helper()
	if err := unix.Kill(h.pid(), s); err != nil {
		h.t.Fatal(err)
	}
}

func leave(t *testing.T, c *Client) {
	t.Helper()
	if err := c.Leave(t.Context()); err != nil {
		t.Error(err)
	}
}

// end ends all links, and the process with the last.
func end(t *testing.T, c *Client) {
	t.Helper()
	c.mu.Lock()
	ids := c.ids()
	c.mu.Unlock()
	for _, id := range ids {
		c.Detach(id)
	}
	leave(t, c)
}

func allow(t *testing.T, rules ...string) egress.Policy {
	t.Helper()
	var p egress.Policy
	for _, text := range rules {
		r, err := egress.ParseRule(text)
		if err != nil {
			t.Fatal(err)
		}
		p.Allow = append(p.Allow, r)
	}
	return p
}

// attach is a guest at the machine's end of a new link, and what its machine's process keeps.
func attach(t *testing.T, c *Client, id string, p egress.Policy) (*networktest.Guest, *os.File) {
	t.Helper()
	machine, peer, err := c.Attach(id, p, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	fd, err := unix.Dup(descriptor(machine))
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = peer.Close() })
	return networktest.NewGuest(t, os.NewFile(uintptr(fd), "guest")), peer
}

// reap waits for the end of a process whose daemon was this program, and is gone.
func reap(t *testing.T, pid int) {
	t.Helper()
	if _, err := unix.Wait4(pid, nil, 0, nil); err != nil {
		t.Errorf("wait for process %d: %v", pid, err)
	}
}

// echo sends something through a guest's connection, and has it come back.
func echo(t *testing.T, conn net.Conn) error {
	t.Helper()
	text := []byte("is anybody there?")
	_ = conn.SetDeadline(time.Now().Add(testenv.Timeout(5 * time.Second)))
	if _, err := conn.Write(text); err != nil {
		return err
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(conn, got); err != nil {
		return err
	}
	if !bytes.Equal(got, text) {
		return fmt.Errorf("%q came back", got)
	}
	return nil
}

func connect(t *testing.T, g *networktest.Guest) (net.Conn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(5*time.Second))
	defer cancel()
	conn, err := g.DialTCP(ctx, theWorld+":7")
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn, nil
}

func works(t *testing.T, g *networktest.Guest) net.Conn {
	t.Helper()
	conn, err := connect(t, g)
	if err == nil {
		err = echo(t, conn)
	}
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(testenv.Timeout(10 * time.Second))
	for !is() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: not within 10 s", what)
		}
	}
}

// TestFlows: the process is started by the first link, passes nothing before it is told to, and what the policy allows
// afterwards; flows are listed, told and counted; with the last link it ends and leaves nothing.
func TestFlows(t *testing.T) {
	h := newHome(t)
	c := h.daemon()
	g, _ := attach(t, c, "sb1", allow(t, theWorld))
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := g.DialTCP(short, theWorld+":7"); err == nil {
		t.Error("a link that is closed lets a guest connect")
	}
	if err := c.Open(t.Context(), "sb1"); err != nil {
		t.Fatal(err)
	}
	told := make(chan network.Flow, 100)
	watching, stop := context.WithCancel(t.Context())
	defer stop()
	begun, watched := make(chan struct{}), make(chan error, 1)
	go func() {
		watched <- c.Watch(watching, "sb1", func() { close(begun) }, func(f network.Flow) error {
			told <- f
			return nil
		})
	}()
	<-begun
	works(t, g)
	if f := <-told; f.Verdict != network.VerdictAllowed || f.To.String() != theWorld+":7" {
		t.Errorf("told of %+v", f)
	}
	if _, err := g.DialTCP(t.Context(), "198.51.100.1:80"); err == nil {
		t.Error("connected where no rule allows it")
	}
	if f := <-told; f.Verdict != network.VerdictRefused {
		t.Errorf("told of %+v", f)
	}
	flows, err := c.Flows(t.Context(), "sb1")
	if err != nil || len(flows) != 2 {
		t.Errorf("flows %+v, error %v", flows, err)
	}
	totals, err := c.Totals(t.Context())
	if got := totals["sb1"]; err != nil || !got.Talked || got.Sent == 0 || got.Refused == 0 {
		t.Errorf("totals %+v, error %v", got, err)
	}
	if err := c.SetPolicy(t.Context(), "sb1", egress.Policy{}); err != nil {
		t.Fatal(err)
	}
	if _, err := connect(t, g); err == nil {
		t.Error("connected where no rule allows it any more")
	}
	pid := h.pid()
	c.Detach("sb1")
	if err := <-watched; err != nil {
		t.Errorf("watching ended with %v", err)
	}
	if _, err := c.Flows(t.Context(), "sb1"); err == nil {
		t.Error("a link that is gone has flows")
	}
	leave(t, c)
	if unix.Kill(pid, 0) == nil {
		await(t, "its end", func() bool { return unix.Kill(pid, 0) != nil })
	}
	for _, name := range []string{"sock", "record"} {
		if _, err := os.Lstat(filepath.Join(h.dir, name)); err == nil {
			t.Errorf("%s is left", name)
		}
	}
	if r := h.restarts(); len(r) > 0 {
		t.Errorf("restarted: %v", r)
	}
}

// TestKilled: when the process dies under traffic another has the links, as they were told to be; flows are gone, which is said.
func TestKilled(t *testing.T) {
	h := newHome(t)
	c := h.daemon()
	defer end(t, c)
	g, _ := attach(t, c, "sb1", egress.Policy{})
	closed, _ := attach(t, c, "closed", allow(t, theWorld))
	if err := c.Open(t.Context(), "sb1"); err != nil {
		t.Fatal(err)
	}
	if err := c.SetPolicy(t.Context(), "sb1", allow(t, theWorld)); err != nil {
		t.Fatal(err)
	}
	for round := range 3 {
		conn := works(t, g)
		pid := h.pid()
		h.signal(unix.SIGKILL)
		await(t, "another process", func() bool { return len(h.restarts()) == round+1 })
		if now := h.pid(); now == pid {
			t.Fatal("the record names the dead one")
		}
		if err := echo(t, conn); err == nil {
			t.Error("a connection of a process that is dead goes on")
		}
	}
	works(t, g)
	if r := h.restarts(); !strings.Contains(r[0], "[closed sb1]") || !strings.Contains(r[0], "signal 9") {
		t.Errorf("restarts are told as %q", r)
	}
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := closed.DialTCP(short, theWorld+":7"); err == nil {
		t.Error("a link that was closed is open in the next process")
	}
}

// TestBudgetOutlives: what was seen to be spent is not given again by a restart.
func TestBudgetOutlives(t *testing.T) {
	h := newHome(t)
	c := h.daemon()
	c.pingEvery = 20 * time.Millisecond
	defer end(t, c)
	p := allow(t, theWorld)
	p.BudgetBytes = 50
	g, _ := attach(t, c, "sb1", p)
	if err := c.Open(t.Context(), "sb1"); err != nil {
		t.Fatal(err)
	}
	works(t, g) // 17 bytes in each direction
	await(t, "the counters to be noted", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.links["sb1"].last.Received > 0
	})
	h.signal(unix.SIGKILL)
	await(t, "another process", func() bool { return len(h.restarts()) == 1 })
	totals, err := c.Totals(t.Context())
	if got := totals["sb1"].BudgetLeft; err != nil || got < 1 || got > 16 {
		t.Errorf("%d bytes of the budget are left, error %v", got, err)
	}
}

// TestDaemonGone: flows go on while there is no daemon, and with the next one, which ends links that are no machine's of its own.
func TestDaemonGone(t *testing.T) {
	h := newHome(t)
	first := h.daemon()
	g, peer := attach(t, first, "sb1", allow(t, theWorld))
	other, _ := attach(t, first, "builder", allow(t, theWorld))
	for _, id := range []string{"sb1", "builder"} {
		if err := first.Open(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	conn, gone := works(t, g), works(t, other)
	pid := h.pid()
	leave(t, first)
	if err := echo(t, conn); err != nil {
		t.Fatalf("without a daemon: %v", err)
	}
	second := h.daemon()
	defer reap(t, pid)
	defer end(t, second)
	lost, err := second.Adopt(t.Context(), map[string]network.Attached{"sb1": {Link: peer, Policy: allow(t, theWorld)}})
	if err != nil || len(lost) > 0 {
		t.Fatalf("lost %v, error %v", lost, err)
	}
	if err := echo(t, conn); err != nil {
		t.Fatalf("with the next daemon: %v", err)
	}
	await(t, "the end of a link that nobody has", func() bool {
		totals, err := second.Totals(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return len(totals) == 1
	})
	if err := echo(t, gone); err == nil {
		t.Error("a link of no machine goes on")
	}
	if h.pid() != pid || len(h.restarts()) > 0 {
		t.Error("another process was started")
	}
	if err := second.SetPolicy(t.Context(), "sb1", egress.Policy{}); err != nil {
		t.Fatal(err)
	}
	if err := echo(t, conn); err == nil {
		t.Error("a flow goes on that the policy does not allow any more")
	}
}

// TestBothGone: a machine's process has kept the other end of its link.
func TestBothGone(t *testing.T) {
	h := newHome(t)
	first := h.daemon()
	g, peer := attach(t, first, "sb1", allow(t, theWorld))
	if err := first.Open(t.Context(), "sb1"); err != nil {
		t.Fatal(err)
	}
	works(t, g)
	pid := h.pid()
	leave(t, first)
	h.signal(unix.SIGKILL)
	reap(t, pid)
	second := h.daemon()
	defer end(t, second)
	kept, err := duplicate(peer)
	if err != nil {
		t.Fatal(err)
	}
	lost, err := second.Adopt(t.Context(), map[string]network.Attached{"sb1": {Link: kept, Policy: allow(t, theWorld)}, "old": {}})
	if want := []string{"old", "sb1"}; err != nil || !slices.Equal(lost, want) {
		t.Fatalf("lost %v, want %v; error %v", lost, want, err)
	}
	works(t, g)
	if err := second.Open(t.Context(), "old"); !errors.Is(err, errNoLink) {
		t.Errorf("a sandbox without a link is told %v", err)
	}
}

// TestStopped: a process that stands still keeps nobody waiting who needs nothing of it, and is replaced.
func TestStopped(t *testing.T) {
	h := newHome(t)
	c := h.daemon()
	c.pingEvery, c.pingLimit = 100*time.Millisecond, time.Second
	defer end(t, c)
	g, _ := attach(t, c, "sb1", allow(t, theWorld))
	if err := c.Open(t.Context(), "sb1"); err != nil {
		t.Fatal(err)
	}
	works(t, g)
	h.signal(unix.SIGSTOP)
	began := time.Now()
	for i := range 200 {
		machine, peer, err := c.Attach(fmt.Sprint("other", i), egress.Policy{}, 0)
		if err != nil {
			t.Fatal(err)
		}
		closeAll([]*os.File{machine, peer})
		if err := c.Open(t.Context(), fmt.Sprint("other", i)); err != nil {
			t.Fatal(err)
		}
		c.Detach(fmt.Sprint("other", i))
	}
	if took := time.Since(began); took > testenv.Timeout(time.Second) {
		t.Errorf("200 links took %s", took)
	}
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := c.Totals(short); err == nil {
		t.Error("it answers")
	}
	await(t, "another process", func() bool { return len(h.restarts()) == 1 })
	if r := h.restarts()[0]; !strings.Contains(r, "did not answer") {
		t.Errorf("the restart is told as %q", r)
	}
	works(t, g)
}

// TestStoppedAtTheEnd: a process that does not hear that it is to end is ended.
func TestStoppedAtTheEnd(t *testing.T) {
	h := newHome(t)
	c := h.daemon()
	attach(t, c, "sb1", egress.Policy{})
	if _, err := c.Totals(t.Context()); err != nil {
		t.Fatal(err)
	}
	pid := h.pid()
	h.signal(unix.SIGSTOP)
	c.Detach("sb1")
	leave(t, c)
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("it is still there: %v", err)
	}
}

// TestAnotherForkds: of a process that speaks another protocol only the links are taken.
func TestAnotherForkds(t *testing.T) {
	h := newHome(t)
	first := h.daemon()
	g, _ := attach(t, first, "sb1", allow(t, theWorld))
	if err := first.Open(t.Context(), "sb1"); err != nil {
		t.Fatal(err)
	}
	works(t, g)
	pid := h.pid()
	leave(t, first)
	second := h.daemon()
	defer end(t, second)
	second.protocol = protocol + 1
	dead := make(chan struct{})
	go func() { // Whose child it is.
		defer close(dead)
		reap(t, pid)
	}()
	lost, err := second.Adopt(t.Context(), map[string]network.Attached{"sb1": {Policy: allow(t, theWorld)}})
	<-dead
	if err != nil || !slices.Equal(lost, []string{"sb1"}) {
		t.Fatalf("lost %v, error %v", lost, err)
	}
	works(t, g)
	if h.pid() == pid {
		t.Error("it is still the one")
	}
}

// TestConfined: nothing is left to the process but what it does.
func TestConfined(t *testing.T) {
	h := newHome(t)
	c := h.daemon()
	defer end(t, c)
	g, _ := attach(t, c, "sb1", allow(t, theWorld))
	if err := c.Open(t.Context(), "sb1"); err != nil {
		t.Fatal(err)
	}
	works(t, g)
	pid := h.pid()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"NoNewPrivs:\t1\n", "Seccomp:\t2\n", "CapEff:\t0000000000000000\n", "CapPrm:\t0000000000000000\n"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("its status lacks %q", want)
		}
	}
	if os.Geteuid() != 0 {
		return
	}
	id, err := proc.Owner(pid)
	if err != nil || id < 3_100_000_000 {
		t.Errorf("it is user %d (error %v)", id, err)
	}
	if !strings.Contains(string(status), "Groups:\t \n") {
		t.Error("it has groups")
	}
	for _, set := range []string{"CapBnd", "CapInh", "CapAmb"} {
		if !strings.Contains(string(status), set+":\t0000000000000000\n") {
			t.Errorf("%s is not empty", set)
		}
	}
	theirs, err1 := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	ours, err2 := os.Readlink("/proc/self/ns/net")
	if err := errors.Join(err1, err2); err != nil || theirs != ours {
		t.Errorf("its network is %s and not the host's %s (error %v)", theirs, ours, err)
	}
}

// TestDoesNotStart: what keeps the process from starting is said to who needs it, and to nobody else.
func TestDoesNotStart(t *testing.T) {
	h := newHome(t)
	if err := os.WriteFile(h.stage(), []byte(`{"hosts": {"203.0.113.1:1": "8.8.8.8:53"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	c := h.daemon()
	defer end(t, c)
	attach(t, c, "closed", egress.Policy{})
	if err := c.Open(t.Context(), "closed"); err != nil {
		t.Errorf("a sandbox that may reach nothing: %v", err)
	}
	attach(t, c, "sb1", allow(t, theWorld))
	await(t, "the failure", func() bool { return c.State().Error != nil })
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := c.Open(ctx, "sb1"); err == nil || !strings.Contains(err.Error(), "loopback") {
		t.Errorf("a sandbox that may: %v", err)
	}
}

// TestManyLinks: none is lost or left, however they come and go.
func TestManyLinks(t *testing.T) {
	h := newHome(t)
	c := h.daemon()
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 50 {
				id := fmt.Sprint("sb", w, "-", i)
				machine, peer, err := c.Attach(id, egress.Policy{}, 0)
				if err != nil {
					t.Error(err)
					return
				}
				_ = c.Open(t.Context(), id)
				_, _ = c.Totals(t.Context())
				if i%10 != 0 {
					c.Detach(id)
				}
				closeAll([]*os.File{machine, peer})
			}
		})
	}
	wg.Wait()
	totals, err := c.Totals(t.Context())
	if err != nil || len(totals) != 40 {
		t.Errorf("%d links, want 40; error %v", len(totals), err)
	}
	leave(t, c)
	defer reap(t, h.pid())
	second := h.daemon()
	machines := map[string]network.Attached{}
	for id := range totals {
		machines[id] = network.Attached{}
	}
	if lost, err := second.Adopt(t.Context(), machines); err != nil || len(lost) > 0 {
		t.Errorf("lost %v, error %v", lost, err)
	}
	end(t, second)
}
