package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

// networkOf is the process of a home's networks, 0 if none runs.
func networkOf(home string) int {
	text, err := os.ReadFile(filepath.Join(home, "network.json"))
	var rec struct {
		PID int `json:"pid"`
	}
	if err != nil || json.Unmarshal(text, &rec) != nil || !alive(rec.PID) {
		return 0
	}
	return rec.PID
}

// killNetwork ends that process in the hardest way.
func (f *forkd) killNetwork() {
	f.t.Helper()
	pid := networkOf(f.home)
	if pid == 0 {
		f.t.Fatal("there is no process of networks to kill")
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		f.t.Fatal(err)
	}
	await(f.t, 10*time.Second, "another process of networks", func() bool {
		now := networkOf(f.home)
		return now != 0 && now != pid
	})
}

// ticks is a server on loopback, where tests' guests find it as ticks.example:7: it says a connection's number and then a word
// every 50 ms.
type ticks struct {
	file string // that a daemon's outside is described in
}

func newTicks(t *testing.T) *ticks {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(func() {
		stop()
		_ = l.Close()
		wg.Wait()
	})
	var count atomic.Int64
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { tick(ctx, conn, count.Add(1)) })
		}
	})
	const addr = "203.0.114.77"
	outside, err := json.Marshal(map[string]any{
		"names": map[string][]netip.Addr{"ticks.example": {netip.MustParseAddr(addr)}},
		"hosts": map[string]string{addr + ":7": l.Addr().String()},
	})
	s := &ticks{file: filepath.Join(t.TempDir(), "outside.json")}
	if err == nil {
		err = os.WriteFile(s.file, outside, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func tick(ctx context.Context, conn net.Conn, number int64) {
	defer conn.Close()
	_, err := fmt.Fprintln(conn, number)
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for err == nil {
		select {
		case <-ticker.C:
			_, err = fmt.Fprintln(conn, "tick")
		case <-ctx.Done():
			return
		}
	}
}

// listener is what a guest does with ticks: it counts on one connection, and remembers how that ended.
const listener = `
import socket, threading
class Listener:
    def __init__(self):
        self.n, self.end = 0, ""
        self.k = socket.create_connection(("ticks.example", 7), timeout=20)
        self.k.settimeout(None)
        self.f = self.k.makefile()
        self.number = int(self.f.readline())
        threading.Thread(target=self.run, daemon=True).start()
    def run(self):
        try:
            for line in self.f: self.n += 1
            self.end = "closed"
        except Exception as e:
            self.end = repr(e)
def listen():
    global a
    try:
        a = Listener()
        return a.number
    except Exception as e:
        return repr(e)
`

// hears says that the guest's connection is the numbered one and goes on.
func (f *forkd) hears(id string, number int) {
	f.t.Helper()
	var before int
	await(f.t, testenv.Timeout(20*time.Second), "words of the outside", func() bool {
		got := strings.Fields(f.eval(id, "print(a.number, a.n, a.end)"))
		n, err := strconv.Atoi(got[1])
		if err != nil || got[0] != strconv.Itoa(number) || len(got) > 2 {
			f.t.Fatalf("the guest's connection: %v, want number %d and no end", got, number)
		}
		if before == 0 {
			before = n + 1
		}
		return n > before
	})
}

// hearsNoMore says that the guest's connection, on which it only listens, ends.
func (f *forkd) hearsNoMore(id string) {
	f.t.Helper()
	await(f.t, testenv.Timeout(20*time.Second), "the end of a connection whose other end is gone", func() bool {
		return strings.TrimSpace(f.eval(id, "print(a.end)")) != ""
	})
}

func (f *forkd) listens(id string) int {
	f.t.Helper()
	got := strings.TrimSpace(f.eval(id, "print(listen())"))
	n, err := strconv.Atoi(got)
	if err != nil {
		f.t.Fatalf("the guest cannot connect: %s", got)
	}
	return n
}

// TestNetworkProcess: flows survive the daemon; the process that moves them may die, stand still, or die with the daemon, and
// nothing but flows is lost; it ends with the daemon when no sandbox is left.
func TestNetworkProcess(t *testing.T) {
	f := copied(t, "FORKD_NETWORK_OUTER="+newTicks(t).file)
	quiet := f.one()
	pid := networkOf(f.home)
	if pid == 0 {
		t.Fatal("the first sandbox has no process of networks")
	}
	id := f.one("--egress", "none", "--allow", "ticks.example")
	f.eval(id, listener)
	number := f.listens(id)
	f.hears(id, number)

	f.killDaemon()
	f.run("daemon", "start")
	f.hears(id, number)
	if now := networkOf(f.home); now != pid {
		t.Errorf("the daemon's successor has the networks in process %d, they were in %d", now, pid)
	}
	f.run("daemon", "stop")
	f.run("daemon", "start")
	f.hears(id, number)

	f.killNetwork()
	f.hearsNoMore(id)
	f.hears(id, f.listens(id))
	if events := f.run("events", "--since", "0", "--json"); !strings.Contains(events, "network.restarted") {
		t.Error("no event says that networks were begun anew")
	}

	f.stoppedNetwork(id, quiet)

	// A branch leaves its source's connections alone.
	number = f.listens(id)
	f.run("branch", id, "-t", "connected")
	f.hears(id, number)
	f.knowsNames("connected")
	if doctor := f.try("doctor").stdout; !strings.Contains(doctor, "process "+strconv.Itoa(networkOf(f.home))) {
		t.Errorf("the doctor does not know the process of networks:\n%s", doctor)
	}

	f.run("suspend", id)
	f.run("wake", id)
	f.hearsNoMore(id)
	f.listens(id)

	// A paused guest is told when it is resumed.
	f.run("pause", id)
	f.killNetwork()
	f.run("resume", id)
	f.hearsNoMore(id)
	f.listens(id)

	f.killDaemon()
	if err := syscall.Kill(networkOf(f.home), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	f.run("daemon", "start")
	f.hearsNoMore(id)
	f.hears(id, f.listens(id))

	pid = networkOf(f.home)
	f.run("kill", id)
	f.run("kill", quiet)
	f.run("daemon", "stop")
	await(t, 10*time.Second, "the end of a process of no networks", func() bool { return !alive(pid) })
	for _, name := range []string{"network.sock", "network.json"} {
		if _, err := os.Lstat(filepath.Join(f.home, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", name, err)
		}
	}
}

// knowsNames: what a guest had looked up its children use without asking again, if they may.
func (f *forkd) knowsNames(tag string) {
	f.t.Helper()
	const dial = `
import socket
try:
    with socket.create_connection(("203.0.114.77", 7), timeout=20) as k: print("heard", k.makefile().readline())
except OSError as e: print(repr(e))`
	child, closed := f.forkOf(tag, 1)[0].ID, f.forkOf(tag, 1, "--egress", "none")[0].ID
	if got := f.eval(child, dial); !strings.HasPrefix(got, "heard ") {
		f.t.Errorf("a child does not reach the address that its source was given for a name: %s", got)
	}
	if got := f.eval(closed, dial); !strings.Contains(got, "ConnectionRefused") {
		f.t.Errorf("a child that may reach nothing: %s", got)
	}
	f.run("kill", child)
	f.run("kill", closed)
}

// stoppedNetwork: a process that stands still keeps neither machines waiting nor those who need no network.
func (f *forkd) stoppedNetwork(id, quiet string) {
	f.t.Helper()
	pid := networkOf(f.home)
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		f.t.Fatal(err)
	}
	defer func() {
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			f.t.Error(err)
		}
	}()
	began := time.Now()
	f.run("kill", f.one())
	f.eval(id, "print(1)")
	f.run("exec", quiet, "--", "true")
	f.run("ls")
	if took := time.Since(began); took > testenv.Timeout(20*time.Second) {
		f.t.Errorf("a fork, an evaluation, a command and a list took %s beside a process of networks that stands still", took)
	}
}
