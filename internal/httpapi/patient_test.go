package httpapi

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// TestStalledStream: a client that takes nothing of a command's output is let go. The command goes on, and was in nobody's way.
func TestStalledStream(t *testing.T) {
	url, dir := execServerOf(t, &Server{Stall: 200 * time.Millisecond})
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimSuffix(strings.TrimPrefix(url, "http://"), "/exec"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ended := filepath.Join(dir, "ended")
	body, err := json.Marshal(api.ExecRequest{
		Args: []string{"sh", "-c", "head -c 50000000 /dev/zero | tr '\\0' x; touch " + ended}, TimeoutSecs: 300,
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = fmt.Fprintf(conn, "POST /exec HTTP/1.1\r\nHost: x\r\nAccept: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		jsonLines, len(body), body)
	if err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReaderSize(conn, 16).ReadString('\n'); err != nil || !strings.Contains(line, "200") {
		t.Fatalf("%q, %v", line, err)
	}
	resp := post(t, url, jsonLines, api.ExecRequest{Args: []string{"echo", "beside"}})
	if got := toldEvents(t, resp.Body); !strings.Contains(got, "stdout beside\n") {
		t.Errorf("beside it: %s", got)
	}
	within(t, "the command has not gone on", func() bool {
		_, err := os.Stat(ended)
		return err == nil
	})
}

func within(t *testing.T, complaint string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for late := time.After(testenv.Timeout(30 * time.Second)); !done(); {
		select {
		case <-tick.C:
		case <-late:
			t.Fatal(complaint)
		}
	}
}

// TestPatient: who is silent for longer than a client may take nothing is not cut off, nor is the next request of a connection,
// and who takes a connection over has it without a deadline.
func TestPatient(t *testing.T) {
	const quiet = 50 * time.Millisecond
	s := &Server{Stall: quiet}
	mux := http.NewServeMux()
	mux.HandleFunc("/silent", func(w http.ResponseWriter, _ *http.Request) {
		for range 2 {
			_, _ = io.WriteString(w, "some")
			<-time.After(4 * quiet)
		}
	})
	mux.HandleFunc("/taken", func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		<-time.After(4 * quiet)
		_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 8\r\nConnection: close\r\n\r\nsomesome")
	})
	server := httptest.NewServer(s.Patient(mux))
	defer server.Close()
	for _, path := range []string{"/silent", "/silent", "/taken"} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := server.Client().Do(r)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || string(body) != "somesome" {
			t.Errorf("%s: %q, %v", path, body, err)
		}
		<-time.After(4 * quiet)
	}
}
