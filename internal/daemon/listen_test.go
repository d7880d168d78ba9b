package daemon

import (
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/access"
)

// TestListen: a listener is opened when there is a token, once, and not by a daemon that stops.
func TestListen(t *testing.T) {
	home := testHome(t)
	tokens := testTokens(t, home)
	l := &tcpListener{home: home, tokens: tokens, log: slog.New(slog.DiscardHandler)}
	refused := func(bind, want string) {
		t.Helper()
		if err := l.Listen(t.Context(), bind); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", bind, err, want)
		}
		if address, _ := l.Where(); address != "" {
			t.Errorf("%s: it is at %s", bind, address)
		}
	}
	const bind = "127.0.0.1:0"
	refused(bind, "the daemon is stopping") // or has not begun
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }), ReadHeaderTimeout: time.Minute,
	}
	l.begin(server)
	refused(bind, "no token")
	if _, _, err := tokens.Create(access.Spec{Scope: access.Use, By: access.Owner()}); err != nil {
		t.Fatal(err)
	}
	for _, wrong := range []string{"nowhere", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:58*", "127.0.0.1:65536", ":-1"} {
		refused(wrong, "HOST:PORT")
	}
	taken, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", bind)
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	refused(taken.Addr().String(), "address already in use")
	if err := l.Listen(t.Context(), bind); err != nil {
		t.Fatal(err)
	}
	address, _ := l.Where()
	if err := l.Listen(t.Context(), taken.Addr().String()); err != nil {
		t.Errorf("a second time: %v", err)
	}
	if again, _ := l.Where(); again != address || !strings.HasPrefix(address, "http://127.0.0.1:") {
		t.Errorf("it was at %s, and is at %s", address, again)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusTeapot {
		t.Errorf("it serves %s", resp.Status)
	}
	if err := server.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := l.end(); !errors.Is(err, http.ErrServerClosed) {
		t.Errorf("the end: %v", err)
	}
}
