package httpapi

import (
	"crypto/tls"
	"net"
	"path/filepath"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

// TestClientLeavesADeafGuest: a client that hangs up while its guest takes nothing leaves nothing behind in the daemon.
func TestClientLeavesADeafGuest(t *testing.T) {
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	client, err := (&net.Dialer{}).DialContext(t.Context(), "unix", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	up, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	below, deaf := net.Pipe()
	defer deaf.Close()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		stop := watchHangup(up, func() { _ = up.Close(); _ = below.Close() })
		defer stop()
		pipe(t.Context(), up, below, func() { _ = up.Close() }, func() { _ = below.Close() })
	}()
	if _, err := client.Write(make([]byte, 100<<10)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
		t.Fatal("it ended while the client is there")
	case <-time.After(1500 * time.Millisecond):
	}
	_ = client.Close()
	select {
	case <-ended:
	case <-time.After(testenv.Timeout(10 * time.Second)):
		t.Fatal("it goes on without a client")
	}
}

// TestHangupOverTLS: what encrypts a connection does not hide that its other end has gone.
func TestHangupOverTLS(t *testing.T) {
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	client, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	up, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer up.Close()
	secure := tls.Server(up, &tls.Config{MinVersion: tls.VersionTLS12})
	if hungUp(secure) {
		t.Error("it is taken for gone")
	}
	gone := make(chan struct{})
	stop := watchHangup(secure, func() { close(gone) })
	defer stop()
	_ = client.Close()
	select {
	case <-gone:
	case <-time.After(testenv.Timeout(10 * time.Second)):
		t.Error("its end is not seen")
	}
}
