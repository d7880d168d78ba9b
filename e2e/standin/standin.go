// Package standin is the world outside for tests: servers on loopback that answer, under their official names, as the
// archives do from which programs fetch packages. Each has one small package, made here. It is for tests only; nothing it
// does leaves the host.
package standin

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"log/slog"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// World is what answers. Close ends it.
type World struct {
	// CA is the certificate, in PEM, that a guest must trust.
	CA []byte

	sites    map[string]http.Handler // by host name
	names    map[string]netip.Addr
	secure   *httptest.Server
	plain    *httptest.Server
	mu       sync.Mutex
	requests []string
}

// Start makes a world.
func Start() (*World, error) {
	w := &World{names: map[string]netip.Addr{}}
	var err error
	if w.sites, err = sites(); err != nil {
		return nil, err
	}
	next := netip.MustParseAddr("151.101.1.1") // looks like anybody's on the Internet; nobody dials it
	for _, name := range slices.Sorted(maps.Keys(w.sites)) {
		w.names[name] = next
		next = next.Next()
	}
	certificate, ca, err := certify(slices.Sorted(maps.Keys(w.sites)))
	if err != nil {
		return nil, err
	}
	w.CA = ca
	quiet := slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	w.plain = httptest.NewUnstartedServer(http.HandlerFunc(w.serve))
	w.plain.Config.ErrorLog = quiet
	w.plain.Start()
	w.secure = httptest.NewUnstartedServer(http.HandlerFunc(w.serve))
	w.secure.Config.ErrorLog = quiet
	w.secure.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}
	w.secure.EnableHTTP2 = true
	w.secure.StartTLS()
	return w, nil
}

// Close ends the servers.
func (w *World) Close() {
	w.plain.Close()
	w.secure.Close()
}

// Names are the host names that answer, with the addresses that the world's name server gives for them.
func (w *World) Names() map[string]netip.Addr { return maps.Clone(w.names) }

// Dials says where a connection to an address of Names really goes: ADDRESS:PORT outside → on loopback.
func (w *World) Dials() map[string]string {
	dials := map[string]string{}
	for _, addr := range w.names {
		dials[netip.AddrPortFrom(addr, 80).String()] = w.plain.Listener.Addr().String()
		dials[netip.AddrPortFrom(addr, 443).String()] = w.secure.Listener.Addr().String()
	}
	return dials
}

// Requests are what was asked for so far, "GET https://pypi.org/simple/".
func (w *World) Requests() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.requests)
}

func (w *World) serve(rw http.ResponseWriter, r *http.Request) {
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	w.mu.Lock()
	w.requests = append(w.requests, r.Method+" "+scheme+"://"+r.Host+r.URL.Path)
	w.mu.Unlock()
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	site, ok := w.sites[strings.ToLower(host)]
	if !ok {
		http.Error(rw, "no such site", http.StatusMisdirectedRequest)
		return
	}
	site.ServeHTTP(rw, r)
}

// certify makes an authority and a certificate of it for names.
func certify(names []string) (tls.Certificate, []byte, error) {
	none := tls.Certificate{}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return none, nil, err
	}
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "forkd's test authority"}, NotBefore: time.Now().Add(-24 * time.Hour),
		NotAfter: time.Now().Add(48 * time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	if err != nil {
		return none, nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return none, nil, err
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "stand-in"}, DNSNames: names, NotBefore: ca.NotBefore, NotAfter: ca.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	if err != nil {
		return none, nil, fmt.Errorf("certify the stand-ins: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: caDER}), nil
}

// files serves content by path.
type files map[string][]byte

func (f files) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, ok := f[r.URL.Path]
	if !ok {
		http.NotFound(w, r)
		return
	}
	kind := "application/octet-stream"
	switch {
	case strings.HasSuffix(r.URL.Path, "/") && strings.Contains(r.URL.Path, "/simple/"):
		kind = "text/html"
	case strings.HasPrefix(string(body), "{"):
		kind = "application/json"
	}
	w.Header().Set("Content-Type", kind)
	http.ServeContent(w, r, "", time.Unix(1_700_000_000, 0), strings.NewReader(string(body)))
}
