package httpapi

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/api"
	bus "forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/testenv"
)

// lines are what a reply of JSON lines holds, as "type object".
func lines(t *testing.T, text string) []string {
	t.Helper()
	got := []string{}
	for line := range strings.Lines(text) {
		var e api.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		got = append(got, strings.TrimSpace(e.Type+" "+e.SandboxID+e.SnapshotTag))
	}
	return got
}

func TestListen(t *testing.T) {
	s := newServer(t) // its host has told that it has started
	b := s.Host.Events()
	first := b.Kept(1)
	started, _ := first.Now()
	b.Emit(bus.Event{Type: bus.SandboxForked, Sandbox: "sba", Snapshot: "py"})
	b.Emit(bus.Event{Type: bus.SandboxEnded, Sandbox: "sbb"})
	b.Emit(bus.Event{Type: bus.SnapshotReady, Snapshot: "py"})
	handler := asOwner(s.Handler())
	get := func(query string, headers ...string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodGet, "/v1/events?follow=false"+query, nil)
		for i := 0; i < len(headers); i += 2 {
			r.Header.Set(headers[i], headers[i+1])
		}
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, r)
		return rec
	}
	for query, want := range map[string][]string{
		"":                                 {"daemon.started", "sandbox.forked sbapy", "sandbox.ended sbb", "snapshot.ready py"},
		"&tail=1":                          {"snapshot.ready py"},
		"&tail=0":                          {},
		"&type=sandbox":                    {"sandbox.forked sbapy", "sandbox.ended sbb"},
		"&type=sandbox.ended&type=daemon":  {"daemon.started", "sandbox.ended sbb"},
		"&sandbox=sbb":                     {"sandbox.ended sbb"},
		"&snapshot=py":                     {"sandbox.forked sbapy", "snapshot.ready py"},
		"&snapshot=py&type=sandbox&tail=3": {"sandbox.forked sbapy"},
		fmt.Sprintf("&since=%d", started.Sequence+1): {"sandbox.ended sbb", "snapshot.ready py"},
		"&since=1&type=snapshot":                     {"events.lost", "snapshot.ready py"},
	} {
		rec := get(query)
		if rec.Code != http.StatusOK || rec.Header().Get("Content-Type") != jsonLines {
			t.Errorf("%s: %d %s", query, rec.Code, rec.Header())
		}
		if diff := cmp.Diff(want, lines(t, rec.Body.String())); diff != "" {
			t.Errorf("%s: %s", query, diff)
		}
	}
	for _, bad := range []string{
		"&since=x", "&since=-1", "&since=18446744073709551615", "&tail=-1", "&tail=x", "&since=1&tail=1", "&type=colour", "&type=sandbox.", "&more=1",
	} {
		if rec := get(bad); rec.Code != http.StatusBadRequest {
			t.Errorf("%s: %d %s", bad, rec.Code, rec.Body)
		}
	}
	for _, bad := range []string{"", "x", "-1"} {
		for _, query := range []string{"", "&since=1"} {
			if rec := get(query, "Last-Event-ID", bad); rec.Code != http.StatusBadRequest {
				t.Errorf("%s, Last-Event-ID %q: %d %s", query, bad, rec.Code, rec.Body)
			}
		}
	}
	rec := get("", "Accept", eventStream, "Last-Event-ID", fmt.Sprint(started.Sequence+2))
	want := fmt.Sprintf("id: %d\nevent: snapshot.ready\ndata: {", started.Sequence+3)
	if text := rec.Body.String(); !strings.HasPrefix(text, want) || !strings.HasSuffix(text, "}\n\n") || strings.Count(text, "\n\n") != 1 {
		t.Errorf("as server-sent events: %q", text)
	}
}

// TestListenSlowly: who reads nothing holds up nobody, and is told how much it has missed when it reads.
func TestListenSlowly(t *testing.T) {
	s := newServer(t)
	server := httptest.NewServer(asOwner(s.Handler()))
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(time.Minute))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"/v1/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	// More than all the buffers on the way hold, and then more than is kept.
	const most = 60_000
	reason := strings.Repeat("x", 1000)
	for range most {
		s.Host.Events().Emit(bus.Event{Type: bus.SandboxForked, Reason: reason})
	}
	s.Host.Events().Emit(bus.Event{Type: bus.DaemonStopping})
	got, lost := 0, uint64(0)
	scan := bufio.NewScanner(resp.Body)
	for scan.Scan() {
		var e api.Event
		if err := json.Unmarshal(scan.Bytes(), &e); err != nil {
			t.Fatal(err)
		}
		switch e.Type {
		case string(bus.Lost):
			lost += e.Lost
		case string(bus.SandboxForked):
			got++
		}
		if e.Type == string(bus.DaemonStopping) {
			break
		}
	}
	if lost == 0 || uint64(got)+lost != most {
		t.Errorf("%d read, %d lost, of %d: %v", got, lost, most, scan.Err())
	}
	cancel()
	_, _ = io.Copy(io.Discard, resp.Body)
}
