package metrics

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

func read(t *testing.T, m *Metrics) string {
	t.Helper()
	rec := httptest.NewRecorder()
	m.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if rec.Code != 200 || !strings.HasPrefix(rec.Header().Get("Content-Type"), "text/plain; version=0.0.4") {
		t.Fatalf("%d %s: %s", rec.Code, rec.Header(), rec.Body)
	}
	return rec.Body.String()
}

func TestSamples(t *testing.T) {
	asked := 0
	m := New("1.2\"3", func() State {
		asked++
		return State{Sandboxes: map[string]int{"running": 2, "paused": 0}, Snapshots: map[string]int{"ready": 1}, MemoryOwn: 4096, DiskImages: 7, Forking: 3, NetworkSent: 5, NetworkFramesRefused: 6}
	})
	m.Took(Fork, "hot", OK, 20*time.Millisecond)
	m.Took(ForkChild, "", OK, 20*time.Millisecond)
	m.Took(ForkChild, "", Failed, time.Second)
	m.Took(BranchPause, "live", OK, time.Millisecond)
	m.Took(Exec, "stream", OK, time.Minute)
	m.Took("nothing we know", "x", OK, time.Minute)
	m.Begin("GET", "/v1/sandboxes/{id}")(404, time.Millisecond)
	m.Begin("GET", "/v1/sandboxes/{id}")(0, time.Millisecond)
	if asked != 0 {
		t.Error("the state is asked for before anybody reads")
	}
	text := read(t, m)
	for _, want := range []string{
		`forkd_build_info{version="1.2\"3"} 1`,
		`forkd_sandboxes{state="running"} 2`, `forkd_sandboxes{state="paused"} 0`, `forkd_snapshots{status="ready"} 1`,
		`forkd_sandbox_memory_own_bytes 4096`, `forkd_disk_bytes{kind="images"} 7`, `forkd_operations_in_progress{operation="fork"} 3`,
		`forkd_fork_duration_seconds_count{mode="hot",result="ok"} 1`, `forkd_fork_children_total{result="error"} 1`,
		`forkd_branch_pause_duration_seconds_bucket{mode="live",le="0.001"} 1`, `forkd_exec_duration_seconds_count{mode="stream",result="ok"} 1`,
		`forkd_http_requests_total{code="404",method="GET",route="/v1/sandboxes/{id}"} 1`,
		`forkd_http_requests_total{code="none",method="GET",route="/v1/sandboxes/{id}"} 1`, `forkd_http_requests_in_flight 0`,
		`forkd_network_bytes_total{direction="sent"} 5`, `forkd_network_frames_lost_total{reason="refused"} 6`, `forkd_network_flows_open 0`,
		"go_goroutines ", "process_open_fds ",
	} {
		if !strings.Contains(text, want+"\n") && !strings.Contains(text, "\n"+want) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
}

// TestNames: Prometheus' own linter has nothing to say.
func TestNames(t *testing.T) {
	m := New("dev", func() State {
		return State{Sandboxes: map[string]int{"running": 1}, Snapshots: map[string]int{"ready": 1}}
	})
	for of := range m.timed {
		m.Took(of, "m", OK, time.Second)
	}
	m.Begin("GET", "/")(200, time.Second)
	problems, err := testutil.GatherAndLint(m.registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestConcurrentReaders(t *testing.T) {
	var busy sync.Mutex
	m := New("dev", func() State {
		if !busy.TryLock() {
			t.Error("two ask at once")
			return State{}
		}
		defer busy.Unlock()
		return State{}
	})
	var wg sync.WaitGroup
	for range maxReaders {
		wg.Go(func() {
			rec := httptest.NewRecorder()
			m.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
			m.Took(ForkChild, "", OK, time.Millisecond)
		})
	}
	wg.Wait()
}

func BenchmarkTook(b *testing.B) {
	m := New("dev", func() State { return State{} })
	for b.Loop() {
		m.Took(Fork, "hot", OK, time.Millisecond)
	}
}
