package daemon

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/fingerprint"
	"forkd.dev/forkd/internal/layout"
)

func testHome(t *testing.T) layout.Home {
	t.Helper()
	home := layout.Home{Root: filepath.Join(t.TempDir(), "home")}
	if err := os.MkdirAll(home.Root, 0o700); err != nil {
		t.Fatal(err)
	}
	return home
}

func testTokens(t *testing.T, home layout.Home) *access.Store {
	t.Helper()
	tokens, err := access.Open(home.Tokens())
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

func TestNetworkSettings(t *testing.T) {
	for _, tt := range []struct {
		n    Network
		says string
	}{
		{Network{}, ""},
		{Network{Bind: "127.0.0.1:0"}, ""},
		{Network{Bind: ":8889", TLSCert: "c", TLSKey: "k"}, ""},
		{Network{Bind: "8889"}, "HOST:PORT"},
		{Network{Bind: "::1"}, "HOST:PORT"},
		{Network{TLSCert: "c", TLSKey: "k"}, "--bind"},
		{Network{Bind: ":1", TLSCert: "c"}, "--tls-key"},
		{Network{Bind: ":1", TLSKey: "k"}, "--tls-cert"},
	} {
		err := tt.n.check()
		if (err == nil) != (tt.says == "") || err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%+v: %v", tt.n, err)
		}
	}
}

// TestNoTokenNoTCP: an open port that nobody guards is never opened.
func TestNoTokenNoTCP(t *testing.T) {
	home := testHome(t)
	tokens := testTokens(t, home)
	listens := func() error {
		p, err := listenTCP(t.Context(), Network{Bind: "127.0.0.1:0"}, home, tokens)
		if err == nil {
			_ = p.Close()
		}
		return err
	}
	if err := listens(); err == nil || !strings.Contains(err.Error(), "forkd token create") {
		t.Error(err)
	}
	if _, _, err := tokens.Create(access.Spec{Scope: access.Use, TTL: time.Nanosecond, By: access.Owner()}); err != nil {
		t.Fatal(err)
	}
	if err := listens(); err == nil {
		t.Error("a token that has expired is enough")
	}
	if _, _, err := tokens.Create(access.Spec{Scope: access.Use, By: access.Owner()}); err != nil {
		t.Fatal(err)
	}
	if err := listens(); err != nil {
		t.Error(err)
	}
}

// served is a listener that answers /version.
func served(t *testing.T, home layout.Home, n Network) *public {
	t.Helper()
	tokens := testTokens(t, home)
	if !tokens.Usable() {
		if _, _, err := tokens.Create(access.Spec{Scope: access.Use, By: access.Owner()}); err != nil {
			t.Fatal(err)
		}
	}
	p, err := listenTCP(t.Context(), n, home, tokens)
	if err != nil {
		t.Fatal(err)
	}
	server := &httptest.Server{Listener: p.Listener, Config: &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, `{"version":"`+r.Header.Get("Authorization")+`"}`)
	}), ReadHeaderTimeout: time.Minute}}
	server.Start()
	t.Cleanup(server.Close)
	return p
}

func TestTLS(t *testing.T) {
	home := testHome(t)
	p := served(t, home, Network{Bind: "0.0.0.0:0"})
	_, port, err := net.SplitHostPort(p.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	address := "https://127.0.0.1:" + port
	cert, _ := home.Certificate()
	for _, tt := range []struct {
		name string
		cfg  client.Config
		says string // "": it succeeds
	}{
		{"by its key", client.Config{Address: address, Fingerprint: p.pin}, ""},
		{"by its certificate", client.Config{Address: address, CA: cert}, ""},
		{"by its certificate, by name", client.Config{Address: "https://localhost:" + port, CA: cert}, ""},
		{"by nothing", client.Config{Address: address}, "unknown authority"},
		{"another key", client.Config{Address: address, Fingerprint: "sha256//" + strings.Repeat("A", 43) + "="}, "fingerprint is " + p.pin},
		{"unencrypted", client.Config{Address: "http://127.0.0.1:" + port}, "HTTPS"},
	} {
		tt.cfg.Token = "secret"
		c, err := client.Open(tt.cfg)
		if err != nil {
			t.Fatal(tt.name, err)
		}
		v, err := c.Version(t.Context())
		c.Close()
		switch {
		case tt.says == "" && (err != nil || v.Version != "Bearer secret"):
			t.Errorf("%s: %+v, %v", tt.name, v, err)
		case tt.says != "" && (err == nil || !strings.Contains(err.Error(), tt.says)):
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	for _, version := range []uint16{tls.VersionTLS10, tls.VersionTLS11} {
		d := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS10, MaxVersion: version}}
		if conn, err := d.DialContext(t.Context(), "tcp", "127.0.0.1:"+port); err == nil {
			_ = conn.Close()
			t.Errorf("TLS version %x is spoken", version)
		}
	}
}

func TestLoopbackIsPlain(t *testing.T) {
	p := served(t, testHome(t), Network{Bind: "127.0.0.1:0"})
	if !strings.HasPrefix(p.url, "http://127.0.0.1:") || p.pin != "" {
		t.Errorf("%s %s", p.url, p.pin)
	}
	c, err := client.New(p.url)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Version(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestKeyLasts: clients pin the key, so that it stays the same when the certificate is made anew.
func TestKeyLasts(t *testing.T) {
	home := testHome(t)
	first, err := ownCertificate(home, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	same, err := ownCertificate(home, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	other, err := ownCertificate(home, "192.0.2.7:0")
	if err != nil {
		t.Fatal(err)
	}
	if !first.Equal(same) || first.Equal(other) || fingerprint.Of(first) != fingerprint.Of(other) {
		t.Error("the certificate changes when its names do not, or the key does")
	}
	if other.VerifyHostname("192.0.2.7") != nil || other.VerifyHostname("localhost") != nil {
		t.Error("the names are not in it")
	}
	certFile, keyFile := home.Certificate()
	if info, err := os.Stat(keyFile); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if err := os.WriteFile(certFile, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if again, err := ownCertificate(home, "127.0.0.1:0"); err != nil || fingerprint.Of(again) != fingerprint.Of(first) {
		t.Error(err)
	}
	if err := os.WriteFile(keyFile, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ownCertificate(home, "127.0.0.1:0"); err == nil || !strings.Contains(err.Error(), keyFile) {
		t.Error(err)
	}
}

// TestRenewedCertificate: new files are read without a restart, and half of a new pair breaks nothing.
func TestRenewedCertificate(t *testing.T) {
	one, two := testHome(t), testHome(t)
	for _, home := range []layout.Home{one, two} {
		if _, err := ownCertificate(home, "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
	}
	cert, key := one.Certificate()
	newCert, newKey := two.Certificate()
	k := &keyPair{certFile: cert, keyFile: key}
	if err := k.load(); err != nil {
		t.Fatal(err)
	}
	look := func() string {
		k.looked = time.Time{}
		pair, err := k.get(nil)
		if err != nil {
			t.Fatal(err)
		}
		c, err := x509.ParseCertificate(pair.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		return fingerprint.Of(c)
	}
	old := look()
	copyOver(t, newCert, cert)
	if look() != old {
		t.Error("half of a pair is served")
	}
	copyOver(t, newKey, key)
	if look() == old {
		t.Error("the new one is not")
	}
}

func copyOver(t *testing.T, from, to string) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, text, 0o600); err != nil {
		t.Fatal(err)
	}
	later := time.Now().Add(time.Hour)
	if err := os.Chtimes(to, later, later); err != nil {
		t.Fatal(err)
	}
}

// TestPeers: the kernel says who is at the other end of the unix socket.
func TestPeers(t *testing.T) {
	dir, err := os.MkdirTemp("", "forkd-peers-") //nolint:usetesting // one that another user may enter
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "s")
	l, err := layout.ListenSocket(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for name, mode := range map[string]os.FileMode{dir: 0o755, path: 0o666} {
		if err := os.Chmod(name, mode); err != nil {
			t.Fatal(err)
		}
	}
	accept := func() access.Principal {
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return access.FromContext(whose(t.Context(), c))
	}
	ours, err := layout.DialSocket(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	if p := accept(); p != access.Owner() {
		t.Errorf("%+v", p)
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can be somebody else as well")
	}
	dialled := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread, which is another user now, ends
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, 65534, 65534, 65534); errno != 0 {
			dialled <- errno
			return
		}
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err == nil {
			defer syscall.Close(fd)
			err = syscall.Connect(fd, &syscall.SockaddrUnix{Name: path})
		}
		dialled <- err
	}()
	if err := <-dialled; err != nil {
		t.Fatal(err)
	}
	if p := accept(); !p.Stranger() || p.Scope != access.None {
		t.Errorf("%+v", p)
	}
	if p := access.FromContext(whose(context.WithoutCancel(t.Context()), &net.TCPConn{})); p != (access.Principal{}) {
		t.Errorf("over TCP: %+v", p)
	}
}

// TestBoundedConnections: whoever opens connections and says nothing takes no more than their share, and those who wait get
// in when others leave.
func TestBoundedConnections(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := newBoundedListener(l, 2)
	accepted := make(chan net.Conn)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := b.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	for range 3 {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	first, second := <-accepted, <-accepted
	select {
	case <-accepted:
		t.Fatal("a third one is let in")
	case <-time.After(100 * time.Millisecond):
	}
	for range 2 { // closing twice gives back one place
		_ = first.Close()
	}
	third := <-accepted
	select {
	case b.places <- struct{}{}:
		t.Error("a place is given back twice")
	default:
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	<-ended
	_, _ = second.Close(), third.Close()
	if n := mostConnections(); n < 32 || n > 4096 {
		t.Error(n)
	}
}
