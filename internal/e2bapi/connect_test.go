package e2bapi

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/httpapi"
	"forkd.dev/forkd/internal/testenv"
)

// TestStalledStream: a call ends whose client takes nothing of what it streams, signs of life included.
func TestStalledStream(t *testing.T) {
	ended := make(chan error, 1)
	handle := streaming(func(_ *http.Request, out *stream) error {
		for {
			var e processEvent
			e.Event.Data = &eventData{Stdout: make([]byte, 32<<10)}
			if err := out.send(e); err != nil {
				return err
			}
		}
	})
	api := &httpapi.Server{Stall: 100 * time.Millisecond}
	server := httptest.NewServer(api.Patient(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { ended <- handle(w, r) })))
	defer server.Close()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(server.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\nKeepalive-Ping-Interval: 1\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReaderSize(conn, 16).ReadString('\n'); err != nil || !strings.Contains(line, "200") {
		t.Fatalf("%q, %v", line, err)
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("it ended as if all had been taken")
		}
	case <-time.After(testenv.Timeout(20 * time.Second)):
		t.Fatal("it goes on")
	}
}
