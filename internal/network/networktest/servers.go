package networktest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/network/escapetest"
)

// Servers are what stands at the addresses of the world of package escapetest, on loopback. They answer everybody, and
// remember whom they were taken for.
type Servers struct {
	// Hosts are, by "address:port", where on loopback each is.
	Hosts map[string]string

	mu   sync.Mutex
	seen []string
}

// NewServers starts them, until the test is over.
func NewServers(t testing.TB) *Servers {
	t.Helper()
	s := &Servers{Hosts: map[string]string{}}
	web := s.serve(t, listen(t), "http")
	secure := s.serve(t, tls.NewListener(listen(t), s.config(t)), "https")
	banner := listen(t)
	handle(t, banner, func(conn net.Conn) {
		_, _ = io.WriteString(conn, "SSH-2.0-world\r\n")
		line := make([]byte, 100)
		n, _ := conn.Read(line)
		_, _ = conn.Write(line[:n])
	})
	echo := echoUDP(t)
	for _, addr := range []string{escapetest.Allowed4, "[" + escapetest.Allowed6 + "]"} {
		s.Hosts[addr+":80"], s.Hosts[addr+":443"], s.Hosts[addr+":8443"], s.Hosts[addr+":22"] = web, secure, secure, banner.Addr().String()
		s.Hosts[addr+":9999"] = echo
	}
	return s
}

// Seen are the hosts that were asked for, each with its protocol.
func (s *Servers) Seen() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

func (s *Servers) saw(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, what)
}

func listen(t testing.TB) net.Listener {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (s *Servers) serve(t testing.TB, l net.Listener, protocol string) string {
	server := &http.Server{
		ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			s.saw(protocol + " " + r.Host)
			_, _ = io.Copy(io.Discard, r.Body)
			switch {
			case r.Method == http.MethodConnect:
				w.WriteHeader(http.StatusMethodNotAllowed)
			case r.URL.Path == "/redirect":
				http.Redirect(w, r, "http://redirected."+escapetest.Evil+"/", http.StatusFound)
			default:
				_, _ = fmt.Fprintf(w, "served %s\n", r.Host)
			}
		}),
	}
	var done sync.WaitGroup
	done.Go(func() { _ = server.Serve(l) })
	t.Cleanup(func() {
		_ = server.Close()
		done.Wait()
	})
	return l.Addr().String()
}

func (s *Servers) config(t testing.TB) *tls.Config {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(24 * time.Hour), DNSNames: []string{escapetest.Allowed}}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{{Certificate: [][]byte{cert}, PrivateKey: key}},
		GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) {
			s.saw("tls " + info.ServerName)
			return nil, nil
		},
	}
}

// handle serves each connection until the test is over.
func handle(t testing.TB, l net.Listener, serve func(net.Conn)) {
	var done sync.WaitGroup
	done.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			done.Go(func() {
				_ = conn.SetDeadline(time.Now().Add(time.Minute))
				serve(conn)
				_ = conn.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		done.Wait()
	})
}

func echoUDP(t testing.TB) string {
	conn, err := (&net.ListenConfig{}).ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var done sync.WaitGroup
	done.Go(func() {
		b := make([]byte, 65535)
		for {
			n, from, err := conn.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = conn.WriteTo(b[:n], from)
		}
	})
	t.Cleanup(func() {
		_ = conn.Close()
		done.Wait()
	})
	return conn.LocalAddr().String()
}
