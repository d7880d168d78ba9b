package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/e2e/load"
	"forkd.dev/forkd/internal/testenv"
)

const (
	live = "live"
	diff = "diff"
	full = "full"
)

// modes are those of this host; the others are skipped with the reason that the program gives.
func modes() []string { return []string{live, diff, full} }

// liveHere is whether this host can capture live.
var liveHere struct {
	once   sync.Once
	auto   api.Snapshot
	byName result
}

// needMode skips a test where the program says that it cannot capture so. It must say it of live only, and only where
// it chooses another mode by itself.
func needMode(t testing.TB, f *forkd, mode string) {
	t.Helper()
	if mode != live {
		return
	}
	f.freely()
	liveHere.once.Do(func() {
		id := f.one()
		liveHere.auto = f.branch(id)
		liveHere.byName = f.try("branch", id, "--mode", live, "-t", "live-by-name")
		f.try("kill", id)
		f.try("rmi", "live-by-name", liveHere.auto.Tag)
	})
	auto, r := liveHere.auto, liveHere.byName
	if auto.Mode == live {
		if r.code != 0 {
			t.Fatalf("auto chose live (%s), and live says: %+v", auto.ModeReason, r)
		}
		return
	}
	if r.code != 1 || !strings.Contains(r.stderr, "live capture unavailable") || !strings.Contains(r.stderr, "try:") {
		t.Fatalf("auto chose %s (%s), and live says: %+v", auto.Mode, auto.ModeReason, r)
	}
	testenv.Missing(t, live, auto.ModeReason)
}

// liveEnv is what a daemon's environment must say for its sandboxes to be captured live here. As root they are in jails, and
// there they can be where the administrator has said so; else the tests of live captures go without.
func liveEnv() []string {
	text, err := os.ReadFile("/proc/sys/vm/unprivileged_userfaultfd")
	if os.Geteuid() != 0 || err == nil && strings.TrimSpace(string(text)) == "1" {
		return nil
	}
	return []string{"FORKD_JAIL=off"}
}

// freely gives the test a daemon by which sandboxes can be captured live, if it can be had.
func (f *forkd) freely() {
	f.t.Helper()
	with, before := liveEnv(), f.env
	if with == nil || slices.Contains(f.env, with[0]) {
		return
	}
	f.run("daemon", "stop")
	f.env = slices.Concat(before, with)
	f.t.Cleanup(func() {
		// The other tests want the daemon that everybody has.
		f.env = before
		if r := f.try("daemon", "stop"); r.code != 0 {
			f.t.Errorf("stop the daemon: %+v", r)
		}
	})
}

// branch captures a sandbox; the snapshot is removed with the test, and what stands on it.
func (f *forkd) branch(id string, flags ...string) api.Snapshot {
	f.t.Helper()
	var s api.Snapshot
	f.json(&s, append([]string{"branch", id}, flags...)...)
	f.t.Cleanup(func() {
		if r := f.try("rmi", "--cascade", s.Tag); r.code != 0 && !strings.Contains(r.stderr, "not found") {
			f.t.Errorf("remove %s: %s", s.Tag, r.stderr)
		}
	})
	return s
}

func (f *forkd) remove(tags ...string) {
	f.t.Helper()
	f.run(append([]string{"rmi"}, tags...)...)
}

func (f *forkd) info(tag string) api.SnapshotInfo {
	f.t.Helper()
	var s api.SnapshotInfo
	f.json(&s, "snapshot-info", tag, "--wait", "2m")
	return s
}

// tags are those of all snapshots, with their status.
func (f *forkd) tags() map[string]string {
	f.t.Helper()
	var list []api.Snapshot
	f.json(&list, "snapshots")
	all := map[string]string{}
	for _, s := range list {
		all[s.Tag] = s.Status
	}
	return all
}

// restart ends the daemon, not its sandboxes, and starts another.
func (f *forkd) restart() {
	f.t.Helper()
	f.run("daemon", "stop")
	f.run("daemon", "start")
}

// client is the Go client of the same daemon.
func (f *forkd) client() *client.Client {
	f.t.Helper()
	c, err := client.New("unix://" + filepath.Join(f.home, "forkd.sock"))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(c.Close)
	return c
}

// rest makes a request and returns its status and, if it is no success, the error.
func (f *forkd) rest(method, path, body string) (int, api.Error) {
	f.t.Helper()
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", filepath.Join(f.home, "forkd.sock"))
	}}}
	defer c.CloseIdleConnections()
	req, err := http.NewRequestWithContext(f.t.Context(), method, "http://forkd"+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	var e api.Error
	if resp.StatusCode >= http.StatusBadRequest {
		if err := json.Unmarshal(text, &e); err != nil || e.Message == "" {
			f.t.Fatalf("%s %s: %d %s", method, path, resp.StatusCode, text)
		}
	}
	return resp.StatusCode, e
}

// started is a command of ours that is running.
type started struct {
	cmd            *exec.Cmd
	stdout, stderr bytes.Buffer
	done           chan struct{}
	err            error
}

// start runs a command beside the test.
func (f *forkd) start(args ...string) *started {
	f.t.Helper()
	s := &started{cmd: exec.CommandContext(f.t.Context(), f.bin, args...), done: make(chan struct{})}
	s.cmd.Env = append(os.Environ(), "FORKD_HOME="+f.home, "FORKD_HOST=")
	s.cmd.Env = append(s.cmd.Env, f.env...)
	s.cmd.Stdout, s.cmd.Stderr = &s.stdout, &s.stderr
	if err := s.cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	go func() {
		defer close(s.done)
		s.err = s.cmd.Wait()
	}()
	f.t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-s.done
	})
	return s
}

// wait waits for the command's end.
func (s *started) wait(t testing.TB, limit time.Duration) result {
	t.Helper()
	timer := time.NewTimer(testenv.Timeout(limit))
	defer timer.Stop()
	select {
	case <-s.done:
	case <-timer.C:
		t.Fatalf("%v did not end within %s: %s", s.cmd.Args, limit, s.stderr.String())
	}
	r := result{s.stdout.String(), s.stderr.String(), 0}
	if exit, ok := errors.AsType[*exec.ExitError](s.err); ok {
		r.code = exit.ExitCode()
	} else if s.err != nil {
		r.code = -1
	}
	return r
}

// pass lets time pass: a random moment is what is wanted, not an event.
func pass(t testing.TB, d time.Duration) {
	t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
	}
}

// fire starts the load of package load in a sandbox: so many MiB, rewritten at so many a second, as fast as it goes when
// there is time for it.
func (f *forkd) fire(id string, mib int) {
	f.t.Helper()
	self, err := os.Executable()
	if err != nil {
		f.t.Fatal(err)
	}
	f.run("cp", self, id+":/root/load")
	rate := "50" // what it does not do leaves the processors to the rest of the test
	if testenv.Soak() {
		rate = "0"
	}
	f.run("exec", id, "--", "/root/load", load.Word, "start", strconv.Itoa(mib), rate)
	f.eval(id, `
def fire_ask(words):
    import socket
    s = socket.socket(socket.AF_UNIX)
    s.connect("`+load.Socket+`")
    s.sendall(words.encode() + b"\n")
    said = b""
    while part := s.recv(1 << 16):
        said += part
    print(said.decode().strip())`)
}

// ask asks the load. Nothing must be wrong.
func (f *forkd) ask(id, what string, from uint64) load.Report {
	f.t.Helper()
	r := f.answer(id, what, from)
	if r.Error != "" {
		f.t.Errorf("the load of %s: %s", id, r.Error)
	}
	return r
}

// answer asks the load: "report", or "check" to have it look at everything first.
func (f *forkd) answer(id, what string, from uint64) load.Report {
	f.t.Helper()
	out := f.eval(id, fmt.Sprintf("fire_ask(%q)", fmt.Sprintf("%s %d", what, from)))
	var r load.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		f.t.Fatalf("the load of %s answers %q: %v", id, out, err)
	}
	return r
}

// common is how many records from the same one on two copies of a load have in common.
func common(a, b load.Report) int {
	for i, chain := range a.Chains {
		if i >= len(b.Chains) || b.Chains[i] != chain {
			return i
		}
	}
	return len(a.Chains)
}

// spread says how values are spread.
func spread(values []float64) string {
	sorted := slices.Sorted(slices.Values(values))
	if len(sorted) == 0 {
		return "none"
	}
	at := func(q float64) float64 { return sorted[int(q*float64(len(sorted)-1)+0.5)] }
	return fmt.Sprintf("%.1f (p50) %.1f (p90) %.1f (max)", at(0.5), at(0.9), at(1))
}

// number is a count from the environment, for long runs.
func number(t testing.TB, name string, usual, soak int) int {
	t.Helper()
	if text := os.Getenv(name); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("%s=%s is no number", name, text)
		}
		return n
	}
	if testenv.Soak() {
		return soak
	}
	return usual
}

// clean says what a home has besides its snapshots, with no sandbox of its own running.
func (f *forkd) clean() {
	f.t.Helper()
	if out := f.run("ls", "-q"); out != "" {
		f.t.Errorf("sandboxes are left: %q", out)
	}
	var left []string
	// What is dropped in the background is gone a moment later.
	await(f.t, 10*time.Second, "the machines' files to go", func() bool {
		left = slices.DeleteFunc(leftovers(f.home), func(s string) bool {
			// The daemon that runs has its socket, and a place for the machines' groups.
			return s == "forkd.sock" || strings.HasPrefix(s, "hot/") || strings.HasPrefix(filepath.Base(s), "forkd-")
		})
		return len(left) == 0
	})
	if len(left) > 0 {
		f.t.Errorf("left behind: %v", left)
	}
}

// storedBytes is what the layers of a home take on its disk.
func storedBytes(t testing.TB, home string) int64 {
	t.Helper()
	var sum int64
	err := filepath.WalkDir(filepath.Join(home, "layers"), func(path string, d os.DirEntry, err error) error {
		var st syscall.Stat_t
		if err == nil {
			err = syscall.Lstat(path, &st)
		}
		if errors.Is(err, os.ErrNotExist) {
			return nil // collected meanwhile
		}
		if err == nil && d.Type().IsRegular() {
			sum += st.Blocks * 512
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return sum
}
