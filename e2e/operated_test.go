package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// listened is a stream of events, as somebody reads it who goes on where it was.
type listened struct {
	t    *testing.T
	body io.ReadCloser
	scan *bufio.Scanner
	id   string // of the last
}

// listen reads server-sent events from after an id; "": from now on.
func (f *forkd) listen(t *testing.T, after string) *listened {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", filepath.Join(f.home, "forkd.sock"))
	}}}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(time.Minute))
	t.Cleanup(func() { cancel(); c.CloseIdleConnections() })
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://forkd/v1/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", "text/event-stream")
	if after != "" {
		req.Header.Set("Last-Event-ID", after)
	}
	resp, err := c.Do(req) //nolint:bodyclose // Its reader closes it, or the context.
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%s %s", resp.Status, resp.Header)
	}
	return &listened{t: t, body: resp.Body, scan: bufio.NewScanner(resp.Body)}
}

// until reads up to an event of a type and of one of the objects.
func (l *listened) until(kind, object string) api.Event {
	l.t.Helper()
	for l.scan.Scan() {
		line := l.scan.Text()
		if id, ok := strings.CutPrefix(line, "id: "); ok {
			l.id = id
		}
		text, ok := strings.CutPrefix(line, "data: ")
		if !ok {
			continue
		}
		var e api.Event
		if err := json.Unmarshal([]byte(text), &e); err != nil {
			l.t.Fatalf("%q: %v", line, err)
		}
		if strconv.FormatUint(e.Sequence, 10) != l.id {
			l.t.Errorf("id %s has sequence %d", l.id, e.Sequence)
		}
		if e.Type == kind && (e.SandboxID == object || e.SnapshotTag == object) {
			return e
		}
	}
	l.t.Fatalf("the stream ended before %s of %s: %v", kind, object, l.scan.Err())
	return api.Event{}
}

// TestEventsAuditUsageMetrics: what happens on a real daemon is told, written down, counted and paid for.
func TestEventsAuditUsageMetrics(t *testing.T) {
	f := shared(t)
	f.run("daemon", "start")
	events := f.listen(t, "")
	children := f.fork(2, "--label", "test=operated")
	a, b := children[0], children[1]
	events.until("sandbox.forked", a.ID)
	f.run("pause", a.ID)
	events.until("sandbox.paused", a.ID)
	f.run("resume", a.ID)
	events.until("sandbox.resumed", a.ID)
	if err := events.body.Close(); err != nil {
		t.Error(err)
	}

	before := f.usage(a.ID)
	f.run("exec", a.ID, "--", "python3", "-c", "import os,time\nb=os.urandom(40<<20)\nt=time.process_time()\nwhile time.process_time()-t<1: pass\n"+
		"f=open('/var/tmp/x','wb'); f.write(b); f.flush(); os.fsync(f.fileno())")
	after := f.usage(a.ID)
	if d := after.CPUSeconds - before.CPUSeconds; d < 0.9 || d > 120 {
		t.Errorf("a second of work cost %.2f s", d)
	}
	if d := after.MemoryOwnBytes - before.MemoryOwnBytes; d < 30<<20 {
		t.Errorf("40 MiB of random memory cost %d bytes", d)
	}
	if after.DiskOwnBytes-before.DiskOwnBytes < 35<<20 || after.IOWrittenBytes-before.IOWrittenBytes < 35<<20 {
		t.Errorf("40 MiB written: disk %d → %d, io %d → %d", before.DiskOwnBytes, after.DiskOwnBytes, before.IOWrittenBytes, after.IOWrittenBytes)
	}
	if after.MemorySharedBytes == 0 || after.MemoryProportionalBytes < after.MemoryOwnBytes ||
		after.MemoryProportionalBytes > after.MemoryOwnBytes+after.MemorySharedBytes {
		t.Errorf("own, shared, proportional: %d, %d, %d", after.MemoryOwnBytes, after.MemorySharedBytes, after.MemoryProportionalBytes)
	}
	f.run("suspend", a.ID)
	if asleep := f.usage(a.ID); asleep.CPUSeconds < after.CPUSeconds || asleep.MemoryOwnBytes != 0 {
		t.Errorf("suspended: %+v, before that %+v", asleep, after)
	}
	var rows []struct {
		api.Usage

		CPUPercent *float64 `json:"cpu_percent"`
	}
	f.json(&rows, "top", "-l", "test=operated")
	if len(rows) != 2 || rows[0].CPUPercent == nil {
		t.Errorf("top: %+v", rows)
	}

	// Goes on where it was, over what happened meanwhile.
	events = f.listen(t, events.id)
	events.until("sandbox.suspended", a.ID)
	if err := syscall.Kill(b.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if e := events.until("sandbox.failed", b.ID); e.Reason == "" || e.Labels["test"] != "operated" {
		t.Errorf("failed: %+v", e)
	}
	f.run("kill", a.ID, b.ID)
	events.until("sandbox.ended", b.ID)

	for name, least := range map[string]float64{
		`forkd_fork_children_total{result="ok"}`: 2, `forkd_suspend_duration_seconds_count{result="ok"}`: 1,
		`forkd_pause_duration_seconds_count{result="ok"}`: 1, `forkd_exec_duration_seconds_count{mode="stream",result="ok"}`: 1,
		`forkd_http_requests_total{code="201",method="POST",route="/v1/sandboxes"}`: 1, `forkd_sandboxes{state="running"}`: 0,
	} {
		if got := f.sample(name); got < least {
			t.Errorf("%s is %g, want at least %g", name, got, least)
		}
	}
	f.checkAudit(a.ID, b.ID)
}

func (f *forkd) usage(id string) api.Usage {
	f.t.Helper()
	u, err := f.client().Usage(f.t.Context(), id)
	if err != nil {
		f.t.Fatal(err)
	}
	return *u
}

// sample is a sample of the metrics; -1: there is none.
func (f *forkd) sample(name string) float64 {
	f.t.Helper()
	for line := range strings.Lines(f.get("/metrics")) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				f.t.Fatalf("%q: %v", line, err)
			}
			return n
		}
	}
	return -1
}

// get is the body of a page.
func (f *forkd) get(path string) string {
	f.t.Helper()
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", filepath.Join(f.home, "forkd.sock"))
	}}}
	defer c.CloseIdleConnections()
	req, err := http.NewRequestWithContext(f.t.Context(), http.MethodGet, "http://forkd"+path, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		f.t.Fatalf("%s: %s, %v: %s", path, resp.Status, err, text)
	}
	return string(text)
}

// checkAudit looks for what two children of this test have left in the log, and has the daemon begin another.
func (f *forkd) checkAudit(a, b string) {
	f.t.Helper()
	path := filepath.Join(f.home, "audit.log")
	text, err := os.ReadFile(path)
	if err != nil {
		f.t.Fatal(err)
	}
	var forked, ran, killed bool
	for line := range bytes.Lines(text) {
		var e struct {
			RequestID string              `json:"request_id"`
			Principal string              `json:"principal"`
			Remote    string              `json:"remote"`
			Method    string              `json:"method"`
			Route     string              `json:"route"`
			Touched   map[string][]string `json:"touched"`
			Created   map[string][]string `json:"created"`
			Argv      []string            `json:"argv"`
			Status    int                 `json:"status"`
		}
		if err := json.Unmarshal(line, &e); err != nil {
			f.t.Fatalf("%q: %v", line, err)
		}
		if e.RequestID == "" || e.Principal == "" || e.Remote != "unix" {
			f.t.Errorf("%s", line)
		}
		of := e.Method + " " + e.Route
		forked = forked || of == "POST /v1/sandboxes" && strings.Join(e.Created["sandbox"], " ") == a+" "+b && e.Touched["snapshot"][0] == parentTag
		ran = ran || e.Route == "/v1/sandboxes/{id}/call" && len(e.Argv) == 3 && e.Argv[0] == "python3" && e.Touched["sandbox"][0] == a
		killed = killed || of == "DELETE /v1/sandboxes/{id}" && e.Touched["sandbox"][0] == b && e.Status == http.StatusNoContent
	}
	if !forked || !ran || !killed {
		f.t.Errorf("forked %t, ran %t, killed %t in %s", forked, ran, killed, text)
	}
	if err := os.Rename(path, path+".moved"); err != nil {
		f.t.Fatal(err)
	}
	pid := f.status().PID
	if err := syscall.Kill(pid, syscall.SIGHUP); err != nil {
		f.t.Fatal(err)
	}
	await(f.t, testenv.Timeout(10*time.Second), "another audit log", func() bool { _, err := os.Stat(path); return err == nil })
	f.run("ls")
	if text, err := os.ReadFile(path); err != nil || !strings.Contains(string(text), "/v1/sandboxes") {
		f.t.Errorf("the new log: %s, %v", text, err)
	}
	if now := f.status().PID; now != pid {
		f.t.Errorf("daemon %d is %d after SIGHUP", pid, now)
	}
}

// TestRequiredAuditOnFullDisk: what changes anything is refused before it acts, and says why; what only looks is answered;
// with room again all is well.
func TestRequiredAuditOnFullDisk(t *testing.T) {
	testenv.Need(t, "root")
	f := aloneOn(t, "4m")
	f.env = append(f.env, "FORKD_AUDIT_REQUIRED=true")
	f.run("daemon", "start")
	f.run("ls")
	filler := filepath.Join(filepath.Dir(f.home), "filler")
	fill, err := os.Create(filler)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = fill.Write(make([]byte, 512))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if err := fill.Close(); err != nil {
		t.Fatal(err)
	}
	await(t, testenv.Timeout(20*time.Second), "a refusal", func() bool { // the log's last block takes some more
		r := f.try("rmi", "nothing")
		return r.code != 0 && strings.Contains(r.stderr, "audit log is required")
	})
	for _, request := range []string{"POST /v1/sandboxes", "DELETE /v1/snapshots/nothing", "POST /v1/sandboxes/sbnothing/exec"} {
		method, path, _ := strings.Cut(request, " ")
		if status, e := f.rest(method, path, `{}`); status != http.StatusServiceUnavailable || e.Code != api.CodeUnavailable {
			t.Errorf("%s: %d %+v", request, status, e)
		}
	}
	f.run("ls")
	if n := f.sample("forkd_audit_write_failures_total"); n < 4 {
		t.Errorf("%g failures counted", n)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if r := f.try("rmi", "nothing"); !strings.Contains(r.stderr, "not found") {
		t.Errorf("with room again: %+v", r)
	}
	text, err := os.ReadFile(filepath.Join(f.home, "audit.log"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if last := lines[len(lines)-1]; !strings.Contains(last, `"status":404`) || !json.Valid([]byte(last)) || !strings.Contains(fmt.Sprint(lines), `"phase":"begin"`) {
		t.Errorf("the log after that: %s", text)
	}
}
